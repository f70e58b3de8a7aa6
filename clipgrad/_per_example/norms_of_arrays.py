"""Norms of an array of each example, which neither overflow nor underflow."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._arrays import accumulator, real_or_absolute, widest


def norms_of_array(x: jax.Array) -> jax.Array:
    """The norms over all but the first axis."""
    return as_numbers(*roots_of_array(x))


def roots_of_array(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The norms over all but the first axis, ``root * 2 ** exponent``."""
    x = real_or_absolute(x)
    x = x.astype(accumulator(x))
    axes = tuple(range(1, x.ndim))
    exponent = exponent_of(largest_of_each(x, axes))
    scaled = times_power(x, -exponent[(..., *[None] * len(axes))])
    # The bound changes nothing. Without it XLA makes (x * x) * (c * c) of the squares where it
    # knows the power c, as that of 0, and c * c is inf.
    scaled = jnp.maximum(scaled, jnp.finfo(x.dtype).min)
    return jnp.sqrt(dot_of_each(scaled, scaled, 0)), exponent


def side_by_side(norms: Sequence[jax.Array]) -> jax.Array:
    """The norms of several arrays, of the shape (examples, arrays), in the widest dtype."""
    return jnp.stack([norm.astype(widest(norms)) for norm in norms], axis=1)


def dot_of_each(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """For each index of an axis the sum of the products of two arrays.

    As a product of vectors: XLA's CPU compiler adds up a sum to a single number one by one, and
    what is lost is a few parts in a million of narrow numbers, all on one side.
    """
    labels = list(range(x.ndim))
    return jnp.einsum(x, labels, y, labels, [axis], precision="highest")


def largest_of_each(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The largest absolute value along axes; 0 of none."""
    return jnp.max(jnp.abs(x), axis=tuple(axes), initial=0)


def exponent_of(size: jax.Array) -> jax.Array:
    """The exponents of numbers from 0 on, whose negative powers bring these near 1.

    It is at most one whose negative power is a normal number; 0, NaN and inf have some exponent.
    """
    bits, mantissa, bias = _format(size.dtype)
    field = jax.lax.bitcast_convert_type(size, f"int{bits}") >> mantissa
    return jnp.minimum(field, 2 * (bias - 1)).astype("int32") - (bias - 1)


def as_numbers(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """``x * 2 ** exponent``, where the power alone may leave the range of numbers."""
    half = exponent // 2
    return times_power(times_power(x, half), exponent - half)


def times_power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """``x * 2 ** exponent``, exactly; 0 where the power is no normal number, inf if too large."""
    return x * jax.lax.convert_element_type(_power(exponent, x.dtype), x.dtype)


def _power(exponent: jax.Array, dtype: Any) -> jax.Array:
    kind = "float64" if jnp.finfo(dtype).bits == 64 else "float32"
    bits, mantissa, bias = _format(kind)
    field = jnp.clip(exponent + bias, 0, 2 * bias).astype(f"int{bits}")
    return jax.lax.bitcast_convert_type(field << mantissa, kind)


def _format(dtype: Any) -> tuple[int, int, int]:
    """The bits of a number, the bits of its mantissa, and the field of the exponent of 1."""
    return (64, 52, 1023) if jnp.finfo(dtype).bits == 64 else (32, 23, 127)
