"""One answer by every method: what goes wrong while a leaf is followed makes this leaf direct."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._per_example import follow, sums, terms
from tests.test_per_example_products import FOLLOWED, assert_clipped, one_by_one


def broken(*args, **kwargs):
    raise RuntimeError("out of order")


def rule(name):
    return lambda patch: patch.setitem(follow._RULES, name, broken)


BREAKS = {
    "dot_general": rule("dot_general"),
    "transpose": rule("transpose"),
    "add_any": rule("add_any"),
    "scan": rule("scan"),
    "squares": lambda patch: patch.setattr(follow, "squares", broken),
    "sums": lambda patch: patch.setattr(sums, "_weighted", broken),
    "slices": lambda patch: patch.setattr(terms.Term, "between", broken),
    "terms": lambda patch: patch.setattr(terms.Term, "with_axes", broken),
}


@pytest.mark.parametrize(
    "method", [pytest.param("one pass", marks=pytest.mark.exhaustive), "two passes"]
)
def test_whatever_breaks_while_a_leaf_is_followed_makes_it_direct(method, monkeypatch):
    def loss(p, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x @ p["in"].T, p["layers"])
        cut = jnp.concatenate([p["cut"], p["cut"]], axis=1)
        x = jnp.sin(x @ cut[:, :5]) * (x @ cut[:, 3:8])
        return jnp.sum(x @ p["twice"] @ p["twice"])

    shapes = {"in": (12, 8), "layers": (3, 12, 12), "cut": (12, 4), "twice": (5, 5)}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), 4), strict=True))
    params = {k: jax.random.normal(keys[k], s) / 3 for k, s in shapes.items()}
    batch = jax.random.normal(jax.random.key(1), (3, 2, 8))
    each = one_by_one(loss, params, batch)
    rule, plans = cg.ClipByGlobalNorm(2.0), {}
    per_example = cg.clip_per_example(loss, rule, reduce="sum", method=method)

    @jax.jit
    def with_each_of_them(params, batch):
        found = {}
        for name, breaks in BREAKS.items():
            with monkeypatch.context() as patch:
                breaks(patch)
                plans[name] = per_example.plan(params, batch)
                found[name] = per_example(params, batch)
        return found

    for name, result in with_each_of_them(params, batch).items():
        assert_clipped(result, each, 2.0)
        leaves = plans[name].leaves
        failed = [leaf for leaf in leaves if "RuntimeError: out of order" in leaf.reason]
        assert failed and all(leaf.norm == "direct" for leaf in failed), name


def test_an_error_of_the_model_is_its_own():
    @jax.custom_vjp
    def same(x):
        return x

    def backward(_, ct):
        raise KeyError("of the model")

    same.defvjp(lambda x: (x, None), backward)
    with pytest.raises(KeyError, match="of the model"):
        cg.clip_per_example(lambda w, x: same(w @ x), None)(jnp.ones(2), jnp.ones((3, 2)))


# What is an array in the plan is one in every pass: there NaN and inf count as 0.


def test_both_passes_leave_out_the_same_of_an_example_that_is_not_finite():
    """The first kernel has a gradient that is NaN, and no other: tanh is flat at infinity."""

    def loss(p, x):
        x = jnp.tanh(jax.lax.conv(x[None], p["stem"], (1, 1), "SAME"))
        return jnp.sum(jnp.tanh(x.reshape(8, -1) @ p["w"]) @ p["small"]) + jnp.sum(p["b"] * x[0, 0])

    shapes = {"stem": (8, 3, 3, 3), "w": (36, 9), "small": (9, 1), "b": (6, 6)}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), 4), strict=True))
    params = {k: jax.random.normal(keys[k], s) / 3 for k, s in shapes.items()}
    batch = jax.random.normal(jax.random.key(1), (4, 3, 6, 6)).at[1, 0, 2, 2].set(jnp.inf)

    @jax.jit
    def run(params, batch):
        return [
            cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0), nonfinite="zero", method=method)(
                params, batch
            )[1:]
            for method in ("direct", *FOLLOWED)
        ]

    (expected, stats), *others = run(params, batch)
    assert all(np.isfinite(g).all() for g in expected.values())
    assert (np.asarray(stats.nonfinite) > 0).tolist() == [False, True, False, False]
    for grads, own in others:
        for path, g in expected.items():
            np.testing.assert_allclose(grads[path], g, atol=2e-5 * np.abs(g).max(), err_msg=path)
        np.testing.assert_allclose(own.norm, stats.norm, rtol=2e-5)
