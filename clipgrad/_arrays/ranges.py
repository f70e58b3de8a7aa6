"""Blue's method: three sums of squares, of which one is in range for every norm that is a float.

The sums are of elements scaled down, as they are, and scaled up; a norm is the root of the one that
is in range, divided by the scale. It is the method of LAPACK's ``nrm2`` (Blue, A Portable Fortran
Program to Find the Euclidean Norm of a Vector, 1978; Anderson, Algorithm 978, 2017), with constants
that leave room for sums of very many elements.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from clipgrad._arrays.numbers import if_else, number, one_program_if_eager, real_or_absolute


class _Range(NamedTuple):
    """Exponents of two: what norms a plain sum of squares is right for, and two scales.

    A plain sum is right for norms in [2 ** low, 2 ** high]. Larger norms are read off the sum of
    (x * 2 ** down) ** 2, smaller ones off the sum of (x * 2 ** up) ** 2.
    """

    low: int
    high: int
    down: int
    up: int


# In float32, where numbers are from 2 ** -126 to 2 ** 128:
# * low: of a norm of 2 ** -30 the square is 2 ** -60. Elements from 2 ** -63 on have squares in
#   range, and 2 ** 42 smaller ones add less than its rounding.
# * high: the square, 2 ** 100, leaves room where sums of many leaves and devices are added up.
# * down: 2 ** 50 of the largest elements have a sum in range, 2 ** (2 * (128 - 90) + 50).
# * up: the smallest elements have squares in range, 2 ** (2 * (-126 + 73)), and so has a norm of
#   2 ** low, 2 ** (2 * (-30 + 73)).
# In float64, from 2 ** -1022 to 2 ** 1024, in the same way.
_RANGES = {"float32": _Range(-30, 50, -90, 73), "float64": _Range(-450, 450, -550, 600)}


def _bounded_product(size: jax.Array, scale: Any) -> jax.Array:
    """A product to be squared: of that alone XLA would make ``(x * x) * (c * c)``.

    Both factors would be out of range. It does so where the scale is a constant.
    """
    return lax.max(lax.mul(size, scale), number(jnp.finfo(size.dtype).min, size))


@one_program_if_eager
def scaled_squares(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Squares of a leaf scaled down, and scaled up, which stop where they are not used.

    The bounds change no sum that is used. They are on one side only: two make a clamp, for which
    XLA's CPU loops take another buffer.
    """
    size = real_or_absolute(leaf)
    rule = _RANGES[size.dtype.name]
    down = _bounded_product(size, number(2.0**rule.down, size))
    largest = 2.0 ** (rule.low + rule.up)
    up = lax.min(lax.mul(size, number(2.0**rule.up, size)), number(largest, size))
    return lax.square(down), lax.min(lax.square(up), number(largest**2, size))


@one_program_if_eager
def bounded_square(size: jax.Array) -> jax.Array:
    """The plain square, which stops at a large number where it is not used."""
    rule = _RANGES[size.dtype.name]
    # One number, but as an array: in a minimum with a number XLA's CPU loops lose NaN, for a select
    # they take a buffer, and so they do for a factor that is used twice.
    limit = lax.mul(size, number(2.0 ** (rule.down - 1), size))
    return lax.min(lax.square(size), lax.max(limit, number(2.0 ** (2 * rule.high), size)))


