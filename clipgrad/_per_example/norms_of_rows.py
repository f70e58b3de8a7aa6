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
from clipgrad._per_example.padding import Padding
from clipgrad._per_example.products import on_accelerators, product
from clipgrad._per_example.uses import Factors, Rows, Use
from clipgrad._sharding import is_local


def have_grams(uses: Sequence[Use]) -> bool:
    """Whether rows of each two uses can be compared: on the same parts of a leaf, or apart."""
    pairs = itertools.combinations(uses, 2)
    return all(a.key == b.key or a.view.is_apart(b.view) for a, b in pairs)


def gram_entries(uses: Sequence[Use]) -> int:
    """The number of inner products that the Gram matrices of one example have."""
    return sum(2 * groups * rows**2 for groups, rows in map(_extent, _by_key(uses)))


def _by_key(uses: Sequence[Use]) -> list[list[Use]]:
    by_key: dict[Any, list[Use]] = {}
    for use in uses:
        by_key.setdefault(use.key, []).append(use)
    return list(by_key.values())


def _extent(uses: Sequence[Use]) -> tuple[int, int]:
    """The number of groups, and the rows of uses of one key."""
    groups, rows = zip(*map(group_and_row_count, uses), strict=True)
    return groups[0], sum(rows)


def group_and_row_count(use: Use) -> tuple[int, int]:
    """The number of groups, and of rows."""
    sizes, axes = use.sizes, use.factorization
    return math.prod(sizes[k] for k in axes.groups), math.prod(sizes[k] for k in axes.rows)


def gram_norms(leaves: Sequence[Sequence[Factors]], padding: Padding = None) -> list[jax.Array]:
    """The norms of the gradients of leaves, of which each has uses with comparable rows.

    ``padding``: examples whose rows are 0.
    """
    rows = [_rows_by_key(factors) for factors in leaves]
    keys = iter(_norms_of_keys([parts for by_key in rows for parts in by_key], padding))
    norms = [[next(keys) for _ in by_key] for by_key in rows]
    return [x[0] if len(x) == 1 else norms_of_array(side_by_side(x)) for x in norms]


def _rows_by_key(factors: Sequence[Factors]) -> list[list[Rows]]:
    """For each key of the uses of a leaf their rows."""
    rows = {use: use.rows(x, ct) for use, x, ct in factors}
    return [[rows[use] for use in uses] for uses in _by_key(list(rows))]


def _norms_of_keys(keys: list[list[Rows]], padding: Padding) -> list[jax.Array]:
    """For each key the norms of the gradients that its rows make.

    Rows are brought near 1 for that. On an accelerator, where to read them for their size and to
    copy them takes as long as the Gram matrices, these are made of rows as they are, and made again
    if that leaves the range of numbers; not on several devices, which would have to agree.
    """

    def in_range(keys: list[list[Rows]]) -> list[jax.Array]:
        return [_of_one_key(parts) for parts in keys]

    def as_they_are(keys: list[list[Rows]]) -> list[jax.Array]:
        norms, flags = zip(*map(_of_plain_key, keys), strict=True)
        is_right = functools.reduce(jnp.logical_and, flags)
        is_right = is_right if padding is None else is_right | padding
        with jax.named_scope("out_of_range"):
            return jax.lax.cond(jnp.all(is_right), lambda: [*norms], lambda: in_range(keys))

    has_grams = not all(map(_is_outer, keys))
    if not has_grams or not all(map(is_local, jax.tree.leaves(keys))):
        return in_range(keys)
    return on_accelerators(as_they_are, in_range, keys)


def _is_outer(parts: Sequence[Rows]) -> bool:
    """Whether all uses of a key are one with one row on each side."""
    return len(parts) == 1 and parts[0].is_outer


def _of_one_key(parts: Sequence[Rows]) -> jax.Array:
    """The norms, in which all left sides have one power of two, and all right sides."""
    if _is_outer(parts):
        return _of_outer(parts[0])
    parts, exponents = _in_range(parts)
    pairs = _pairs(parts)
    total = sum(_inner_product(a, b) * times for a, b, times in pairs)
    return as_numbers(jnp.sqrt(total), exponents)


