"""The gradient of a leaf as a sum of products, none of which is made.

A term is a product of factors, as in `jax.numpy.einsum`: every axis of a factor has a label, an
axis of the gradient is made of labels (several where axes were merged), and labels that belong to
no axis are summed over. Transposing, reshaping, slicing or padding a gradient changes its terms
alone.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import platform_dependent

from clipgrad._compat import gpus_have_bfloat16
from clipgrad._numerics import accumulator, with_real_dtype

# A gradient that is doubled again and again would be 2, 4, 8, ... products; an unrolled recurrence
# of this many steps is still followed.
MOST_TERMS = 2**10


CHANGED_CARRY = "changed in the carry of a scan, not only added to"


# A number, or in a block a pair of them (`blocks.py`).
Label = Any


class Unfollowed(Exception):  # noqa: N818
    """A change of a gradient that can't be made in its factors."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Factor:
    """An array whose axes have labels; or indices, of rows with a single 1 along ``hot``."""

    values: jax.Array
    labels: tuple[Label, ...] = dataclasses.field(metadata={"static": True})
    hot: Label | None = dataclasses.field(default=None, metadata={"static": True})
    length: int = dataclasses.field(default=0, metadata={"static": True})  # of the hot axis
    # The label of the steps of the last scan that has stacked it.
    steps: Label | None = dataclasses.field(default=None, metadata={"static": True})
    # Whether it is the same for all examples, as what masks a weight, and has no axis for them.
    is_shared: bool = dataclasses.field(default=False, metadata={"static": True})
    # Whether several gradients have it, as those of two kernels of a recurrence.
    is_common: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def owned(self) -> tuple[Label, ...]:
        """All labels, the hot axis included."""
        return self.labels if self.hot is None else (*self.labels, self.hot)

    @property
    def sizes(self) -> dict[Label, int]:
        own = dict(zip(self.labels, jnp.shape(self.values), strict=True))
        return own if self.hot is None else own | {self.hot: self.length}

    def split(self, label: int, parts: Sequence[tuple[int, int]]) -> "Factor":
        """The factor with one label replaced by several of these ``(label, size)``."""
        if label not in self.owned:
            return self
        if label == self.hot:
            raise Unfollowed("a reshape splits an indexed axis")
        i = self.labels.index(label)
        shape = self.values.shape
        values = self.values.reshape(*shape[:i], *(n for _, n in parts), *shape[i + 1 :])
        labels = (*self.labels[:i], *(new for new, _ in parts), *self.labels[i + 1 :])
        return dataclasses.replace(self, values=values, labels=labels)

    def cut(self, label: int, start: int, stop: int) -> "Factor":
        """The factor between two indices of a label."""
        if label not in self.owned:
            return self
        if label == self.hot:
            raise Unfollowed("a slice of an indexed axis")
        axis = self.labels.index(label)
        values = jax.lax.slice_in_dim(self.values, start, stop, axis=axis)
        return dataclasses.replace(self, values=values)

    def merged(self, labels: Sequence[int], new: int) -> "Factor":
        """The factor with labels in this order as one."""
        if self.hot in labels:
            raise Unfollowed("a change along an indexed axis")
        if not set(labels) <= set(self.labels):
            raise Unfollowed("a change along an axis of different factors")
        rest = [k for k in self.labels if k not in labels]
        order = [self.labels.index(k) for k in (*labels, *rest)]
        values = jnp.transpose(self.values, order)
        values = values.reshape(-1, *values.shape[len(labels) :])
        return dataclasses.replace(self, values=values, labels=(new, *rest))

    def scaled(self, array: jax.Array, labels: Sequence[int]) -> "Factor":
        """The factor times an array of some of its labels; of booleans: where they are true."""
        if array.dtype == bool:
            order = [k for k in self.labels if k in labels]
            array = jnp.transpose(array, [list(labels).index(k) for k in order])
            array = array.reshape([n if k in labels else 1 for k, n in self.sizes.items()])
            return dataclasses.replace(self, values=jnp.where(array, self.values, 0))
        # A factor may be larger than the gradient, and than what half precision holds.
        values = with_real_dtype(self.values, accumulator(self.values))
        array = jnp.asarray(array, values.dtype)
        arrays, named = [values, array], [self.labels, labels]
        values = einsum(arrays, named, self.labels) if labels else values * array
        return dataclasses.replace(self, values=values)

    def stacked(self, label: int, by_scan: bool) -> "Factor":
        """The factor of values that have one more axis, in front: all by a scan, or examples."""
        if self.is_shared and not by_scan:
            return self
        steps = label if by_scan else self.steps
        return dataclasses.replace(self, labels=(label, *self.labels), steps=steps)


