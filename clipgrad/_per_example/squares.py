"""Sums of squares with an exponent beside them, which neither overflow nor underflow."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._numerics import Norm, accumulator, real_or_absolute

# The exponent of 0: less than that of any product of three numbers of float64.
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
        largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(x), initial=0) for x in wide])
        exponent = exponents(largest)
        used = jnp.where(exponent == NO_EXPONENT, 0, exponent)
        totals = [jnp.sum(jnp.square(times_power(x, -used))) for x in wide]
        bad = [jnp.sum(~f, dtype=dtype) for f in finite]
        return cls(functools.reduce(jnp.add, totals), used, functools.reduce(jnp.add, bad))

    @classmethod
    def sum(cls, parts: Sequence["Squares"]) -> "Squares":
        """The sum of several."""
        dtype = max((part.total.dtype.name for part in parts), default="float32")
        if not parts:
            return cls(jnp.zeros((), dtype), jnp.int32(0), jnp.zeros((), dtype))
        present = [jnp.where(p.total == 0, NO_EXPONENT, p.exponent) for p in parts]
        largest = functools.reduce(jnp.maximum, present)
        largest = jnp.where(largest == NO_EXPONENT, 0, largest)
        totals = [
            times_power(part.total.astype(dtype), 2 * (part.exponent - largest)) for part in parts
        ]
        bad = [part.nonfinite.astype(dtype) for part in parts]
        return cls(functools.reduce(jnp.add, totals), largest, functools.reduce(jnp.add, bad))

    def over_axis(self) -> "Squares":
        """The sum over the first axis."""
        present = jnp.where(self.total == 0, NO_EXPONENT, self.exponent)
        largest = jnp.max(present, axis=0, initial=NO_EXPONENT)
        largest = jnp.where(largest == NO_EXPONENT, 0, largest)
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


def exponents(largest: jax.Array) -> jax.Array:
    """For numbers from 0 on the exponents ``e`` with ``2 ** (e - 1) <= x < 2 ** e``, as integers.

    `NO_EXPONENT` for 0 (and what XLA takes for 0); some exponent for NaN and inf.
    """
    bits, mantissa, bias = (32, 23, 126) if largest.dtype.itemsize == 4 else (64, 52, 1022)
    integers = jax.lax.bitcast_convert_type(largest, f"int{bits}")
    field = (integers >> mantissa).astype(jnp.int32)
    return jax.lax.stop_gradient(jnp.where(field > 0, field - bias, NO_EXPONENT))


def times_power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """``x * 2 ** exponent``, in two steps so that neither factor is out of range."""
    half = exponent // 2
    return x * _power(half, x.dtype) * _power(exponent - half, x.dtype)


def _power(exponent: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``2 ** exponent`` exactly, 0 where it is not a normal number."""
    wide = jnp.finfo(dtype).bits == 64
    bits, mantissa, bias = (64, 52, 1023) if wide else (32, 23, 127)
    field = jnp.clip(exponent + bias, 0, 2 * bias).astype(f"int{bits}")
    return jax.lax.bitcast_convert_type(field << mantissa, f"float{bits}")
