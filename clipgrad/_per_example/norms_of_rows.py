r"""Norms of the gradients of a leaf, from rows of all its uses.

$\|\sum_t x_t y_t^\top\|^2 = \sum_{ts} \langle x_t, x_s\rangle \langle y_t, y_s\rangle$, from two
Gram matrices. The rounding of such a sum is added to it, so that a norm is not too small where
products cancel.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._arrays import accumulator
from clipgrad._per_example.norms_of_arrays import (
    as_numbers,
    dot_of_each,
    exponent_of,
    largest_of_each,
    norms_of_array,
    roots_of_array,
    side_by_side,
    times_power,
)
from clipgrad._per_example.products import product
from clipgrad._per_example.uses import Factors, Rows, Use


def have_grams(uses: Sequence[Use]) -> bool:
    """Whether rows of each two uses can be compared: on the same parts of a leaf, or apart."""
    pairs = itertools.combinations(uses, 2)
    return all(a.key == b.key or a.place.is_apart(b.place) for a, b in pairs)


def gram_entries(uses: Sequence[Use]) -> int:
    """The number of inner products that the Gram matrices of one example have."""
    return sum(2 * groups * rows**2 for groups, rows in map(_extent, _by_key(uses)))


def _by_key(uses: Sequence[Use]) -> list[list[Use]]:
    found: dict[Any, list[Use]] = {}
    for use in uses:
        found.setdefault(use.key, []).append(use)
    return list(found.values())


def _extent(uses: Sequence[Use]) -> tuple[int, int]:
    """The number of groups, and the rows of uses of one key."""
    groups, rows = zip(*map(group_and_row_count, uses), strict=True)
    return groups[0], sum(rows)


def group_and_row_count(use: Use) -> tuple[int, int]:
    """The number of groups, and of rows."""
    shape = (*use.lengths, *use.y.shape)
    sizes = dict(zip([*use.outer, *use.labels[1][len(use.outer) + 1 :]], shape, strict=True))
    axes = use.factorization
    return math.prod(sizes[k] for k in axes.groups), math.prod(sizes[k] for k in axes.rows)


def gram_norms(factors: Sequence[Factors]) -> jax.Array:
    """The norms of the gradients of a leaf that uses with comparable rows have."""
    rows = {use: use.rows(x, ct) for use, x, ct in factors}
    each = [_of_one_key([rows[use] for use in own]) for own in _by_key(list(rows))]
    return each[0] if len(each) == 1 else norms_of_array(side_by_side(each))


def _of_one_key(parts: Sequence[Rows]) -> jax.Array:
    """The norms, in which all left sides have one power of two, and all right sides."""
    if len(parts) == 1 and parts[0].is_outer:
        return _of_outer(parts[0])
    parts, exponents = _in_range(parts)
    total: Any = 0.0
    for i, j in itertools.combinations_with_replacement(range(len(parts)), 2):
        both = _inner_product(parts[i], parts[j])
        total += both if i == j else 2 * both
    return as_numbers(jnp.sqrt(total), exponents)


def _of_outer(rows: Rows) -> jax.Array:
    """The norms of one row on each side, as of a dense layer without positions."""
    (left, first), (right, second) = (roots_of_array(jnp.swapaxes(x, 0, 1)) for x in rows)
    lengths = [math.sqrt(x.shape[0] * x.shape[3]) for x in rows]
    error = (4 + sum(lengths)) * float(jnp.finfo(left.dtype).eps) / 4
    return as_numbers(left * right * (1 + error), first + second)


def _in_range(parts: Sequence[Rows]) -> tuple[list[Rows], jax.Array]:
    """The rows times powers of two, one for each side, and the exponents of their products.

    Where a side is indices, of ones, the other side has its power as well.
    """
    left, right = (_exponent(side) for side in zip(*parts, strict=True))
    found = []
    for rows in parts:
        powers = [left, right]
        if rows.left.ndim == 3:
            powers = [0, left + right]
        elif rows.right.ndim == 3:
            powers = [left + right, 0]
        sides = zip(rows, powers, strict=True)
        found.append(Rows(*(x if x.ndim == 3 else _near_one(x, power) for x, power in sides)))
    return found, left + right


def _exponent(side: Sequence[jax.Array]) -> Any:
    """The largest exponent of each example in the arrays of a side; 0 of indices alone."""
    sizes = [largest_of_each(x, (0, 2, 3)) for x in side if x.ndim == 4]
    exponents = [exponent_of(size.astype(accumulator(size))) for size in sizes]
    return functools.reduce(jnp.maximum, exponents) if exponents else 0


def _near_one(x: jax.Array, exponent: jax.Array) -> jax.Array:
    x = x.astype("float32") if x.dtype == jnp.float16 else x  # whose range is too small
    return times_power(x, -exponent[None, :, None, None])


def _inner_product(a: Rows, b: Rows) -> jax.Array:
    """The inner product of two gradients of each example, and what rounding may have taken of it.

    A sum of n terms, each wrong by at most u, is taken to be wrong by sqrt(n) u.
    """
    kind = max(accumulator(x) for x in (*a, *b) if x.ndim == 4)
    left, right = (_inner(*side).astype(kind) for side in zip(a, b, strict=True))
    sides = zip(a, b, strict=True)
    lengths = [max(x.shape[3] if x.ndim == 4 else 1 for x in side) for side in sides]
    error = 4 + sum(map(math.sqrt, lengths))
    unit = float(jnp.finfo(kind).eps) / 2
    total, size = dot_of_each(left, right, 1), dot_of_each(jnp.abs(left), jnp.abs(right), 1)
    return total + error * unit * size


def _inner(a: jax.Array, b: jax.Array) -> jax.Array:
    """The inner products of the rows of one side: (groups, examples, rows, rows)."""
    if a.ndim == b.ndim == 3:
        return (a[..., :, None] == b[..., None, :]).astype("float32")
    if a.ndim == 3:
        return jnp.swapaxes(_inner(b, a), 2, 3)
    if b.ndim == 3:
        return jnp.take_along_axis(a, b[:, :, None, :], axis=3).astype(accumulator(a))
    return product([a, b], ["gbtn", "gbsn"], "gbts")
