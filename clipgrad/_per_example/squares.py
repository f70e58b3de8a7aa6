"""Sums of squares with an exponent beside them, which neither overflow nor underflow."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._numerics import Norm, accumulator, if_else, real_or_absolute

# Less than the exponent of any product of two numbers of float64: of a sum that is 0.
NO_EXPONENT = -10_000


class Squares(NamedTuple):
    """Sums of squares ``total * 4 ** exponent``; a total is not finite where an element is not."""

    total: jax.Array
    exponent: jax.Array

    @classmethod
    def of(cls, x: jax.Array) -> "Squares":
        """The sums over all but the first axes of an array."""
        x = real_or_absolute(x)
        x = x.astype(accumulator(x))
        axes = tuple(range(1, x.ndim))
        exponent = exponent_of(largest_of_each(x, axes))
        scaled = times_power(x, -exponent[(..., *[None] * len(axes))])
        return cls(dot_of_each(scaled, scaled, 0), exponent)

    @classmethod
    def none(cls, size: int) -> "Squares":
        """The sums of nothing."""
        return cls(jnp.zeros(size, "float32"), jnp.zeros(size, "int32"))

    @classmethod
    def stacked(cls, each: Sequence["Squares"], size: int) -> "Squares":
        """Several of ``size`` examples, one behind the other, in the widest of their dtypes."""
        if not each:
            return cls(jnp.zeros((0, size), "float32"), jnp.zeros((0, size), "int32"))
        dtype = max((x.total.dtype for x in each), key=lambda kind: kind.itemsize)
        total = jnp.stack([x.total.astype(dtype) for x in each])
        return cls(total, jnp.stack([x.exponent for x in each]))

    def over_axis(self) -> "Squares":
        """The sum over the first axis."""
        present = if_else(self.total == 0, NO_EXPONENT, self.exponent)
        most = jnp.max(present, axis=0, initial=NO_EXPONENT)
        most = if_else(most == NO_EXPONENT, 0, most)
        scaled = times_power(self.total, 2 * (present - most[None]))
        return Squares(jnp.sum(scaled, axis=0), most)

    def norm(self, count: float = 1.0) -> Norm:
        """The square root, of the mean of ``count`` squares."""
        root = jnp.sqrt(if_else(self.total == 0, 1, self.total / count))
        # The scale is 1 in the ordinary range, as in other norms, and a normal number elsewhere.
        ordinary = (self.exponent > -30) & (self.exponent < 50)
        moved = if_else(ordinary, 0, jnp.clip(self.exponent, -100, 100))
        root = if_else(self.total == 0, 0, times_power(root, self.exponent - moved))
        return Norm.of(root, times_power(jnp.ones_like(root), -moved))


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