def is_shared(value: Any) -> bool:
    """Whether this is a factor that all examples share."""
    return isinstance(value, Factor) and value.is_shared


def apart(tree: Any) -> tuple[Any, list[jax.Array]]:
    """The tree without the arrays that all examples share, and these."""
    found = [x.values for x in jax.tree.leaves(tree, is_leaf=is_shared) if is_shared(x)]
    return _with_shared(tree, [None] * len(found)), found


def rejoined(own: Any, shared: Sequence[jax.Array]) -> Any:
    """The tree of which these were set `apart`."""
    return _with_shared(own, shared)


def _with_shared(tree: Any, values: Sequence[Any]) -> Any:
    rest = iter(values)

    def change(x: Any) -> Any:
        return dataclasses.replace(x, values=next(rest)) if is_shared(x) else x

    return jax.tree.map(change, tree, is_leaf=is_shared)


class GradientAxis(NamedTuple):
    """An axis of a gradient: zero but for a window from ``start``, whose labels are in order."""

    labels: tuple[Label, ...]
    start: int
    size: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Term:
    """A product of factors; every axis of the gradient has one or more of their labels, or none."""

    factors: tuple[Factor, ...]
    axes: tuple[GradientAxis, ...] = dataclasses.field(metadata={"static": True})

    @property
    def sizes(self) -> dict[Label, int]:
        return {k: n for factor in self.factors for k, n in factor.sizes.items()}

    @property
    def summed(self) -> tuple[int, ...]:
        """The labels that are summed over, the last one that was added in front.

        It is the first axis of the factors, and the examples' may be sharded: in front it
        stays where it is when axes are merged.
        """
        kept = {label for axis in self.axes for label in axis.labels}
        return tuple(sorted(set(self.sizes) - kept, reverse=True))

    def extent(self, axis: GradientAxis) -> int:
        """The length of the window of an axis."""
        sizes = self.sizes
        return math.prod(sizes[label] for label in axis.labels)

    def fresh(self, count: int = 1) -> range:
        """Labels that the term does not have."""
        first = max((k for factor in self.factors for k in factor.owned), default=-1) + 1
        return range(first, first + count)

    def with_axes(self, axes: Sequence[GradientAxis]) -> "Term":
        return dataclasses.replace(self, axes=tuple(axes))

    def map(self, change: Callable[[Factor], Factor]) -> "Term":
        return dataclasses.replace(self, factors=tuple(map(change, self.factors)))

    def split(self, label: int, sizes: Sequence[int]) -> "Term":
        """The term with a label replaced by several whose sizes multiply to its own."""
        new = self.fresh(len(sizes))
        changed = self.map(lambda f: f.split(label, list(zip(new, sizes, strict=True))))
        axes = [
            axis._replace(
                labels=tuple(m for k in axis.labels for m in (new if k == label else [k]))
            )
            for axis in self.axes
        ]
        return changed.with_axes(axes)

    def stacked(self, size: int | None) -> "Term":
        """The term of values with one more axis in front: a new first axis, or ``None``: a sum."""
        (label,) = self.fresh()
        term = self.map(lambda factor: factor.stacked(label, by_scan=size is not None))
        return (
            term if size is None else term.with_axes([GradientAxis((label,), 0, size), *self.axes])
        )

    @property
    def own(self) -> tuple[Factor, ...]:
        """The factors that an example has for itself."""
        return tuple(factor for factor in self.factors if not factor.is_shared)

    @property
    def shared(self) -> tuple[Factor, ...]:
        """The factors that all examples share."""
        return tuple(filter(is_shared, self.factors))

    @property
    def windows(self) -> list[tuple[int, int]]:
        """The indices of each axis of the gradient between which it is not zero."""
        return [(axis.start, axis.start + self.extent(axis)) for axis in self.axes]

    def between(self, starts: Sequence[int], stops: Sequence[int]) -> "Term | None":
        """The term between these indices of the gradient; None if it is zero there."""
        term, axes = self, []
        for axis, window, low, high in zip(self.axes, self.windows, starts, stops, strict=True):
            start, stop = max(window[0], low), min(window[1], high)
            if start >= stop:
                return None
            if (start, stop) != window:
                if len(axis.labels) != 1:
                    raise Unfollowed("a slice of merged axes")
                bounds = start - axis.start, stop - axis.start
                term = term.map(lambda f, k=axis.labels[0], b=bounds: f.cut(k, *b))
            axes.append(GradientAxis(axis.labels, start - low, high - low))
        return term.with_axes(axes)

    @property
    def arrays(self) -> list[int]:
        """The places of the factors that are arrays of an example's own."""
        return [i for i, f in enumerate(self.factors) if f.hot is None and not f.is_shared]

    def replaced(self, place: int, new: Factor) -> "Term":
        """The term with another factor at this place."""
        factors = (*self.factors[:place], new, *self.factors[place + 1 :])
        return dataclasses.replace(self, factors=factors)

    def times(self, number: jax.Array | int) -> "Term":
        return self.along(jnp.asarray(number), (), shared=False)

    def along(self, array: jax.Array, dimensions: Sequence[int], shared: bool) -> "Term":
        """The term times an array that has only these axes of the gradient.

        One that is ``shared`` by all examples is a factor of its own if no other has these axes.
        """
        own = self.part_along(array, dimensions)
        owners = [i for i in self.arrays if set(own.labels) <= set(self.factors[i].labels)]
        if owners:
            place = owners[0]
            return self.replaced(place, self.factors[place].scaled(own.values, own.labels))
        if not shared:
            raise Unfollowed("a product with an array of each example's own, as large as it")
        return dataclasses.replace(self, factors=(*self.factors, own))

    def part_along(
        self, array: jax.Array, dimensions: Sequence[int], others: Sequence[Label] = ()
    ) -> Factor:
        """An array of axes of the gradient, where this is not zero, and others, as a factor."""
        for d, i in enumerate(dimensions):
            array = jax.lax.slice_in_dim(array, *self.windows[i], axis=d)
        own, sizes = [label for d in dimensions for label in self.axes[d].labels], self.sizes
        rest = array.shape[len(dimensions) :]
        array = array.reshape([*(sizes[label] for label in own), *rest])
        return Factor(array, (*own, *others), is_shared=True)

    def rearranged(
        self, place: int, change: Callable[[jax.Array], jax.Array], several: bool = True
    ) -> "Term":
        """The term with an axis changed by a linear function of the first axis of an array.

        ``several``: factors may share the axis, as its elements only move.
        """
        axis, term = self.axes[place], self
        if not axis.labels:
            term = self.with_label(place)
            axis = term.axes[place]
        owners = [i for i, f in enumerate(term.factors) if set(axis.labels) & set(f.owned)]
        if len(owners) > 1 and not several:
            raise Unfollowed("a sum along an axis that factors share")
        (label,), size = term.fresh(), 0
        for i in owners:
            factor = term.factors[i].merged(axis.labels, label)
            values = jnp.moveaxis(factor.values, factor.labels.index(label), 0)
            before, extent = axis.start, values.shape[0]
            edge = before, axis.size - before - extent, 0
            if edge != (0, 0, 0):
                edges = [edge, *[(0, 0, 0)] * (values.ndim - 1)]
                values = jax.lax.pad(values, jnp.zeros((), values.dtype), edges)
            values = change(values)
            size = values.shape[0]
            labels = (label, *(k for k in factor.labels if k != label))
            term = term.replaced(i, dataclasses.replace(factor, values=values, labels=labels))
        axes = list(term.axes)
        axes[place] = GradientAxis((label,), 0, size)
        return term.with_axes(axes)

    def with_label(self, place: int) -> "Term":
        """The term with a label of size 1 for an axis that has none."""
        (label,), first = self.fresh(), self.arrays[0]
        factor, axes = self.factors[first], list(self.axes)
        values, labels = factor.values[..., None], (*factor.labels, label)
        axes[place] = axes[place]._replace(labels=(label,))
        new = dataclasses.replace(factor, values=values, labels=labels)
        return self.replaced(first, new).with_axes(axes)

    def without(self, dimensions: Sequence[int]) -> "Term":
        """The term summed over some axes of the gradient."""
        kept = [axis for i, axis in enumerate(self.axes) if i not in set(dimensions)]
        return self.with_axes(kept).tidied()

    def tidied(self) -> "Term":
        """The term with what a single factor sums over, or a shared one beside it, summed in it."""
        term = self
        for label in self.summed:
            owners = [f for f in term.factors if label in f.owned]
            if len(owners) == 1 or any(f.is_shared for f in owners):
                rest = [f for f in term.factors if label not in f.owned]
                new = _summed_in(owners, label)
                term = dataclasses.replace(term, factors=(new, *rest))
        return term