@one_program_if_eager
def in_range(down: jax.Array, plain: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of three sums of squares the one that is in range, and the scale of its elements."""
    rule = _RANGES[plain.dtype.name]
    is_large = lax.gt(down, number(2.0 ** (2 * (rule.high + rule.down)), down))
    is_large = lax.bitwise_and(is_large, lax.eq(plain, plain))  # not if it is NaN
    is_small = lax.lt(plain, number(2.0 ** (2 * rule.low), plain))
    is_small = lax.bitwise_and(is_small, lax.gt(up, number(0, up)))
    total = if_else(is_large, down, if_else(is_small, up, plain))
    return total, _range_scale(is_large, is_small, plain)


def is_in_range(plain: jax.Array) -> jax.Array:
    """Whether a plain sum of squares can be read; not if it is NaN."""
    rule = _RANGES[plain.dtype.name]
    return _is_between(plain, 2.0 ** (2 * rule.low), 2.0 ** (2 * rule.high))


def is_root_in_range(root: jax.Array) -> jax.Array:
    """Whether the plain sum of this root can be read; not if it is NaN."""
    rule = _RANGES[root.dtype.name]
    return _is_between(root, 2.0**rule.low, 2.0**rule.high)


def _is_between(x: jax.Array, low: float, high: float) -> jax.Array:
    return lax.bitwise_and(lax.ge(x, number(low, x)), lax.le(x, number(high, x)))


@one_program_if_eager
def from_plain(plain: jax.Array) -> tuple[jax.Array, ...]:
    """All three sums of squares, from a plain one that is in range."""
    rule = _RANGES[plain.dtype.name]
    high, down = 2.0 ** (2 * rule.high), 2.0**rule.down
    # A bound between two factors, of which XLA would make one that is out of range.
    return jnp.minimum(plain * down, high * down) * down, plain, jnp.zeros_like(plain)


@one_program_if_eager
def if_needed(up: jax.Array, plain: jax.Array) -> jax.Array:
    """A sum of squares scaled up, 0 where the plain sum is large enough to be read.

    So it is after sums have been added up: where their total is too small, each of them is.
    """
    return if_else(plain < 2.0 ** (2 * _RANGES[plain.dtype.name].low), up, 0)


def _chosen_scale(is_large: jax.Array, is_small: jax.Array, like: jax.Array) -> jax.Array:
    """The power of two that brings elements into the middle of the range."""
    rule, one = _RANGES[like.dtype.name], lax.full_like(like, 1)
    return if_else(is_large, 2.0**rule.down, if_else(is_small, 2.0**rule.up, one))


def _range_scale(is_large: jax.Array, is_small: jax.Array, like: jax.Array) -> jax.Array:
    """The scale as a quotient: XLA computes it once.

    It would compute a choice, with all the sums that it depends on, in the loop of each leaf.
    """
    rule, one = _RANGES[like.dtype.name], lax.full_like(like, 1)
    inverse = if_else(is_large, 2.0**-rule.down, if_else(is_small, 2.0**-rule.up, one))
    return lax.div(number(1, like), inverse)


# Of this instead of 0 the root is divided by. It and a quotient of it are in range in float32.
_LEAST_SQUARE = 2.0**-208


def narrow_root(total: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Root, scale and divisor (see `Norm`) in float32 of a float64 sum of float32 squares.

    Of a norm below 1 the scale is a power of two near the third power of the inverse fourth root:
    so the root is near that fourth root, whose powers second derivatives divide by. From 1 on it
    is 1, but for norms without a reciprocal. At inf it is 0, and makes the divisor NaN.
    """
    one = number(1, total)
    safe = lax.sqrt(if_else(lax.eq(total, number(0, total)), _LEAST_SQUARE, total))
    small = lax.min(_power_of_two(lax.sqrt(lax.sqrt(safe))), one)
    large = _power_of_two(lax.max(lax.mul(safe, number(2.0**-125, safe)), one))
    scale = lax.div(one, lax.mul(lax.mul(lax.mul(small, small), small), large))
    root = lax.sqrt(total)
    root = if_else(lax.gt(scale, number(0, scale)), lax.mul(root, scale), root)
    each = (root, scale, lax.mul(safe, scale))
    root, scale, divisor = (lax.convert_element_type(x, jnp.float32) for x in each)
    return root, scale, divisor


def _power_of_two(x: jax.Array) -> jax.Array:
    """The nearest power of two. It has no derivative; that of `reduce_precision` is 1."""
    return lax.stop_gradient(lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, 0))


