"""A tree of limits for `ClipByNorm`: each leaf is clipped as by a rule with its own number."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from tests.helpers import PLACES, assert_close, assert_same, tree_of

everywhere = pytest.mark.parametrize("apply", PLACES.values(), ids=PLACES)
DIRECTION = np.array([0.6, 0.8])


def nested(key, dtype=jnp.float32):
    body, head = (tree_of(k, dtype, 2.0) for k in jax.random.split(key))
    return {"body": {"b": body["bias"], "n": None, "w": body["dense"]}, "head": head}


FULL = {"body": {"b": None, "n": None, "w": 0.3}, "head": 0.1}


@pytest.mark.kinds("apply", "dtype", "options")
@everywhere
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"axis": -1}, {"ord": 1}], ids=str)
def test_each_leaf_is_clipped_to_its_own_limit(apply, dtype, options, key):
    grads = nested(key, dtype)
    clipped = jax.jit(lambda g: apply(cg.ClipByNorm(FULL, **options), g, g))(grads)
    alone = jax.jit(lambda g: cg.ClipByNorm(0.3, **options)(g))(grads["body"]["w"])
    assert_same(clipped["body"]["w"], alone)
    assert clipped["body"]["n"] is None
    assert_same(clipped["body"]["b"], grads["body"]["b"])
    below = jax.jit(lambda g: cg.ClipByNorm(0.1, **options)(g))(grads["head"])
    assert_same(clipped["head"], below)


def test_new_limits_retrace_nothing_and_may_be_traced():
    grads, traces = {"a": jnp.array([3.0, 4.0]), "b": jnp.ones(1)}, []

    @jax.jit
    def clip(rule):
        traces.append(rule)
        return rule(grads)

    for a in (0.5, 2.0):
        clipped = clip(cg.ClipByNorm({"a": a, "b": 0.25}))
        assert_close(clipped, {"a": a * DIRECTION, "b": np.array([0.25])})
    assert len(traces) == 1
    slope = jax.grad(lambda c: clip(cg.ClipByNorm({"a": c, "b": 1.0}))["a"].sum())(2.0)
    np.testing.assert_allclose(slope, 1.4, rtol=1e-6)


def test_limits_may_be_schedules_and_statistics_keep_the_tree():
    rule = cg.ClipByNorm({"a": optax.linear_schedule(2.0, 1.0, 1), "b": 0.5})
    tx = cg.gradient_clip(rule, stats="per_leaf")
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.ones(1)}
    state, first = tx.init(grads), tx.init(grads)
    for limit in (2.0, 1.0):
        updates, state = jax.jit(tx.update)(grads, state)
        assert jax.tree.structure(state) == jax.tree.structure(first)
        assert_close(state.threshold, {"a": limit, "b": 0.5})
        assert_close(updates, {"a": limit * DIRECTION, "b": np.array([0.5])})
        assert_close(state.leaf_stats["a"].clipped_norm, limit)
        assert_close(state.stats.clipped_norm, np.hypot(limit, 0.5))
    assert cg.scalars(state)["clip/threshold/a"] == 1


@pytest.mark.kinds()
@pytest.mark.parametrize("method", ["auto", "direct"])
def test_each_example_has_a_limit_for_each_layer(method):
    x = jax.random.normal(jax.random.key(0), (6, 4)) * 0.3  # where tanh is not saturated
    w = {"v": jnp.ones((4, 2)), "b": jnp.zeros(2)}

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w["v"] + w["b"]) * jnp.arange(2.0))

    limits = {"v": 0.05, "b": 0.02}
    each = jax.vmap(jax.grad(loss), (None, 0))(w, x)
    expected, squares = {}, 0.0
    for name, g in each.items():
        g = np.float64(g).reshape(6, -1)
        norms = np.linalg.norm(g, axis=1)
        g = g * np.minimum(1, limits[name] / np.maximum(norms, 1e-30))[:, None]
        expected[name] = g.mean(0).reshape(w[name].shape)
        squares = squares + (g**2).sum(1)
    rule = cg.ClipByNorm(limits)
    _, grads, stats = jax.jit(cg.clip_per_example(loss, rule, method=method))(w, x)
    assert_close(grads, expected, rtol=2e-5, atol=1e-8)
    assert_close(stats.clipped_norm, np.sqrt(squares), rtol=1e-5)


@pytest.mark.parametrize(
    "error, run, match",
    [
        (ValueError, lambda: cg.ClipByNorm({"a": -1.0}), r"max_norm\['a'\]: got -1.0"),
        (TypeError, lambda: cg.ClipByNorm([cg.EMAThreshold()]), r"max_norm\[0\]: got EMAThres"),
        (TypeError, lambda: cg.ClipByNorm({}), "max_norm: got {} of type dict, expected a number"),
        (TypeError, lambda: cg.ClipByGlobalNorm({"a": 1.0}), "max_norm: got {'a': 1.0} of type di"),
        (ValueError, lambda: cg.ClipByNorm({"a": 1.0})({"b": jnp.ones(1)}),
         r"max_norm: got limits of the structure .*expected a prefix of PyTreeDef\({'b': \*}\)"),
        (ValueError, lambda: cg.ClipByNorm([1.0])(jnp.ones(1)), "max_norm: got limits of the"),
        (TypeError, lambda: cg.ClipByNorm({"a": lambda step: 1.0})({"a": jnp.ones(1)}),
         "max_norm: got a schedule, which only a gradient clip can evaluate"),
    ],
    ids=range(7),
)  # fmt: skip
def test_what_makes_no_sense_is_refused(error, run, match):
    with pytest.raises(error, match=match):
        run()