def _summed_in(factors: Sequence[Factor], label: int) -> Factor:
    """The product of factors summed over a label; no larger than these together."""
    if any(factor.hot is not None for factor in factors):
        raise Unfollowed("a sum over indices or an indexed axis")
    sizes = {k: n for factor in factors for k, n in factor.sizes.items() if k != label}
    if len(factors) == 1:
        (factor,) = factors
        values = jnp.sum(factor.values, factor.labels.index(label))
        return dataclasses.replace(factor, values=values, labels=tuple(sizes))
    if math.prod(sizes.values()) > sum(factor.values.size for factor in factors):
        raise Unfollowed("a sum over what several factors have, larger than these")
    arrays, labels = zip(*((factor.values, factor.labels) for factor in factors), strict=True)
    values = product(arrays, labels, tuple(sizes))
    return Factor(values, tuple(sizes), is_shared=all(factor.is_shared for factor in factors))


def einsum(
    arrays: Sequence[jax.Array], labels: Sequence[Sequence[Any]], out: Sequence[Any], **options: Any
) -> jax.Array:
    """`jax.numpy.einsum` with anything as labels; those that all arrays and the result have first.

    XLA transposes factors whose rows are in front of such an axis.
    """
    same = [k for k in out if all(k in each for each in labels)] if len(arrays) == 2 else []
    orders = [[*same, *(k for k in each if k not in same)] for each in labels]
    arrays = [
        jnp.transpose(a, [list(each).index(k) for k in order]) if list(each) != order else a
        for a, each, order in zip(arrays, labels, orders, strict=True)
    ]
    labels = orders
    names = {k: i for i, k in enumerate(dict.fromkeys(k for each in labels for k in each))}
    pairs = [
        x for a, each in zip(arrays, labels, strict=True) for x in (a, [names[k] for k in each])
    ]
    return jnp.einsum(*pairs, [names[k] for k in out], **options)


