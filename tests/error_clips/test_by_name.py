"""Clipping by name equals `clip_cotangent` written at the same places, and edits nothing."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad import _programs
from tests.error_clips.tagged import MODELS, X, by_hand, loss_of, scanned, step
from tests.helpers import assert_close, assert_same
from tests.rows import each_value, first_row

VALUE = cg.ErrorClipByValue(0.3)
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


@first_row
@every_model
def test_the_gradient_is_that_of_clips_written_by_hand(model):
    rules = {"h": VALUE}
    clipped, hand, plain = (
        jax.jit(jax.grad(f))(X)
        for f in (
            cg.error_clip_by_name(loss_of(model), rules),
            loss_of(model, by_hand(rules)),
            loss_of(model),
        )
    )
    assert_close(clipped, hand, rtol=1e-5, atol=1e-6)
    assert not np.allclose(clipped, plain)


@first_row
@every_model
def test_the_value_is_unchanged_bit_by_bit(model):
    clipped = cg.error_clip_by_name(functools.partial(model, tag=checkpoint_name), {"h": VALUE})
    assert_same(jax.jit(clipped)(X), jax.jit(lambda x: model(x, checkpoint_name))(X))


def instructions(compiled):
    """A compiled program without its names and source lines: instructions have numbers."""
    lines = (line.split(", metadata")[0] for line in compiled.as_text().splitlines()[1:])
    text = "\n".join(line for line in lines if " = " in line)
    numbers = {name: f"%{i}" for i, name in enumerate(dict.fromkeys(re.findall(r"%[\w.-]+", text)))}
    return re.sub(r"%[\w.-]+", lambda name: numbers[name[0]], text).splitlines()


@first_row
@pytest.mark.parametrize("name", ["plain", "scan", "scan of scan", "remat, dots", "jit of jit"])
def test_the_compiled_forward_pass_is_the_same_program(name):
    model = functools.partial(MODELS[name], tag=checkpoint_name)
    plain, clipped = (
        jax.jit(f).lower(X).compile() for f in (model, cg.error_clip_by_name(model, {"h": VALUE}))
    )
    assert instructions(clipped) == instructions(plain)


@each_value
@every_model
@pytest.mark.parametrize("rules", [{}, {"h": None}], ids=str)
def test_without_a_rule_it_is_the_identity(model, rules):
    plain = loss_of(model)
    clipped = cg.error_clip_by_name(plain, rules)
    programs = [_programs.equations(jax.make_jaxpr(f)(X)) for f in (plain, clipped)]
    names = [[equation.primitive.name for equation in program] for program in programs]
    assert names[0] == names[1]


def test_a_prefix_is_put_before_each_name():
    def model(x):
        return jnp.sum(3 * checkpoint_name(x, "encoder/h") + 5 * checkpoint_name(x, "decoder/h"))

    clipped = cg.error_clip_by_name(model, {"h": cg.ErrorClipByValue(1.0)}, prefix="encoder/")
    np.testing.assert_allclose(jax.grad(clipped)(X), np.full(X.shape, 6.0))


def row_by_row(row, tag=checkpoint_name):
    return 10 * tag(2 * row, "h")


MAPS = {
    "jit of vmap": jax.jit(jax.vmap(row_by_row)),
    "vmap of scan": jax.vmap(
        lambda r: jax.lax.scan(lambda c, _: (row_by_row(c), 0), r, length=1)[0]
    ),
}


@each_value
@pytest.mark.parametrize("mapped", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("of_stats", [False, True], ids=["by name", "with stats"])
def test_a_norm_inside_of_vmap_is_one_for_the_batch_and_a_warning_says_so(mapped, of_stats):
    def model(x):
        return jnp.sum(mapped(x))

    rules = {"h": cg.ClipByGlobalNorm(1.0)}
    by_name = jax.grad(cg.error_clip_by_name(model, rules))
    if of_stats:
        by_name = lambda x: cg.value_and_grad_with_stats(model, error_clip=rules)(x)[1]  # noqa: E731
    with pytest.warns(UserWarning, match=r"for \['h'\].* inside jax.vmap.*clip_cot") as record:
        gradient = by_name(X)
    np.testing.assert_allclose(gradient, np.full(X.shape, 2 / np.sqrt(12)), rtol=1e-6)
    assert len(record) == 1


@first_row
@pytest.mark.parametrize(("size", "batches"), [(None, 4), (2, 2), (4, 1)], ids=str)
def test_the_size_of_the_batches_of_a_map_counts_by_name_and_not_by_hand(size, batches):
    def gradient(tag, clip=lambda f: f):
        row = functools.partial(row_by_row, tag=tag)
        return jax.grad(clip(lambda x: jnp.sum(jax.lax.map(row, x, batch_size=size))))(X)

    rules = {"h": cg.ClipByGlobalNorm(1.0)}
    by_hand_of_each = np.full(X.shape, 2 / np.sqrt(3))
    np.testing.assert_allclose(gradient(by_hand(rules)), by_hand_of_each, rtol=1e-6)
    by_name = functools.partial(cg.error_clip_by_name, rules=rules)
    if size is None:
        np.testing.assert_allclose(gradient(checkpoint_name, by_name), by_hand_of_each, rtol=1e-6)
    else:
        with pytest.warns(UserWarning, match="inside jax.vmap"):
            clipped = gradient(checkpoint_name, by_name)
        np.testing.assert_allclose(clipped, by_hand_of_each / np.sqrt(4 / batches), rtol=1e-6)


@pytest.mark.slow
def test_a_norm_by_name_inside_of_vmap_without_a_warning():
    def model(x):
        return jnp.sum(jax.vmap(row_by_row)(x))

    per_row = cg.error_clip_by_name(model, {"h": cg.ClipByNorm(1.0, axis=-1)})
    expected = np.full(X.shape, 2 / np.sqrt(3))
    np.testing.assert_allclose(jax.grad(per_row)(X), expected, rtol=1e-6)
    of_a_row = lambda x: jnp.sum(row_by_row(x))  # noqa: E731
    outside = jax.vmap(jax.grad(cg.error_clip_by_name(of_a_row, {"h": cg.ClipByGlobalNorm(1.0)})))
    np.testing.assert_allclose(outside(X), expected, rtol=1e-6)
    named = jax.named_scope("vmap")(row_by_row)
    scoped = cg.error_clip_by_name(lambda x: jnp.sum(named(x)), {"h": cg.ClipByGlobalNorm(1.0)})
    np.testing.assert_allclose(jax.grad(scoped)(X), 2 / np.sqrt(12), rtol=1e-6)
    cg.error_clip_by_name(model, {"h": lambda g: g})(X)
    cg.value_and_grad_with_stats(model, error_clip={"h": None})(X)
    cg.value_and_grad_with_stats(model)(X)


def test_the_clipped_function_is_differentiable_forwards_beside_the_clips():
    def model(x, y):
        return jnp.sum(jnp.sin(checkpoint_name(x, "h")) + y**2)

    clipped = cg.error_clip_by_name(model, {"h": VALUE})
    _, tangent = jax.jvp(functools.partial(clipped, X), (X,), (jnp.ones_like(X),))
    np.testing.assert_allclose(tangent, jnp.sum(2 * X), rtol=1e-6)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: clipped(x, X), (X,), (X,))


def test_the_result_keeps_its_tree_and_weak_types():
    def model(params, scale, *, name, flag=True):
        h = checkpoint_name(params["w"] * scale, "h")
        return {"h": h, "weak": jnp.asarray(2.0) * scale, "none": None, "text": name, "flag": flag}

    clipped = cg.error_clip_by_name(model, {"h": VALUE})
    for fun in (model, clipped):
        result = fun({"w": X, "empty": None}, 2.0, name="a", flag=False)
        assert result["text"] == "a" and result["flag"] is False and result["none"] is None
        assert result["weak"].weak_type and not result["h"].weak_type


UNKNOWN = (
    r"^error_clip_by_name: got 'q', expected a name that is tagged in this function, or the path "
    r"of a module in it \(NNX and Equinox: in a model among its arguments\); there are "
    r"\['h', 'out'\]; tag a variable with "
    r"x = jax.ad_checkpoint.checkpoint_name\(x, 'q'\)$"
)


def test_a_name_that_tags_nothing_is_an_error_that_lists_those_that_do():
    with pytest.raises(ValueError, match=UNKNOWN):
        cg.error_clip_by_name(loss_of(scanned), {"q": VALUE})(X)
    with pytest.raises(ValueError, match=UNKNOWN):
        cg.error_clip_by_name(loss_of(scanned), {"q": None, "h": VALUE})(X)
    with pytest.raises(ValueError, match="got 'h'.*; there are none; tag a variable with"):
        cg.error_clip_by_name(jnp.sum, {"h": VALUE})(X)


@pytest.mark.parametrize(
    ("rules", "error"),
    [
        (VALUE, "rules: got ClipByValue.*expected a mapping from names to rules.*everywhere"),
        ({0: VALUE}, "rules: got dict, expected a mapping from names"),
        ({"h": 5.0}, r"did you mean ErrorClipByValue\(max=5.0\)"),
        (
            {"h": cg.AdaptiveClip()},
            "needs parameters, expected .*a variable has none; .*clip_cotangent",
        ),
        ({"h": cg.ErrorClipByValue(lambda step: 1.0)}, "schedule"),
    ],
    ids=["no mapping", "no name", "a number", "a rule of parameters", "a schedule"],
)
def test_wrong_rules_are_refused_at_once(rules, error):
    with pytest.raises(TypeError, match=error):
        cg.error_clip_by_name(step, rules)


def test_what_is_no_function_or_no_prefix_is_refused_at_once():
    with pytest.raises(TypeError, match="prefix: got 3, expected a string"):
        cg.error_clip_by_name(step, {"h": VALUE}, prefix=3)
    for fun, hint in ((3, "$"), (None, "$"), ({"h": VALUE}, "; the rules"), (VALUE, "; the rules")):
        with pytest.raises(TypeError, match=f"fun: got .*expected a function{hint}"):
            cg.error_clip_by_name(fun, {"h": VALUE})


def test_the_signature_and_the_name_are_kept():
    def model(x, *, scale=1.0):
        """Its docstring."""
        return checkpoint_name(x, "h") * scale

    clipped = cg.error_clip_by_name(model, {"h": VALUE})
    assert (clipped.__name__, clipped.__doc__) == ("model", "Its docstring.")
    assert inspect.signature(clipped) == inspect.signature(model)


def test_many_tagged_sites_make_a_program_linear_in_the_size_of_the_model():
    """Counts equations, which no clock disturbs; the time is in the benchmarks."""

    def model(x, sites):
        @jax.jit
        def block(x):
            return checkpoint_name(jnp.sin(x), "out")

        for i in range(sites):
            x = block(checkpoint_name(jax.checkpoint(jnp.tanh)(x), f"in{i}"))
        return jnp.sum(x)

    def equations(sites):
        fun = functools.partial(model, sites=sites)
        names = {f"in{i}": VALUE for i in range(sites)} | {"out": VALUE}
        clipped = cg.error_clip_by_name(fun, names)
        return len(list(_programs.equations(jax.make_jaxpr(clipped)(X))))

    small, large = equations(11), equations(88)
    assert large == pytest.approx(8 * small, rel=0.05)
