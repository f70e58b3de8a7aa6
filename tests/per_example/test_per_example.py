"""Clipping per example: against a loop, optax and one device; memory, precision, bad input."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.helpers import (
    CASES,
    RELEASED,
    array,
    assert_close,
    assert_same,
    float64,
    generator,
    key_of,
    stable_id,
)
from tests.rows import each_value, first_row

NORM = cg.ClipByGlobalNorm(1.0)


def loss(params, example):
    x, y = example
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def linear(params, example):
    """The gradient is the example."""
    return sum(jnp.sum(p * x) for p, x in zip(params, example, strict=True))


def data(key, size=16):
    """Small inputs: where tanh is saturated, rounding of the gradient itself shows."""
    rng = generator(key)
    params = {"w": array(0.2 * rng.normal(size=(6, 8))), "v": array(rng.normal(size=(8, 2)))}
    return params, (array(rng.normal(size=(size, 6))), array(9 * rng.normal(size=(size, 2))))


each_gradient = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))


def clipped(*args, **kwargs):
    return jax.jit(cg.clip_per_example(*args, **kwargs))


@pytest.fixture(scope="module")
def by_every_rule():
    """The arguments, and the gradients and statistics of every rule, compiled at once."""
    params, batch = data(jax.random.key(0))
    makers = {case.name: case.make for case in CASES}

    @jax.jit
    def run(params, batch):
        clips = {
            n: cg.clip_per_example(loss, make(0.05), microbatch=4) for n, make in makers.items()
        }
        return {n: per_example(params, batch)[1:] for n, per_example in clips.items()}

    return params, each_gradient(params, batch), run(params, batch)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rule_clips_the_gradient_of_each_example(case, by_every_rule):
    params, each, results = float64(by_every_rule[0]), float64(by_every_rule[1]), by_every_rule[2]
    grads, stats = results[case.name]
    examples = [{k: g[i] for k, g in each.items()} for i in range(16)]
    references = [case.reference(e, params, 0.05) for e in examples]
    mean = {k: np.mean([r[k] for r in references], axis=0) for k in params}
    assert_close(grads, mean, rtol=2e-5, atol=1e-7)
    norms = [np.sqrt(sum((g**2).sum() for g in e.values())) for e in examples]
    assert_close(stats.norm, np.array(norms), rtol=1e-5)
    above = [max(np.max(r) for r in case.ratios(e, params, 0.05)) for e in examples]
    assert (stats.clipped == (np.array(above) > 1 if case.limits else True)).all()


@pytest.mark.slow
def test_it_equals_the_function_of_optax_on_float32(key):
    params, batch = data(key)
    each = each_gradient(params, batch)

    @jax.jit
    def run(max_norm):
        rule = cg.ClipByGlobalNorm(max_norm)
        return cg.clip_per_example(loss, rule, reduce="sum", microbatch=8)(params, batch)

    for max_norm in (0.0, 0.3, 1.0, np.inf):
        theirs, number = optax.per_example_global_norm_clip(each, max_norm)
        _, grads, stats = run(jnp.float32(max_norm))
        for name, expected in theirs.items():  # examples cancel, so rounding is that of the leaf
            size = max(1.0, float(jnp.abs(expected).max()))
            assert_close(grads[name], expected, rtol=1e-5, atol=1e-6 * size)
        assert stats.clipped.sum() == number


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("microbatch", [None, 4])
def test_without_a_rule_it_is_the_gradient_of_the_mean(microbatch, key):
    params, batch = data(key)

    def mean(params, batch):
        return jnp.mean(jax.vmap(loss, (None, 0))(params, batch))

    expected = jax.jit(jax.value_and_grad(mean))(params, batch)
    value, grads, stats = clipped(loss, None, microbatch=microbatch)(params, batch)
    assert_close((value, grads), expected, rtol=1e-5, atol=1e-6)
    assert not stats.clipped.any()
    value, *_ = clipped(loss, None, reduce="sum", microbatch=microbatch)(params, batch)
    np.testing.assert_allclose(value, 16 * expected[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("microbatch", [1, 6])
def test_statistics_and_aux_come_in_the_order_of_the_batch(microbatch):
    sizes = jnp.arange(1.0, 13.0)

    def with_aux(w, x):
        return w * x, {"twice": 2 * x, "pair": jnp.stack([x, -x])}

    per_example = cg.clip_per_example(
        with_aux, cg.ClipByValue(6.5), microbatch=microbatch, has_aux=True, reduce="sum"
    )
    (value, aux), grad, stats = jax.jit(per_example)(jnp.float32(2), sizes)
    assert value == 2 * 78 and grad == 21 + 6 * 6.5
    assert_same(aux, {"twice": 2 * sizes, "pair": jnp.stack([sizes, -sizes], axis=1)})
    assert (stats.norm == sizes).all() and (stats.clipped == (sizes > 6.5)).all()
    assert stats.clipped.mean() == 0.5


def test_a_microbatch_may_be_an_integer_of_numpy():
    per_example = cg.clip_per_example(linear, NORM, reduce="sum", microbatch=np.int64(2))
    norms = jax.eval_shape(
        lambda p, x: per_example(p, x)[2].norm, [array(np.ones(()))], [array(np.ones(4))]
    )
    assert norms.shape == (4,)


# precision


MANY = 1100
PATHS = {
    "all at once": ({}, lambda f: f),
    "microbatches": ({"microbatch": 100}, lambda f: f),
    "one by one": ({"microbatch": 1}, lambda f: f),
    "vmap": ({"microbatch": 100}, lambda f: lambda p, x: unmapped(jax.vmap(f, (None, 0)), p, x)),
    "shard_map": ({"microbatch": 110}, lambda f: on_one_of_two_devices(f)),
}
every_half = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
every_reduction = pytest.mark.parametrize("reduce", ["sum", "mean"])


def unmapped(mapped, params, batch):
    results = mapped(params, [jnp.stack([x, jnp.zeros_like(x)]) for x in batch])
    return jax.tree.map(lambda x: x[0], results)


def on_one_of_two_devices(f):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))

    def local(params, batch):
        return [g[None] for g in f(params, batch)[1]]

    def run(params, batch):
        twice = [jnp.concatenate([x, jnp.zeros_like(x)]) for x in batch]
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
        return None, [g[0] for g in mapped(params, twice)], None

    return run


def alike(dtype, seed=0):
    """Gradients in much the same direction, so that their sum is as large as it can be."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(1 + 0.3 * rng.normal(size=(MANY, 5)), dtype)


