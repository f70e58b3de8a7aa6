"""The error clip under every transformation, against the composition that it stands for.

That every rule is applied everywhere is in test_rules_everywhere.py: in CI one rule shows what a
transformation does that knows nothing of rules.
"""

import functools

import jax
import jax.ad_checkpoint
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.helpers import CASES, array, assert_close, assert_same
from tests.rows import first_row

LIMIT = 0.3
RULES = {case.name: case.make(LIMIT) for case in CASES}
RULES["a function"] = lambda tree: jax.tree.map(lambda g: 0.1 * g, tree)
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
# By element, by slice, by tree, with params, and one's own: for products with other parameters.
KINDS = ("ClipByValue", "ClipByNorm(axis=-1)", "ClipByGlobalNorm", "AdaptiveClip", "a function")
every_kind = pytest.mark.parametrize("rule", [RULES[name] for name in KINDS], ids=KINDS)
X = array(np.linspace(-1, 2, 24).reshape(8, 3))
A = array(np.linspace(-1, 1, 12).reshape(3, 4))


def inner(x):
    return jnp.tanh(x @ A)


def outer(h):
    return jnp.sum(jnp.sin(3 * h) @ jnp.arange(1.0, 5.0))


def clipped_loss(x, rule, wrap=lambda f: f):
    return wrap(lambda x: outer(cg.clip_cotangent(inner(x), rule)))(x)


def expected_gradient(x, rule, inner=inner, outer=outer):
    """The pull-back of ``inner`` applied to the clipped cotangent that ``outer`` sends."""
    h, pull_back = jax.vjp(inner, x)
    cotangent = jax.grad(outer)(h)
    clipped, _ = cg.clip_grads(cotangent, rule, h)
    return pull_back(clipped)[0]


def test_a_norm_rule_is_per_example_inside_vmap_and_joint_outside():
    rule = cg.ClipByGlobalNorm(1.0)
    x = array([[3.0, 4.0], [3.0, 4.0]])

    def pull(x):
        return jax.vjp(lambda x: cg.clip_cotangent(x, rule), x)[1](x)[0]

    np.testing.assert_allclose(jax.vmap(pull)(x), [[0.6, 0.8]] * 2, rtol=1e-6)
    np.testing.assert_allclose(pull(x), [[0.424264, 0.565685]] * 2, rtol=1e-6)


def rnn(h, xs, clip, wrap=lambda step: step):
    def step(h, x):
        h = clip(jnp.tanh(1.5 * h + x))
        return h, h

    return jnp.sum(jax.lax.scan(wrap(step), h, xs)[1] ** 2)


def unrolled(h, xs, clip):
    total = 0.0
    for x in xs:
        h = clip(jnp.tanh(1.5 * h + x))
        total = total + jnp.sum(h**2)
    return total


@pytest.mark.slow
@first_row
@every_rule
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["scan", "scan of remat"])
def test_every_step_of_a_scan_is_clipped(rule, wrap):
    h = jnp.full((3,), 0.1)

    def clip(x):
        return cg.clip_cotangent(x, rule)

    scanned = jax.jit(jax.grad(lambda h: rnn(h, X, clip, wrap)))(h)
    assert_close(scanned, jax.grad(lambda h: unrolled(h, X, clip))(h), rtol=2e-5, atol=1e-7)
    plain = jax.grad(lambda h: rnn(h, X, lambda x: x))(h)
    assert not np.allclose(scanned, plain)


def test_a_threshold_that_changes_inside_a_scan():
    def loss(h, limits):
        def step(h, c):
            return cg.clip_cotangent(3.0 * h, cg.ClipByValue(c)), None

        return jnp.sum(jax.lax.scan(step, h, limits)[0])

    limits = array([0.25, 4.0])
    np.testing.assert_allclose(jax.grad(loss)(array(np.ones(2)), limits), 3 * 0.25 * np.ones(2))


