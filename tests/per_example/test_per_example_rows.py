"""Gradients from rows: against the examples one by one in float64; plans, ranges, memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.helpers import RELEASED, SEED, array
from tests.per_example.per_example_programs import PROGRAMS, arguments
from tests.per_example.per_example_references import (
    METHODS,
    OF_COTANGENT,
    OF_INPUT,
    assert_clipped,
    every_way,
    norms_of,
    one_by_one,
    wide,
)
from tests.rows import first_row

# Of a promise, so that they run by default although each costs half a second.
CORE = {
    "embedding tied to the head", "convolution with stride and dilation",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in CORE else pytest.mark.slow) for name in PROGRAMS],
)
def test_a_program_is_clipped_as_one_example_after_the_other(name):
    loss = PROGRAMS[name].loss
    params, batch = arguments(name)
    each = one_by_one(loss, params, batch)
    norms = norms_of(each)
    limit = float(np.median(np.sqrt(sum(n**2 for n in norms.values()))))
    ways, by_leaf = every_way(loss, cg.ClipByGlobalNorm(limit), params, batch)
    for result in ways.values():
        assert_clipped(result, each, limit)
    for path, norm in norms.items():
        np.testing.assert_allclose(by_leaf[path], norm, rtol=2e-5, atol=1e-30, err_msg=path)
    plan = cg.clip_per_example(loss, cg.ClipByGlobalNorm(limit)).plan(params, batch)
    direct = {leaf.path: leaf.reason for leaf in plan.leaves if leaf.norm == "direct"}
    assert set(direct) == PROGRAMS[name].direct
    assert all(direct.values()) and plan.method == "rows"


# The precision in which a program computes, with the parameters in float32: one of two, in turn.

HALF = ["bfloat16", "float16"]


@pytest.mark.slow
@pytest.mark.usefixtures("users_promotion")
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, HALF[i % 2]) for i, name in enumerate(PROGRAMS, SEED)]
)
def test_a_program_in_half_precision_is_as_near_as_vmap_of_grad(name, dtype):
    params, batch = arguments(name)
    narrow = lambda tree: jax.tree.map(  # noqa: E731
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )

    def loss(p, x):
        return PROGRAMS[name].loss(narrow(p), narrow(x)).astype(jnp.float32)

    exact = norms_of(one_by_one(PROGRAMS[name].loss, params, batch))
    near = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, batch)
    near = norms_of(wide(near))
    norms_by_leaf = jax.jit(cg.per_example_norms(loss, per_leaf=True))(params, batch)
    unit = float(jnp.finfo(dtype).eps)
    for path, norm in exact.items():
        bound = 2 * np.abs(near[path] - norm).max() + 8 * unit * norm.max()
        assert (np.abs(np.float64(norms_by_leaf[path]) - norm) <= bound).all(), path


# rules and options

MIXED = "scanned layers"  # with a stack of kernels, and biases that are direct


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [cg.ClipByNorm, lambda c: cg.ClipByBlockRMS(c / 10), cg.AutoNorm, lambda c: None],
    ids=["norm", "block rms", "auto norm", "off"],
)
def test_other_rules_of_norms_and_none_equal_the_direct_method(make):
    params, batch = arguments(MIXED)
    loss, rule = PROGRAMS[MIXED].loss, make(0.3)

    @jax.jit
    def run(params, batch):
        return [
            cg.clip_per_example(loss, rule, where=where, microbatch=microbatch, method=method)(
                params, batch
            )
            for where, microbatch in (("w", 1), (None, None))
            for method in METHODS
        ]

    results = run(params, batch)
    for pair in (results[:2], results[2:]):
        for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
            a, b = np.float64(a), np.float64(b)
            np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5 * np.abs(a).max())


@pytest.mark.parametrize(
    "rule", [cg.ClipByValue(0.1), cg.ClipByGlobalNorm(1.0, ord=1), lambda g: g]
)
def test_other_rules_are_direct_and_the_plan_says_so(rule):
    params, batch = arguments(MIXED)
    plan = cg.clip_per_example(PROGRAMS[MIXED].loss, rule).plan(params, batch)
    assert plan.method == "direct" and "does not scale whole leaves by L2 norms" in str(plan)


LARGE = {
    "a mask": (lambda p, x: jnp.sum(x @ (p["w"] * 2.0)), 512, "used by mul"),
    "a sorted weight": (lambda p, x: jnp.sum(x @ jnp.sort(p["w"])), 512, "used by"),
    "many rows": (lambda p, x: jnp.sum(jnp.sin(jnp.tile(x, (2000, 1)) @ p["w"])), 512, None),
    "a mask of a small weight": (lambda p, x: jnp.sum(x @ (p["w"] * 2.0)), 511, None),
    "a dense product": (lambda p, x: jnp.sum(x @ p["w"]), 512, None),
}


@pytest.mark.parametrize("name", LARGE)
def test_the_plan_warns_of_a_large_leaf_that_is_direct_for_no_reason_of_size(name):
    fun, columns, reason = LARGE[name]
    weight, batch = (jax.ShapeDtypeStruct(s, "float32") for s in ((513, columns), (2, 513)))
    plan = cg.clip_per_example(fun, cg.ClipByGlobalNorm(1.0)).plan({"w": weight}, batch)
    assert len(plan.warnings) == (reason is not None)
    for text in plan.warnings:
        assert text.startswith(f"w takes 2 MiB, the gradient of each example, since it is {reason}")
        assert str(plan).endswith(f"\nwarning: {text}")
    assert "warning" in str(plan) or not plan.warnings


def test_the_plan_is_a_table_and_counts_what_is_kept():
    params, batch = arguments(MIXED)
    plan = cg.per_example_norms(PROGRAMS[MIXED].loss).plan(params, batch)
    kernel = next(leaf for leaf in plan.leaves if leaf.path == "w")
    # For each example and layer 3 rows of 12 numbers on both sides.
    assert kernel.norm == "Gram" and kernel.rows == 5 * 3 and kernel.bytes == 3 * 5 * 2 * 36 * 4
    assert kernel.reason == "Gram matrices are smaller than it"
    assert plan.method == "rows" and plan.reason == "of all examples at once"
    assert plan.direct_bytes == 3 * 4 * 5 * (144 + 12)
    lines = str(plan).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["leaf", "b", "w"]
    assert lines[2].endswith("used by broadcast_in_dim") or lines[2].endswith("used by add")
    shapes = jax.eval_shape(lambda *args: args, params, batch)
    assert cg.per_example_norms(PROGRAMS[MIXED].loss).plan(*shapes) == plan


@pytest.mark.parametrize(
    ("layers", "width", "batch", "positions", "microbatch", "expected", "reason"),
    [
        (1, 1024, 2048, 64, None, 2048, "of all examples at once"),
        (1, 1024, 4096, 64, None, 2048, "one of 2 parts of the examples at a time"),
        (1, 1024, 3000, 64, None, 1500, "one of 2 parts of the examples at a time"),
        (1, 1024, 4096, 64, 4096, 4096, "of 1 microbatches, as asked"),
        (32, 4096, 2, 2048, None, 2, "of all examples at once"),
        (32, 4096, 4, 2048, None, 2, "one of 2 parts of the examples at a time"),
    ],
    ids=["1 GiB", "more", "no power of two", "as asked", "twice the weights", "more than twice"],
)
def test_auto_takes_as_many_examples_as_fit(
    layers, width, batch, positions, microbatch, expected, reason, monkeypatch
):
    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    monkeypatch.setattr(jax, "device_count", lambda: 1)
    per_example = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0), microbatch=microbatch)
    weights = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    plan = per_example.plan(weights, jax.ShapeDtypeStruct((batch, positions, width), jnp.float32))
    assert plan.microbatch == expected and reason in plan.reason
    assert all(leaf.bytes <= 2**32 for leaf in plan.leaves)


@pytest.mark.slow
def test_parts_of_the_examples_give_the_sum_of_all(monkeypatch):
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w))

    keys = jax.random.split(jax.random.key(0))
    args = jax.random.normal(keys[0], (12, 12)), jax.random.normal(keys[1], (6, 6, 12))
    clip, norms = cg.clip_per_example(loss, cg.ClipByGlobalNorm(5.0)), cg.per_example_norms(loss)
    expected = jax.jit(lambda *args: (clip(*args), norms(*args)))(*args)
    monkeypatch.setattr("clipgrad._per_example.gradients._ROOM", 2**10)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert clip.plan(*args).microbatch == norms.plan(*args).microbatch == 2
    by_parts = jax.jit(lambda *args: (clip(*args), norms(*args)))(*args)
    for a, b in zip(*map(jax.tree.leaves, (expected, by_parts)), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-6)


# truth


def cancelling(params, example):
    """A gradient that is the difference of two products."""
    x, y = example
    return jnp.sum(jnp.sin(x @ params["w"])) - jnp.sum(jnp.sin(y @ params["w"]))


@jax.jit
def cancelling_norms(params, batch):
    return cg.per_example_norms(cancelling)(params, batch)


@pytest.mark.slow
@given(st.integers(0, 2**16), st.integers(-9, 0))
def test_a_norm_is_not_too_small_where_products_cancel(seed, exponent):
    rng = np.random.default_rng(seed)
    params = {"w": jnp.asarray(rng.normal(size=(24, 40)) * 1e-3, jnp.float32)}
    x = rng.normal(size=(8, 4, 24))
    y = x + 10.0**exponent * rng.normal(size=x.shape)
    batch = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    exact = norms_of(one_by_one(cancelling, params, batch))["w"]
    norms = np.float64(cancelling_norms(params, batch))
    # What the cosines are rounded by is a part of 1e-7 of each product, which is in no norm.
    whole = np.sqrt(8 * 24 * 40)
    assert (norms >= exact * (1 - 1e-6) - 3e-7 * whole).all()
    assert (norms <= exact * (1 + 2e-5) + 3e-3 * whole).all()


def squared(params, example):
    """The gradient is a product of three parts, each as large as one wants."""
    scale, x = example
    return scale * jnp.sum(jnp.sin(x @ params["w"]))


@pytest.mark.slow
def test_extreme_gradients_neither_overflow_nor_underflow():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(12, 40)), jnp.float32)}
    scale = jnp.float32([1e17, 1e-21, 1e-30, 1e30, 0.0, 1.0])
    x = jnp.asarray(rng.normal(size=(6, 3, 12)), jnp.float32)
    each = norms_of(one_by_one(squared, params, (scale, x)))["w"]
    ways, by_leaf = every_way(squared, cg.ClipByGlobalNorm(1e-22), params, (scale, x))
    np.testing.assert_allclose(by_leaf["w"], each, rtol=2e-5)
    for _, grads, stats in ways.values():
        np.testing.assert_allclose(stats.norm, each, rtol=2e-5)
        total = np.linalg.norm(np.float64(grads["w"]))
        assert 0 < total <= 5e-22 * (1 + 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("positions", [1, 3], ids=["one row", "Gram matrices"])
def test_a_product_is_as_large_as_its_factors_together(positions):
    """Of any size, with a bias that is the cotangent: by leaf, together and clipped."""

    def loss(params, example):
        x, y = example
        x, y = (jnp.tile(z, (positions, 1)) for z in (x, y))
        return jnp.sum(y * (x @ params["w"])) + jnp.sum(y * params["b"][None])

    rng = np.random.default_rng(0)
    sides = (np.float32(OF_INPUT), 12), (np.float32(OF_COTANGENT) / 3, 40)
    x, y = (s[:, None] * rng.uniform(0.5, 1, (len(s), n)).astype("float32") for s, n in sides)
    params = {"w": jnp.zeros((12, 40)), "b": jnp.zeros(40)}
    sizes = [np.sqrt(np.sum(np.float64(z) ** 2, 1)) for z in (x, y)]
    norms = {"w": positions * sizes[0] * sizes[1], "b": positions * sizes[1]}
    whole = np.hypot(*norms.values())
    ways, by_leaf = every_way(loss, cg.ClipByGlobalNorm(1.0), params, (x, y))
    for path, norm in norms.items():
        of_leaf, finite = by_leaf[path], np.isfinite(norm)
        np.testing.assert_allclose(of_leaf[finite], norm[finite], rtol=1e-5)
        assert not np.isfinite(of_leaf[~finite]).any()
    finite, (_, _, stats) = np.isfinite(whole), ways["auto"]
    np.testing.assert_allclose(stats.norm[finite], whole[finite], rtol=1e-5)
    np.testing.assert_array_equal(stats.nonfinite > 0, ~finite)
    assert (stats.norm[finite] >= whole[finite] * (1 - 4e-7)).all()


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(1e20, marks=pytest.mark.slow), 1e30])
def test_a_coefficient_is_not_multiplied_with_the_constants_of_a_loss(size):
    """Compiled, the coefficient 1e-20 times 1 / 1e20 was 0, and the gradient of the kernel too."""

    def loss(params, x):
        first = (x @ params["w"] + params["b"][None]) / size
        return jnp.sum(first * (x @ params["w"])) / len(x)

    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    params, x = {"w": make(16, 8), "b": make(8)}, make(4, 5, 16) * size
    rule = cg.ClipByGlobalNorm(1.0)
    clips = [cg.clip_per_example(loss, rule, method=method) for method in METHODS]
    (_, grads, stats), (_, expected, others) = (
        jax.jit(lambda *args, f=clip: f(*args)).lower(params, x).compile(RELEASED)(params, x)
        for clip in clips
    )
    np.testing.assert_allclose(stats.norm, others.norm, rtol=1e-5)
    np.testing.assert_allclose(grads["w"], expected["w"], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(grads["b"] * size, expected["b"] * size, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("name", [MIXED, "dense layers", "embedding tied to the head", "lstm"])
@pytest.mark.parametrize("method", METHODS)
def test_an_example_that_is_nan_is_left_out_and_harms_no_other(method, name):
    params, batch = arguments(name)
    loss = PROGRAMS[name].loss

    def spoiled(p, example):
        x, number = example
        return loss(p, x) * number

    each = {k: g[[0, 2]] for k, g in one_by_one(loss, params, batch).items()}
    norm = np.sqrt(sum(n**2 for n in norms_of(each).values()))
    limit = float(np.median(norm)) / 2
    factor, rule = np.minimum(1, limit / norm), cg.ClipByGlobalNorm(limit)

    @jax.jit
    def run(params, batch):
        clips = {
            nonfinite: cg.clip_per_example(
                spoiled, rule, reduce="sum", nonfinite=nonfinite, method=method
            )
            for nonfinite in ("zero", "propagate")
        }
        numbers = jnp.array([1.0, jnp.nan, 1.0])
        return {name: clip(params, (batch, numbers)) for name, clip in clips.items()}

    by_policy = run(params, batch)
    _, grads, stats = by_policy["zero"]
    for path, g in each.items():
        expected = np.tensordot(factor, g, 1)
        np.testing.assert_allclose(grads[path], expected, atol=2e-5 * np.abs(expected).max())
    assert (np.asarray(stats.nonfinite) > 0).tolist() == [False, True, False]
    assert all(np.isnan(g).any() for g in jax.tree.leaves(by_policy["propagate"][1]))


# costs


def arrays_in(text):
    shapes = re.findall(r"(?:f32|bf16)\[([\d,]+)\]", text)
    return {tuple(map(int, shape.split(","))) for shape in shapes}


@pytest.mark.slow
def test_no_gradient_of_each_example_is_made():
    """Of no leaf that has rows: neither in the program nor in its memory."""

    def loss(p, ids):
        @jax.checkpoint
        def layer(x, w):
            return x + jnp.tanh(x @ w["u"]) @ w["d"], None

        x, _ = jax.lax.scan(layer, p["e"][ids], {"u": p["u"], "d": p["d"]})
        return -jnp.mean(jax.nn.log_softmax(x @ p["e"].T)[:, 0])

    shapes = {"e": (301, 96), "u": (3, 96, 205), "d": (3, 205, 96)}
    params = {k: jnp.ones(s) for k, s in shapes.items()}
    batch = jnp.zeros((16, 8), int)
    per_example = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0))
    compiled = jax.jit(lambda p, b: per_example(p, b)[1]).lower(params, batch).compile(RELEASED)
    sizes = [301 * 96, 96 * 205]
    made = {np.prod(s) for s in arrays_in(compiled.as_text())}
    assert not made & {16 * n for n in sizes} | made & {16 * 3 * n for n in sizes}


def test_uses_of_one_value_keep_it_once():
    """Query, key and value of a layer have the same input."""

    def loss(p, x):
        step = lambda x, w: (jnp.tanh(x @ w["q"]) * (x @ w["k"]), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x, p)[0])

    params = {k: array(np.ones((5, 24, 24))) for k in "qk"}
    plan = cg.per_example_norms(loss).plan(params, array(np.ones((7, 4, 24))))
    rows = 7 * 5 * 4 * 24 * 4
    assert sorted(leaf.bytes for leaf in plan.leaves) == [rows, 2 * rows]


# devices


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embedding tied to the head", MIXED])
def test_a_sharded_batch_needs_one_all_reduce(name):
    params, batch = arguments(name)
    batch = np.concatenate([batch, batch, batch])[:8]
    per_example = cg.clip_per_example(PROGRAMS[name].loss, cg.ClipByGlobalNorm(0.1))

    def run(params, batch):
        return per_example(params, batch)[1:]

    expected = jax.jit(run)(params, batch)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(batch, NamedSharding(mesh, P("x")))
    replicated = jax.device_put(params, NamedSharding(mesh, P()))
    compiled = jax.jit(run).lower(replicated, sharded).compile()
    text = compiled.as_text()
    assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1
    assert "all-gather" not in text and "all-to-all" not in text
    pairs = zip(*map(jax.tree.leaves, (expected, compiled(replicated, sharded))), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_explicit_mesh_axes_are_refused_with_what_to_write(method):
    params, batch = arguments(MIXED)
    batch = np.concatenate([batch, batch, batch])[:8]
    loss, rule = PROGRAMS[MIXED].loss, cg.ClipByGlobalNorm(1.0)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(batch, NamedSharding(mesh, P("x")))
        for run in (
            cg.clip_per_example(loss, rule, method=method),
            cg.per_example_norms(loss, method=method),
        ):
            with pytest.raises(ValueError, match=r"Explicit mesh axes 'x', expected Auto .* write"):
                run(params, sharded)


# bad input


def test_wrong_arguments_and_models_with_other_leaves_are_refused():
    with pytest.raises(ValueError, match="method: got 'fast', expected one of auto, direct"):
        cg.per_example_norms(lambda p, x: p, method="fast")
    with pytest.raises(TypeError, match="loss_fn: got 3 of type int, expected a function of"):
        cg.per_example_norms(3)
    model = {"w": array(np.ones(2)), "activation": jnp.tanh}
    with pytest.raises(TypeError, match=r"at 'activation', expected arrays.*\n.*eqx.partition"):
        cg.clip_per_example(lambda p, x: x, None)(model, array(np.ones(3)))
    with pytest.raises(TypeError, match=r"at 'activation', expected arrays.*\n.*eqx.partition"):
        cg.per_example_norms(lambda p, x: x).plan(model, array(np.ones(3)))