def exact(gradients, reduce, limit=1.0):
    """The clipped gradients of all examples in float64, summed."""
    each = np.float64(gradients)
    each *= np.minimum(1, limit / np.linalg.norm(each, axis=1, keepdims=True))
    return each.sum(axis=0) / (MANY if reduce == "mean" else 1)


def half_a_unit(x):
    """In the last place of each element."""
    return 0.5 * 2.0 ** (np.floor(np.log2(np.abs(np.float64(x)))) - jnp.finfo(x.dtype).nmant)


@pytest.mark.slow
@every_half
@every_reduction
@pytest.mark.parametrize("path", PATHS)
def test_the_sum_is_rounded_once_by_half_a_unit_in_the_last_place(path, reduce, dtype):
    options, place = PATHS[path]
    gradients = alike(dtype)
    per_example = place(cg.clip_per_example(linear, NORM, reduce=reduce, **options))
    _, (result,), _ = jax.jit(per_example)([jnp.zeros(5, dtype)], [gradients])
    off = np.abs(np.float64(result) - exact(gradients, reduce))
    assert result.dtype == dtype and (off <= 1.01 * half_a_unit(result)).all()


@pytest.mark.slow
@every_half
@every_reduction
@pytest.mark.parametrize("microbatch", [None, 100])
def test_parameters_of_float32_keep_the_bound_in_the_result(microbatch, reduce, dtype):
    def cast(params, example):
        return linear([p.astype(dtype) for p in params], example)

    gradients, moved = alike(dtype), {}
    for name, function, params in (("float32", cast, jnp.zeros(5)), ("narrow", linear, None)):
        per_example = clipped(function, NORM, reduce=reduce, microbatch=microbatch)
        params = jnp.zeros(5, dtype) if params is None else params
        whole, *others = (
            np.float64(per_example([params], [x])[1][0])
            for x in (gradients, *(gradients.at[i].set(0) for i in range(0, MANY, 50)))
        )
        moved[name] = max(np.linalg.norm(whole - other) for other in others)
    limit = 1 / MANY if reduce == "mean" else 1
    assert moved["float32"] <= limit * (1 + 1e-3)
    assert moved["narrow"] > 1.05 * limit, "the docstring warns of it"


@pytest.mark.slow
def test_float64_is_summed_in_float64():
    with jax.enable_x64(True):
        batch = [jnp.array([1.0, 1e-12], jnp.float64)]
        _, (grad,), stats = clipped(linear, NORM, reduce="sum", microbatch=1)(
            [jnp.zeros((), jnp.float64)], batch
        )
        assert grad.dtype == stats.norm.dtype == jnp.float64 and grad == 1 + 1e-12


