r"""The norm of a sum of products from Gram matrices of its factors.

$$\Big\| \sum_t x_t \otimes y_t \Big\|^2 = \sum_{t,s} \langle x_t, x_s \rangle \langle y_t, y_s
\rangle$$

Each row is scaled by powers of two, so that no product leaves its range. Where products cancel,
the sum is less than what rounding may make of it. The dot product of two rows of $n$ numbers is
wrong by at most $\sqrt{n}\,u$ times the product of their norms, if the errors of rounding (each at
most $u = 2^{-24}$ in float32) are independent and of mean zero (Higham and Mary 2019, with
probability near 1; in practice far less). So the sum is wrong by at most $(\sqrt{d} + \sqrt{p} +
4)\,u \sum |\langle x_t, x_s \rangle \langle y_t, y_s \rangle|$, and this is added to it: a few
parts in a million of an ordinary norm, and what keeps a norm from being too small where nearly
nothing is left.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._compat import by_platform, to_varying, varying_axes
from clipgrad._numerics import accumulator, if_else
from clipgrad._per_example.blocks import ROW, blocks, placed, row_count, value
from clipgrad._per_example.squares import (
    NO_EXPONENT,
    Squares,
    largest_size,
    power_at_most_one,
    unit_scale,
)
from clipgrad._per_example.terms import (
    Factor,
    GradientAxis,
    Label,
    Products,
    Term,
    Unfollowed,
    einsum,
    product,
)

# How many numbers of a row are multiplied at once on a CPU (benchmarks/RESULTS.md has other sizes).
_PIECE = 2048


class Rows(NamedTuple):
    """The rows of a factor, and the power of two that brings each near 1; an index has none."""

    factor: Factor
    power: jax.Array | None

    def scaled(self, values: jax.Array) -> jax.Array:
        """Values of the rows, or of a piece of them, times their powers."""
        if self.power is None:
            return values
        return values * self.power.astype(values.dtype).reshape(-1, *[1] * (values.ndim - 1))


class BlockInRange(NamedTuple):
    """A block, whose products are those of the scaled rows of its factors, times a weight each."""

    block: Term
    powers: list[jax.Array | None]
    weight: jax.Array

    def rows(self, block: Term) -> list[Rows]:
        """The rows of the factors of the block, or of a part of it."""
        return [Rows(*pair) for pair in zip(block.own, self.powers, strict=True)]

    def multiplied(self) -> Term:
        """The block with what is meant as its factors."""
        own = [
            dataclasses.replace(rows.factor, values=rows.scaled(rows.factor.values))
            for rows in self.rows(self.block)
        ]
        dense = [i for i, factor in enumerate(own) if factor.hot is None]
        # What other gradients have too stays as it is: they share its copy in range.
        i = min(reversed(dense), key=lambda i: (own[i].is_common, own[i].values.size))
        own[i] = dataclasses.replace(own[i], values=Rows(own[i], self.weight).scaled(own[i].values))
        return dataclasses.replace(self.block, factors=(*own, *self.block.shared))


def squares(products: Products) -> Squares:
    """The sum of the squares of a gradient, from Gram matrices or from the gradient itself."""
    found = blocks(products)
    if not found:
        return Squares(jnp.zeros(()), jnp.int32(0))
    ranged, exponent = _in_range(found)
    if uses_gram(found, products.shape):
        each = [_inner_product(ranged[i], ranged[j], *pair) for i, j, *pair in _pairs(found)]
        return Squares(functools.reduce(jnp.add, each), exponent)
    return Squares(_sum_of_squares([x.multiplied() for x in ranged], products.shape), exponent)


def outer_factors(products: Products) -> list[jax.Array] | None:
    """The arrays whose outer product a gradient is, whatever the order of its axes, if it is one.

    So it is for a dense layer without positions: the squares of its gradient are those of its
    input times those of its cotangent, and nothing can cancel.
    """
    if len(products.terms) != 1 or products.carried:
        return None
    (term,) = products.terms
    sizes = term.sizes
    labels = [k for factor in term.factors for k in factor.owned if sizes[k] != 1]
    plain = all(factor.hot is None and not factor.is_shared for factor in term.factors)
    is_outer = plain and len(set(labels)) == len(labels)
    if not is_outer or any(sizes[label] != 1 for label in term.summed):
        return None
    arrays = [factor.values for factor in term.factors]
    return arrays if len(set(map(accumulator, arrays))) == 1 else None


def outer_squares(parts: Sequence[Squares], arrays: Sequence[jax.Array]) -> Squares:
    unit = float(jnp.finfo(parts[0].total.dtype).eps) / 2
    return Squares.of_product(parts, unit * (4 + sum(math.sqrt(x.size) for x in arrays)))


def _sum_of_squares(found: Sequence[Term], shape: Sequence[int]) -> jax.Array:
    """The sum of the squares of a gradient, which is made; with a mask in parts.

    Without a mask it would be made only where it is hardly larger than its factors.
    """

    def whole(found: Sequence[Term]) -> jax.Array:
        parts = [placed(block, value(block)) for block in found]
        return jnp.sum(jnp.square(functools.reduce(jnp.add, parts)))

    axis, count = _cut_axis(found, shape)
    if count == 1:
        return whole(found)
    size = shape[axis] // count
    cut = functools.partial(_block_from, axis=axis, size=size)
    of_part = jax.lax.map(
        lambda i: whole([cut(block, i * size) for block in found]), jnp.arange(count)
    )
    return jnp.sum(of_part)


def _cut_axis(found: Sequence[Term], shape: Sequence[int]) -> tuple[int, int]:
    """An axis that all blocks have whole, and in how many parts none is larger than the factors."""
    hot = {factor.hot for block in found for factor in block.own}
    axes = [GradientAxis(((i, 0),), 0, n) for i, n in enumerate(shape)]
    whole = [
        i
        for i, axis in enumerate(axes)
        if all(block.axes[i] == axis and block.extent(axis) == axis.size for block in found)
        and (i, 0) not in hot
    ]
    if not whole or not any(block.shared for block in found):
        return 0, 1
    axis = max(whole, key=shape.__getitem__)
    factors = sum(factor.values.size for block in found for factor in block.own)
    least = min(-(-math.prod(shape) // factors), shape[axis])
    return axis, next(n for n in range(least, shape[axis] + 1) if shape[axis] % n == 0)


def _block_from(block: Term, start: jax.Array, axis: int, size: int) -> Term:
    """So many indices of an axis of a block, from one on."""
    label = (axis, 0)

    def cut(factor: Factor) -> Factor:
        if label not in factor.labels:
            return factor
        values = _piece(factor.values, start, size, factor.labels.index(label))
        return dataclasses.replace(factor, values=values)

    axes = list(block.axes)
    axes[axis] = GradientAxis((label,), 0, size)
    return block.map(cut).with_axes(axes)


def uses_gram(found: list[Term], shape: Sequence[int]) -> bool:
    """Whether Gram matrices are smaller than the gradient, two of them for each product."""
    if any(block.shared for block in found):
        return False
    try:
        cost = sum(2 * _entries(*pair) for _, _, *pair in _pairs(found))
    except Unfollowed:
        return False
    return cost <= max(math.prod(shape), 2)


def _pairs(found: Sequence[Term]) -> list[tuple[int, int, Term, Term]]:
    """The places of each two blocks that overlap, once, and these cut to where they do."""
    pairs = [
        (i, j, _overlap(a, b)) for i, a in enumerate(found) for j, b in enumerate(found[: i + 1])
    ]
    return [(i, j, *pair) for i, j, pair in pairs if pair is not None]


def _entries(a: Term, b: Term) -> int:
    _partners(a, b)
    return row_count(a) * row_count(b) * math.prod(a.sizes[name] for name in _several_have(a, b))


def _several_have(a: Term, b: Term) -> list[Label]:
    """The axes that several factors of a block share, but for the rows."""

    def several(block: Term) -> set[Label]:
        owned = [label for factor in block.own for label in factor.owned]
        return {label for label in owned if owned.count(label) > 1}

    return sorted((several(a) | several(b)) - {ROW})


def _in_range(found: list[Term]) -> tuple[list[BlockInRange], jax.Array]:
    """Blocks whose rows with their exponents are about 1, times a weight; and the weight of all.

    The weight is at most 1.
    """
    scales = [[_row_scales(factor) for factor in block.own] for block in found]
    masked = [_masks_in_range(block) for block in found]
    totals = [
        functools.reduce(jnp.add, [*of_masks, *(e for _, e in each if e is not None)])
        for each, (_, of_masks) in zip(scales, masked, strict=True)
    ]
    largest = functools.reduce(jnp.maximum, map(_largest_exponent, totals))
    largest = if_else(largest <= NO_EXPONENT // 2, 0, largest)
    ranged = []
    for (block, _), each, total in zip(masked, scales, totals, strict=True):
        weight = power_at_most_one(total - largest, _block_dtype(block))
        ranged.append(BlockInRange(block, [power for power, _ in each], weight))
    return ranged, largest


def _block_dtype(block: Term) -> str:
    return next(accumulator(factor.values) for factor in block.own if factor.hot is None)


def _row_scales(factor: Factor) -> tuple[jax.Array | None, jax.Array | None]:
    """The power of two that brings each row near 1, and the exponents of the rows."""
    if factor.hot is not None:
        return None, None
    largest = largest_size(factor.values, range(1, factor.values.ndim))
    return unit_scale(largest.astype(accumulator(largest)))


def _masks_in_range(block: Term) -> tuple[Term, list[jax.Array]]:
    """The block with what multiplies it about 1, and the exponents of that."""
    masks, exponents = [], []
    for mask in block.shared:
        if mask.values.dtype != bool:
            wide = mask.values.astype(accumulator(mask.values))
            scale, exponent = unit_scale(largest_size(wide))
            mask, exponents = dataclasses.replace(mask, values=wide * scale), [*exponents, exponent]
        masks.append(mask)
    return dataclasses.replace(block, factors=(*block.own, *masks)), exponents


def _largest_exponent(exponents: jax.Array) -> jax.Array:
    return jnp.max(exponents) if exponents.size else jnp.int32(NO_EXPONENT)


def _overlap(a: Term, b: Term) -> tuple[Term, Term] | None:
    """Both blocks where both are; None if nowhere."""
    if a is b or a.windows == b.windows:
        return a, b
    pairs = [list(zip(*ends, strict=True)) for ends in zip(a.windows, b.windows, strict=True)]
    starts, stops = [max(low) for low, _ in pairs], [min(high) for _, high in pairs]
    first, second = (block.between(starts, stops) for block in (a, b))
    return first and second and (first, second)


def _partners(a: Term, b: Term) -> list[tuple[int, int]]:
    """The place of each factor, and in the other block that of the one with the same own axes."""
    kept, merged = {*_several_have(a, b), ROW}, [[axis.labels for axis in x.axes] for x in (a, b)]
    if merged[0] != merged[1] or any(a.sizes[k] != b.sizes[k] for own in merged[0] for k in own):
        raise Unfollowed("products whose axes are merged differently")
    if any(factor.hot in kept for factor in (*a.own, *b.own)):
        raise Unfollowed("an indexed axis that factors share")
    first, second = ([frozenset(f.owned) - kept for f in block.own] for block in (a, b))
    if len(set(second)) < len(second) or len(first) != len(second) or set(first) != set(second):
        raise Unfollowed("products whose factors have different axes")
    return [(i, second.index(own)) for i, own in enumerate(first)]


def _inner_product(x: BlockInRange, y: BlockInRange, a: Term, b: Term) -> jax.Array:
    """The inner product of two blocks, or parts, twice unless they are one, and its error."""
    kept = _several_have(a, b)
    first = x.rows(a)
    second = first if x is y else y.rows(b)
    pairs = [(first[i], second[j]) for i, j in _partners(a, b)]
    dtype = _block_dtype(a)
    grams = [_gram(*pair, kept).astype(dtype) for pair in pairs]
    weights = x.weight[:, None] * y.weight[None]
    product = functools.reduce(jnp.multiply, [_expanded(weights, [], kept), *grams])
    own = [math.prod(a.sizes[k] for k in {*rows.factor.owned} - {*kept, ROW}) for rows in first]
    error = 4 + sum(map(math.sqrt, own))
    unit = float(jnp.finfo(dtype).eps) / 2
    total = jnp.sum(product) + error * unit * jnp.sum(jnp.abs(product))
    return total if x is y else 2 * total


def _gram(x: Rows, y: Rows, kept: Sequence[Label]) -> jax.Array:
    """The inner products of the rows of two factors: (rows, rows, sizes of the kept axes)."""
    indices, others = x.factor, y.factor
    if indices.hot is not None and others.hot is not None:
        same = indices.values[:, None] == others.values[None]
        return _expanded(same.astype(jnp.float32), [], kept)
    if indices.hot is not None:
        return jnp.swapaxes(_gram(y, x, kept), 0, 1)
    own = [name for name in kept if name in x.factor.labels or name in others.labels]
    if others.hot is not None:
        # An index out of range was made one in range, with a row of zeros beside it.
        axis = x.factor.labels.index(others.hot)
        found = jnp.take(x.factor.values, others.values, axis=axis, mode="clip")
        return _expanded(jnp.moveaxis(x.scaled(found), axis, 1), own, kept)
    return _expanded(_dense_gram(x, y, own), own, kept)


def _dense_gram(x: Rows, y: Rows, own: Sequence[Label]) -> jax.Array:
    """The inner products of rows of numbers: (rows, rows, sizes of the axes ``own``)."""
    other: Label = (-2, 0)  # of the rows of ``y``
    labels = [x.factor.labels, (other, *y.factor.labels[1:])]
    out = [ROW, other, *own]

    # Rows with themselves are read, and brought into range, once.
    values = [x.factor.values] if x is y else [x.factor.values, y.factor.values]

    def whole(*values: jax.Array) -> jax.Array:
        scaled = [rows.scaled(each) for rows, each in zip((x, y), values, strict=False)]
        rows = scaled[0], scaled[-1]
        if rows[0].shape[0] == rows[1].shape[0] == 1 and not own:
            second = einsum([rows[1]], labels[1:], [other, *x.factor.labels[1:]])
            first, second = (r.astype(accumulator(r)) for r in (rows[0], second))
            return jnp.sum(first * second).reshape(1, 1)
        return product(rows, labels, out)

    summed = [name for name in x.factor.labels[1:] if name not in own]
    long = max(summed, key=x.factor.sizes.__getitem__, default=None)
    if long is None:
        return whole(*values)
    axes = x.factor.labels.index(long), y.factor.labels.index(long)
    length = x.factor.sizes[long]
    if (count := _pieces(length)) == 1:
        return whole(*values)
    size = length // count

    def in_pieces(*values: jax.Array) -> jax.Array:
        def step(total: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            pairs = zip(values, axes, strict=False)
            return total + whole(*(_piece(v, i * size, size, axis) for v, axis in pairs)), None

        like = jax.eval_shape(whole, *values)
        varying = functools.reduce(frozenset.union, map(varying_axes, values))
        zeros = to_varying(jnp.zeros(like.shape, like.dtype), varying)
        return jax.lax.scan(step, zeros, jnp.arange(count))[0]

    return by_platform(*values, cpu=in_pieces, gpu=whole, default=whole)


def _piece(x: jax.Array, start: jax.Array, size: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _pieces(length: int) -> int:
    """In how many parts an axis is summed on a CPU, so that each of them stays in its cache.

    No copy of the rows in range is made then. Each sum in parts is a loop, which takes longer to
    compile, so that short rows are multiplied whole.
    """
    least = max(1, length // _PIECE)
    return next((n for n in range(least, 4 * least) if length % n == 0), 1)


def _expanded(gram: jax.Array, own: Sequence, kept: Sequence) -> jax.Array:
    sizes = iter(gram.shape[2:])
    return gram.reshape(*gram.shape[:2], *(next(sizes) if n in own else 1 for n in kept))
