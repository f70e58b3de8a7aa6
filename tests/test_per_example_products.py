"""Gradients followed to their products: against one example after the other in float64."""

import functools
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
from benchmarks.per_example_temporaries import PROGRAMS as PLANNED
from clipgrad._jaxpr import equations
from clipgrad._per_example import plan as plan_module
from clipgrad._per_example.plan import Rates
from tests.helpers import RELEASED
from tests.per_example_programs import PROGRAMS, arguments

FOLLOWED = ("one pass", "two passes")


def wide(tree):
    def cast(x):
        return np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)

    return jax.tree.map(cast, tree)


def one_by_one(loss, params, batch):
    """The gradient of each example in float64, one after the other."""
    with jax.enable_x64(True):
        params, batch = wide((params, batch))
        grad = jax.jit(lambda p, b: jax.lax.map(lambda x: jax.grad(loss)(p, x), b))
        return jax.tree.map(np.asarray, grad(params, batch))


def norms_of(each):
    return {k: np.sqrt(np.sum(np.square(g), axis=tuple(range(1, g.ndim)))) for k, g in each.items()}


def every_way(loss, rule, params, batch, **options):
    """The results of both methods, and the norms by leaf, compiled at once."""

    @jax.jit
    def run(params, batch):
        ways = {
            m: cg.clip_per_example(loss, rule, reduce="sum", method=m, **options)(params, batch)
            for m in FOLLOWED
        }
        return ways, cg.per_example_norms(loss, per_leaf=True)(params, batch)

    return run(params, batch)


def assert_clipped(result, each, limit, rtol=2e-5):
    _, grads, stats = result
    norm = np.sqrt(sum(n**2 for n in norms_of(each).values()))
    np.testing.assert_allclose(stats.norm, norm, rtol=rtol, atol=1e-30)
    factor = np.minimum(1, limit / np.maximum(norm, 1e-300))
    for path, g in each.items():
        expected = np.tensordot(factor, g, 1)
        np.testing.assert_allclose(
            np.float64(grads[path]), expected, atol=rtol * np.abs(expected).max(), err_msg=path
        )


# One program for each kind of product, and one in a scan.
CORE = {
    "experts as a batch dimension", "embedding tied to the head", "grouped convolution",
    "lstm", "vmap inside of the loss", "what a branch or a rule of vmap makes differ",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in CORE else (pytest.mark.exhaustive, pytest.mark.row))
        for name in PROGRAMS
    ],
)
def test_a_program_is_followed_and_clipped(name):
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
    assert all(reason and "failed" not in reason for reason in direct.values())


def test_a_weight_that_becomes_too_many_products_is_direct_and_says_so():
    params, batch = arguments(name := "kernel doubled again and again")
    (leaf,) = cg.per_example_norms(PROGRAMS[name].loss).plan(params, batch).leaves
    assert leaf.norm == "direct" and "more than 1,024 products" in leaf.reason


# rules and options

MIXED = "scanned layers"  # with a stack of kernels, and biases that are direct


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "make",
    [lambda c: cg.ClipByNorm(c), lambda c: cg.ClipByBlockRMS(c / 10), lambda c: None],
    ids=["norm", "block rms", "off"],
)
def test_rules_by_leaf_and_none_equal_the_direct_method(make):
    params, batch = arguments(MIXED)
    loss, rule = PROGRAMS[MIXED].loss, make(0.3)

    @jax.jit
    def run(params, batch):
        return [
            cg.clip_per_example(loss, rule, where=where, microbatch=microbatch, method=method)(
                params, batch
            )
            for where, microbatch in (("w", 1), (None, None))
            for method in ("direct", *FOLLOWED)
        ]

    results = run(params, batch)
    for direct, *others in (results[:3], results[3:]):
        for other in others:
            for a, b in zip(jax.tree.leaves(direct), jax.tree.leaves(other), strict=True):
                a, b = np.float64(a), np.float64(b)
                np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5 * np.abs(a).max())


