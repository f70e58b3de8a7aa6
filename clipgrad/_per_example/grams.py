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

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from clipgrad._compat import by_platform, to_varying, varying_axes
from clipgrad._numerics import accumulator, if_else
from clipgrad._per_example.blocks import (
    GradientWindow,
    Part,
    ProductBlock,
    blocks,
    placed,
    value,
)
from clipgrad._per_example.squares import (
    NO_EXPONENT,
    Squares,
    largest_size,
    power_at_most_one,
    unit_scale,
)
from clipgrad._per_example.terms import Products, Unfollowed, einsum, product

# How many numbers of a row are multiplied at once on a CPU (benchmarks/RESULTS.md has other sizes).
_PIECE = 2048


def squares(products: Products) -> Squares:
    """The sum of the squares of a gradient, from Gram matrices or from the gradient itself."""
    found = blocks(products)
    if not found:
        return Squares(jnp.zeros(()), jnp.int32(0))
    scaled, exponent = _blocks_in_range(found)
    if uses_gram(found, products.shape):
        total = functools.reduce(jnp.add, [_inner_product(*pair) for pair in _pairs(scaled)])
    else:
        total = _sum_of_squares([_times_powers(block) for block in scaled], products.shape)
    return Squares(total, exponent)


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
    """The squares of the outer product of arrays, from those of each."""
    unit = float(jnp.finfo(parts[0].total.dtype).eps) / 2
    return Squares.of_product(parts, unit * (4 + sum(math.sqrt(x.size) for x in arrays)))


def _sum_of_squares(found: Sequence[ProductBlock], shape: Sequence[int]) -> jax.Array:
    """The sum of the squares of a gradient, which is made; with a mask in parts.

    Without a mask it would be made only where it is hardly larger than its factors.
    """

    def whole(found: Sequence[ProductBlock]) -> jax.Array:
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