@pytest.mark.slow
@given(st.integers(0, 2**16), st.sampled_from([-20, -6, 0, 6, 18]), st.sampled_from([1e-3, 1, 50]))
def test_no_example_moves_the_sum_by_more_than_the_threshold(seed, exponent, limit):
    rng = np.random.default_rng(seed)
    batch = [jnp.asarray(rng.normal(size=(6, n)) * 10.0**exponent, jnp.float32) for n in (3, 4)]
    params = [jnp.zeros(3), jnp.zeros(4)]
    _, whole, _ = SENSITIVITY(params, batch, jnp.float32(limit))
    _, without, _ = SENSITIVITY(params, [x.at[0].set(0.0) for x in batch], jnp.float32(limit))
    moved = sum(np.sum((np.float64(a) - b) ** 2) for a, b in zip(whole, without, strict=True))
    # Each of the sums is rounded to float32, at most 6 * limit in size.
    assert np.sqrt(moved) <= limit * (1 + 4e-7 + 12 * 2**-23)


@jax.jit
def SENSITIVITY(params, batch, limit):  # noqa: N802
    rule = cg.ClipByGlobalNorm(limit)
    return cg.clip_per_example(linear, rule, reduce="sum", microbatch=2)(params, batch)


# memory


def temporary(size, microbatch, method="direct"):
    params = {"w": jnp.ones((64, 64)), "v": jnp.ones((64, 2))}
    batch = jnp.ones((size, 64)), jnp.ones((size, 2))
    per_example = jax.jit(cg.clip_per_example(loss, NORM, microbatch=microbatch, method=method))
    return per_example.lower(params, batch).compile(RELEASED).memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_is_bounded_by_the_microbatch():
    gradient = 4 * (64 * 64 + 64 * 2)
    few = temporary(64, 4)
    assert temporary(512, 4) < 1.1 * few < 20 * gradient
    assert temporary(512, 16) < 5 * few < 512 * gradient < temporary(512, None)
    # Of rows it is less at once; what grows is the statistics, some 20 numbers for an example.
    assert temporary(512, 4, "auto") < temporary(64, 4, "auto") + 80 * 448 < 4 * gradient


# traces


@pytest.mark.parametrize("method", ["auto", "direct"])
@pytest.mark.parametrize("microbatch", [None, 4])
def test_every_method_traces_the_loss_once(method, microbatch, key):
    params, batch = data(key)
    traces = []

    def counted(factor, params, example):
        traces.append(1)
        return factor * loss(params, example)

    def sums(factor, params, batch):
        counted_loss = lambda params, example: counted(factor, params, example)  # noqa: E731
        per_example = cg.clip_per_example(counted_loss, NORM, microbatch=microbatch, method=method)
        return per_example(params, batch)

    jax.eval_shape(sums, 2.0, params, batch)  # as under jax.jit, with a loss that has a tracer
    assert len(traces) == 1


# devices


@pytest.mark.slow
def test_microbatches_over_eight_devices_give_the_result_of_one(key):
    params, batch = data(key, 32)
    per_example = clipped(loss, NORM, microbatch=16)
    expected = per_example(params, batch)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(batch, NamedSharding(mesh, P("x")))
        compiled = per_example.lower(params, sharded).compile()
        assert_close(compiled(params, sharded), expected, rtol=1e-4, atol=1e-6)
    assert "all-gather" not in compiled.as_text() and "all-to-all" not in compiled.as_text()


@pytest.mark.slow
@each_value
@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_each_device_clips_its_own_examples(microbatch, check_vma, key):
    params, batch = data(key, 32)
    expected = clipped(loss, NORM)(params, batch)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def local(params, batch):
        per_example = clipped(loss, NORM, microbatch=microbatch)
        value, grads, stats = per_example(params, batch)
        return *jax.lax.pmean((value, grads), "x"), stats

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("x")), out_specs=(P(), P(), P("x")), check_vma=check_vma
    )
    assert_close(jax.jit(mapped)(params, batch), expected, rtol=1e-4, atol=1e-6)


# what a user does with it


@pytest.mark.slow
def test_keys_in_the_batch_and_none_in_the_parameters(key):
    params, (x, _) = {"w": jnp.ones(6), "frozen": None}, data(key, 8)[1]

    def noisy(params, example):
        x, key = example
        return jnp.sum(params["w"] * (x + jax.random.normal(key, x.shape)))

    keys = jax.random.split(key, 8)
    grads = [clipped(noisy, NORM, microbatch=m)(params, (x, keys))[1] for m in (2, 8)]
    assert_close(*grads, rtol=1e-5, atol=1e-7)
    noise = jax.vmap(lambda k: jax.random.normal(k, (6,)))(keys)
    assert_close(grads[0]["w"], jnp.mean(jax.vmap(NORM)(x + noise), 0), 1e-5, 1e-6)


