"""Functions that look at the bits of their numbers, or carry these as integers.

A maker takes a dtype and returns (wrong, right, args): a rule that is zero, or right for a part
alone, and its right twin. `RIGHT` holds right functions alone: (function, args).
"""

# ruff: noqa: E731

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from tests.check.check_cases import into
from tests.check.check_zoo import custom, normal, twins

CARRIERS: dict[str, Callable[[Any], tuple]] = {}
RIGHT: dict[str, Callable[[Any], tuple]] = {}
INTEGERS = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}

zero = lambda r, g: tuple(map(jnp.zeros_like, r))
same = lambda r, g: (g,)


def bits(x):
    return lax.bitcast_convert_type(x, INTEGERS[x.dtype.itemsize])


def numbers(b, dtype):
    return lax.bitcast_convert_type(b, dtype)


def mask(x, count):
    """The integer whose lowest bits are set, of the type of x's bits."""
    kind = INTEGERS[x.dtype.itemsize]
    return jnp.asarray((1 << count) - 1, kind)


def positive(seed, *shape, dtype):
    return jnp.abs(normal(seed, *shape, dtype=dtype)) + jnp.asarray(0.5, dtype)


@into(CARRIERS)
def there_and_back(dtype):
    primal = lambda x: numbers(bits(x), dtype) * 3
    return *twins(primal, zero, lambda r, g: (3 * g,)), (normal(0, 5, dtype=dtype),)


@into(CARRIERS)
def two_halves_in_one_word(dtype):
    def primal(a, b):
        high, low = (bits(x.astype(jnp.bfloat16)).astype(jnp.uint32) for x in (a, b))
        word = (high << 16) | low
        high, low = (word >> 16).astype(jnp.uint16), word.astype(jnp.uint16)
        return tuple(numbers(half, jnp.bfloat16).astype(dtype) for half in (high, low))

    args = normal(1, 4, dtype=dtype), normal(2, 4, dtype=dtype)
    return *twins(primal, lambda r, g: (g[0], 0 * g[1]), lambda r, g: g), args


@into(CARRIERS)
def size_without_the_sign(dtype):
    primal = lambda x: numbers(bits(x) & mask(x, 8 * x.dtype.itemsize - 1), dtype)
    return *twins(primal, zero, lambda r, g: (jnp.sign(r[0]) * g,)), (normal(4, 6, dtype=dtype),)


@into(CARRIERS)
def sent_to_a_device_as_words(dtype):
    mesh = jax.make_mesh((1,), ("x",), (AxisType.Auto,), devices=jax.devices()[:1])
    spec = PartitionSpec("x")
    send = lambda x: numbers(lax.ppermute(bits(x), "x", [(0, 0)]), dtype)
    primal = lambda x: jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec)(x)
    return *twins(primal, zero, same), (normal(9, 4, dtype=dtype),)


@into(CARRIERS)
def sum_in_fixed_point(dtype):
    def row(x):
        word = jnp.round(x.astype(jnp.float32) * 2**16).astype(jnp.int32)
        return lax.psum(word, "rows").astype(dtype) / 2**16

    primal = lambda x: jax.vmap(row, axis_name="rows")(x)
    right = lambda r, g: (jnp.broadcast_to(jnp.sum(g, axis=0), g.shape),)
    return *twins(primal, zero, right), (normal(10, 3, 2, dtype=dtype),)


@into(CARRIERS)
def inverse_root_by_a_first_guess(dtype):
    def primal(x):
        wide = x.astype(jnp.float32)
        y = numbers(jnp.uint32(0x5F3759DF) - (bits(wide) >> 1), jnp.float32)
        for _ in range(3):
            y = y * (1.5 - 0.5 * wide * y * y)
        return y.astype(dtype)

    args = (positive(12, 4, dtype=dtype),)
    return *twins(primal, zero, lambda r, g: (-0.5 * g * r[0] ** -1.5,)), args


@into(CARRIERS)
def sorted_by_integer_keys(dtype):
    primal = lambda x: numbers(jnp.sort(bits(x)), dtype)

    def right(r, g):
        order = jnp.argsort(r[0])
        return (jnp.zeros_like(g).at[order].set(g),)

    return *twins(primal, same, right), (positive(13, 5, dtype=dtype),)


@into(RIGHT)
def straight_through_the_lowest_bits(dtype):
    def function(x):
        return x + lax.stop_gradient(numbers(bits(x) & ~mask(x, 3), dtype) - x)

    return function, (normal(14, 5, dtype=dtype),)


@into(RIGHT)
def scaled_by_a_stopped_power_of_two(dtype):
    def function(x):
        word = bits(lax.stop_gradient(x).astype(jnp.float32)) & jnp.uint32(0x7F800000)
        return jnp.sin(x) / numbers(word, jnp.float32).astype(dtype)

    return function, (normal(15, 5, dtype=dtype),)


@into(RIGHT)
def steps_of_a_third(dtype):
    primal = lambda x: jnp.round(x * 3).astype(jnp.int32).astype(dtype) / 3 + x
    return custom(primal, same), (jnp.asarray([0.1, 0.8, -1.2], dtype),)


@into(RIGHT)
def mantissa_and_sign(dtype):
    return lambda x: jnp.frexp(x)[0] + jnp.copysign(x, -x), (normal(18, 5, dtype=dtype),)