def product(
    arrays: Sequence[jax.Array], labels: Sequence[Sequence[Any]], out: Sequence[Any]
) -> jax.Array:
    """An `einsum` whose terms are rounded as in float32, on every backend; float64 stays.

    The default precision of a backend is not enough for a norm, or for a sum that must not exceed
    one: of float32 a GPU makes TF32, a TPU one bfloat16. A bfloat16 array is multiplied as it is
    where matrix units are fast at that: its products with another are exact in float32, and so are
    those with the `_halves` of a float32 array. Of two float32 arrays six products of halves are
    added, by a kernel of NVIDIA's GPUs and by "highest" of a TPU: what the other three would add is
    less than a rounding. A CPU has no such units, and XLA lacks some of these products there.
    float16 becomes float32: its range is too small for the halves, and a TPU does not multiply it
    exactly.
    """
    dtype = max(map(accumulator, arrays))

    def wide(*arrays: jax.Array, precision: Any = "highest") -> jax.Array:
        return einsum([x.astype(dtype) for x in arrays], labels, out, precision=precision)

    def by_halves(*arrays: jax.Array) -> jax.Array:
        pairs = itertools.product(*map(_halves, arrays))
        options = {"preferred_element_type": dtype}
        return functools.reduce(jnp.add, [einsum(pair, labels, out, **options) for pair in pairs])

    if len(arrays) != 2 or dtype != "float32":
        return wide(*arrays)
    if any(x.dtype == jnp.bfloat16 for x in arrays):
        return platform_dependent(*arrays, cpu=wide, default=by_halves)
    if not gpus_have_bfloat16():
        return wide(*arrays)
    six = functools.partial(wide, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6)
    return platform_dependent(*arrays, cuda=six, default=wide)


def _halves(x: jax.Array) -> list[jax.Array]:
    """Three bfloat16 arrays whose sum a float32 array is, to its last bit; the largest first."""
    if x.dtype == jnp.bfloat16:
        return [x]
    found, x = [], x.astype(jnp.float32)
    for _ in range(3):
        # Not by a cast: XLA removes a cast and its inverse, and no rest would be left.
        half = jax.lax.reduce_precision(x, 8, 7)
        found.append(half.astype(jnp.bfloat16))
        x = jnp.where(jnp.isfinite(half), x - half, 0)
    return found


