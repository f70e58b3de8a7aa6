"""Groups of leaves: what is measured, what is scaled, and what became of each leaf."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.helpers import CASES, array, reductions, tree_of

TREE = {
    "body": {"bias": array([2.0]), "kernel": array([3.0, 6.0])},
    "head": array([24.0]),
}  # norms 2, sqrt(45), 24; the body has 7, all of it 25


def norm(tree):
    return np.linalg.norm(np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]))


@pytest.mark.slow
def test_a_history_follows_what_is_measured():
    tx = cg.clip_by_global_norm(cg.PercentileThreshold(50), where="body")
    _, state = tx.update(TREE, tx.init(TREE))
    assert state.threshold == 7
    tx = cg.clip_by_global_norm(cg.PercentileThreshold(50), nonfinite="zero")
    _, state = tx.update(jnp.array([jnp.nan, 3.0]), tx.init(jnp.zeros(2)))
    assert state.threshold == 3


# Statistics by leaf


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_leaf_has_the_statistics_of_its_own_clip(case, key):
    grads, params = tree_of(key, scale=3.0), tree_of(jax.random.fold_in(key, 1))
    tx = cg.gradient_clip(case.make(0.3), stats="per_leaf")
    first = tx.init(params)
    updates, state = jax.jit(tx.update)(grads, first, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, first)
    assert list(state.leaf_stats) == ["bias", "conv", "dense", "empty"]
    for path, stats in state.leaf_stats.items():
        expected = cg.types.ClipStats.of(grads[path], updates[path])
        np.testing.assert_allclose(stats.norm, expected.norm, rtol=1e-6)
        np.testing.assert_allclose(stats.clipped_norm, expected.clipped_norm, rtol=1e-6)
        assert (stats.clipped, stats.nonfinite, stats.size) == (
            expected.clipped, 0, grads[path].size)  # fmt: skip
    total = jax.tree.map(lambda *parts: sum(parts), *state.leaf_stats.values())
    np.testing.assert_allclose(total.norm, state.stats.norm, rtol=1e-6)
    np.testing.assert_allclose(total.clipped_norm, state.stats.clipped_norm, rtol=1e-6)
    assert total.size == state.stats.size


def test_norms_of_leaves_are_right_over_the_whole_range():
    @jax.jit
    def clip(limit, tree):
        tx = cg.clip_by_global_norm(limit, stats="per_leaf")
        updates, state = tx.update(tree, tx.init(tree))
        norms = {path: (s.norm, s.clipped_norm) for path, s in state.leaf_stats.items()}
        return updates, norms

    for limit, scale in itertools.product([1e-33, 1e33, 0.0], [1e-30, 1e-12, 1e12, 1e30]):
        tree = {"large": np.float32([3, 4]), "small": np.float32([3e-4, 4e-4])}
        tree = {path: x * np.float32(scale) for path, x in tree.items()}
        updates, norms = clip(np.float32(limit), tree)
        for path, (before, after) in norms.items():
            np.testing.assert_allclose(before, norm(np.float64(tree[path])), rtol=1e-5)
            kept = norm(np.float64(updates[path]))
            np.testing.assert_allclose(after, kept, rtol=1e-5, atol=2e-38)


@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_the_leaf_that_is_not_finite_is_named(nonfinite):
    tree = {"a": array([jnp.nan, jnp.inf]), "b": array([3.0]), "i": array([1], np.int32)}
    tx = cg.clip_by_global_norm(1.0, stats="per_leaf", nonfinite=nonfinite)
    _, state = jax.jit(tx.update)(tree, tx.init(tree))
    assert {p: int(s.nonfinite) for p, s in state.leaf_stats.items()} == {"a": 2, "b": 0}
    assert state.nonfinite_count == 1


@pytest.mark.slow
def test_statistics_of_a_global_norm_take_no_second_reduction():
    """They follow from the norm; NaN and inf are counted in a branch, if there are any."""
    params = {f"w{i}": jnp.ones((4, 4 + i)) for i in range(2)}

    def compiled(stats):
        tx = cg.clip_by_global_norm(1.0, stats=stats)
        return jax.jit(tx.update).lower(params, tx.init(params)).compile()

    plain, total = (reductions(compiled(stats)) for stats in (False, True))
    assert total <= plain + 2


def test_statistics_without_leaves_cost_no_state():
    assert cg.clip_by_norm(1.0, stats=True).init(TREE).leaf_stats is None
    with pytest.raises(ValueError, match="stats: got 'leaf', expected True, False or 'per_leaf'"):
        cg.clip_by_norm(1.0, stats="leaf")


def test_statistics_of_other_leaves_than_those_of_init_are_refused():
    tx = cg.clip_by_norm(1.0, stats="per_leaf")
    for other in (TREE["body"], {"b": array(np.ones(1)), "h": TREE["head"]}):
        with pytest.raises(ValueError, match="updates: got the leaves .* the state has"):
            jax.jit(tx.update)(other, tx.init(TREE))