def _pairs(parts: Sequence[Rows]) -> list[tuple[Rows, Rows, int]]:
    """All pairs of uses, and how often each counts in the square of the sum."""
    pairs = itertools.combinations_with_replacement(parts, 2)
    return [(a, b, 1 if a is b else 2) for a, b in pairs]


def _of_plain_key(parts: Sequence[Rows]) -> tuple[jax.Array, jax.Array]:
    """The norms by rows as they are, and for each example whether these are right."""
    if _is_outer(parts):
        norms = _of_outer(parts[0])
        return norms, jnp.ones(norms.shape, bool)
    total: Any = 0.0
    lost: Any = 0.0
    for a, b, times in _pairs(parts):
        product, loss = _plain_inner_product(a, b)
        total, lost = total + product * times, lost + loss * times
    # What is lost by products that are too small is less than a rounding; inf and NaN are neither.
    return jnp.sqrt(total), (total >= lost) & (total < jnp.inf)


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
    scaled = []
    for rows in parts:
        powers = [left, right]
        if rows.left.ndim == 3:
            powers = [0, left + right]
        elif rows.right.ndim == 3:
            powers = [left + right, 0]
        sides = zip(rows, powers, strict=True)
        scaled.append(Rows(*(x if x.ndim == 3 else _near_one(x, power) for x, power in sides)))
    return scaled, left + right


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
    left, right = _grams(a, b)
    total, size = dot_of_each(left, right, 1), dot_of_each(jnp.abs(left), jnp.abs(right), 1)
    return total + _error(a, b, left.dtype) * size


def _plain_inner_product(a: Rows, b: Rows) -> tuple[jax.Array, jax.Array]:
    """The same for rows as they are, and `2 ** 26` times what may be lost by too small products.

    Each of n products that an inner product of rows adds up may be lost if it is below the smallest
    normal number, and so may a product of two of these. All four sums are one reduction: of
    several, XLA's GPU compiler reads the Gram matrices again for each.
    """
    left, right = _grams(a, b)
    sizes, zero = (jnp.abs(left), jnp.abs(right)), jnp.zeros((), left.dtype)
    terms = (left * right, sizes[0] * sizes[1], *sizes)
    add = lambda x, y: tuple(map(jnp.add, x, y))  # noqa: E731
    total, size, *each = jax.lax.reduce(terms, (zero,) * 4, add, (0, 2, 3))
    smallest = float(jnp.finfo(left.dtype).tiny) * 2**26
    count = left.size // left.shape[1]
    lengths = _lengths(a, b)[::-1]  # a loss on one side is multiplied by the other side
    parts = [(n * smallest) * x for n, x in zip(lengths, each, strict=True)]
    lost = parts[0] + parts[1] + count * smallest
    return total + _error(a, b, left.dtype) * size, lost


def _grams(a: Rows, b: Rows) -> tuple[jax.Array, jax.Array]:
    """The inner products of the left rows, and of the right rows, in one dtype."""
    dtype = max(accumulator(x) for x in (*a, *b) if x.ndim == 4)
    left, right = (_inner(*side).astype(dtype) for side in zip(a, b, strict=True))
    return left, right


def _lengths(a: Rows, b: Rows) -> list[int]:
    """How many products an inner product of left rows adds up, and one of right rows."""
    sides = zip(a, b, strict=True)
    return [max(x.shape[3] if x.ndim == 4 else 1 for x in side) for side in sides]


def _error(a: Rows, b: Rows, dtype: Any) -> float:
    """By what part of the sizes of its products a sum of these may be wrong."""
    return (4 + sum(map(math.sqrt, _lengths(a, b)))) * float(jnp.finfo(dtype).eps) / 2


def _inner(a: jax.Array, b: jax.Array) -> jax.Array:
    """The inner products of the rows of one side: (groups, examples, rows, rows)."""
    if a.ndim == b.ndim == 3:
        return (a[..., :, None] == b[..., None, :]).astype("float32")
    if a.ndim == 3:
        return jnp.swapaxes(_inner(b, a), 2, 3)
    if b.ndim == 3:
        return jnp.take_along_axis(a, b[:, :, None, :], axis=3).astype(accumulator(a))
    return product([a, b], ["gbtn", "gbsn"], "gbts")
