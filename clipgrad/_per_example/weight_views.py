"""Views of weights: which part of a leaf a value is, and how it lies.

A view is a leaf that was transposed, reshaped, cast or cut, or that a scan hands out step by step.
Each axis of a view has a label, which says what axis of the leaf it is. So two views of one leaf
can be compared, whatever was done to them.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, primitives

from clipgrad._compat import to_varying, varying_axes
from clipgrad._per_example.labels import WeightAxis
from clipgrad._programs import bind

ViewLabel = WeightAxis | None  # of an axis of a view; `None`: its size is 1
Slice = tuple[tuple[int, int], ...]  # from where to where, along each axis


class Result(NamedTuple):
    """One result of an equation with one input."""

    equation: JaxprEqn
    number: int

    def __call__(self, x: jax.Array) -> jax.Array:
        return bind(self.equation, [x])[self.number]


class Reshaped(NamedTuple):
    """An array in another shape."""

    shape: tuple[int, ...]

    def __call__(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.shape)


class ViewStep(NamedTuple):
    """What makes a view of another one, done along the axes of the scans around it."""

    depth: int
    function: Result | Reshaped

    def __call__(self, x: jax.Array) -> jax.Array:
        function: Callable[[jax.Array], jax.Array] = self.function
        for _ in range(self.depth):
            function = jax.vmap(function)
        return function(x)


class Scan(NamedTuple):
    """A scan around a use: the axis of the weight that it goes along.

    One that goes along an axis of size 1 has no ``axis``, and one that uses the same weight in all
    its steps, as a recurrence does, neither.
    """

    length: int
    is_along: bool
    axis: ViewLabel = None


class Reshape(NamedTuple):
    """A reshape that has split or merged axes of a view.

    Attributes:
      labels: of the axes of the view before it.
      slice: of the view before it.
      shape: of the view after it.
    """

    labels: tuple[ViewLabel, ...]
    slice: Slice
    shape: tuple[int, ...]


class WeightView(NamedTuple):
    """A part of a leaf.

    Attributes:
      leaf: the number of the leaf.
      labels: of the axes of the view.
      slice: from where to where the view goes, along each axis of the leaf or of the last of the
        reshapes.
      reshapes: those that have split or merged axes: labels are of their result.
      scans: the scans around, outermost first.
      steps: how the view is made of the leaf, casts left out.
    """

    leaf: int
    labels: tuple[ViewLabel, ...]
    slice: Slice
    reshapes: tuple[Reshape, ...] = ()
    scans: tuple[Scan, ...] = ()
    steps: tuple[ViewStep, ...] = ()

    @classmethod
    def of_leaf(cls, leaf: int, shape: Sequence[int]) -> "WeightView":
        """A whole leaf."""
        return cls(leaf, _labels(shape, 0), _whole(shape))

    def in_scan(self, length: int, is_along: bool) -> "WeightView":
        """What a step of a scan gets: one index of the first axis, or all."""
        if not is_along:
            return self._replace(scans=(*self.scans, Scan(length, False)))
        scan = Scan(length, True, self.labels[0])
        return self._replace(labels=self.labels[1:], scans=(*self.scans, scan))

    def is_apart(self, other: "WeightView") -> bool:
        """Whether two views of a leaf share no element, as far as their slices show.

        These are compared where the views were last reshaped alike.
        """
        slices, others = ([*(r.slice for r in v.reshapes), v.slice] for v in (self, other))
        pairs = zip(self.reshapes, other.reshapes, strict=False)
        depth = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        pairs = zip(slices[depth], others[depth], strict=True)
        return any(min(a[1], b[1]) <= max(a[0], b[0]) for a, b in pairs)

    def results(self, equation: JaxprEqn) -> list["WeightView | None"]:
        """The results of an equation of the view alone, as views; ``None``: not followed."""
        make = _VIEWS.get(equation.primitive)
        views = make(self, equation) if make else None
        return [None] * len(equation.outvars) if views is None else [*views]

    def to_leaf(self, total: jax.Array, shape: Sequence[int]) -> jax.Array:
        """An array that lies as the view, with the axes of scans in front, as the leaf lies."""
        if not self.steps:
            return total.reshape(tuple(shape))

        def view(leaf: jax.Array) -> jax.Array:
            for step in self.steps:
                leaf = step(leaf)
            return leaf

        like = to_varying(jnp.zeros(tuple(shape), total.dtype), varying_axes(total))
        total = total.reshape(jax.eval_shape(view, like).shape)
        return jax.linear_transpose(view, like)(total)[0]

    def kept(self, equation: JaxprEqn) -> list["WeightView"]:
        """The same numbers in the same shape."""
        return [self]

    def transposed(self, equation: JaxprEqn) -> list["WeightView"]:
        """The view with its axes in another order."""
        labels = tuple(self.labels[i] for i in equation.params["permutation"])
        return [self._after(Result(equation, 0), labels=labels)]

    def _after(self, function: Result | Reshaped, **changed: Any) -> "WeightView":
        step = ViewStep(sum(scan.is_along for scan in self.scans), function)
        return self._replace(steps=(*self.steps, step), **changed)

    def split(self, shape: Sequence[int], axis: int, groups: int) -> "WeightView":
        """The view, which has this shape, with an axis split into so many groups."""
        new = (*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
        return self._reshaped(Reshaped(new), shape, new)

    def reshaped(self, equation: JaxprEqn) -> list["WeightView"] | None:
        """The view in another shape; None if the numbers are repeated."""
        old, new = (v.aval.shape for v in (equation.invars[0], equation.outvars[0]))  # type: ignore
        if math.prod(old) != math.prod(new):
            return None
        return [self._reshaped(Result(equation, 0), old, new)]

    def _reshaped(
        self, function: Result | Reshaped, old: Sequence[int], new: Sequence[int]
    ) -> "WeightView":
        if [n for n in old if n != 1] == [n for n in new if n != 1]:
            kept = iter([k for k, n in zip(self.labels, old, strict=True) if n != 1])
            labels = tuple(None if n == 1 else next(kept) for n in new)
            return self._after(function, labels=labels)
        reshapes = (*self.reshapes, Reshape(self.labels, self.slice, tuple(new)))
        labels = _labels(new, len(reshapes))
        return self._after(function, labels=labels, slice=_whole(new), reshapes=reshapes)

    def cut(
        self, equation: JaxprEqn, cuts_of: Callable[[Any, Sequence[int]], "_Cuts"]
    ) -> list["WeightView"] | None:
        """Parts of the view."""
        cuts = cuts_of(equation.params, equation.invars[0].aval.shape)  # type: ignore
        return None if cuts is None else [self._cut(equation, i, *c) for i, c in enumerate(cuts)]

    def _cut(self, equation: JaxprEqn, result: int, cut: Slice, gone: int | None) -> "WeightView":
        """A part of the view, from where to where along each of its axes.

        ``gone``: the axis that the result does not have.
        """
        part, labels = list(self.slice), list(self.labels)
        for i, (label, (start, stop)) in enumerate(zip(self.labels, cut, strict=True)):
            if label is not None:
                first = part[label.number][0]
                part[label.number] = first + start, first + stop
            if stop - start == 1:
                labels[i] = None
        if gone is not None:
            del labels[gone]
        return self._after(Result(equation, result), labels=tuple(labels), slice=tuple(part))


# What an operation gives of a view: for each result from where to where it goes along each axis,
# and the axis that it does not have. None if it is not followed.
_Cuts = list[tuple[Slice, int | None]] | None


def _slice(params: Any, shape: Sequence[int]) -> _Cuts:
    if set(params["strides"] or ()) - {1}:
        return None
    cut = zip(params["start_indices"], params["limit_indices"], strict=True)
    return [(tuple(cut), None)]


def _split(params: Any, shape: Sequence[int]) -> _Cuts:
    axis, sizes, whole = params["axis"], params["sizes"], _whole(shape)
    pairs = zip(sizes, itertools.accumulate(sizes), strict=True)
    cuts = ((stop - size, stop) for size, stop in pairs)
    return [((*whole[:axis], cut, *whole[axis + 1 :]), None) for cut in cuts]


def _unstack(params: Any, shape: Sequence[int]) -> _Cuts:
    axis, whole = params["axis"], _whole(shape)
    cuts = ((i, i + 1) for i in range(shape[axis]))
    return [((*whole[:axis], cut, *whole[axis + 1 :]), axis) for cut in cuts]


# The operations of a view alone that are followed: the views that they give, or None. A further one
# is a row here, and a way in the tests of spellings, which cross it with all others; one that gives
# parts says by `_Cuts` which. An operation that brings numbers into another order along an axis,
# such as `rev`, must not keep its labels: uses whose labels are equal are multiplied number by
# number, so the norms would be wrong without an error.
_VIEWS: dict[Any, Callable[[WeightView, JaxprEqn], Sequence[WeightView] | None]] = {
    primitives.convert_element_type_p: WeightView.kept,
    primitives.reduce_precision_p: WeightView.kept,
    primitives.copy_p: WeightView.kept,
    primitives.name_p: WeightView.kept,
    primitives.transpose_p: WeightView.transposed,
    primitives.reshape_p: WeightView.reshaped,
    primitives.squeeze_p: WeightView.reshaped,
    primitives.broadcast_in_dim_p: WeightView.reshaped,
    primitives.slice_p: functools.partial(WeightView.cut, cuts_of=_slice),
    lax.split_p: functools.partial(WeightView.cut, cuts_of=_split),
}
if hasattr(lax, "unstack_p"):  # JAX 0.10.0 slices instead
    _VIEWS[lax.unstack_p] = functools.partial(WeightView.cut, cuts_of=_unstack)


def has_views(x: Any) -> bool:
    """Whether views of an array are followed: real floating numbers of 16 to 64 bits."""
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits >= 16


def _labels(shape: Sequence[int], reshapes: int) -> tuple[ViewLabel, ...]:
    return tuple(None if n == 1 else WeightAxis(reshapes, i) for i, n in enumerate(shape))


def _whole(shape: Sequence[int]) -> Slice:
    return tuple((0, n) for n in shape)
