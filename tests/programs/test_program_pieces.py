"""Programs that run piece by piece, equal pieces compiled once."""

import platform
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clipgrad._programs import (
    ByPieces,
    Parts,
    free_memory,
    has_repeated_operations,
    is_repetitive,
    opened_scans,
    pieces,
    rounded_in_float64,
)
from tests.helpers import array

W = array(np.random.default_rng(0).normal(size=(3, 3)) * 0.5)
X = array(np.random.default_rng(1).normal(size=(4, 3)))


def layers(count, fault=None):
    def loss(w, x):
        for i in range(count):
            x = jnp.tanh(x @ w + 0.5)
            x = x * 1.25 if i == fault else x
        return jnp.mean(x**2)

    return lambda w, x: list(jax.value_and_grad(loss)(w, x))


class Counted:
    """A `jit` that counts what it compiles."""

    def __init__(self):
        self.count = 0

    def __call__(self, function):
        self.count += 1
        return jax.jit(function)


def assert_same(function, *inputs, jit=jax.jit):
    for got, expected in zip(ByPieces(function, jit)(*inputs), function(*inputs), strict=True):
        assert (got.dtype, got.shape, got.weak_type) == (
            expected.dtype,
            expected.shape,
            expected.weak_type,
        )
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_four_times_as_many_layers_are_hardly_more_compiled_pieces():
    few, many = Counted(), Counted()
    assert_same(layers(20), W, X, jit=few)
    assert_same(layers(80), W, X, jit=many)
    assert 2 < few.count <= many.count <= few.count + 1 < 10


@pytest.mark.slow
def test_rounding_of_more_layers_in_float64_is_hardly_more_compiled_pieces():
    def pieces_of(count):
        program, jit = jax.make_jaxpr(layers(count))(W, X), Counted()
        run = lambda leaves, seed: rounded_in_float64(program, leaves, seed, Parts())  # noqa: E731
        with jax.enable_x64(True):
            ByPieces(run, jit)([W, X], np.uint32(1))
        return jit.count

    assert 2 < pieces_of(10) <= pieces_of(40) <= pieces_of(10) + 2


def test_a_long_program_has_repeated_operations_and_a_short_or_a_varied_one_has_not():
    def embedded(count):
        def loss(w, x):
            for i in range(count):
                x = jnp.tanh(x[jnp.arange(3)] @ w) if i % 2 else x.at[0].add(0.5)
            return jnp.mean(x**2)

        return jax.make_jaxpr(jax.grad(loss))(W, X)

    assert has_repeated_operations(embedded(80))  # a scatter holds the sum of two numbers
    assert not has_repeated_operations(embedded(4))
    varied = lambda x: [jnp.sin(x[i:]) + x[: 300 - i] for i in range(200)]  # noqa: E731
    assert not has_repeated_operations(jax.make_jaxpr(varied)(np.ones(300, np.float32)))


@pytest.mark.slow
def test_a_second_version_compiles_what_differs():
    jit = Counted()
    first = ByPieces(layers(30), jit)
    first(W, X)
    before = jit.count
    second = ByPieces(layers(30), jit)
    second(W, X)
    assert jit.count == before
    assert_same(layers(30, fault=14), W, X, jit=jit)
    assert before < jit.count < 3 * before


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_operands_in_any_order_are_those_of_the_program(seed):
    """The same operations, wired otherwise from piece to piece, with other constants."""
    random = np.random.default_rng(seed)
    operations = [
        (*random.choice(4, 2), random.choice([0.5, 0.25]), random.integers(4)) for _ in range(60)
    ]

    def wired(x, y):
        values = [x, y, x + y, x * y]
        for i, j, scale, to in operations:
            values[to] = jnp.sin(values[i] - values[j] * scale)
        return [*values, x, jnp.float32(2), values[0]]

    assert_same(wired, X, X + 1)


def test_a_program_that_repeats_nothing_and_one_with_a_scan_are_compiled_whole():
    def varied(x):
        for i in range(2, 40):
            x = jnp.sin(jnp.ones((i, x.shape[0])) @ x)
        return x

    assert is_repetitive(jax.make_jaxpr(layers(60))(W, X))
    assert not is_repetitive(jax.make_jaxpr(varied)(X))
    assert not is_repetitive(jax.make_jaxpr(lambda x: x)(X))

    def scanned(x):
        for _ in range(30):
            x = jax.lax.scan(lambda x, _: (x + 1, None), x, length=2)[0]
        return x

    assert not is_repetitive(jax.make_jaxpr(scanned)(X))


