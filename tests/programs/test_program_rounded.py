"""The rounding of a program: what moves, by how much, and what does not."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from clipgrad._programs import Parts, equations, low_jit, rounded, rounded_in_float64
from tests.compare.compare_trainers import AXIS, mesh
from tests.helpers import array

RUNS = 8


def numbers(*shape, seed=0, dtype=jnp.float32):
    return array(np.random.default_rng(seed).normal(size=shape), dtype)


def runs(fun, *args):
    """The results as they are, and those of eight seeds, of one compiled program."""
    program = jax.make_jaxpr(fun)(*args)

    @low_jit
    def run(args, seeds):
        return lax.map(lambda seed: rounded(program, jax.tree.leaves(args), seed), seeds)

    exact = jax.tree.leaves(jax.jit(fun)(*args))
    moved_runs = run(args, array(np.arange(1, RUNS + 1), jnp.uint32))
    wide = lambda x: np.asarray(x).astype(np.float64)  # noqa: E731
    return [(wide(x), wide(several)) for x, several in zip(exact, moved_runs, strict=True)]


def moved(x, seed):
    """Numbers as the results of an operation that changes none."""
    return rounded(jax.make_jaxpr(lambda x: x + jnp.zeros((), x.dtype))(x), [x], seed)[0]


def movements(fun, *args):
    """Of each result, the root mean square of its movements, relative to it."""
    moved_runs = runs(fun, *args)
    return [np.sqrt(np.mean((y - x) ** 2)) / np.sqrt(np.mean(x**2)) for x, y in moved_runs]


def eps(dtype):
    return float(jnp.finfo(dtype).eps)


X, W = numbers(24, 16, seed=1), numbers(16, 8, seed=2)
COUNTS = array(np.round(4 * np.asarray(X)))


@pytest.mark.slow
def test_a_program_of_exact_operations_does_not_move():
    def exact(x, counts):
        half = x.astype(jnp.bfloat16)
        ordered = jnp.sort(jnp.concatenate([x.T, x.T])[::-1], axis=0)
        return {
            "powers": (x * 0.5, x / 4, x * jnp.where(counts > 0, 2.0, 0.25)),
            "copies": (ordered, x[3:, ::2], jnp.where(x > 0.125, x, -x), x.reshape(-1)),
            "stacks": (jnp.stack([x, x]), jnp.unstack(x)[1], jnp.tile(x, 2)),
            "counts": (counts @ jnp.round(3 * W), jnp.sum(counts), jnp.cumsum(counts), counts**2),
            "casts": half.astype(jnp.float32).astype(jnp.bfloat16) == half,
            "largest": (jnp.max(x), jnp.maximum(x, 0.125), jnp.argmax(x), jnp.floor(x)),
            "loop": lax.scan(lambda c, y: (jnp.maximum(c, y), -y), x[0], x),
        }

    for x, several in runs(exact, X, COUNTS):
        np.testing.assert_array_equal(np.broadcast_to(x, several.shape), several)


DTYPES = ["float32", "bfloat16", "float16", "complex64", "float64", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_number_moves_by_one_rounding_of_its_own_type(dtype):
    with jax.enable_x64(dtype == "float64"):
        x = array(np.asarray(numbers(400, seed=3)), dtype)
        wide = np.complex128 if dtype == "complex64" else np.float64
        exact, *neighbors = (np.asarray(y).astype(wide) for y in (x, moved(x, 1), moved(x, 2)))
    kept = np.abs(exact) > 20 * float(jnp.finfo(dtype).tiny)  # subnormal numbers move by more
    steps = [((y - exact)[kept] / exact[kept]).real for y in neighbors]
    for step in steps:
        assert np.mean(step == 0) < (0.5 if "float8" in dtype else 0.05)  # small whole numbers
        assert np.max(np.abs(step)) < 2.01 * eps(dtype)
        assert 0.4 < np.mean(step[step != 0] > 0) < 0.6
    assert 0.4 < np.mean(np.sign(steps[0]) == np.sign(steps[1])) < 0.6


@pytest.mark.slow
def test_what_is_no_number_or_small_and_whole_stays():
    for x in (
        jnp.arange(5.0),
        jnp.zeros((0, 2)),
        jnp.array([jnp.inf, jnp.nan, 0.0]),
        jnp.arange(3),
    ):
        np.testing.assert_array_equal(moved(x, 1), x)
    largest = jnp.finfo(jnp.float32).max
    assert np.isfinite(moved(jnp.full(50, largest), 1)).all()
    small = jnp.full(50, 1e-7, jnp.float16)  # below the normal numbers, where a rounding is larger
    assert np.all(np.asarray(moved(small, 1)) != np.asarray(small))


def block(w, x, dtype=jnp.float32):
    w, x = w.astype(dtype), x.astype(dtype)
    return jnp.mean(jnp.tanh(x @ w).astype(jnp.float32) ** 2)


@pytest.mark.slow
def test_bfloat16_moves_by_its_own_rounding_and_its_products_in_float32_by_theirs():
    def results(w, x, *half):
        return (
            jax.grad(block)(w, x),
            jax.grad(block)(w, x, jnp.bfloat16),
            half[1] @ half[0],
            lax.dot(half[1], half[0], preferred_element_type=jnp.float32),
            x.astype(jnp.bfloat16),
        )

    single, mixed, narrow, wide, cast = movements(
        results, W, X, W.astype(jnp.bfloat16), X.astype(jnp.bfloat16)
    )
    assert 0.5 * eps("float32") < single < 30 * eps("float32")
    assert 0.3 * eps("bfloat16") < mixed < 30 * eps("bfloat16")
    assert 0.5 * eps("bfloat16") < narrow < 4 * eps("bfloat16")
    assert 0.5 * eps("float32") < wide < 3 * eps("float32")
    assert 0.5 * eps("bfloat16") < cast < 1.5 * eps("bfloat16")


@pytest.mark.slow
def test_every_kind_of_program_is_entered():
    @jax.custom_vjp
    def ruled(x):
        return jnp.sin(x)

    ruled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    matrix = X[:16] + 8 * jnp.eye(16)

    def results(x):
        grad = jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.exp(x)))(x)))
        return {
            "jit": jax.jit(jnp.sin)(x),
            "scan": lax.scan(lambda c, y: (jnp.sin(c + y), c), x[0], x)[1],
            "while": lax.while_loop(
                lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x)
            ),
            "cond": lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
            "remat": grad(x),
            "rule": ruled(x),
            "grad of a rule": jax.grad(lambda x: jnp.sum(ruled(x)))(x),
            "jvp": jax.nn.silu(x),
            "solve": jnp.linalg.solve(matrix, x[:16]),
            "vmap of while": jax.vmap(
                lambda y: lax.while_loop(lambda c: jnp.max(c) < 9, lambda c: 3 * c + 1, jnp.abs(y))
            )(x),
            "callback": jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        }

    program = lambda x: [leaf for k, v in results(x).items() for leaf in jax.tree.leaves(v)[-1:]]  # noqa: E731
    for name, movement in zip(jax.eval_shape(results, X), movements(program, X), strict=True):
        assert 0.2 * eps("float32") < movement < 40 * eps("float32"), (name, movement)


@pytest.mark.parametrize("check", [True, False])
def test_devices_of_a_shard_map_round_equal_numbers_alike_and_others_apart(check):
    def on_each(x):
        apart = jnp.sin(x + lax.axis_index(AXIS).astype(x.dtype) // 4)  # equal on four devices
        total = lax.psum(apart, AXIS)
        return apart[None], jnp.sin(total)[None]

    spread = jax.shard_map(
        on_each, mesh=mesh(), in_specs=P(), out_specs=(P(AXIS), P(AXIS)), check_vma=check
    )
    if check:
        spread = jax.shard_map(
            lambda x: (on_each(x)[0], jnp.broadcast_to(on_each(x)[1], (1, *x.shape))),
            mesh=mesh(), in_specs=P(), out_specs=(P(AXIS), P()),
        )  # fmt: skip
    apart, same = runs(spread, numbers(300, seed=6))
    steps = np.sign(apart[1] - apart[0])
    assert abs(np.mean(steps[:, 0] * steps[:, 4])) < 0.1
    np.testing.assert_array_equal(steps[:, 0], steps[:, 1])
    assert np.any(same[1] != same[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_rounding_is_a_function_of_the_number_its_position_and_the_seed(dtype):
    def results(x):
        """One function, at three steps of a scan, in another order, and with the other sign."""
        steps = lax.scan(lambda c, _: (c, jnp.tanh(x)), 0, length=3)[1]
        return jnp.tanh(x), *steps, jnp.tanh(x[::-1])[::-1], jnp.tanh(-x)

    with jax.enable_x64(dtype == "float64"):
        moved_results = runs(results, array(np.asarray(numbers(300, seed=8)), dtype))
    first, *steps, turned, other = (np.sign(moved[1:] - moved[:1]) for _, moved in moved_results)
    for step in steps:
        np.testing.assert_array_equal(first, step)
    assert max(abs(np.mean(first * turned)), abs(np.mean(first * other))) < 0.1
    assert 0.4 < np.mean(first != 0) < 0.6  # each seed has signs of its own


def test_each_operation_rounds_equal_numbers_its_own_way_in_float64():
    """A gradient may take the difference of two, as at a minimum."""

    def twice(x):
        scanned = [lax.scan(lambda c, _: (c, jnp.tanh(x)), 0, length=2)[1][0] for _ in range(2)]
        return jnp.tanh(x), jnp.tanh(x), *scanned

    x = numbers(300, seed=8)
    program = jax.make_jaxpr(twice)(x)

    @low_jit
    def run(x, seed):
        return rounded_in_float64(program, [x], seed, Parts())

    with jax.enable_x64(True):
        results = jax.device_get([run(np.asarray(x), np.uint32(seed)) for seed in (1, 2)])
    signs = [np.sign(y - np.tanh(np.float64(x))) for y in (*results[0], results[1][0])]
    alike = [np.mean(a * b) for i, a in enumerate(signs) for b in signs[:i]]
    assert max(map(abs, alike)) < 0.25


@pytest.mark.parametrize("platform, bits", [("cuda", 10), ("tpu", 7)])
def test_a_product_in_float32_moves_by_the_passes_of_its_backend(monkeypatch, platform, bits):
    """The platform is known when XLA compiles; here it is given."""
    index = {"cuda": 1, "tpu": 2}[platform]
    module = sys.modules["clipgrad._programs.rounded"]  # the function has its name
    monkeypatch.setattr(module, "_platform", lambda: jnp.int32(index))

    def results(w, x):
        return x @ w, jnp.dot(x, w, precision="highest"), jnp.tanh(x)

    product, exact, other = movements(results, W, X)
    assert 0.5 * 2.0**-bits < product < 2 * 2.0**-bits
    assert max(exact, other) < 3 * eps("float32")


def test_a_number_moves_by_few_operations_in_float64():
    """XLA compiles them for each operation of a program: they are most of what rounding costs."""
    x = numbers(2, 3, 4)

    def count(steps):
        sines = lambda x: functools.reduce(lambda x, _: jnp.sin(x), range(steps), x)  # noqa: E731
        program = jax.make_jaxpr(sines)(x)
        run = lambda x, seed, parts: rounded_in_float64(program, [x], seed, parts)  # noqa: E731
        with jax.enable_x64(True):
            return len(list(equations(jax.make_jaxpr(run)(x, jnp.uint32(1), Parts()))))

    assert count(3) - count(2) < 36