@pytest.mark.parametrize(
    "rule", [cg.ClipByValue(0.1), cg.ClipByGlobalNorm(1.0, ord=1), lambda g: g]
)
def test_other_rules_are_direct_and_the_plan_says_so(rule):
    params, batch = arguments(MIXED)
    plan = cg.clip_per_example(PROGRAMS[MIXED].loss, rule).plan(params, batch)
    assert plan.method == "direct" and "does not scale whole leaves by L2 norms" in str(plan)


def test_the_plan_is_a_table_and_counts_what_is_kept():
    params, batch = arguments(MIXED)
    plan = cg.per_example_norms(PROGRAMS[MIXED].loss).plan(params, batch)
    kernel = next(leaf for leaf in plan.leaves if leaf.path == "w")
    # For each example and layer a factor of 3 x 12 on both sides.
    assert kernel.norm == "Gram" and kernel.rows == 3 and kernel.bytes == 3 * 5 * 2 * 36 * 4
    assert plan.reason == "norms are measured where factors arise"
    assert plan.method == "one pass" and plan.direct_bytes == 3 * 4 * 5 * (144 + 12)
    assert [line.split()[0] for line in str(plan).splitlines()[1:4]] == ["leaf", "b", "w"]
    shapes = jax.eval_shape(lambda *args: args, params, batch)
    assert cg.per_example_norms(PROGRAMS[MIXED].loss).plan(*shapes) == plan


@pytest.mark.parametrize(
    ("layers", "width", "batch", "positions", "microbatch", "method", "room"),
    [
        (1, 1024, 2048, 64, None, "one pass", "fit into 1,024 MiB"),
        (1, 1024, 2049, 64, None, "two passes", "do not fit into 1,024 MiB"),
        (1, 1024, 4096, 64, 2048, "one pass", "fit into 1,024 MiB"),
        (32, 4096, 2, 2048, None, "one pass", "fit into 4,096 MiB"),
        (32, 4096, 3, 2048, None, "two passes", "do not fit into 4,096 MiB"),
    ],
    ids=["1 GiB", "more", "in parts", "twice the weights", "a language model"],
)
def test_auto_takes_one_pass_if_the_factors_fit(
    layers, width, batch, positions, microbatch, method, room
):
    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    per_example = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0), microbatch=microbatch)
    weights = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    plan = per_example.plan(weights, jax.ShapeDtypeStruct((batch, positions, width), jnp.float32))
    assert (plan.method, plan.reason) == (method, f"the factors {room}")


@pytest.mark.usefixtures("users_promotion")
@pytest.mark.kinds()
@pytest.mark.parametrize("name", PLANNED)
def test_auto_takes_two_passes_if_the_factors_are_larger_than_the_gradients(name):
    """Those of all steps of a recurrence are; any other leaf is an array then."""
    found = set()
    for seed in range(4):
        drawn = PLANNED[name](np.random.default_rng(seed))
        plan = drawn.clip("auto").plan(*drawn.arguments())
        is_larger = plan.bytes > plan.direct_bytes
        assert plan.method == ("two passes" if is_larger else "one pass")
        assert ("larger than the gradients of all examples" in plan.reason) == is_larger
        found.add(is_larger)
    assert (True in found) == (name in ("recurrence", "lstm"))


def computed_in(dtype, params, x):
    x = x.astype(dtype)
    for w in params["layers"]:
        x = jnp.tanh(x @ w.astype(dtype))
    return jnp.sum((x * params["scale"].astype(dtype)[None]).astype("float32"))


