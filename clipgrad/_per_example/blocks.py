"""Terms of one gradient in a normal form: those that are alike joined along what is summed over.

A **block** is a `Term` whose labels are `ROW`, for all that is summed over, and places: an axis of
the gradient, and a number in that. `ROW` is the first axis of each factor of an example's own; an
index has no other. The factors that all examples share are without rows, and come last.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._compat import by_platform
from clipgrad._numerics import accumulator
from clipgrad._per_example.terms import Factor, Label, Products, Term, Unfollowed, product

ROW: Label = (-1, 0)


def blocks(products: Products) -> list[Term]:
    """The terms, those that differ by their numbers alone joined to one block."""
    groups: dict[Any, list[Term]] = {}
    dtype = sum_dtype(products)
    for term in products.terms:
        block = _normal_form(term, dtype)
        kinds = tuple(
            (f.labels, f.hot, f.length, f.values.dtype.name, f.values.shape[1:]) for f in block.own
        )
        masks = tuple((mask.labels, id(mask.values)) for mask in block.shared)
        groups.setdefault((kinds, masks, block.axes), []).append(block)
    return [_joined_blocks(group) for group in groups.values()]


def row_count(block: Term) -> int:
    """The number of products that are summed."""
    return block.own[0].values.shape[0]


def sum_dtype(products: Products) -> str:
    """The dtype in which products are summed: float64 if anything in them is."""
    factors = [f for term in products.terms for f in term.factors if f.hot is None]
    arrays = [f.values for f in factors if f.values.dtype != bool]
    return max([accumulator(x) for x in (products, *arrays)])


def _normal_form(term: Term, dtype: str) -> Term:
    term = _indexed_alike(term)
    places: dict[Label, Label] = {
        label: (i, p) for i, axis in enumerate(term.axes) for p, label in enumerate(axis.labels)
    }
    owned = [label for factor in term.own for label in factor.labels]
    several = {label for label in places if owned.count(label) > 1}
    summed = {label: term.sizes[label] for label in term.summed}
    own = _folded([_with_rows(factor, places, summed, several, dtype) for factor in term.own])
    own.sort(key=lambda factor: (factor.owned, factor.hot is not None))
    masks = [_mask(factor, places) for factor in term.shared]
    axes = [axis._replace(labels=tuple(places[k] for k in axis.labels)) for axis in term.axes]
    return Term((*own, *masks), tuple(axes))


def _mask(factor: Factor, places: dict[Label, Label]) -> Factor:
    """A factor that all examples share, with its axes in order."""
    if not set(factor.labels) <= set(places):
        raise Unfollowed("a sum over an axis of what all examples share")
    own = sorted(factor.labels, key=places.__getitem__)
    values = _moved(factor.values, [factor.labels.index(label) for label in own])
    return Factor(values, tuple(places[label] for label in own), is_shared=True)


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


def _with_rows(
    factor: Factor,
    places: dict[Label, Label],
    summed: dict[Label, int],
    several: set[Label],
    dtype: str,
) -> Factor:
    """A factor with one axis for all that is summed over, and its other axes in order.

    Axes that ``several`` factors have, as of scanned layers, are in front while others are merged:
    a product over them wants them there, and there a scan has stacked them, so that XLA copies
    none.
    """
    own = sorted((label for label in factor.labels if label in places), key=places.__getitem__)
    first = [label for label in own if label in several]
    last = [label for label in own if label not in several]
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
    return Factor(
        values,
        (ROW, *(places[label] for label in own)),
        hot,
        factor.length,
        is_common=factor.is_common,
    )


def _moved(values: jax.Array, order: list[int]) -> jax.Array:
    return values if order == sorted(order) else jnp.transpose(values, order)


def _folded(factors: Sequence[Factor]) -> list[Factor]:
    """The factors, those without labels of their own multiplied into others."""
    result: list[Factor] = []
    for factor in sorted(factors, key=lambda factor: -len(factor.labels)):
        i = next((i for i, other in enumerate(result) if _holds(other, factor)), None)
        if i is None:
            result.append(factor)
        else:
            other = result[i]
            arrays, labels = (other.values, factor.values), (other.labels, factor.labels)
            values = product(arrays, labels, other.labels)
            result[i] = dataclasses.replace(other, values=values)
    return result


def _holds(factor: Factor, other: Factor) -> bool:
    return factor.hot is None and other.hot is None and set(other.labels) <= set(factor.labels)


def _joined_blocks(group: list[Term]) -> Term:
    first = group[0]
    if len(group) == 1:
        return first
    columns = zip(*(block.own for block in group), strict=True)
    own = [
        dataclasses.replace(column[0], values=jnp.concatenate([f.values for f in column]))
        for column in columns
    ]
    return dataclasses.replace(first, factors=(*own, *first.shared))


def value(block: Term) -> jax.Array:
    """The sum of products of a block, as a part of the gradient with the axes of its windows."""
    hot = [factor for factor in block.own if factor.hot is not None]
    dense = sorted((f for f in block.own if f.hot is None), key=lambda f: f.values.size)
    names = sorted({label for factor in dense for label in factor.labels} - {ROW})
    total = _product(dense, [ROW, *names] if hot else names)
    if hot:
        zeros = jnp.zeros((*(factor.length for factor in hot), *total.shape[1:]), total.dtype)
        total = zeros.at[tuple(factor.values for factor in hot)].add(total, mode="drop")
        order: list[Any] = [factor.hot for factor in hot] + names
        names = sorted(order)
        total = jnp.transpose(total, [order.index(name) for name in names])
    for mask in block.shared:
        total, names = _times_mask(block, total, names, mask)
    return total.reshape([block.extent(axis) for axis in block.axes])


def _times_mask(
    block: Term, total: jax.Array, names: list[Label], mask: Factor
) -> tuple[jax.Array, list[Label]]:
    """The total, of these names, times what all examples share; booleans: where they are true."""
    every, sizes = sorted({*names, *mask.labels}), block.sizes

    def beside(x: jax.Array, own: Sequence[Any]) -> jax.Array:
        return x.reshape([sizes[name] if name in own else 1 for name in every])

    total, values = beside(total, names), beside(mask.values, mask.labels)
    if values.dtype == bool:
        return jnp.where(values, total, 0), every
    return total * values.astype(total.dtype), every


def _product(factors: list[Factor], out: list[Label]) -> jax.Array:
    """The product of factors with these axes; the first one is the smallest.

    XLA's CPU compiler transposes what comes first, and swaps the factors of a product that is
    transposed: 2,048 rows of 32k and 64 numbers then take five times as long as the other way
    around. So where that is less than a factor, the result is transposed behind a barrier.
    """
    labels = [factor.labels for factor in factors]
    values = [factor.values for factor in factors]
    shared = [k for k in out if all(k in each for each in labels)]
    made = [*shared, *(k for each in labels for k in each if k in out and k not in shared)]

    def at_once(*values: jax.Array) -> jax.Array:
        return product(values, labels, out)

    def transposed_after(*values: jax.Array) -> jax.Array:
        total = jax.lax.optimization_barrier(product(values, labels, made))
        return jnp.transpose(total, [made.index(k) for k in out])

    rows, first = values[0].shape[0], math.prod(values[0].shape[1:])
    if len(factors) != 2 or made == out or rows < first:
        return at_once(*values)
    return by_platform(*values, cpu=transposed_after, gpu=at_once, default=at_once)


def placed(block: Term, part: jax.Array) -> jax.Array:
    """A part of a gradient at its place, with zeros around it."""
    edges = [(a.start, a.size - a.start - block.extent(a), 0) for a in block.axes]
    if all(edge == (0, 0, 0) for edge in edges):
        return part
    return jax.lax.pad(part, jnp.zeros((), part.dtype), edges)


def dense_gradient(products: Products) -> jax.Array:
    """The gradient itself, in float32 or wider."""
    parts = [placed(block, value(block)) for block in blocks(products)]
    zeros = [] if parts else [jnp.zeros(products.shape, sum_dtype(products))]
    return functools.reduce(jnp.add, [*parts, *zeros])
