"""`clip_cotangent`: what it does to a value, to its cotangent and to a probe."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.helpers import CASES, array, assert_same, tree_of
from tests.rows import each_value


@each_value
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_value_is_unchanged_bit_by_bit(case, dtype):
    values = [0.0, -0.0, 1e-40, 3.0, jnp.inf, -jnp.inf, jnp.nan]
    x = {"x": array([values], dtype), "n": array(np.arange(3), np.int32), "none": None}
    for f in (cg.clip_cotangent, jax.jit(cg.clip_cotangent, static_argnums=())):
        result = cg.clip_cotangent(x, case.make(0.1)) if f is cg.clip_cotangent else f(x, None)
        assert_same(result, x)
    assert_same(jax.jit(lambda x: cg.clip_cotangent(x, case.make(0.1)))(x), x)


def test_the_sum_over_all_uses_is_clipped_once():
    """Paddle and hooks of PyTorch agree: 3 - 5 + 10 = 8 is clipped to 6, then doubled."""

    def loss(x):
        h = cg.clip_cotangent(2 * x, cg.ErrorClipByValue(max=6.0))
        return 3 * h - 5 * h + 10 * h

    assert jax.grad(loss)(1.0) == 12


@each_value
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("threshold", [0.1, "array"])
def test_only_array_thresholds_and_needed_values_are_saved(case, threshold, key):
    threshold = jnp.float32(0.1) if isinstance(threshold, str) else threshold
    rule, x = case.make(threshold), tree_of(key)

    def residuals(rule):
        pull_back = jax.vjp(lambda x: cg.clip_cotangent(x, rule), x)[1]
        return [leaf.shape for leaf in jax.tree.leaves(pull_back)]

    thresholds = [()] * sum(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(rule))
    values = [leaf.shape for leaf in jax.tree.leaves(x)] if rule.needs_params else []
    assert sorted(residuals(rule)) == sorted([*thresholds, *values])


def test_a_function_sees_the_tree_with_none_where_there_is_no_cotangent():
    seen = []

    def rule(tree):
        seen.append(jax.tree.structure(tree))
        return jax.tree.map(lambda g: 2 * g, tree)

    def loss(x):
        out = cg.clip_cotangent({"i": jnp.arange(2), "s": "text", "x": x}, rule)
        return jnp.sum(out["x"])

    np.testing.assert_array_equal(jax.grad(loss)(array(np.ones(2))), [2, 2])
    assert seen[0] == jax.tree.structure({"i": None, "s": None, "x": 0})


@pytest.mark.parametrize(
    "bad, hint",
    [
        (0.1, r"did you mean ErrorClipByValue\(max=0.1\)\?"),
        (cg.ErrorClipByValue, r"did you mean an instance, ClipByValue\(...\)\?"),
        (
            optax.clip_by_global_norm(1.0),
            r"got an optax\.GradientTransformation, .*; write the rule, such as",
        ),
        ({"h": None}, "got {'h': None} of type dict"),
    ],
    ids=lambda value: str(value).partition("(")[0],
)
def test_what_is_no_rule_is_refused_at_the_call(bad, hint):
    with pytest.raises(
        TypeError, match=f"a ClipRule, a function of the cotangent or None.*{hint}|{hint}"
    ):
        cg.clip_cotangent(array(np.ones(2)), bad)


@pytest.mark.parametrize(
    "rule, match",
    [
        (cg.ClipByValue(array(np.ones(3))), r"max: got an array of shape \(3,\).*\(2,\)"),
        (cg.ClipByValue(1.0, array(np.zeros(3))), r"min: got an array of shape \(3,\)"),
        (cg.ClipByNorm(1.0, axis=1), r"axis: got 1 for the leaf of shape \(2,\)"),
        (
            lambda tree: tree[:1],
            r"rule: got the shape \(1,\) back for the leaf, expected .* \(2,\)",
        ),
        (lambda tree: [tree], "rule: got the structure"),
        (cg.AdaptiveClip(axis=3), r"axis: got 3 for the leaf of shape \(2,\)"),
    ],
    ids=range(6),
)
def test_a_rule_that_does_not_fit_is_refused_in_the_forward_pass(rule, match):
    with pytest.raises(ValueError, match=match):
        cg.clip_cotangent(array(np.ones(2)), rule)


# The probe


def loss(x, rule=None, probe=None):
    return 10 * cg.clip_cotangent(2 * x, rule, probe=probe)


def test_the_gradient_of_a_probe_is_what_the_clip_did():
    rule = cg.ErrorClipByValue(max=5.0)
    gradient, stats = jax.grad(loss, argnums=(0, 2))(1.0, rule, cg.types.ClipStats.zero())
    assert gradient == 10
    assert (stats.norm, stats.clipped_norm, stats.changed, stats.size) == (10, 5, 1, 1)
    gradient, stats = jax.grad(loss, argnums=(0, 2))(1.0, None, cg.types.ClipStats.zero())
    assert (gradient, stats.norm, stats.clipped) == (20, 10, False)


def rnn(h, xs, probes, rule):
    def step(h, inputs):
        x, probe = inputs
        return cg.clip_cotangent(jnp.tanh(2 * h + x), rule, probe=probe), None

    return jnp.sum(jax.lax.scan(step, h, (xs, probes))[0] ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
def test_probes_of_a_scan_hold_one_entry_for_each_step(transform, key):
    xs = jax.random.normal(key, (6, 3))
    rule = cg.ClipByNorm(0.05)

    def run(h, probes):
        return rnn(h, xs, probes, rule)

    h = jnp.zeros(3)
    stats = jax.grad(transform(run), argnums=1)(h, cg.types.ClipStats.zero((6,)))
    assert stats.norm.shape == (6,)

    def tail(h, start):
        return rnn(h, xs[start:], cg.types.ClipStats.zero((6 - start,)), rule)

    for start in range(6):
        state = h
        for x in xs[: start + 1]:
            state = jnp.tanh(2 * state + x)
        arriving = jax.grad(lambda s, start=start: tail(s, start + 1))(state)
        np.testing.assert_allclose(stats.norm[start], jnp.linalg.norm(arriving), rtol=1e-5)
    assert (stats.clipped_norm <= 0.05 * (1 + 4e-7)).all()


@pytest.mark.slow
def test_probes_that_are_shared_add_up_over_uses_lanes_and_devices(key):
    x = jax.random.normal(key, (8, 3))
    rule = cg.ClipByNorm(0.1)

    def total(probe):
        return jnp.sum(jax.vmap(lambda x: jnp.sum(cg.clip_cotangent(x, rule, probe=probe) ** 2))(x))

    lanes = jax.grad(total)(cg.types.ClipStats.zero())
    assert lanes.size == 24
    np.testing.assert_allclose(lanes.norm, 2 * jnp.linalg.norm(x), rtol=1e-6)
    np.testing.assert_allclose(lanes.clipped_norm, 0.1 * 8**0.5, rtol=1e-6)

    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def mapped(x, probe):
        y = cg.clip_cotangent(x, dataclasses.replace(rule, axis_name=()), probe=probe)
        return jax.lax.psum(jnp.sum(y**2), "x")

    sharded = jax.shard_map(mapped, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
    devices = jax.jit(jax.grad(sharded, argnums=1))(x, cg.types.ClipStats.zero())
    for a, b in zip(devices, lanes, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(
    "bad, match",
    [
        (0.0, r"probe: got float, expected clipgrad.types.ClipStats.zero\(\)"),
        (
            lambda: cg.types.ClipStats.zero((3,)),
            r"probe: got leading axes \(3,\), expected a probe without",
        ),
    ],
)
def test_what_is_no_probe_is_refused(bad, match):
    with pytest.raises(TypeError, match=match):
        cg.clip_cotangent(array(np.ones(2)), None, probe=bad() if callable(bad) else bad)


# A tree of rules goes with a tree of values.


def cotangents_of(place, x, rules):
    """The cotangent of each array of a tree, each used 10 times."""
    ten = lambda tree: sum(10 * jnp.sum(leaf) for leaf in jax.tree.leaves(tree))  # noqa: E731
    losses = {
        "clip_cotangent": lambda x: ten(cg.clip_cotangent(x, rules)),
        "inputs": lambda x: cg.error_clip({"x": rules})(lambda x: ten(x))(x),
        "outputs": lambda x: ten(cg.error_clip(outputs=rules)(lambda x: x)(x)),
        "args": lambda x: cg.error_clip({"args": rules})(lambda *args: ten(args))(x),
        "kwargs": lambda x: cg.error_clip({"x": rules})(lambda **kwargs: ten(kwargs))(x=x),
    }
    return jax.grad(losses[place])(x)


ONE, TWO = cg.ErrorClipByValue(1.0), cg.ErrorClipByValue(2.0)
TREE = {"b": 0.5, "w": [0.5, (0.5, 0.5)]}
OF_TREES = {
    "off": ({"b": ONE, "w": None}, {"b": 1, "w": [10, (10, 10)]}),
    "prefix": ({"b": ONE, "w": [TWO, ONE]}, {"b": 1, "w": [2, (1, 1)]}),
    "whole": ({"b": None, "w": [TWO, (ONE, None)]}, {"b": 10, "w": [2, (1, 10)]}),
    "function": (
        {"b": lambda g: 3 * g, "w": lambda g: jax.tree.map(jnp.negative, g)},
        {"b": 30, "w": [-10, (-10, -10)]},
    ),
    "norm of a part": ({"b": None, "w": [None, cg.ClipByGlobalNorm(5.0)]},
                       {"b": 10, "w": [10, (5 / 2**0.5, 5 / 2**0.5)]}),
    "one": (ONE, {"b": 1, "w": [1, (1, 1)]}),
    "none": (None, {"b": 10, "w": [10, (10, 10)]}),
}  # fmt: skip
IN_PLACES = ("clip_cotangent", "inputs", "outputs", "args", "kwargs")


@pytest.mark.parametrize("place", IN_PLACES)
@pytest.mark.parametrize("rules", OF_TREES)
def test_each_part_of_a_tree_has_its_rule(rules, place):
    cotangents, expected = OF_TREES[rules]
    clipped = cotangents_of(place, TREE, cotangents)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), clipped, expected)


@pytest.mark.parametrize("place", IN_PLACES)
def test_rules_that_are_no_prefix_or_no_rules_are_refused(place):
    for rules in ({"b": ONE}, {"b": ONE, "w": [ONE]}, [ONE, TWO], {"b": ONE, "w": {"x": TWO}}):
        with pytest.raises(ValueError, match="got rules of the structure .*expected a prefix"):
            cotangents_of(place, TREE, rules)
    with pytest.raises(TypeError, match="rule: got 0.1 .*did you mean ErrorClipByValue"):
        cotangents_of(place, TREE, {"b": 0.1, "w": None})


def test_the_probe_of_a_tree_of_rules_adds_up_what_they_did():
    def loss(x, probe):
        clipped = cg.clip_cotangent(x, {"a": ONE, "b": None}, probe=probe)
        return 3 * clipped["a"] + 4 * clipped["b"]

    x = {"a": 1.0, "b": jnp.float32(1)}
    stats = jax.grad(loss, 1)(x, cg.types.ClipStats.zero())
    assert (stats.norm, stats.changed, stats.size) == (5, 1, 2)
