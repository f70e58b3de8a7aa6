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
    """A sum of squares ``total * 4 ** exponent``.

    Attributes:
      total: not finite where an element is not.
      exponent: any number where the total is 0.
      nonfinite: how many elements are NaN or inf where these count as 0; ``None`` elsewhere.
    """

    total: jax.Array
    exponent: jax.Array
    nonfinite: jax.Array | None = None

    @classmethod
    def of(cls, *arrays: jax.Array, zero: bool = False) -> "Squares":
        """The sum of the squares of arrays; ``zero``: NaN and inf count as 0 in them."""
        dtype, bad = max(map(accumulator, arrays)), None
        wide = [real_or_absolute(x).astype(dtype) for x in arrays]
        if zero:
            finite = [jnp.isfinite(x) for x in arrays]
            wide = [jnp.where(f, x, jnp.zeros_like(x)) for f, x in zip(finite, wide, strict=True)]
            bad = functools.reduce(jnp.add, [jnp.sum(~f, dtype=dtype) for f in finite])
        scale, exponent = power_scale(functools.reduce(jnp.maximum, map(largest_size, wide)))
        total = functools.reduce(jnp.add, [jnp.sum(jax.lax.square(x * scale)) for x in wide])
        return cls(total, exponent, bad)

    @classmethod
    def of_product(cls, parts: "Sequence[Squares]", error: float) -> "Squares":
        """The squares of an outer product of arrays, with its relative error of rounding."""
        total = functools.reduce(jnp.multiply, [part.total for part in parts])
        exponent = functools.reduce(jnp.add, [part.exponent for part in parts])
        return cls(total * (1 + error), exponent)

    def over_axis(self) -> "Squares":
        """The sum over the first axis."""
        present = if_else(self.total == 0, NO_EXPONENT, self.exponent)
        largest = jnp.max(present, axis=0, initial=NO_EXPONENT)
        largest = if_else(largest == NO_EXPONENT, 0, largest)
        scaled = self.total * power_at_most_one(2 * (present - largest), self.total.dtype)
        bad = None if self.nonfinite is None else jnp.sum(self.nonfinite, axis=0)
        return Squares(jnp.sum(scaled, axis=0), largest, bad)

    def norm(self, count: float = 1.0) -> Norm:
        """The square root, of the mean of ``count`` squares."""
        root = jnp.sqrt(if_else(self.total == 0, 1, self.total / count))
        # The scale is 1 in the ordinary range, as in other norms, and a normal number elsewhere.
        ordinary = (self.exponent > -30) & (self.exponent < 50)
        moved = if_else(ordinary, 0, _clamped(self.exponent, -100, 100))
        root = if_else(self.total == 0, 0, root * _power(self.exponent - moved, root.dtype))
        return Norm.of(root, _power(-moved, root.dtype))


def largest_size(x: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
    """The largest absolute value along axes (``None``: all); 0 of none."""
    axes = tuple(range(x.ndim)) if axes is None else tuple(axes)
    if not x.size:
        return jnp.zeros([n for i, n in enumerate(x.shape) if i not in axes], x.dtype)
    return jnp.max(jnp.abs(x), axis=axes)


def power_scale(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For numbers from 0 on the power of two that brings them near 1, and the exponent of each.

    A number is between ``2 ** (exponent - 1)`` and ``2 ** exponent``, and times its power from 1/2
    to 1, or to 4 at the upper end of the range, where the inverse would not be a normal number. 0
    (and what XLA takes for 0), NaN and inf have some exponent.
    """
    bits, mantissa, bias = _format(largest.dtype)
    integers = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(largest), f"int{bits}")
    field = _clamped(integers >> mantissa, 0, 2 * (bias - 1))
    scale = jax.lax.bitcast_convert_type((2 * bias - 1 - field) << mantissa, largest.dtype)
    return scale, (field - (bias - 1)).astype(jnp.int32)


def unit_scale(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `power_scale`, with `NO_EXPONENT` as the exponent of 0."""
    scale, exponent = power_scale(largest)
    smallest = 1 - _format(largest.dtype)[2]
    return scale, if_else(exponent > smallest, exponent, NO_EXPONENT)


def power_at_most_one(exponent: jax.Array, dtype: Any) -> jax.Array:
    """``2 ** exponent`` for exponents up to 0; 0 where that is not a normal number."""
    bits, mantissa, bias = _format(dtype)
    field = _clamped(exponent + bias, 0, bias).astype(f"int{bits}")
    return jax.lax.bitcast_convert_type(field << mantissa, dtype)


def _power(exponent: jax.Array, dtype: Any) -> jax.Array:
    """``2 ** exponent`` exactly, 0 where it is not a normal number."""
    bits, mantissa, bias = _format(dtype)
    field = _clamped(exponent + bias, 0, 2 * bias).astype(f"int{bits}")
    return jax.lax.bitcast_convert_type(field << mantissa, dtype)


def _format(dtype: Any) -> tuple[int, int, int]:
    """The bits of a number, the bits of its mantissa, and the field of the exponent of 1."""
    return (64, 52, 1023) if jnp.finfo(dtype).bits == 64 else (32, 23, 127)


def _clamped(x: jax.Array, least: int, most: int) -> jax.Array:
    """Integers from one to another; `jax.numpy.clip` would be a call in each place."""
    return jax.lax.clamp(jnp.array(least, x.dtype), x, jnp.array(most, x.dtype))
