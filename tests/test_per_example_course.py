"""One answer by every method: what goes wrong while a leaf is followed makes this leaf direct."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._per_example import follow, sums, terms
from tests.per_example_programs import PROGRAMS, arguments
from tests.test_per_example_products import (
    FOLLOWED,
    assert_clipped,
    every_way,
    norms_of,
    one_by_one,
)

ROWS = [
    "joined kernels that are cut again",
    "kernel reshaped across its axes",
    "kernel doubled again and again",
    "strided convolution of an image smaller than its kernel",
    "first state that is a weight",
    "first state that is halved",
]


def in_one(names):
    """The losses of these programs added up, so that they are compiled at once."""
    given = {name: arguments(name) for name in names}
    params = {name: p for name, (p, _) in given.items()}
    batch = {name: x for name, (_, x) in given.items()}

    def loss(params, batch):
        return sum(PROGRAMS[name].loss(params[name], batch[name]) for name in names)

    return loss, params, batch


def flat(tree):
    return {"/".join(map(str, path)): x for path, x in _paths(tree)}


def _paths(tree):
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield [entry.key for entry in path], leaf


@pytest.mark.exhaustive
def test_rows_that_crashed_hung_or_were_wrong_have_one_answer():
    loss, params, batch = in_one(ROWS)
    each = flat(one_by_one(loss, params, batch))
    norms = norms_of(each)
    limit = float(np.median(np.sqrt(sum(n**2 for n in norms.values()))))
    ways, by_leaf = every_way(loss, cg.ClipByGlobalNorm(limit), params, batch)
    for value, grads, stats in ways.values():
        assert_clipped((value, flat(grads), stats), each, limit)
    for path, norm in norms.items():
        np.testing.assert_allclose(by_leaf[path], norm, rtol=2e-5, err_msg=path)
    plan = cg.clip_per_example(loss, cg.ClipByGlobalNorm(limit)).plan(params, batch)
    direct = {leaf.path: leaf.reason for leaf in plan.leaves if leaf.norm == "direct"}
    assert set(direct) == {f"{name}/{leaf}" for name in ROWS for leaf in PROGRAMS[name].direct}
    assert all(reason and "failed" not in reason for reason in direct.values())
    assert "more than 1,024 products" in direct["kernel doubled again and again/w"]


# Whatever goes wrong


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


# What a leaf costs to compile, beside the plain gradient


def operations(loss, params, batch, method):
    """The number of operations in the program, as JAX gives it to the compiler."""
    if method is None:
        mean = lambda p, x: jnp.mean(jax.vmap(loss, (None, 0))(p, x))  # noqa: E731
        function = jax.value_and_grad(mean)
    else:
        function = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0), method=method)
    text = jax.jit(function).lower(params, batch).as_text()
    return len(re.findall(r"^ *%\S+ = ", text, re.MULTILINE))


@pytest.mark.kinds("method")
@pytest.mark.parametrize("width", [64, 1024])
@pytest.mark.parametrize(
    ("method", "of_kernel", "of_bias"), [("one pass", 16, 12), ("two passes", 21, 25)]
)
def test_each_leaf_adds_as_many_operations_in_any_depth(method, of_kernel, of_bias, width):
    """A shape is measured by one function, so that a leaf is little more than a call.

    Five operations of a kernel are the choice of its product by platform.
    """

    def loss(p, x):
        for w, b in p:
            x = jnp.tanh(x @ w + b[None])
        return jnp.sum(x)

    def dense(p, x):
        for w in p:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    def added(loss, leaf):
        batch = jax.ShapeDtypeStruct((16, 8 * width // 64, width), jnp.float32)
        found = {
            own: [operations(loss, [leaf] * n, batch, own) for n in (3, 4, 7)]
            for own in (None, method)
        }
        (a, b, _), (d, e, f) = found[None], found[method]
        assert f - e == 3 * (e - d), "linear in the number of leaves"
        return (e - d) - (b - a)

    kernel, bias = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((width, width), (width,)))
    of_dense = added(dense, kernel)
    assert of_dense <= of_kernel and added(loss, (kernel, bias)) - of_dense <= of_bias