SIZED = [(dtype, *size) for dtype in ("bfloat16", "float32") for size in ((64, 4), (1024, 256))]
MEMORY = {"as much as there is": 2**40, "little": 2**24, "unknown": None}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_auto_takes_the_least_estimated_time_of_what_fits(backend, memory, monkeypatch):
    """On an accelerator: never more than direct does where that fits; norms are followed."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(plan_module, "device_memory", lambda: MEMORY[memory])
    found = set()
    for dtype, width, rows in SIZED:
        layers = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 2
        params = {"layers": layers, "scale": jax.ShapeDtypeStruct((width,), jnp.float32)}
        batch = jax.ShapeDtypeStruct((32, rows, width), jnp.float32)
        loss = functools.partial(computed_in, dtype)
        plan = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0)).plan(params, batch)
        estimates = re.findall(r"(one pass|two passes|direct) ([\d.e-]+) ms", plan.reason)
        seconds = {method: float(t) for method, t in estimates}
        assert set(seconds) == {"one pass", "two passes", "direct"}, plan.reason
        fits = "(does not fit)" not in plan.reason
        assert (seconds[plan.method] <= seconds["direct"]) if fits else plan.method != "direct"
        kinds = {leaf.norm for leaf in plan.leaves}
        assert kinds == {"direct"} or plan.method != "direct"
        assert {leaf.dtype for leaf in plan.leaves if leaf.norm != "direct"} <= {dtype}
        found.add((plan.method, fits))
        assert cg.per_example_norms(loss).plan(params, batch).method == "one pass"
    assert (False in {fits for _, fits in found}) == (memory == "little")
    assert "one pass" in {method for method, _ in found}
    assert memory == "little" or ("direct", True) in found


def test_what_is_direct_for_its_time_is_the_same_clip(monkeypatch, key):
    keys = jax.random.split(key, 3)
    params = {"layers": [jax.random.normal(k, (24, 24)) for k in keys[:2]], "scale": jnp.ones(24)}
    batch = jax.random.normal(keys[2], (4, 3, 24))
    loss = functools.partial(computed_in, "float32")
    monkeypatch.setattr(plan_module, "device_rates", lambda: Rates(1e30, 1.0, 1e30))
    options = {"reduce": "sum", "where": "layers*"}
    clips = [
        cg.clip_per_example(loss, cg.ClipByGlobalNorm(0.5), method=method, **options)
        for method in ("auto", "one pass")
    ]
    assert [c.plan(params, batch).method for c in clips] == ["direct", "one pass"]
    ours, expected = jax.jit(lambda: [clip(params, batch) for clip in clips])()
    for a, b in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    # An example with NaN is left out as a whole only where it is followed.
    zero = cg.clip_per_example(loss, cg.ClipByGlobalNorm(0.5), nonfinite="zero")
    assert zero.plan(params, batch).method == "one pass"


# truth


def cancelling(params, example):
    """A gradient that is the difference of two products."""
    x, y = example
    return jnp.sum(jnp.sin(x @ params["w"])) - jnp.sum(jnp.sin(y @ params["w"]))


@jax.jit
def cancelling_norms(params, batch):
    return cg.per_example_norms(cancelling)(params, batch)


@given(st.integers(0, 2**16), st.integers(-9, 0))
def test_a_norm_is_not_too_small_where_products_cancel(seed, exponent):
    rng = np.random.default_rng(seed)
    params = {"w": jnp.asarray(rng.normal(size=(24, 40)) * 1e-3, jnp.float32)}
    x = rng.normal(size=(8, 4, 24))
    y = x + 10.0**exponent * rng.normal(size=x.shape)
    batch = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    exact = norms_of(one_by_one(cancelling, params, batch))["w"]
    found = np.float64(cancelling_norms(params, batch))
    # What the cosines are rounded by is a part of 1e-7 of each product, which is in no norm.
    whole = np.sqrt(8 * 24 * 40)
    assert (found >= exact * (1 - 1e-6) - 3e-7 * whole).all()
    assert (found <= exact * (1 + 2e-5) + 3e-3 * whole).all()


def squared(params, example):
    """The gradient is a product of three parts, each as large as one wants."""
    scale, x = example
    return scale * jnp.sum(jnp.sin(x @ params["w"]))


@pytest.mark.exhaustive
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


OF_INPUT = [1.0, 1e30, 1e-30, 1e30, 1e-30, 1e18, 3e38, 1e-37, 0.0, 1.0, np.inf, 1.0, np.nan]
OF_COTANGENT = [1.0, 1e-30, 1e30, 1e7, 1e-7, 1e18, 1e-3, 1e2, 1.0, 0.0, 1.0, np.inf, 1.0]


def test_an_outer_product_is_as_large_as_its_factors_together():
    """Of any size, with a bias that is the cotangent: by leaf, together and clipped."""

    def loss(params, example):
        x, y = example
        return jnp.sum(y * (x @ params["w"])) + jnp.sum(y * params["b"])

    rng = np.random.default_rng(0)
    sides = (np.float32(OF_INPUT), 12), (np.float32(OF_COTANGENT), 40)
    x, y = (s[:, None] * rng.uniform(0.5, 1, (len(s), n)).astype("float32") for s, n in sides)
    params = {"w": jnp.zeros((12, 40)), "b": jnp.zeros(40)}
    sizes = [np.sqrt(np.sum(np.float64(z) ** 2, 1)) for z in (x, y)]
    norms = {"w": sizes[0] * sizes[1], "b": sizes[1]}
    whole = np.hypot(*norms.values())
    results, by_leaf = every_way(loss, cg.ClipByGlobalNorm(1.0), params, (x, y))
    for path, norm in norms.items():
        found, finite = by_leaf[path], np.isfinite(norm)
        np.testing.assert_allclose(found[finite], norm[finite], rtol=5e-6)
        assert not np.isfinite(found[~finite]).any()
    finite = np.isfinite(whole)
    for _, _, stats in results.values():
        np.testing.assert_allclose(stats.norm[finite], whole[finite], rtol=5e-6)
        np.testing.assert_array_equal(stats.nonfinite > 0, ~finite)
        assert (stats.norm[finite] >= whole[finite] * (1 - 4e-7)).all()


@pytest.mark.parametrize("method", ["one pass", "two passes"])
@pytest.mark.parametrize("size", [pytest.param(1e20, marks=pytest.mark.exhaustive), 1e30])
def test_a_weight_is_not_multiplied_with_the_constants_of_a_loss(method, size):
    """Compiled, the weight 1e-20 times 1 / 1e20 was 0, and the gradient of the kernel as well."""

    def loss(params, x):
        first = (x @ params["w"] + params["b"][None]) / size
        return jnp.sum(first * (x @ params["w"])) / len(x)

    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    params, x = {"w": make(16, 8), "b": make(8)}, make(4, 5, 16) * size
    rule = cg.ClipByGlobalNorm(1.0)
    clip, direct = (cg.clip_per_example(loss, rule, method=m) for m in (method, "direct"))
    (_, grads, stats), (_, expected, others) = (
        jax.jit(lambda *args, f=f: f(*args)).lower(params, x).compile(RELEASED)(params, x)
        for f in (clip, direct)
    )
    np.testing.assert_allclose(stats.norm, others.norm, rtol=1e-5)
    np.testing.assert_allclose(grads["w"], expected["w"], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(grads["b"] * size, expected["b"] * size, rtol=1e-3, atol=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
def test_half_precision_is_summed_in_float32(dtype):
    name = "dense layer over a sequence"
    params, batch = arguments(name, dtype)
    loss = PROGRAMS[name].loss
    each = one_by_one(loss, params, batch)
    norm = np.sqrt(sum(n**2 for n in norms_of(each).values()))
    unit = float(jnp.finfo(dtype).eps)
    ways, _ = every_way(loss, cg.ClipByGlobalNorm(0.5), params, batch)
    for _, grads, stats in ways.values():
        np.testing.assert_allclose(np.float64(stats.norm), norm, rtol=8 * unit)
        whole = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in grads.values()))
        assert all(g.dtype == dtype for g in grads.values()) and whole <= 3 * 0.5 * (1 + unit)


@pytest.mark.exhaustive
def test_no_factor_leaves_the_range_of_half_precision_where_the_gradient_is_in_it():
    def loss(params, example):
        x, y = example
        wide = jnp.full((12, 1), 1000, x.dtype)
        made = x @ (params["w"] * wide) + x @ (params["v"] / (1e-5 * wide / 1000))
        made += x @ (1000 * params["v"].T).T
        return jnp.sum(made.astype(y.dtype) * y)

    x, y = jnp.full((3, 2, 12), 100, jnp.float16), jnp.full((3, 2, 16), 1e-5, jnp.float32)
    params = {"w": jnp.zeros((12, 16), jnp.float16), "v": jnp.zeros((12, 16), jnp.float16)}
    each = one_by_one(loss, params, (x, y))
    ways, _ = every_way(loss, cg.ClipByGlobalNorm(1.0), params, (x, y))
    for result in ways.values():
        assert_clipped(result, each, 1.0, rtol=1e-2)


def test_an_example_that_is_nan_is_left_out_and_harms_no_other():
    params, batch = arguments(MIXED)
    loss = PROGRAMS[MIXED].loss
    bad = batch.at[1, 0, 0].set(jnp.nan)
    each = {k: g[[0, 2]] for k, g in one_by_one(loss, params, batch).items()}
    norm = np.sqrt(sum(n**2 for n in norms_of(each).values()))
    factor = np.minimum(1, 0.3 / norm)
    ways, _ = every_way(loss, cg.ClipByGlobalNorm(0.3), params, bad, nonfinite="zero")
    for _, grads, stats in ways.values():
        for path, g in each.items():
            expected = np.tensordot(factor, g, 1)
            np.testing.assert_allclose(grads[path], expected, atol=2e-5 * np.abs(expected).max())
        assert (np.asarray(stats.nonfinite) > 0).tolist() == [False, True, False]
    ways, _ = every_way(loss, cg.ClipByGlobalNorm(0.3), params, bad)
    assert all(np.isnan(grads["w"]).any() for _, grads, _ in ways.values())


# costs


def arrays_in(text):
    shapes = re.findall(r"(?:f32|bf16)\[([\d,]+)\]", text)
    return {tuple(map(int, shape.split(","))) for shape in shapes}


@pytest.mark.kinds()
@pytest.mark.parametrize("method", FOLLOWED)
def test_no_gradient_of_each_example_is_made(method):
    """Of no leaf that is followed: neither in the program nor in its memory."""

    def loss(p, ids):
        @jax.checkpoint
        def layer(x, w):
            return x + jnp.tanh(x @ w["u"]) @ w["d"], None

        x, _ = jax.lax.scan(layer, p["e"][ids], {"u": p["u"], "d": p["d"]})
        return -jnp.mean(jax.nn.log_softmax(x @ p["e"].T)[:, 0])

    shapes = {"e": (301, 96), "u": (3, 96, 205), "d": (3, 205, 96)}
    params = {k: jnp.ones(s) for k, s in shapes.items()}
    batch = jnp.zeros((16, 8), int)
    per_example = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0), method=method)
    compiled = jax.jit(lambda p, b: per_example(p, b)[1]).lower(params, batch).compile(RELEASED)
    sizes = [301 * 96, 96 * 205]
    made = {np.prod(s) for s in arrays_in(compiled.as_text())}
    assert not made & {16 * n for n in sizes} | made & {16 * 3 * n for n in sizes}
    if method == "two passes":
        plain = jax.jit(jax.grad(lambda p, b: jnp.mean(jax.vmap(loss, (None, 0))(p, b))))
        temporary = plain.lower(params, batch).compile(RELEASED).memory_analysis()
        most = 1.2 * temporary.temp_size_in_bytes
        assert compiled.memory_analysis().temp_size_in_bytes < most + 2**18


def linear_in_each_weight(p, x):
    """The example times a linear function of each weight, which all examples share."""
    mask = np.random.default_rng(0).normal(size=(96, 96))
    stack = jax.tree.map(lambda *w: jnp.stack(w), p["first"], p["second"])
    x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]
    changed = [
        p["lora"] + 2 * p["a"] @ p["b"],
        jnp.flip(p["reversed"], 0),
        jnp.cumsum(p["cumulative"], 0) / 9,
        p["masked"] * jnp.asarray(mask, x.dtype),
        jnp.where(mask > 0, p["selected"], 0.0),
        jnp.tril(p["triangle"]),
        p["strided"][::2],
        p["squared"] @ p["squared"].T,
        jnp.tanh(p["bounded"]),
    ]
    for w in changed:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def weights_of_linear():
    names = ["first", "second", "lora", "reversed", "cumulative", "masked", "selected"]
    shapes = dict.fromkeys([*names, "triangle", "squared", "bounded"], (96, 96))
    shapes |= {"strided": (192, 96), "a": (96, 2), "b": (2, 96)}
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.normal(size=s) / 9, jnp.float32) for k, s in shapes.items()}


@pytest.mark.parametrize("method", FOLLOWED)
def test_of_a_linear_function_of_a_weight_no_gradient_of_each_example_is_made(method):
    params, batch = weights_of_linear(), jnp.ones((64, 2, 96))
    rule = cg.ClipByGlobalNorm(1.0)
    per_example = cg.clip_per_example(linear_in_each_weight, rule, method=method)
    compiled = jax.jit(lambda p, b: per_example(p, b)[1]).lower(params, batch).compile(RELEASED)
    largest = max(np.prod(s) for s in arrays_in(compiled.as_text()))
    assert largest < 64 * 96 * 96 / 8
    # Of all examples they would have 24 MB; the parameters have 0.4 MB.
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 96 * 96 * 4
    plan = {leaf.path: (leaf.norm, leaf.reason) for leaf in per_example.plan(params, batch).leaves}
    masked = {"masked", "selected", "triangle", "bounded"}
    small = "direct", "no larger for one example than its factors"
    assert plan == {
        k: small if k in "ab" else ("product" if k in masked else "Gram", "") for k in params
    }


def test_one_pass_makes_gram_matrices_of_one_scanned_layer_at_a_time():
    def loss(p, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p)[0])

    per_example = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0), method="one pass")
    program = jax.make_jaxpr(per_example)(jnp.ones((3, 29, 29)), jnp.ones((5, 11, 29)))
    inside = {v.aval.shape for e in equations(program) for v in e.outvars}
    assert (5, 11, 11) in inside and not any(shape.count(11) > 1 and 3 in shape for shape in inside)


@pytest.mark.parametrize("positions", [3, 29], ids=["factors", "arrays"])
def test_what_a_scan_has_stacked_is_not_copied_for_the_sum(positions):
    """Where Gram matrices are small, factors are stacked, and elsewhere gradients."""

    def loss(p, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p)[0])

    per_example = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0), method="one pass")
    args = jnp.ones((2, 17, 17)), jnp.ones((64, positions, 17))
    text = jax.jit(lambda p, b: per_example(p, b)[1]).lower(*args).compile(RELEASED).as_text()
    stacked = [2, 64, min(positions, 17), 17]
    made = re.findall(r"= f32\[([\d,]+)\]\S* ([\w-]+)[(]", text)
    sizes = [(np.prod(list(map(int, shape.split(",")))), name) for shape, name in made]
    assert {name for n, name in sizes if n == np.prod(stacked)} - {"transpose"}
    assert (np.prod(stacked), "transpose") not in sizes


@pytest.mark.exhaustive
def test_a_convolution_is_summed_over_examples_without_patches():
    """Of a kernel that is not clipped no norm is needed: two passes are a plain gradient."""

    dims = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def loss(p, x):
        for _ in range(3):
            x = jax.lax.conv_general_dilated(x[None], p["k"], (1, 1), "SAME", **dims)[0]
        return jnp.sum(jnp.tanh(x) * p["b"][None, None])

    params, batch = {"k": jnp.ones((3, 3, 16, 16)), "b": jnp.ones(16)}, jnp.ones((16, 8, 8, 16))
    options = {"where": "b", "method": "two passes"}
    per_example = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0), **options)
    plain = jax.grad(lambda p, b: jnp.mean(jax.vmap(loss, (None, 0))(p, b)))
    ours, least = (
        jax.jit(f).lower(params, batch).compile(RELEASED).memory_analysis().temp_size_in_bytes
        for f in (lambda p, b: per_example(p, b)[1], plain)
    )
    assert ours <= 1.2 * least


# devices


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", FOLLOWED)
def test_a_sharded_batch_needs_one_all_reduce(method):
    name = "embedding tied to the head"
    params, batch = arguments(name)
    batch = jnp.concatenate([batch, batch, batch])[:8]
    per_example = cg.clip_per_example(PROGRAMS[name].loss, cg.ClipByGlobalNorm(0.1), method=method)

    def run(params, batch):
        return per_example(params, batch)[1:]

    expected = jax.jit(run)(params, batch)
    for kind in (AxisType.Explicit, AxisType.Auto):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
        sharded = jax.device_put(batch, NamedSharding(mesh, P("x")))
        replicated = jax.device_put(params, NamedSharding(mesh, P()))
        compiled = jax.jit(run).lower(replicated, sharded).compile()
        text = compiled.as_text()
        assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1
        assert "all-gather" not in text and "all-to-all" not in text
        pairs = zip(*map(jax.tree.leaves, (expected, compiled(replicated, sharded))), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-6)

    def local(params, batch):
        grads, stats = run(params, batch)
        return jax.lax.pmean(grads, "x"), stats

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("x")), out_specs=(P(), P("x")))
    for a, b in zip(*map(jax.tree.leaves, (expected, jax.jit(mapped)(params, batch))), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-6)


# bad input


def test_wrong_arguments_and_models_with_other_leaves_are_refused():
    with pytest.raises(ValueError, match="method: got 'fast', expected one of auto, one pass"):
        cg.per_example_norms(lambda p, x: p, method="fast")
    with pytest.raises(TypeError, match="loss_fn: got 3 of type int, expected a function of"):
        cg.per_example_norms(3)
    with pytest.raises(ValueError, match="microbatch: got 0, expected a positive integer"):
        cg.per_example_norms(lambda p, x: p, microbatch=0)
    model = {"w": jnp.ones(2), "activation": jnp.tanh}
    with pytest.raises(TypeError, match=r"at 'activation', expected arrays.*\n.*eqx.partition"):
        cg.clip_per_example(lambda p, x: x, None)(model, jnp.ones(3))
    with pytest.raises(TypeError, match=r"at 'activation', expected arrays.*\n.*eqx.partition"):
        cg.per_example_norms(lambda p, x: x).plan(model, jnp.ones(3))


def test_two_kernels_of_a_recurrence_share_a_gram_matrix():
    """That of the cotangents of their sum, as in an LSTM: three are made, not four."""

    def loss(params, xs):
        def step(h, x):
            return jnp.tanh((x @ params["in"] + h @ params["rec"])[:16]), None

        return jnp.sum(jax.lax.scan(step, jnp.zeros(16), xs)[0] ** 2)

    params = {"in": jnp.ones((16, 48)), "rec": jnp.ones((16, 48))}
    program = jax.jit(cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0), method="one pass"))
    text = program.lower(params, jnp.ones((2, 5, 16))).compile().as_text()
    assert len(re.findall(r"= f32\[2,5,5\]\S* dot[(]", text)) == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_swapped", [False, True])
def test_two_kernels_of_a_recurrence_share_their_cotangents_in_range(is_swapped):
    """The weights of a kernel's rows go to its inputs: cotangents are scaled once for both."""
    steps, inputs, width = 256, 128, 32

    def loss(params, x):
        w, r, bias = params

        def step(h, x):
            total = w.T @ x + r.T @ h if is_swapped else x @ w + h @ r
            return jnp.tanh(total + bias), None

        return jnp.sum(jax.lax.scan(step, jnp.zeros(width), x)[0] ** 2)

    params = jnp.ones((inputs, width)), jnp.ones((width, width)), jnp.ones(width)
    clipped = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0), method="one pass")
    compiled = jax.jit(clipped).lower(params, jnp.ones((16, steps, inputs))).compile(RELEASED)
    rows = 4 * 16 * steps  # bytes of one number of each row
    assert compiled.memory_analysis().temp_size_in_bytes < rows * (2 * inputs + 2 * 32 + 16)