@first_row
@every_rule
@pytest.mark.parametrize("taken", [0, 1])
def test_cond_and_switch_clip_in_the_branch_that_is_taken(rule, taken):
    def branch(x):
        return outer(cg.clip_cotangent(inner(x), rule))

    def plain(x):
        return outer(inner(x))

    @jax.jit
    def gradients(x, i):
        cond = jax.grad(lambda x: jax.lax.cond(i == 0, branch, plain, x))(x)
        switch = jax.grad(lambda x: jax.lax.switch(i, [branch, plain], x))(x)
        return cond, switch, expected_gradient(x, rule) if taken == 0 else jax.grad(plain)(x)

    *clipped_gradients, expected = gradients(X, taken)
    assert_close(clipped_gradients, [expected] * 2, rtol=1e-5, atol=1e-7)


POLICIES = {
    name: getattr(jax.checkpoint_policies, name)
    for name in ("everything_saveable", "nothing_saveable", "dots_saveable")
} | {
    "save_only_these_names": jax.checkpoint_policies.save_only_these_names("h"),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"],
        offload_src="device", offload_dst="pinned_host"),
    "default": None,
}  # fmt: skip


@first_row
@every_kind
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_clip_survives_rematerialization(rule, policy):
    def loss(x):
        h = jax.ad_checkpoint.checkpoint_name(inner(x), "h")
        return outer(cg.clip_cotangent(h, rule))

    gradient = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy)))(X)
    assert_close(gradient, expected_gradient(X, rule), rtol=1e-5, atol=1e-7)


@first_row
@every_rule
def test_inside_and_outside_of_a_custom_vjp(rule):
    @jax.custom_vjp
    def tripled(x):
        return x

    tripled.defvjp(lambda x: (x, None), lambda _, g: (3 * g,))
    outside = jax.grad(lambda x: outer(cg.clip_cotangent(tripled(inner(x)), rule)))(X)
    assert_close(outside, 3 * expected_gradient(X, rule), rtol=1e-5, atol=1e-6)

    @jax.custom_vjp
    def squared(x):
        return outer(cg.clip_cotangent(inner(x), rule))

    def forward(x):
        return jax.vjp(lambda x: outer(cg.clip_cotangent(inner(x), rule)), x)

    squared.defvjp(forward, lambda pull_back, g: pull_back(g))
    assert_close(jax.grad(squared)(X), expected_gradient(X, rule), rtol=1e-5, atol=1e-7)


@first_row
@every_rule
def test_derivatives_of_the_gradient(rule):
    """Gradient, jacobian and hessian of the clipped gradient, against those of its composition."""

    def actual(x):
        return jax.grad(clipped_loss)(x, rule)

    def expected(x):
        return expected_gradient(x, rule)

    @jax.jit
    def derivatives(x):
        both = [(jax.jacrev(f)(x), jax.jacfwd(f)(x)) for f in (actual, expected)]
        return *both, jax.hessian(clipped_loss)(x, rule)

    ours, by_composition, hessian = derivatives(X[:1])
    assert_close(ours, by_composition, rtol=1e-4, atol=1e-5)
    assert_close(hessian, by_composition[1], rtol=1e-4, atol=1e-5)


def test_forward_mode_is_refused_by_jax_and_works_without_a_rule():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: clipped_loss(x, cg.ClipByValue(1.0)), (X,), (X,))
    jax.jvp(lambda x: clipped_loss(x, None), (X,), (X,))


@first_row
@every_rule
def test_an_exported_program_clips(rule):
    gradient = jax.jit(jax.grad(functools.partial(clipped_loss, rule=rule)))
    exported = jax.export.export(gradient)(jax.ShapeDtypeStruct(X.shape, X.dtype))
    loaded = jax.export.deserialize(exported.serialize())
    assert_close(loaded.call(X), expected_gradient(X, rule), rtol=1e-5, atol=1e-7)


@first_row
@every_rule
def test_the_forward_pass_is_the_same_program(rule):
    def program(rule):
        f = jax.jit(lambda x: clipped_loss(x, rule))
        text = f.lower(X).compile().as_text()
        return [line.split(", metadata")[0] for line in text.splitlines()[1:] if " = " in line]

    assert program(rule) == program(None)
    assert_same(inner(X), cg.clip_cotangent(inner(X), rule))
