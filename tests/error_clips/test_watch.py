"""Statistics by name out of the backward pass, against clips and probes written by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.error_clips.tagged import MODELS, X, loss_of, scanned, step
from tests.helpers import array, assert_close, assert_same, generator
from tests.rows import first_row

RULES = {"h": cg.ErrorClipByValue(0.3)}
LENGTHS = {"scan": (4,), "reversed scan": (4,), "scan of jit": (4,), "scan of scan": (2, 4)}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def rnn(w, inputs):
    def cell(h, x):
        h = checkpoint_name(w * h + x, "h")
        return h, None

    return jax.lax.scan(cell, 0.0, inputs)[0]


@pytest.mark.slow
@first_row
@every_model
def test_value_gradient_and_sums_are_those_of_clips_written_by_hand(model):
    def hand(x, probe):
        def tag(value, name):
            return cg.clip_cotangent(value, RULES.get(name), probe=probe if name == "h" else None)

        return loss_of(model, tag)(x)

    value, grads, stats = jax.jit(cg.value_and_grad_with_stats(loss_of(model), error_clip=RULES))(X)
    expected, (gradient, total) = jax.jit(jax.value_and_grad(hand, argnums=(0, 1)))(
        X, cg.types.ClipStats.zero()
    )
    assert_close((value, grads), (expected, gradient), rtol=1e-5, atol=1e-6)
    axes = tuple(range(stats["h"].size.ndim))
    assert_close(jax.tree.map(lambda s: s.sum(axes), stats["h"]), total, rtol=1e-4, atol=1e-6)
    assert stats["h"].clipped.any()


@pytest.mark.parametrize("name", MODELS)
def test_there_is_one_entry_for_each_step_of_the_scans_around_a_variable(name):
    watched = cg.value_and_grad_with_stats(loss_of(MODELS[name]), watch=["h"])
    stats = jax.eval_shape(lambda x: watched(x)[2]["h"].norm, X)
    lengths = {"unrolled scan": (4,), "scan of remat": (4,), "loops": (3,)}
    assert stats.shape == (LENGTHS | lengths).get(name, ())


@pytest.mark.slow
def test_all_names_are_watched_unless_some_are_chosen():
    loss = loss_of(scanned)
    assert list(cg.value_and_grad_with_stats(loss)(X)[2]) == ["h", "out"]
    assert list(cg.value_and_grad_with_stats(loss, watch=["out"])(X)[2]) == ["out"]
    both = cg.value_and_grad_with_stats(loss, error_clip=RULES, watch=("out",))(X)[2]
    assert list(both) == ["h", "out"] and both["h"].clipped.any() and not both["out"].clipped.any()
    assert cg.value_and_grad_with_stats(loss, watch=[])(X)[2] == {}


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_value_and_grad_with_stats_measures_64_bits_in_float64(dtype):
    with jax.enable_x64(True):
        loss = lambda x: jnp.sum(jnp.abs(checkpoint_name(2 * x, "h")) ** 2)  # noqa: E731
        stats = jax.jit(cg.value_and_grad_with_stats(loss))(array([1 + 1e-12] * 2, dtype))[2]
        np.testing.assert_allclose(stats["h"].norm, 2**1.5 * 2 * (1 + 1e-12), rtol=1e-15)
        assert stats["h"].norm.dtype == jnp.float64


def test_the_positions_of_jax_are_taken():
    def loss(a, b, *, scale=1.0):
        return jnp.sum(checkpoint_name(a["x"] * b, "h")) * scale

    a, b = {"x": X}, array(2 * np.asarray(X))
    for argnums in (-1, np.int64(1), (1, 0), [0]):
        expected = jax.value_and_grad(loss, argnums)(a, b, scale=3.0)
        actual = cg.value_and_grad_with_stats(loss, argnums)(a, b, scale=3.0)
        assert_same(actual[:2], expected)


def test_auxiliary_results_are_kept():
    def loss(x):
        h = checkpoint_name(jnp.sin(x), "h")
        return jnp.sum(h), {"h": h, "text": "a", "none": None}

    (value, aux), grads, stats = cg.value_and_grad_with_stats(loss, has_aux=True)(X)
    (expected, aux_expected), gradient = jax.value_and_grad(loss, has_aux=True)(X)
    assert aux.pop("text") == aux_expected.pop("text")
    assert_same((value, aux, grads), (expected, aux_expected, gradient))
    np.testing.assert_allclose(stats["h"].norm, np.sqrt(12), rtol=1e-6)


@pytest.mark.slow
def test_variables_of_one_name_are_added_up_as_far_as_their_loops_agree():
    def nested(x, shapes):
        total = 0.0
        for shape in shapes:
            f = lambda x: jnp.sum(checkpoint_name(x, "h"))  # noqa: E731
            for length in reversed(shape):
                f = lambda x, f=f, n=length: jax.lax.scan(  # noqa: E731
                    lambda c, _: (c + f(x), None), 0.0, None, length=n
                )[0]
            total = total + f(x)
        return total

    cases = {((3,), (2,)): 10, ((2, 3), (2,)): [8, 8], ((), (3,)): 8}
    for shapes, sizes in cases.items():
        stats = cg.value_and_grad_with_stats(lambda x, s=shapes: nested(x, s))(jnp.ones(2))[2]
        np.testing.assert_array_equal(stats["h"].size, sizes)


def test_the_function_is_traced_once():
    traces = []

    def loss(x):
        traces.append(None)
        return jnp.sum(checkpoint_name(x, "h"))

    jax.jit(cg.value_and_grad_with_stats(loss))(X)
    assert len(traces) == 1


@pytest.mark.parametrize("watch", ["h", 3, [3]], ids=str)
def test_a_wrong_choice_of_names_is_refused_at_once(watch):
    with pytest.raises(TypeError, match="watch: got .*expected names"):
        cg.value_and_grad_with_stats(rnn, watch=watch)


def test_all_names_leave_out_what_has_no_cotangent_but_not_what_cannot_be_reached():
    @jax.custom_vjp
    def rule(x):
        return checkpoint_name(x, "inside")

    rule.defvjp(lambda x: (x, None), lambda _, g: (g,))

    def loss(x, apply=lambda x: x):
        index = checkpoint_name(jnp.arange(2), "index")
        checkpoint_name(x, "unused")
        return jnp.sum(apply(checkpoint_name(x, "h"))[index])

    assert list(cg.value_and_grad_with_stats(loss)(X)[2]) == ["h"]
    with pytest.raises(ValueError, match="got 'inside', which tags a variable inside of cus"):
        cg.value_and_grad_with_stats(functools.partial(loss, apply=rule))(X)
    assert cg.value_and_grad_with_stats(functools.partial(loss, apply=rule), watch=["h"])(X)[2]


def test_no_argument_to_differentiate_is_an_error():
    with pytest.raises(ValueError, match=r"argnums: got \(\), expected the position of"):
        cg.value_and_grad_with_stats(lambda x: x, argnums=())
    for wrong in (1.0, "0", (0, 1.0), None):
        with pytest.raises(TypeError, match="argnums: got .*, expected the position of"):
            cg.value_and_grad_with_stats(lambda x: x, argnums=wrong)


def test_used_statistics_change_a_compiled_gradient_by_rounding_at_most(key):
    rng = generator(key)
    params = [array(rng.normal(size=(16, 16))) for _ in range(4)]
    x = array(np.linspace(-1.0, 1.0, 16))

    def loss(params, x):
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w / 4) + x
        return jnp.mean(x**2)

    expected = jax.jit(jax.value_and_grad(loss))(params, x)
    watched = cg.value_and_grad_with_stats(loss)
    assert_same(jax.jit(lambda *args: watched(*args)[:2])(params, x), expected)
    *value_and_gradient, stats = jax.jit(watched)(params, x)
    assert_close(tuple(value_and_gradient), expected, rtol=1e-6, atol=1e-7)
    assert len(stats) == 4


@pytest.mark.slow
@pytest.mark.parametrize("tracked", [True, False])
def test_inside_of_shard_map_they_are_those_of_all_devices_or_of_each(tracked):
    loss = loss_of(step)

    def local(x):
        return cg.value_and_grad_with_stats(loss, error_clip=RULES)(x)[2]["h"].norm[None]

    mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,))
    rows = P("d")
    norms = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=tracked)
    )(X)
    each = np.stack([local(x[None])[0] for x in X])
    expected = np.full(4, np.linalg.norm(each)) if tracked else each
    np.testing.assert_allclose(norms, expected, rtol=1e-5)
