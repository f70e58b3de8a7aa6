"""Inputs on which peers fail: each row once failed in a library of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import clipgrad as cg

pytestmark = pytest.mark.exhaustive


def update(tx, grads, params=None):
    return tx.update(grads, tx.init(params), params)[0]


def norm(tree):
    return np.linalg.norm(np.concatenate([np.ravel(np.float64(x)) for x in jax.tree.leaves(tree)]))


@pytest.mark.parametrize("compiled", [True, False])
def test_float16_whose_squares_overflow(compiled):
    clip = lambda g: update(cg.clip_by_global_norm(1.0), g)  # noqa: E731
    clipped = (jax.jit(clip) if compiled else clip)(jnp.full(4, 300.0, jnp.float16))
    np.testing.assert_array_equal(clipped, np.float16([0.5] * 4))


def test_float16_whose_squares_underflow():
    clipped = update(cg.clip_by_global_norm(0.01), jnp.full(2**20, 1e-4, jnp.float16))
    assert norm(clipped) == pytest.approx(0.01, rel=5e-3)


def test_more_bfloat16_leaves_than_bfloat16_can_count():
    grads = [jnp.ones(1, jnp.bfloat16)] * 400
    assert norm(update(cg.clip_by_global_norm(1.0), grads)) == pytest.approx(1, rel=4e-3)


def test_a_mixed_tree_whose_norm_is_too_large_for_its_narrow_leaf():
    grads = {"a": jnp.array([1e5]), "b": jnp.array([1.0], jnp.float16)}
    clipped = update(cg.clip_by_global_norm(1e4), grads)
    assert float(clipped["b"][0]) == pytest.approx(0.1, rel=1e-3)


def test_float32_whose_squares_overflow_is_not_zeroed():
    clipped = update(cg.clip_by_global_norm(1.0), jnp.array([1e20, 1e20]))
    np.testing.assert_allclose(clipped, [0.70710678] * 2, rtol=1e-6)
    both = optax.chain(cg.clip_by_global_norm(1.0), optax.apply_if_finite(optax.sgd(1.0), 3))
    np.testing.assert_allclose(update(both, jnp.array([3e19, 0.0])), [-1, 0], rtol=1e-6)


def test_float32_whose_norm_is_above_its_range():
    clipped = update(cg.clip_by_global_norm(1.0), jnp.array([3e38, 3e38]))
    np.testing.assert_allclose(clipped, [0.70710678] * 2, rtol=1e-6)


@pytest.mark.parametrize(
    "tx", [cg.clip_by_global_norm, cg.clip_by_block_rms, cg.adaptive_grad_clip, cg.clip_by_norm]
)
def test_the_gradient_through_a_clip_of_zeros_is_finite(tx):
    x = jnp.zeros(3)
    gradient = jax.grad(lambda x: jnp.sum(update(tx(1.0), x, x)))(x)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("tx", [cg.clip_by_global_norm, cg.clip_by_block_rms, cg.clip_by_norm])
def test_zeros_with_a_threshold_of_zero(tx):
    np.testing.assert_array_equal(update(tx(0.0), jnp.zeros(3)), 0)
    np.testing.assert_array_equal(update(tx(0.0), jnp.ones(3)), 0)


def test_one_inf_does_not_zero_the_others():
    grads = {"a": jnp.array([jnp.inf, 1.0]), "b": jnp.array([2.0])}
    for leaf in jax.tree.leaves(update(cg.clip_by_global_norm(1.0), grads)):
        assert np.isnan(leaf).all()
    zeroed = update(cg.clip_by_global_norm(1.0, nonfinite="zero"), grads)
    assert norm(zeroed) == pytest.approx(1) and zeroed["b"] > 0


@pytest.mark.parametrize(
    "tx", [cg.clip_by_global_norm, cg.clip_by_value, cg.clip_by_norm, cg.clip_by_block_rms]
)
def test_integer_and_float0_leaves_are_untouched(tx):
    grads = {"f": jnp.array([3.0]), "i": jnp.array([7]), "z": np.zeros(2, jax.dtypes.float0)}
    clipped = update(tx(1.0), grads)
    assert clipped["f"] == 1 and clipped["i"] is grads["i"] and clipped["z"] is grads["z"]
    assert update(tx(1.0), {"p": 3.0})["p"] == 1


@pytest.mark.parametrize("limit", [np.float32(0.5), jnp.float32(0.5), 0.5])
@pytest.mark.parametrize(
    "tx", [cg.clip_by_global_norm, cg.clip_by_value, cg.clip_by_block_rms, cg.adaptive_grad_clip]
)
def test_bfloat16_stays_bfloat16_with_any_threshold(tx, limit):
    grads = {"w": jnp.full((2, 2), 9.0, jnp.bfloat16)}
    clipped = jax.jit(lambda g, c: update(tx(c), g, {"w": jnp.ones((2, 2))}))(grads, limit)
    assert clipped["w"].dtype == jnp.bfloat16


def agc(shape, limit, value=0.05):
    grads = jnp.full(shape, 1e-3).at[(0,) * len(shape)].set(value)
    return grads, update(cg.adaptive_grad_clip(limit), grads, jnp.ones(shape))


@pytest.mark.parametrize("shape", [(2, 4, 3), (3, 16, 8)])
def test_units_of_attention_and_of_one_dimensional_convolution(shape):
    grads, clipped = agc(shape, 0.0201)
    np.testing.assert_array_equal(clipped, grads)


def test_units_of_a_kernel_with_one_input():
    grads = jnp.array([[1.0, 0.001, 0.001, 0.001]])
    clipped = update(cg.adaptive_grad_clip(0.02), grads, jnp.ones((1, 4)))
    np.testing.assert_allclose(clipped, [[0.02, 0.001, 0.001, 0.001]], rtol=1e-6)


def test_units_of_rank_six_and_of_a_mixed_tree():
    shapes = {"conv": (3, 3, 4, 8), "bias": (8,), "six": (1, 2, 1, 2, 1, 2)}
    params = {k: jnp.ones(s) for k, s in shapes.items()}
    clipped = update(cg.adaptive_grad_clip(0.1), params, params)
    np.testing.assert_allclose(clipped["six"], 0.1, rtol=1e-6)
    by_path = cg.adaptive_grad_clip(0.1, axis={"conv": (0, 1, 2), "bias": None, "six": -1})
    np.testing.assert_allclose(update(by_path, params, params)["conv"], 0.1, rtol=1e-6)


def test_statistics_in_a_scan():
    tx = cg.clip_by_global_norm(1.0, stats=True)

    def step(state, grads):
        updates, state = tx.update(grads, state)
        return state, state.stats.norm

    grads = jnp.array([[3.0, 4.0], [jnp.nan, 1.0], [6.0, 8.0]])
    state, norms = jax.lax.scan(step, tx.init(jnp.zeros(2)), grads)
    np.testing.assert_allclose(norms, [5, np.nan, 10])
    assert (state.count, state.clipped_count, state.nonfinite_count) == (3, 3, 1)


def test_statistics_of_bfloat16_are_float32():
    tx = cg.clip_by_global_norm(1.0, stats=True)
    params = jnp.zeros(2, jnp.float32)
    state = tx.update(jnp.ones(2, jnp.bfloat16), tx.init(params))[1]
    assert state.stats.norm.dtype == jnp.float32


def test_the_direction_in_shard_map():
    grads = jnp.array([10.0, 10.0] + [0.1] * 6)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    tx = cg.clip_by_global_norm(1.0, axis_name="x")
    mapped = jax.shard_map(lambda g: update(tx, g), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_allclose(mapped(grads), grads / norm(grads), rtol=1e-6)


def test_small_gradients_below_the_threshold_are_left_alone():
    grads = jnp.array([3e-7, 4e-7])
    np.testing.assert_array_equal(update(cg.clip_by_global_norm(1e-6), grads), grads)
    assert norm(update(cg.clip_by_global_norm(1e-8), grads)) == pytest.approx(1e-8)


def test_the_factor_never_exceeds_one():
    """A formula found in many projects multiplies small gradients by ``max_norm``."""
    for limit in (0.1, 10.0):
        assert update(cg.clip_by_global_norm(limit), jnp.array([0.05])) == np.float32(0.05)


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_thresholds_that_would_flip_signs_are_refused(limit):
    for tx in (cg.clip_by_value, cg.clip_by_norm, cg.clip_by_global_norm, cg.adaptive_grad_clip):
        with pytest.raises(ValueError, match="expected a threshold that is not"):
            tx(limit)


def test_an_error_clip_survives_recomputation():
    @jax.checkpoint
    def loss(x):
        return 7 * cg.clip_cotangent(x, cg.ErrorClipByValue(1.0))

    assert jax.grad(loss)(1.0) == 1


def test_a_tree_array_bounds_and_low_precision_cotangents():
    def loss(x):
        x = cg.clip_cotangent(x, cg.ErrorClipByValue(jnp.array([1.0, 2.0])))
        return 9 * jnp.sum(x["a"]) + 9 * jnp.sum(x["b"].astype(jnp.float32))

    gradient = jax.grad(loss)({"a": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16)})
    np.testing.assert_array_equal(gradient["a"], [1, 2])
    assert gradient["b"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="min: got 2, expected at most max, 1"):
        cg.ErrorClipByValue(1, 2)


def test_a_pytorch_unit_for_ported_kernels():
    grads = jnp.zeros((4, 3, 5)).at[0].set(1.0)
    clipped = update(cg.adaptive_grad_clip(0.1, axis=(1, 2)), grads, jnp.ones((4, 3, 5)))
    np.testing.assert_allclose(clipped[0], 0.1, rtol=1e-6)