def _cut_axis(found: Sequence[ProductBlock], shape: Sequence[int]) -> tuple[int, int]:
    """An axis that all blocks have whole, and in how many parts none is larger than the factors."""
    whole = [
        i
        for i, n in enumerate(shape)
        if all(block.windows[i] == GradientWindow(0, (n,), n) for block in found)
        and not any(part.hot == (i, 0) for block in found for part in block.parts)
    ]
    if not whole or not any(block.masks for block in found):
        return 0, 1
    axis = max(whole, key=shape.__getitem__)
    factors = sum(part.values.size for block in found for part in block.parts)
    least = min(-(-math.prod(shape) // factors), shape[axis])
    return axis, next(n for n in range(least, shape[axis] + 1) if shape[axis] % n == 0)


def _block_from(block: ProductBlock, start: jax.Array, axis: int, size: int) -> ProductBlock:
    """So many indices of an axis of a block, from one on."""

    def cut(part: Part, rows: int) -> Part:
        if (axis, 0) not in part.names:
            return part
        return part._replace(
            values=_piece(part.values, start, size, rows + part.names.index((axis, 0)))
        )

    windows = list(block.windows)
    windows[axis] = GradientWindow(0, (size,), size)
    parts, masks = [cut(p, 1) for p in block.parts], [cut(p, 0) for p in block.masks]
    return block._replace(parts=tuple(parts), masks=tuple(masks), windows=tuple(windows))


def uses_gram(found: list[ProductBlock], shape: Sequence[int]) -> bool:
    """Whether Gram matrices are smaller than the gradient, two of them for each product."""
    if any(block.masks for block in found):
        return False
    try:
        cost = sum(2 * _entries(*pair) for pair in _pairs(found))
    except Unfollowed:
        return False
    return cost <= max(math.prod(shape), 2)


def _pairs(found: Sequence[ProductBlock]) -> list[tuple[ProductBlock, ProductBlock]]:
    """Each two blocks that overlap, once, cut to where they do."""
    pairs = [_overlap(a, b) for i, a in enumerate(found) for b in found[: i + 1]]
    return [pair for pair in pairs if pair is not None]


def _entries(a: ProductBlock, b: ProductBlock) -> int:
    kept = math.prod(a.size(name) for name in a.kept | b.kept)
    _partners(a, b)
    return a.rows * b.rows * kept


def _blocks_in_range(found: list[ProductBlock]) -> tuple[list[ProductBlock], jax.Array]:
    """Blocks whose rows with their exponents are about 1, times a weight; and the weight of all.

    The weight is at most 1.
    """
    rows = [[_row_scales(part) for part in block.parts] for block in found]
    masked = [_masks_in_range(block) for block in found]
    totals = [
        functools.reduce(jnp.add, [*of_masks, *(e for _, e in each if e is not None)])
        for each, (_, of_masks) in zip(rows, masked, strict=True)
    ]
    largest = functools.reduce(jnp.maximum, map(_largest_exponent, totals))
    largest = if_else(largest <= NO_EXPONENT // 2, 0, largest)
    scaled = []
    for (block, _), each, total in zip(masked, rows, totals, strict=True):
        smallest = _weighted_part(block)
        powers: list[tuple[jax.Array, ...]] = [
            () if scale is None else (scale,) for scale, _ in each
        ]
        weight = power_at_most_one(total - largest, accumulator(block.parts[smallest].values))
        powers[smallest] = (*powers[smallest], weight)
        pairs = zip(block.parts, powers, strict=True)
        scaled.append(block._replace(parts=tuple(p._replace(powers=x) for p, x in pairs)))
    return scaled, largest


def _weighted_part(block: ProductBlock) -> int:
    """The part of a block that gets the weight: what is not of this gradient alone stays as it is.

    Two kernels of a recurrence then share its copy in range, or its Gram matrix. Otherwise it is
    the smallest one.
    """
    dense = [i for i, part in enumerate(block.parts) if part.hot is None]
    parts = block.parts
    return min(reversed(dense), key=lambda i: (parts[i].is_common, parts[i].values.size))


def _row_scales(part: Part) -> tuple[jax.Array | None, jax.Array | None]:
    """The power of two that brings each row near 1, and the exponents of the rows."""
    if part.hot is not None:
        return None, None
    largest = largest_size(part.values, range(1, part.values.ndim))
    return unit_scale(largest.astype(accumulator(largest)))


def _masks_in_range(block: ProductBlock) -> tuple[ProductBlock, list[jax.Array]]:
    """The block with what multiplies it about 1, and the exponents of that."""
    masks, exponents = [], []
    for mask in block.masks:
        if mask.values.dtype != bool:
            wide = mask.values.astype(accumulator(mask.values))
            scale, exponent = unit_scale(largest_size(wide))
            mask, exponents = mask._replace(values=wide * scale), [*exponents, exponent]
        masks.append(mask)
    return block._replace(masks=tuple(masks)), exponents


def _largest_exponent(exponents: jax.Array) -> jax.Array:
    return jnp.max(exponents) if exponents.size else jnp.int32(NO_EXPONENT)


def _times_powers(block: ProductBlock) -> ProductBlock:
    """The block with its rows multiplied by what is meant."""
    parts = [
        part._replace(values=_in_range(part, part.values), powers=()) if part.powers else part
        for part in block.parts
    ]
    return block._replace(parts=tuple(parts))


def _in_range(part: Part, rows: jax.Array) -> jax.Array:
    """Rows of a part, or of a piece of it, times the powers of two of the rows."""
    for power in part.powers:
        rows = rows * power.astype(rows.dtype).reshape(-1, *[1] * (rows.ndim - 1))
    return rows


def _overlap(a: ProductBlock, b: ProductBlock) -> tuple[ProductBlock, ProductBlock] | None:
    """Both blocks where both are; None if nowhere."""
    if a is b or a.windows == b.windows:
        return a, b
    for i, (v, w) in enumerate(zip(a.windows, b.windows, strict=True)):
        if v == w:
            continue
        start = max(v.start, w.start)
        stop = min(v.start + math.prod(v.sizes), w.start + math.prod(w.sizes))
        if start >= stop:
            return None
        a, b = (_cut_block(block, i, start, stop) for block in (a, b))
    return a, b


def _cut_block(block: ProductBlock, axis: int, start: int, stop: int) -> ProductBlock:
    window, name = block.windows[axis], (axis, 0)
    if window.start == start and math.prod(window.sizes) == stop - start:
        return block
    if len(window.sizes) != 1 or any(part.hot == name for part in block.parts):
        raise Unfollowed("slices of merged axes that overlap")

    def cut(part: Part) -> Part:
        if name not in part.names:
            return part
        i = 1 + part.names.index(name)
        bounds = start - window.start, stop - window.start
        return part._replace(values=jax.lax.slice_in_dim(part.values, *bounds, axis=i))

    windows = list(block.windows)
    windows[axis] = window._replace(start=start, sizes=(stop - start,))
    return block._replace(parts=tuple(map(cut, block.parts)), windows=tuple(windows))


def _partners(a: ProductBlock, b: ProductBlock) -> list[tuple[Part, Part]]:
    """Each part of a block with the part of the other which has the same axes for itself."""
    kept = a.kept | b.kept
    if [w.sizes for w in a.windows] != [w.sizes for w in b.windows]:
        raise Unfollowed("products whose axes are merged differently")

    def own(part: Part) -> frozenset:
        return frozenset(part.owned) - kept

    others = {own(part): part for part in b.parts}
    if len(others) < len(b.parts) or {own(p) for p in a.parts} != set(others):
        raise Unfollowed("products whose factors have different axes")
    if any(part.hot in kept for part in (*a.parts, *b.parts)):
        raise Unfollowed("an indexed axis that factors share")
    if len(a.parts) != len(b.parts):
        raise Unfollowed("products of different numbers of factors")
    return [(part, others[own(part)]) for part in a.parts]


def _inner_product(a: ProductBlock, b: ProductBlock) -> jax.Array:
    """The inner product of two blocks, twice unless they are one, and its error of rounding."""
    kept = sorted(a.kept | b.kept)
    pairs = _partners(a, b)
    dtype = next(accumulator(part.values) for part in a.parts if part.hot is None)
    grams = [_gram(*pair, kept).astype(dtype) for pair in pairs]
    product = functools.reduce(jnp.multiply, grams)
    error = 4 + sum(math.sqrt(math.prod(map(a.size, set(p.owned) - set(kept)))) for p, _ in pairs)
    unit = float(jnp.finfo(dtype).eps) / 2
    total = jnp.sum(product) + error * unit * jnp.sum(jnp.abs(product))
    return total if a is b else 2 * total


def _gram(x: Part, y: Part, kept: Sequence) -> jax.Array:
    """The inner products of the rows of two parts: (rows, rows, sizes of the kept axes)."""
    if x.hot is not None and y.hot is not None:
        return _expanded((x.values[:, None] == y.values[None]).astype(jnp.float32), [], kept)
    if x.hot is not None:
        return jnp.swapaxes(_gram(y, x, kept), 0, 1)
    own = [name for name in kept if name in x.names or name in y.names]
    if y.hot is not None:
        # An index out of range was made one in range, with a row of zeros beside it.
        axis = 1 + x.names.index(y.hot)
        found = jnp.take(x.values, y.values, axis=axis, mode="clip")
        return _expanded(jnp.moveaxis(_in_range(x, found), axis, 1), own, kept)
    return _expanded(_dense_gram(x, y, own), own, kept)


def _dense_gram(x: Part, y: Part, own: Sequence) -> jax.Array:
    """The inner products of rows of numbers: (rows, rows, sizes of the axes ``own``)."""
    labels = [[(-1, 0), *x.names], [(-2, 0), *y.names]]
    out = [(-1, 0), (-2, 0), *own]

    # Rows with themselves are read, and brought into range, once.
    values = [x.values] if x is y else [x.values, y.values]

    def whole(*values: jax.Array) -> jax.Array:
        scaled = [_in_range(*pair) for pair in zip((x, y), values, strict=False)]
        rows = scaled[0], scaled[-1]
        if rows[0].shape[0] == rows[1].shape[0] == 1 and not own:
            second = einsum([rows[1]], labels[1:], [(-2, 0), *x.names])
            first, second = (r.astype(accumulator(r)) for r in (rows[0], second))
            return jnp.sum(first * second).reshape(1, 1)
        return product(rows, labels, out)

    summed = [name for name in x.names if name not in own]
    long = max(summed, key=lambda name: x.values.shape[1 + x.names.index(name)], default=None)
    if long is None:
        return whole(*values)
    axes = 1 + x.names.index(long), 1 + y.names.index(long)
    length = x.values.shape[axes[0]]
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