@pytest.mark.slow
def test_what_where_leaves_out_is_summed_as_it_is(key):
    params, batch = data(key)
    plain = jax.grad(lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, batch)))(params)
    _, grads, stats = clipped(loss, cg.ClipByValue(0.0), where="v")(params, batch)
    assert_close(grads["w"], plain["w"], rtol=1e-5, atol=1e-6)
    assert not grads["v"].any() and (stats.size == 16).all()


@first_row
@pytest.mark.parametrize("nonfinite", ["propagate", "zero", "error"])
def test_an_example_that_is_nan(nonfinite):
    batch = [array([[3.0, 4.0], [jnp.nan, 1.0], [0.3, 0.4]])]
    per_example = cg.clip_per_example(linear, NORM, nonfinite=nonfinite, reduce="sum")
    checked = jax.jit(checkify.checkify(per_example))
    error, (_, (grad,), stats) = checked([array(np.zeros(2))], batch)
    grad, stats = jax.device_get((grad, stats))
    # A norm says that an element is bad; where it is an error, they are counted.
    bad = 1 if nonfinite == "error" else 2
    assert (stats.nonfinite == np.float32([0, bad, 0])).all()
    if nonfinite == "zero":
        np.testing.assert_allclose(grad, [0.6 + 0.3, 0.8 + 0.4], rtol=1e-6)
    else:
        assert np.isnan(grad).all()
    assert ("are NaN or inf" in (error.get() or "")) == (nonfinite == "error")


BAD = array([[1.0, 2.0], [3.0, 4.0], [jnp.nan, 1.0], [0.3, 0.4], [jnp.inf, -jnp.inf], [1.0, 0.0]])
BARE = (lambda p, x: jnp.sum(p * x), array(np.ones(2)), "the gradient", " ")
NAMED = (
    lambda p, x: jnp.sum(p["{w}"] * x) + p["b"],
    {"{w}": array(np.ones(2)), "b": array(np.zeros(()))},
)
LEAVES = {"a single array": BARE, "a tree": (*NAMED, "'{w}'", " '{w}' ")}


def test_the_first_bad_example_is_told_though_a_later_one_has_more_bad_elements():
    fun, params, *_ = LEAVES["a single array"]
    per_example = cg.clip_per_example(fun, NORM, nonfinite="error")
    error, _ = jax.jit(checkify.checkify(per_example))(params, BAD)
    assert "in 2 of 6 examples, the first with index 2" in error.get()


@pytest.mark.slow
@each_value
@pytest.mark.parametrize("microbatch", [None, 1, 3])
@pytest.mark.parametrize("method", ["auto", "direct"])
@pytest.mark.parametrize("leaves", LEAVES)
def test_a_bad_example_is_an_error_that_names_leaf_and_example(leaves, method, microbatch):
    fun, params, eager, compiled = LEAVES[leaves]
    options = {"nonfinite": "error", "microbatch": microbatch, "method": method}
    per_example = cg.clip_per_example(fun, NORM, **options)
    which = "3 elements in 2 of 6 examples, the first with index 2"
    message = f"grads: got NaN or inf in {eager} ({which}), expected finite numbers"
    with pytest.raises(FloatingPointError, match=f"^{re.escape(message)}$"):
        per_example(params, BAD)
    per_example(params, BAD[jnp.array([0, 1, 3])])
    error, _ = jax.jit(checkify.checkify(per_example))(params, BAD)
    message = f"3 elements of the gradient{compiled}are NaN or inf, {which.partition('s ')[2]}"
    assert error.get().startswith(message)
    assert jax.jit(checkify.checkify(per_example))(params, BAD[:2].repeat(3, 0))[0].get() is None


@pytest.mark.slow
def test_a_leaf_that_is_not_clipped_raises_no_error():
    fun, params = NAMED
    _, grads, _ = cg.clip_per_example(fun, NORM, nonfinite="error", where="b")(params, BAD)
    assert jnp.isnan(grads["{w}"]).any() and grads["b"] == 1


@pytest.mark.slow
def test_the_gradients_have_the_structure_and_dtypes_of_the_parameters():
    params = [jnp.ones(2, d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64)]

    def mixed(params, x):
        return sum(jnp.sum(jnp.abs(p).astype(jnp.float32)) for p in params) * x

    _, grads, _ = clipped(mixed, NORM, microbatch=2)(params, jnp.arange(4.0))
    chex.assert_trees_all_equal_shapes_and_dtypes(grads, params)


