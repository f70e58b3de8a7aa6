"""Groups of leaves: what is measured, what is scaled, and what became of each leaf."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.helpers import CASES, assert_close, reductions, tree_of

TREE = {
    "body": {"bias": jnp.array([2.0]), "kernel": jnp.array([3.0, 6.0])},
    "head": jnp.array([24.0]),
}  # norms 2, sqrt(45), 24; the body has 7, all of it 25


def norm(tree):
    return np.linalg.norm(np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]))


# Measured and scaled


@pytest.mark.kinds("where")
@pytest.mark.parametrize(
    "where, measure, factors",
    [
        ("body", None, (1 / 7, 1)),
        ("body", ".", (0.04, 1)),
        ("head", "body", (1, 1 / 7)),
        (None, {"body": True, "head": False}, (1 / 7, 1 / 7)),
        ("head", lambda tree: {"body": {"bias": True, "kernel": False}, "head": False}, (1, 0.5)),
    ],
    ids=range(5),
)
def test_what_is_measured_and_what_is_scaled_are_said_apart(where, measure, factors):
    body, head = factors
    expected = {"body": jax.tree.map(lambda g: g * body, TREE["body"]), "head": TREE["head"] * head}
    groups = {"where": where, "measure": measure}
    clipped, stats = cg.clip_grads(TREE, cg.ClipByGlobalNorm(1.0), **groups)
    assert_close(clipped, expected)
    assert head != 1 or clipped["head"] is TREE["head"]
    for tx in (
        cg.clip_by_global_norm(1.0, **groups),
        cg.gradient_clip(cg.ClipByGlobalNorm(1.0), **groups, stats=True),
    ):
        updates, state = jax.jit(tx.update)(TREE, tx.init(TREE), TREE)
        assert_close(updates, expected)
    assert stats.clipped_norm == 1 and state.stats.norm == pytest.approx(float(stats.norm))
    assert float(stats.norm) == pytest.approx(1 / min(factors))


def test_a_nan_that_is_measured_reaches_what_is_scaled_unless_it_is_zeroed():
    tree = {**TREE, "head": jnp.array([jnp.nan])}
    groups = {"where": "body", "measure": "."}
    clipped, _ = cg.clip_grads(tree, cg.ClipByGlobalNorm(1.0), **groups)
    assert jnp.isnan(clipped["body"]["kernel"]).all()
    clipped, stats = cg.clip_grads(tree, cg.ClipByGlobalNorm(1.0), **groups, nonfinite="zero")
    assert stats.norm == 7 and jnp.isnan(clipped["head"]).all()
    with pytest.raises(FloatingPointError, match="NaN or inf in 'head'"):
        cg.clip_grads(tree, cg.ClipByGlobalNorm(1.0), **groups, nonfinite="error")


def test_a_history_follows_what_is_measured():
    tx = cg.clip_by_global_norm(cg.PercentileThreshold(50), where="body", measure="head")
    _, state = tx.update(TREE, tx.init(TREE))
    assert state.threshold == 24
    tx = cg.clip_by_global_norm(cg.PercentileThreshold(50), nonfinite="zero")
    _, state = tx.update(jnp.array([jnp.nan, 3.0]), tx.init(jnp.zeros(2)))
    assert state.threshold == 3


@pytest.mark.parametrize("rule", [cg.ClipByNorm(1.0), None], ids=str)
def test_measure_is_refused_where_there_is_no_single_norm(rule):
    with pytest.raises(ValueError, match="measure: got leaves .* expected ClipByGlobalNorm"):
        cg.clip_grads(TREE, rule, measure="body")
    with pytest.raises(ValueError, match="measure: got leaves .* expected ClipByGlobalNorm"):
        cg.gradient_clip(rule, measure="body")


def test_a_measure_that_is_no_selection_is_refused():
    for wrong, match in (("[", "expected a path or a reg"), ({"x": True}, "got a mask of the str")):
        with pytest.raises(ValueError, match=f"measure: .*{match}"):
            cg.clip_grads(TREE, cg.ClipByGlobalNorm(1.0), measure=wrong)


# Statistics by leaf


@pytest.mark.exhaustive
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
    tree = {"a": jnp.array([jnp.nan, jnp.inf]), "b": jnp.array([3.0]), "i": jnp.array([1])}
    tx = cg.clip_by_global_norm(1.0, stats="per_leaf", nonfinite=nonfinite)
    _, state = tx.update(tree, tx.init(tree))
    assert {p: int(s.nonfinite) for p, s in state.leaf_stats.items()} == {"a": 2, "b": 0}
    assert state.nonfinite_count == 1


@pytest.mark.exhaustive
def test_statistics_of_a_global_norm_take_no_second_reduction():
    """The norms are read off the sums that make up the global norm, and the clipped ones from
    these; NaN and inf are counted in a branch that is taken only if there are any."""
    params = {f"w{i}": jnp.ones((4, 4 + i)) for i in range(2)}

    def compiled(stats):
        tx = cg.clip_by_global_norm(1.0, stats=stats)
        return jax.jit(tx.update).lower(params, tx.init(params)).compile()

    plain, total, each = (reductions(compiled(stats)) for stats in (False, True, "per_leaf"))
    assert total <= plain + 2 and each <= total + 2
    tx = cg.clip_by_global_norm(1.0, stats="per_leaf")

    def norms(grads):
        state = tx.update(grads, tx.init(params))[1]
        return {path: (s.norm, s.clipped_norm) for path, s in state.leaf_stats.items()}

    assert reductions(jax.jit(norms).lower(params).compile()) == plain


def test_statistics_without_leaves_cost_no_state():
    assert cg.clip_by_norm(1.0, stats=True).init(TREE).leaf_stats is None
    with pytest.raises(ValueError, match="stats: got 'leaf', expected True, False or 'per_leaf'"):
        cg.clip_by_norm(1.0, stats="leaf")


def test_statistics_of_other_leaves_than_those_of_init_are_refused():
    tx = cg.clip_by_norm(1.0, stats="per_leaf")
    for other in (TREE["body"], {"b": jnp.ones(1), "h": TREE["head"]}):
        with pytest.raises(ValueError, match="updates: got the leaves .* the state has"):
            tx.update(other, tx.init(TREE))