@pytest.mark.slow
def test_what_nothing_reads_any_more_is_freed():
    """The arrays that live while it runs are those that the gradient as one program has."""
    live = []

    def watched(function):
        compiled = jax.jit(function)

        def run(*inputs):
            outputs = compiled(*inputs)
            live.append(sum(x.nbytes for x in jax.live_arrays()))
            return outputs

        return run

    w, x = jnp.ones((64, 64)) / 64, jnp.ones((512, 64))
    function = layers(40)
    sizes = jax.jit(function).lower(w, x).compile().memory_analysis()
    before = sum(x.nbytes for x in jax.live_arrays())
    ByPieces(function, watched)(w, x)
    assert max(live) - before < 1.25 * (sizes.temp_size_in_bytes + sizes.output_size_in_bytes)


@pytest.mark.parametrize(("worthwhile", "spare"), [(2**14, 0.0), (2**40, 0.0), (2**14, 100.0)])
def test_free_memory_is_returned_where_it_would_need_more_than_the_arrays(
    worthwhile, spare, monkeypatch
):
    """Not where little is free, nor where what is free fits beside what lives."""
    returned = []
    monkeypatch.setattr(pieces, "WORTHWHILE", worthwhile)
    monkeypatch.setattr(pieces, "SPARE", spare)
    monkeypatch.setattr(pieces, "return_free_memory", lambda: returned.append(1))
    w, x = jnp.ones((8, 8)) / 8, jnp.ones((128, 8))
    assert_same(layers(40), w, x)
    assert bool(returned) == ((worthwhile, spare) == (2**14, 0.0))


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
@pytest.mark.parametrize("has_trim", [True, False])
def test_free_memory_is_returned_by_glibc_alone(platform, has_trim, monkeypatch):
    """And elsewhere nothing happens: not on another system, nor with another C library."""
    trimmed = []
    trim = lambda spare: trimmed.append(spare)  # noqa: E731
    library = types.SimpleNamespace(**({"malloc_trim": trim} if has_trim else {}))
    monkeypatch.setattr(free_memory.sys, "platform", platform)
    monkeypatch.setattr(free_memory.ctypes, "CDLL", lambda name: library)
    free_memory._trim.cache_clear()
    free_memory.return_free_memory()
    free_memory._trim.cache_clear()
    assert trimmed == ([0] if has_trim and platform == "linux" else [])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_glibc_has_the_function_that_returns_free_memory():
    trim = free_memory._trim()
    assert trim is not None and trim(0) in (0, 1)


def scanned(length):
    """A loss of a scan, its gradient, and stacks: one that a loop reads, too, and of a constant."""

    def loss(w, xs):
        def step(carry, x):
            h, count = carry
            h = jnp.tanh(h @ w + x[0])
            return (h, count + 1), (h * 2, h + x[1])

        elements = xs[:length], jnp.zeros((length, 4, 3))
        (h, count), (first, second) = jax.lax.scan(step, (X, 0), elements)
        return jnp.mean(h**2) + jnp.mean(first), (first, second, h, count)

    def run(w, xs):
        (_, aux), grads = jax.value_and_grad(loss, has_aux=True)(w, xs)
        return [*aux, jax.lax.stop_gradient(aux[1]), grads, jnp.sum(aux[0])]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("length", "longest"), [(6, 3), (7, 3), (1, 1), (0, 0)])
def test_what_a_scan_stacks_is_taken_when_some_steps_have_run(length, longest, monkeypatch):
    """In the order of its steps, once, whatever reads it besides; other results are the same."""
    monkeypatch.setattr(opened_scans, "AT_ONCE", 3 * 2 * X.nbytes)
    seen = []

    def take(x):
        seen.append(x.shape)
        return np.asarray(x) * 3

    xs = jnp.asarray(np.random.default_rng(2).normal(size=(7, 4, 3)), jnp.float32)
    function, numbers = scanned(length), (0, 1, 2, 4)
    run, expected = ByPieces(function, jax.jit, dict.fromkeys(numbers, take)), function(W, xs)
    for _ in range(2):
        for i, (x, y) in enumerate(zip(run(W, xs), expected, strict=True)):
            np.testing.assert_allclose(x, y * 3 if i in numbers else y, rtol=1e-5, atol=1e-6)
    assert max((shape[0] for shape in seen if len(shape) == 3), default=0) == longest


class Shift:
    """A callback whose text says nothing of its number."""

    def __init__(self, by):
        self.by = by

    def __repr__(self):
        return "shift"

    def __call__(self, x):
        return np.asarray(x) + np.float32(self.by)


def test_options_of_the_same_text_are_not_the_same():
    def shifted(x):
        for i in range(8):
            x = jnp.sin(x) * 0.5 + jnp.cos(x)
            x = jax.pure_callback(Shift(i), jax.typeof(x), x)
        return [x]

    assert_same(shifted, X)