# bad input


@pytest.mark.parametrize(
    "wrong, error, match",
    [
        ({"rule": 0.1}, TypeError, r"rule: got 0.1 .* did you mean ClipByGlobalNorm\(0.1\)"),
        ({"rule": cg.ClipByNorm(lambda t: 1.0)}, TypeError, "max_norm: got a schedule"),
        ({"reduce": "max"}, ValueError, "reduce: got 'max', expected one of mean, sum"),
        ({"microbatch": 0}, ValueError, "microbatch: got 0, expected a positive integer or None"),
        ({"microbatch": True}, ValueError, "microbatch: got True, expected a positive integer"),
        ({"nonfinite": "skip"}, ValueError, "nonfinite: got 'skip', expected one of"),
        (
            {"loss_fn": None},
            TypeError,
            "loss_fn: got None of type NoneType, expected a function of",
        ),
        ({"loss_fn": NORM}, TypeError, "loss_fn: got ClipByGlobalNorm.* write the loss before"),
    ],
    ids=stable_id,
)
def test_wrong_arguments_are_refused_at_once(wrong, error, match):
    with pytest.raises(error, match=match):
        cg.clip_per_example(**{"loss_fn": loss, "rule": NORM, **wrong})


@pytest.mark.parametrize(
    "batch, match",
    [
        (
            {"x": array(np.ones((4, 2))), "y": array(np.ones(3))},
            r"'x': \(4, 2\), 'y': \(3,\)}, expected the",
        ),
        ({"x": array(np.ones((4, 2))), "y": 1.0}, r"'y': \(\)}, expected the same leading axis"),
        (array(np.ones(())), r"{'the batch': \(\)}, expected the same leading axis"),
        (array(np.ones((0, 2))), r"{'the batch': \(0, 2\)}, expected the same leading axis"),
        ({}, "batch: got leaves of the shapes {}"),
        (array(np.ones((4, 2))), "microbatch: got 3, expected a divisor of the 4 examples"),
    ],
    ids=range(6),
)
def test_a_wrong_batch_is_refused(batch, match):
    with pytest.raises(ValueError, match=match):
        cg.clip_per_example(lambda w, x: w, NORM, microbatch=3)(jnp.float32(1), batch)


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("leaf", [key_of(0), 1, array(np.zeros(3), bool)], ids=stable_id)
def test_parameters_that_have_no_gradient_are_passed_over(leaf, key):
    params, batch = data(key)
    more = {**params, "step": leaf}
    for method in ("auto", "direct"):
        per_example = cg.clip_per_example(loss, NORM, method=method)
        value, grads, stats = per_example(more, batch)
        assert grads.pop("step") is None
        assert_close((value, grads, stats), per_example(params, batch), rtol=1e-6)
        assert len(per_example.plan(more, batch).leaves) == 2
    norms = cg.per_example_norms(loss)
    assert_close(norms(more, batch), norms(params, batch), rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [lambda f, **o: cg.clip_per_example(f, NORM, **o), cg.per_example_norms],
    ids=["clip", "norms"],
)
@pytest.mark.parametrize("method", ["auto", "direct"])
def test_a_wrong_loss_and_parameters_without_arrays_are_refused(method, make):
    def refused(match, loss_fn, params=None, **options):
        per_example = make(loss_fn, method=method, **options)
        params = {"w": array(np.ones(3))} if params is None else params
        with pytest.raises(ValueError, match=match):
            per_example(params, array(np.ones((4, 3))))
        if method == "auto" or params == {}:
            with pytest.raises(ValueError, match=match):
                per_example.plan(params, array(np.ones((4, 3))))

    def right(p, x):
        return jnp.sum(p["w"] * x)

    refused(r"params: got {}, expected a tree with an array .* write \(params, batch\)", right, {})
    refused(
        r"loss_fn: got float32\[3\] from it for one example, expected a floating scalar; write its "
        r"mean or sum, as in\n  lambda params, x: jnp.mean\(loss_fn\(params, x\[None\]\)\)",
        lambda p, x: p["w"] * x,
    )
    refused(r"got int32\[\] .* expected a floating scalar", lambda p, x: jnp.int32(3))
    refused("got NoneType .* expected a floating scalar", lambda p, x: None)
    refused("got a tuple .* has_aux=True for", lambda p, x: (right(p, x), x))
    refused(r"got float32\[\] .*expected \(loss, aux\) .* leave has_aux out", right, has_aux=True)
    refused(
        r"got float32\[3\] .* expected a floating scalar",
        lambda p, x: (p["w"] * x, x),
        has_aux=True,
    )