class Carry(NamedTuple):
    """The carry of a scan that a gradient is added to: its number, and whose gradient it is."""

    number: int
    leaves: frozenset[int]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Products:
    """A gradient as a sum of terms, and of the carries of scans that it adds to."""

    terms: tuple[Term, ...]
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    carried: tuple[Carry, ...] = dataclasses.field(default=(), metadata={"static": True})
    squares: Any = None  # its `Squares`, where these are known

    def __post_init__(self) -> None:
        if len(self.terms) > MOST_TERMS:
            raise Unfollowed(f"a sum of more than {MOST_TERMS:,} products")

    @classmethod
    def of(cls, array: Any) -> "Products":
        """An array as a sum of one product, of itself alone."""
        axes = [GradientAxis((i,), 0, n) for i, n in enumerate(array.shape)]
        term = Term((Factor(array, tuple(range(array.ndim))),), tuple(axes))
        return cls((term,), tuple(array.shape), array.dtype)

    def map(self, change: Callable[[Term], Term | None], aval: Any) -> "Products":
        """Each term changed, for a result of the shape and dtype of ``aval``; None: it is zero."""
        if self.carried:
            raise Unfollowed(CHANGED_CARRY)
        terms = tuple(term for term in map(change, self.terms) if term is not None)
        return Products(terms, tuple(aval.shape), aval.dtype, squares=self.squares)

    def plus(self, other: "Products") -> "Products":
        carried = (*self.carried, *other.carried)
        terms = (*self.terms, *other.terms)
        return dataclasses.replace(self, terms=terms, carried=carried)


def reshaped(term: Term, old: Sequence[int], new: Sequence[int]) -> Term:
    axes: list[GradientAxis] = []
    for first, second in segments(old, new):
        term, made = _reshaped_segment(
            term, [term.axes[i] for i in first], [new[i] for i in second]
        )
        axes += made
    return term.with_axes(axes).tidied()


def segments(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The least groups of axes that a reshape turns into each other."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        first, second, a, b = [], [], 1, 1
        while not first and not second or a != b:
            if (a <= b and i < len(old)) or j == len(new):
                a, i = a * old[i], i + 1
                first.append(i - 1)
            else:
                b, j = b * new[j], j + 1
                second.append(j - 1)
        groups.append((first, second))
    return groups


def _reshaped_segment(
    term: Term, axes: Sequence[GradientAxis], sizes: Sequence[int]
) -> tuple[Term, list[GradientAxis]]:
    real = [axis for axis in axes if axis.size != 1 or axis.labels]
    wide = [n for n in sizes if n != 1]
    if len(real) <= 1 and len(wide) <= 1 and (not real or real[0].size == math.prod(wide)):
        if not wide:
            made = [GradientAxis((), 0, 1)] * len(sizes)
            if real and sizes:
                made[0] = real[0]
            return term, made  # without sizes a label of size 1 is summed over
        return term, [real[0] if n != 1 else GradientAxis((), 0, 1) for n in sizes]
    if any(term.extent(axis) != axis.size for axis in real[1:]):
        raise Unfollowed("a reshape of padded axes")
    inner = math.prod(axis.size for axis in real[1:])
    labels = [label for axis in real for label in axis.labels]
    start, extent = real[0].start * inner, term.extent(real[0]) * inner
    return _dealt(term, labels, start, extent, sizes)


def _dealt(
    term: Term, labels: list[int], start: int, extent: int, sizes: Sequence[int]
) -> tuple[Term, list[GradientAxis]]:
    """Labels in order dealt out to new axes; only the first of these may have a window."""
    whole = math.prod(sizes)
    first = next(i for i, n in enumerate(sizes) if n != 1)
    inner = math.prod(sizes[first + 1 :])
    if start % inner or extent % inner:
        raise Unfollowed("a reshape of padded axes")
    made = []
    for i, size in enumerate(sizes):
        window = extent // inner if i == first and extent != whole else size
        own: list[int] = []
        while (have := math.prod(term.sizes[label] for label in own)) < window:
            room = window // have
            label, labels = labels[0], labels[1:]
            if (length := term.sizes[label]) > room:
                if window % have or length % room:
                    raise Unfollowed("a reshape that does not keep the axes of products apart")
                new = term.fresh(2)
                term = term.split(label, (room, length // room))
                label, labels = new[0], [new[1], *labels]
            own.append(label)
        if math.prod(term.sizes[label] for label in own) != window:
            raise Unfollowed("a reshape that does not keep the axes of products apart")
        made.append(GradientAxis(tuple(own), start // inner if i == first else 0, size))
    return _leftover(term, labels, made)


def _leftover(
    term: Term, labels: Sequence[int], made: list[GradientAxis]
) -> tuple[Term, list[GradientAxis]]:
    """Labels of size 1 that no axis needs join the last one."""
    if made:
        made[-1] = made[-1]._replace(labels=(*made[-1].labels, *labels))
    return term, made
