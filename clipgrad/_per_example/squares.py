"""Sums of squares with an exponent beside them, which neither overflow nor underflow."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._numerics import Norm, accumulator, if_else, real_or_absolute

# The exponent of 0: less than the exponent of any product of three numbers of float64.
NO_EXPONENT = -10_000


class Squares(NamedTuple):
    """A sum of squares ``total * 4 ** exponent``, and how many elements are NaN or inf."""

    total: jax.Array
    exponent: jax.Array
    nonfinite: jax.Array

    @classmethod
    def of(cls, *arrays: jax.Array, zero: bool = False) -> "Squares":
        """The sum of the squares of arrays; ``zero``: NaN and inf count as 0 in them."""
        dtype = max(map(accumulator, arrays))
        finite = [jnp.isfinite(x) for x in arrays]
        wide = [real_or_absolute(x).astype(dtype) for x in arrays]
        if zero:
            wide = [jnp.where(f, x, jnp.zeros_like(x)) for f, x in zip(finite, wide, strict=True)]
        scale, exponent = unit_scale(functools.reduce(jnp.maximum, map(largest_size, wide)))
        used = if_else(exponent == NO_EXPONENT, 0, exponent)
        totals = [jnp.sum(jnp.square(x * scale)) for x in wide]
        bad = [jnp.sum(~f, dtype=dtype) for f in finite]
        return cls(functools.reduce(jnp.add, totals), used, functools.reduce(jnp.add, bad))

    def over_axis(self) -> "Squares":
        """The sum over the first axis."""
        present = if_else(self.total == 0, NO_EXPONENT, self.exponent)
        largest = jnp.max(present, axis=0, initial=NO_EXPONENT)
        largest = if_else(largest == NO_EXPONENT, 0, largest)
        scaled = times_power(self.total, 2 * (self.exponent - largest))
        return Squares(jnp.sum(scaled, axis=0), largest, jnp.sum(self.nonfinite, axis=0))

    def norm(self, count: float = 1.0) -> Norm:
        """The square root, of the mean of ``count`` squares."""
        root = jnp.sqrt(jnp.where(self.total == 0, 1, self.total) / count)
        root = jnp.where(self.total == 0, 0, root)
        # The scale is 1 in the ordinary range, as in other norms, and a normal number elsewhere.
        ordinary = (self.exponent > -30) & (self.exponent < 50)
        scale = jnp.where(ordinary, 0, jnp.clip(-self.exponent, -100, 100))
        root = times_power(root, self.exponent + scale)
        return Norm.of(root, times_power(jnp.ones_like(root), scale))


def largest_size(x: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
    """The largest absolute value along axes (``None``: all); 0 of none."""
    axes = tuple(range(x.ndim)) if axes is None else tuple(axes)
    if not x.size:
        return jnp.zeros([n for i, n in enumerate(x.shape) if i not in axes], x.dtype)
    return jnp.max(jnp.abs(x), axis=axes)


def unit_scale(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For numbers from 0 on the power of two that brings them near 1, and the exponent of each.

    A number is between ``2 ** (exponent - 1)`` and ``2 ** exponent``, and times its power from 1/2
    to 1, or to 4 at the upper end of the range, where the inverse would not be a normal number. The
    exponent is `NO_EXPONENT` of 0 (and what XLA takes for 0); NaN and inf have some exponent.
    """
    bits, mantissa, bias = _format(largest.dtype)
    integers = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(largest), f"int{bits}")
    field = _clamped(integers >> mantissa, 2 * (bias - 1))
    scale = jax.lax.bitcast_convert_type((2 * bias - 1 - field) << mantissa, largest.dtype)
    exponent = (field - (bias - 1)).astype(jnp.int32)
    return scale, if_else(field > 0, exponent, NO_EXPONENT)


def power_at_most_one(exponent: jax.Array, dtype: Any) -> jax.Array:
    """``2 ** exponent`` for exponents up to 0; 0 where that is not a normal number."""
    bits, mantissa, bias = _format(dtype)
    field = _clamped(exponent + bias, bias).astype(f"int{bits}")
    return jax.lax.bitcast_convert_type(field << mantissa, dtype)


def times_power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """``x * 2 ** exponent``, in two steps so that neither factor is out of range."""
    half = exponent >> 1
    return x * _power(half, x.dtype) * _power(exponent - half, x.dtype)


def _power(exponent: jax.Array, dtype: Any) -> jax.Array:
    """``2 ** exponent`` exactly, 0 where it is not a normal number."""
    bits, mantissa, bias = _format(dtype)
    field = _clamped(exponent + bias, 2 * bias).astype(f"int{bits}")
    return jax.lax.bitcast_convert_type(field << mantissa, dtype)


def _format(dtype: Any) -> tuple[int, int, int]:
    """The bits of a number, the bits of its mantissa, and the field of the exponent of 1."""
    return (64, 52, 1023) if jnp.finfo(dtype).bits == 64 else (32, 23, 127)


def _clamped(x: jax.Array, most: int) -> jax.Array:
    """Integers from 0 to another one; `jax.numpy.clip` would be a call in each place."""
    return jax.lax.clamp(jnp.array(0, x.dtype), x, jnp.array(most, x.dtype))
