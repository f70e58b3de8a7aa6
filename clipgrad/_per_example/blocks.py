"""Terms of one gradient in a normal form: those that are alike joined along what is summed over."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._compat import by_platform
from clipgrad._numerics import accumulator
from clipgrad._per_example.terms import Factor, Products, Term, Unfollowed, product

# Of an axis of a factor: the axis of the gradient, and the place in that.
FactorAxis = tuple[int, int]


class Part(NamedTuple):
    """A factor, of the shape (rows, sizes of the names); or the hot index of each row."""

    values: jax.Array
    names: tuple[FactorAxis, ...]
    hot: FactorAxis | None
    length: int
    is_common: bool = False  # with the gradients of other leaves
    powers: tuple[jax.Array, ...] = ()  # of two, of each row: the row times these is meant

    @property
    def owned(self) -> tuple[FactorAxis, ...]:
        """All names, the hot axis included."""
        return self.names if self.hot is None else (self.hot,)


class GradientWindow(NamedTuple):
    """The place of a block along an axis of the gradient: ``sizes`` multiply to its length."""

    start: int
    sizes: tuple[int, ...]
    size: int


class ProductBlock(NamedTuple):
    """A sum over rows of products of parts."""

    parts: tuple[Part, ...]
    windows: tuple[GradientWindow, ...]
    masks: tuple[Part, ...] = ()  # what the sum is multiplied with, without rows

    @property
    def rows(self) -> int:
        """The number of products that are summed."""
        return self.parts[0].values.shape[0]

    @property
    def kept(self) -> frozenset[FactorAxis]:
        """The names that several parts share."""
        all_names = [name for part in self.parts for name in part.owned]
        return frozenset(name for name in all_names if all_names.count(name) > 1)

    def size(self, name: FactorAxis) -> int:
        """The size of a name."""
        return self.windows[name[0]].sizes[name[1]]


def blocks(products: Products) -> list[ProductBlock]:
    """The terms, those that differ by their numbers alone joined to one block."""
    groups: dict[Any, list[ProductBlock]] = {}
    dtype = sum_dtype(products)
    for term in products.terms:
        block = _normal_form(term, dtype)
        shapes = tuple((p.names, p.hot, p.length, p.values.dtype.name) for p in block.parts)
        masks = tuple((mask.names, id(mask.values)) for mask in block.masks)
        groups.setdefault((shapes, masks, block.windows), []).append(block)
    return [_joined_blocks(group) for group in groups.values()]


def sum_dtype(products: Products) -> str:
    """The dtype in which products are summed: float64 if anything in them is."""
    factors = [f for term in products.terms for f in term.factors if f.hot is None]
    arrays = [f.values for f in factors if f.values.dtype != bool]
    return max([accumulator(x) for x in (products, *arrays)])


def _normal_form(term: Term, dtype: str) -> ProductBlock:
    term = _indexed_alike(term)
    places = {
        label: (i, p) for i, axis in enumerate(term.axes) for p, label in enumerate(axis.labels)
    }
    sizes = term.sizes
    summed = {label: sizes[label] for label in term.summed}
    masks = [_mask(factor, places) for factor in term.factors if factor.is_shared]
    own = [factor for factor in term.factors if not factor.is_shared]
    owned = [label for factor in own for label in factor.labels]
    shared = {label for label in places if owned.count(label) > 1}
    parts = [_part(factor, places, summed, shared, dtype) for factor in own]
    windows = [
        GradientWindow(axis.start, tuple(sizes[label] for label in axis.labels), axis.size)
        for axis in term.axes
    ]
    ordered = sorted(_folded(parts), key=lambda part: (part.owned, part.hot is not None))
    return ProductBlock(tuple(ordered), tuple(windows), tuple(masks))


def _mask(factor: Factor, places: dict) -> Part:
    """A factor that all examples share, with its axes in order."""
    if not set(factor.labels) <= set(places):
        raise Unfollowed("a sum over an axis of what all examples share")
    own = sorted(factor.labels, key=places.__getitem__)
    values = _moved(factor.values, [factor.labels.index(label) for label in own])
    return Part(values, tuple(places[label] for label in own), None, 0)


def _indexed_alike(term: Term) -> Term:
    """The term without indices that differ along an axis of the gradient.

    Such an axis, as of scanned layers, is summed over, and the rows have its index as well.
    """
    kept = {label for axis in term.axes for label in axis.labels}
    differ = {label for f in term.factors if f.hot is not None for label in f.labels} & kept
    for label in sorted(differ):
        (new,), size = term.fresh(), term.sizes[label]
        index = Factor(jnp.arange(size, dtype=jnp.int32), (label,), new, size)
        axes = [
            a._replace(labels=tuple(new if k == label else k for k in a.labels)) for a in term.axes
        ]
        term = dataclasses.replace(term, factors=(*term.factors, index)).with_axes(axes)
    return term


def _part(
    factor: Factor, places: dict, summed: dict[int, int], shared: set[int], dtype: str
) -> Part:
    """A factor with one axis for all that is summed over, and its other axes in order.

    Axes that several factors have, as of scanned layers, are in front while others are merged: a
    product over them wants them there, and there a scan has stacked them, so that XLA copies none.
    """
    own = sorted((label for label in factor.labels if label in places), key=places.__getitem__)
    first = [label for label in own if label in shared]
    last = [label for label in own if label not in shared]
    present = [label for label in summed if label in factor.labels]
    sizes, values = factor.sizes, factor.values
    if factor.hot is None and values.dtype != jnp.bfloat16:
        values = values.astype(dtype)
    values = _moved(values, [factor.labels.index(label) for label in (*first, *present, *last)])
    heads, tails = ([sizes[label] for label in labels] for labels in (first, last))
    if len(present) < len(summed):
        ones = [n if label in present else 1 for label, n in summed.items()]
        values = values.reshape(*heads, *ones, *tails)
        values = jnp.broadcast_to(values, (*heads, *summed.values(), *tails))
    values = values.reshape(*heads, math.prod(summed.values()), *tails)
    found = [*first, None, *last]
    values = _moved(values, [found.index(label) for label in (None, *own)])
    hot = None if factor.hot is None else places[factor.hot]
    names = tuple(places[label] for label in own)
    return Part(values, names, hot, factor.length, factor.is_common)


def _moved(values: jax.Array, order: list[int]) -> jax.Array:
    return values if order == sorted(order) else jnp.transpose(values, order)


def _folded(parts: list[Part]) -> list[Part]:
    """The parts, those without names of their own multiplied into others."""
    result: list[Part] = []
    for part in sorted(parts, key=lambda part: -len(part.names)):
        i = next((i for i, other in enumerate(result) if _holds(other, part)), None)
        if i is None:
            result.append(part)
        else:
            other = result[i]
            labels = [[(-1, 0), *p.names] for p in (other, part)]
            values = product([other.values, part.values], labels, labels[0])
            result[i] = other._replace(values=values, is_common=False)
    return result


def _holds(part: Part, other: Part) -> bool:
    return part.hot is None and other.hot is None and set(other.names) <= set(part.names)


def _joined_blocks(group: list[ProductBlock]) -> ProductBlock:
    if len(group) == 1:
        return group[0]
    columns = zip(*(block.parts for block in group), strict=True)
    parts = [
        column[0]._replace(values=jnp.concatenate([part.values for part in column]))
        for column in columns
    ]
    return group[0]._replace(parts=tuple(parts))


def value(block: ProductBlock) -> jax.Array:
    """The sum of products of a block, as a part of the gradient with the axes of its windows."""
    hot = [part for part in block.parts if part.hot is not None]
    dense = sorted((p for p in block.parts if p.hot is None), key=lambda p: p.values.size)
    names = sorted({name for part in dense for name in part.names})
    row = [(-1, 0)] if hot else []
    if not dense:
        total = jnp.ones((block.rows,))  # only indices: a sum of ones at them
    else:
        total = _product(dense, [*row, *names])
    if hot:
        total = _scattered(hot, total)
        order = [name for part in hot for name in part.owned] + names
        total = jnp.transpose(total, [order.index(name) for name in sorted(order)])
        names = sorted(order)
    for mask in block.masks:
        total, names = _times_mask(block, total, names, mask)
    return total.reshape([math.prod(window.sizes) for window in block.windows])


def _times_mask(
    block: ProductBlock, total: jax.Array, names: list[FactorAxis], mask: Part
) -> tuple[jax.Array, list[FactorAxis]]:
    """The total, of these names, times what all examples share; booleans: where they are true."""
    every = sorted({*names, *mask.names})

    def beside(x: jax.Array, own: Sequence[FactorAxis]) -> jax.Array:
        return x.reshape([block.size(name) if name in own else 1 for name in every])

    total, values = beside(total, names), beside(mask.values, mask.names)
    if values.dtype == bool:
        return jnp.where(values, total, 0), every
    return total * values.astype(total.dtype), every


def _product(parts: list[Part], out: list[FactorAxis]) -> jax.Array:
    """The product of parts with these axes; the first one is the smallest.

    XLA's CPU compiler transposes what comes first, and swaps the factors of a product that is
    transposed: 2,048 rows of 32k and 64 numbers then take five times as long as the other way
    around. So where that is less than a factor, the result is transposed behind a barrier.
    """
    labels = [[(-1, 0), *part.names] for part in parts]
    values = [part.values for part in parts]
    shared = [k for k in out if all(k in each for each in labels)]
    made = [*shared, *(k for each in labels for k in each if k in out and k not in shared)]

    def at_once(*values: jax.Array) -> jax.Array:
        return product(values, labels, out)

    def transposed_after(*values: jax.Array) -> jax.Array:
        total = jax.lax.optimization_barrier(product(values, labels, made))
        return jnp.transpose(total, [made.index(k) for k in out])

    rows, first = values[0].shape[0], math.prod(values[0].shape[1:])
    if len(parts) != 2 or made == out or rows < first:
        return at_once(*values)
    return by_platform(*values, cpu=transposed_after, gpu=at_once, default=at_once)


def _scattered(hot: list[Part], rows: jax.Array) -> jax.Array:
    """Rows added up at their indices."""
    zeros = jnp.zeros((*(part.length for part in hot), *rows.shape[1:]), rows.dtype)
    return zeros.at[tuple(part.values for part in hot)].add(rows, mode="drop")


def placed(block: ProductBlock, part: jax.Array) -> jax.Array:
    """A part of a gradient at its place, with zeros around it."""
    edges = [(w.start, w.size - w.start - math.prod(w.sizes), 0) for w in block.windows]
    if all(edge == (0, 0, 0) for edge in edges):
        return part
    return jax.lax.pad(part, jnp.zeros((), part.dtype), edges)


def dense_gradient(products: Products) -> jax.Array:
    """The gradient itself, in float32 or wider."""
    total = None
    for block in blocks(products):
        part = placed(block, value(block))
        total = part if total is None else total + part
    return jnp.zeros(products.shape, sum_dtype(products)) if total is None else total