def toward_one(root: jax.Array, scale: jax.Array) -> jax.Array:
    """A factor that makes the scale of a large norm 1, or a power of two with a reciprocal.

    So a limit stays in range when it is multiplied by the scale: in float32 unless it is less than
    2 ** -251 of the norm, and each element of the result below 2 ** -122.
    """
    down = _RANGES[root.dtype.name].down
    largest = number(2.0 ** -(int(jnp.finfo(root.dtype).maxexp) - 3 + down), root)
    # At most that of 2 ** 50 of the largest elements, so that inf times the factor is inf.
    excess = lax.clamp(number(1, root), lax.mul(root, largest), number(2.0**30, root))
    factor = lax.div(number(2.0**-down, root), _power_of_two(excess))
    return if_else(lax.lt(scale, number(1, scale)), factor, lax.full_like(root, 1))


def scale_of_plain(plain: jax.Array) -> jax.Array:
    return _chosen_scale(*_out_of_range(plain), plain)


def unless_plain(plain: jax.Array, total: jax.Array) -> jax.Array:
    """A scaled sum; the plain one if that is in range or NaN, which a scaled sum may lose."""
    is_large, is_small = _out_of_range(plain)
    return if_else(is_large | is_small, total, plain)


def _out_of_range(plain: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether a plain sum is too large, and too small."""
    rule = _RANGES[plain.dtype.name]
    high, low = (number(2.0 ** (2 * exponent), plain) for exponent in (rule.high, rule.low))
    return lax.gt(plain, high), lax.lt(plain, low)


def scaled_square(leaf: jax.Array, plain: jax.Array) -> jax.Array:
    """The sum of these is used if the plain one is out of range: too large, or else too small."""
    rule = _RANGES[plain.dtype.name]
    scale = if_else(plain > 1, jnp.full_like(plain, 2.0**rule.down), 2.0**rule.up)
    return jnp.square(_bounded_product(real_or_absolute(leaf), scale))


def scale_of_largest(largest: jax.Array) -> jax.Array:
    """A power of two that brings the largest element into the middle of the range."""
    rule = _RANGES[largest.dtype.name]
    is_large = (largest > 2.0**rule.high) & jnp.isfinite(largest)
    return _range_scale(is_large, largest < 2.0**rule.low, largest)


def three_squares(size: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Squares scaled down, as they are, and scaled up."""
    down, up = scaled_squares(size)
    return down, bounded_square(size), up


def stacked_sums(down: jax.Array, plain: jax.Array, up: jax.Array) -> jax.Array:
    """The three sums of squares along a last axis."""
    return jnp.stack([down, plain, if_needed(up, plain)], -1)


def sums_of_norm(norm: jax.Array) -> jax.Array:
    """The three sums of a norm that is known, along a first axis.

    The squares of the norm scaled down, as it is (no larger than can be squared), and scaled up
    (0 unless that is used).
    """
    rule = _RANGES[norm.dtype.name]
    # As in `bounded_square`, the bound is an array: in a minimum with a number NaN gets lost.
    shrunk = lax.mul(norm, number(2.0 ** (rule.high - jnp.finfo(norm.dtype).maxexp), norm))
    plain = lax.min(norm, lax.max(shrunk, number(2.0**rule.high, norm)))
    up = lax.mul(norm, number(2.0**rule.up, norm))
    up = if_else(lax.lt(norm, number(2.0**rule.low, norm)), up, 0)
    each = lax.mul(norm, number(2.0**rule.down, norm)), plain, up
    return lax.square(lax.concatenate([lax.expand_dims(x, [0]) for x in each], 0))


@one_program_if_eager
def root_of_sums(sums: jax.Array) -> jax.Array:
    return root_in_range(sums[..., 0], sums[..., 1], sums[..., 2])


def root_in_range(down: jax.Array, plain: jax.Array, up: jax.Array) -> jax.Array:
    """The norm, from the one of three sums of squares that is in range."""
    total, scale = in_range(down, plain, up)
    root = jnp.sqrt(jnp.where(total == 0, 1, total)) / scale
    return jnp.where(total == 0, 0, root)
