"""`DropTokens`: the laws of a rule that has a number of tokens in place of a threshold."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import clipgrad as cg
from tests.helpers import PLACES, assert_same, float64

everywhere = pytest.mark.parametrize("apply", PLACES.values(), ids=PLACES)
X = jnp.linspace(-1, 2, 24).reshape(8, 3)


def reference(x, k, axis=-1):
    """In float64: the k-th largest norm is the k-th of the sorted ones."""
    norms = np.sqrt((np.abs(x) ** 2).sum(axis=axis, keepdims=True))
    kth = np.sort(norms, axis=None)[::-1][k - 1] if k else np.inf
    return np.where(norms >= kth, 0, x)


def tree_of_tokens(seed, dtype=jnp.float32, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = {"block": (2, 3, 4), "flat": (5, 2), "empty": (0, 3)}
    return {k: jnp.asarray(rng.normal(size=s) * scale, dtype) for k, s in shapes.items()}


@functools.cache
def compiled(apply):
    """One program for every number of tokens and scale."""
    return jax.jit(lambda k, grads: apply(cg.DropTokens(k), grads, grads))


@everywhere
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e19, 1e30])
def test_the_largest_tokens_become_zero_and_the_others_stay_bit_for_bit(apply, scale):
    for k in (0, 1, 4):
        tree = tree_of_tokens(k, scale=scale)
        clipped = compiled(apply)(k, tree)
        expected = {n: reference(x, k) for n, x in float64(tree).items() if x.size}
        assert_same(clipped, {n: jnp.asarray(expected.get(n, x), x.dtype) for n, x in tree.items()})


@functools.cache
def of_features(axis):
    """One program for every number of tokens."""
    return jax.jit(lambda k, x: cg.DropTokens(k, axis=axis)(x))


@hypothesis.given(seed=st.integers(0, 999), k=st.integers(0, 11), axis=st.sampled_from([-1, 0, 1]))
def test_any_leaf_equals_the_reference(seed, k, axis):
    x = np.random.default_rng(seed).normal(size=(4, 3, 4)).round(1)  # with ties
    x = np.where(np.random.default_rng(seed + 1).random(size=(4, 3, 4)) < 0.3, 0, x)
    clipped = of_features(axis)(k, jnp.asarray(x, jnp.float32))
    np.testing.assert_array_equal(clipped, reference(np.float64(np.float32(x)), k, axis))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64", "float8_e5m2"])
def test_norms_are_those_of_float32_and_dtypes_are_kept(dtype):
    x = jnp.array([[300.0, 300.0], [301.0, 0.0], [1.0, 2.0]]).astype(dtype)
    clipped = jax.jit(cg.DropTokens(1))(x)
    assert clipped.dtype == x.dtype
    assert_same(clipped, x.at[0].set(0))


def test_equal_norms_at_the_kth_largest_are_all_dropped():
    x = jnp.array([[3.0, 4.0], [4.0, 3.0], [1.0, 1.0], [5.0, 0.0]])
    np.testing.assert_array_equal(of_features(-1)(1, x), [[0, 0], [0, 0], [1, 1], [0, 0]])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_tokens_that_are_not_finite_rank_first_and_leave_the_others_alone(bad):
    x = jnp.array([[9.0, 9.0], [1.0, bad], [1.0, 1.0], [bad, bad]])
    clip = jax.jit(lambda k: cg.clip_grads(x, cg.DropTokens(k)))
    for k in (1, 2):
        clipped, stats = clip(k)
        np.testing.assert_array_equal(clipped, [[9, 9], [0, 0], [1, 1], [0, 0]])
        assert (stats.nonfinite, stats.changed, stats.size) == (2, 2, 4)
    np.testing.assert_array_equal(clip(3)[0], [[0, 0], [0, 0], [1, 1], [0, 0]])


def test_what_holds_no_cotangent_and_empty_trees_stay():
    tree = {"i": jnp.arange(3), "none": None, "key": jax.random.key(0), "x": X[:2, :1]}
    clipped = cg.clip_grads(tree, cg.DropTokens(1))[0]
    assert all(clipped[name] is tree[name] for name in ("i", "none", "key"))
    assert cg.DropTokens()({}) == {}


@everywhere
def test_a_number_of_tokens_may_be_traced_and_a_new_one_retraces_nothing(apply):
    traces = []

    @jax.jit
    def clip(rule):
        traces.append(rule)
        return apply(rule, X, X)

    for k in (0, 3, 7):
        assert_same(clip(cg.DropTokens(k)), of_features(-1)(k, X))
    assert_same(clip(cg.DropTokens(8)), jnp.zeros_like(X))
    assert_same(clip(jax.tree.map(lambda k: -k, cg.DropTokens(3))), X)
    assert len(traces) == 1
    swept = jax.jit(jax.vmap(lambda k: apply(cg.DropTokens(k), X, X)))(jnp.arange(3))
    assert_same(swept, jnp.stack([of_features(-1)(k, X) for k in range(3)]))


def test_a_schedule_is_the_number_of_tokens_at_a_step():
    tx = cg.gradient_clip(cg.DropTokens(lambda step: jnp.where(step < 1, 2, 0)), stats=True)
    state = tx.init(X)
    for dropped in (2, 0):
        updates, state = jax.jit(tx.update)(X, state)
        assert_same(updates, cg.DropTokens(dropped)(X))
        assert (state.stats.changed, state.threshold) == (dropped, dropped)


@pytest.mark.parametrize(
    "error, make, match",
    [
        (TypeError, lambda: cg.DropTokens(0.5), "k: got 0.5, expected an integer"),
        (TypeError, lambda: cg.DropTokens(jnp.ones(2)), "k: got .*expected an integer"),
        (TypeError, lambda: cg.DropTokens("4"), "k: got '4' of type str, expected a number"),
        (TypeError, lambda: cg.DropTokens(True), "k: got True of type bool"),
        (TypeError, lambda: cg.DropTokens(cg.PercentileThreshold()), "clip by limits can be adap"),
        (ValueError, lambda: cg.DropTokens(-1), "k: got -1, expected .*not negative"),
        (TypeError, lambda: cg.DropTokens(axis="features"), "axis: got 'features'"),
        (ValueError, lambda: cg.DropTokens(2)({"w": jnp.ones((2, 3))}),
         r"k: got 2 for w of shape \(2, 3\), which has 2 tokens .*more tokens than k"),
        (ValueError, lambda: cg.clip_cotangent(jnp.ones(3), cg.DropTokens(1)), "1 tokens along"),
        (ValueError, lambda: cg.DropTokens(1, axis=2)(X), "axis: got 2 for the leaf"),
    ],
    ids=range(10),
)  # fmt: skip
def test_what_makes_no_sense_is_refused(error, make, match):
    with pytest.raises(error, match=match):
        make()


def test_vmap_counts_the_tokens_of_every_lane():
    def loss(probe, x):
        return jnp.sum(cg.clip_cotangent(x, cg.DropTokens(1), probe=probe) ** 2)

    def total(probe, x):
        return jnp.sum(jax.vmap(functools.partial(loss, probe))(x))

    stats = jax.jit(jax.grad(total))(cg.types.ClipStats.zero(), jnp.stack([X, X, X]))
    assert (stats.changed, stats.size, stats.nonfinite) == (3, 24, 0)
