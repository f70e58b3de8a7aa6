"""Places of views of weights in their leaves.

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
Box = tuple[tuple[int, int], ...]  # from where to where, along each axis


class ViewStep(NamedTuple):
    """One result of an equation with one input, done along the axes of the scans around it."""

    depth: int
    equation: JaxprEqn
    result: int

    def __call__(self, x: jax.Array) -> jax.Array:
        fun = lambda x: bind(self.equation, [x])[self.result]  # noqa: E731
        for _ in range(self.depth):
            fun = jax.vmap(fun)
        return fun(x)


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
      box: of the view before it.
      shape: of the view after it.
    """

    labels: tuple[ViewLabel, ...]
    box: Box
    shape: tuple[int, ...]


class ViewPlace(NamedTuple):
    """The place of a view in its leaf.

    Attributes:
      leaf: the number of the leaf.
      labels: of the axes of the view.
      box: from where to where the view goes, along each axis of the leaf or of the last of the
        reshapes.
      frame: the reshapes that have split or merged axes: labels are of their result.
      scans: the scans around, outermost first.
      steps: how the view is made of the leaf, casts left out.
    """

    leaf: int
    labels: tuple[ViewLabel, ...]
    box: Box
    frame: tuple[Reshape, ...] = ()
    scans: tuple[Scan, ...] = ()
    steps: tuple[ViewStep, ...] = ()

    @classmethod
    def of_leaf(cls, leaf: int, shape: Sequence[int]) -> "ViewPlace":
        """The place of a whole leaf."""
        return cls(leaf, _labels(shape, 0), _whole(shape))

    def in_scan(self, length: int, is_along: bool) -> "ViewPlace":
        """The place of what a step of a scan gets: one index of the first axis, or all."""
        if not is_along:
            return self._replace(scans=(*self.scans, Scan(length, False)))
        scan = Scan(length, True, self.labels[0])
        return self._replace(labels=self.labels[1:], scans=(*self.scans, scan))

    def is_apart(self, other: "ViewPlace") -> bool:
        """Whether two views of a leaf share no element, as far as their boxes show.

        These are compared where the views were last reshaped alike.
        """
        boxes, others = ([*(r.box for r in p.frame), p.box] for p in (self, other))
        pairs = zip(self.frame, other.frame, strict=False)
        depth = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        pairs = zip(boxes[depth], others[depth], strict=True)
        return any(min(a[1], b[1]) <= max(a[0], b[0]) for a, b in pairs)

    def results(self, equation: JaxprEqn) -> list["ViewPlace | None"]:
        """The places of the results of an equation of the view alone; ``None``: not followed."""
        view = _VIEWS.get(equation.primitive)
        places = view(self, equation) if view else None
        return [None] * len(equation.outvars) if places is None else [*places]

    def to_leaf(self, total: jax.Array, shape: Sequence[int]) -> jax.Array:
        """An array that lies as the view, with the axes of scans in front, as the leaf lies."""
        if not self.steps:
            return total.reshape(tuple(shape))

        def way(x: jax.Array) -> jax.Array:
            for step in self.steps:
                x = step(x)
            return x

        like = to_varying(jnp.zeros(tuple(shape), total.dtype), varying_axes(total))
        total = total.reshape(jax.eval_shape(way, like).shape)
        return jax.linear_transpose(way, like)(total)[0]

    def kept(self, equation: JaxprEqn) -> list["ViewPlace"]:
        """The place of the same numbers in the same shape."""
        return [self]

    def transposed(self, equation: JaxprEqn) -> list["ViewPlace"]:
        """The place of the view with its axes in another order."""
        labels = tuple(self.labels[i] for i in equation.params["permutation"])
        return [self._after(equation, labels=labels)]

    def _after(self, equation: JaxprEqn, result: int = 0, **changed: Any) -> "ViewPlace":
        depth = sum(scan.is_along for scan in self.scans)
        step = ViewStep(depth, equation, result)
        return self._replace(steps=(*self.steps, step), **changed)

    def reshaped(self, equation: JaxprEqn) -> list["ViewPlace"] | None:
        """The place of the view in another shape; None if the numbers are repeated."""
        old, new = (v.aval.shape for v in (equation.invars[0], equation.outvars[0]))  # type: ignore
        return [self._reshaped(equation, old, new)] if math.prod(old) == math.prod(new) else None

    def _reshaped(self, equation: JaxprEqn, old: Sequence[int], new: Sequence[int]) -> "ViewPlace":
        if [n for n in old if n != 1] == [n for n in new if n != 1]:
            rest = iter([k for k, n in zip(self.labels, old, strict=True) if n != 1])
            labels = tuple(None if n == 1 else next(rest) for n in new)
            return self._after(equation, labels=labels)
        frame = (*self.frame, Reshape(self.labels, self.box, tuple(new)))
        labels = _labels(new, len(frame))
        return self._after(equation, labels=labels, box=_whole(new), frame=frame)

    def cut(
        self, equation: JaxprEqn, cuts_of: Callable[[Any, Sequence[int]], "_Cuts"]
    ) -> list["ViewPlace"] | None:
        """The places of parts of the view."""
        cuts = cuts_of(equation.params, equation.invars[0].aval.shape)  # type: ignore
        return None if cuts is None else [self._cut(equation, i, *c) for i, c in enumerate(cuts)]

    def _cut(self, equation: JaxprEqn, result: int, cut: Box, gone: int | None) -> "ViewPlace":
        """The place of a part of the view, from where to where along each of its axes.

        ``gone``: the axis that the result does not have.
        """
        box, labels = list(self.box), list(self.labels)
        for i, (label, (start, stop)) in enumerate(zip(self.labels, cut, strict=True)):
            if label is not None:
                first = box[label.number][0]
                box[label.number] = first + start, first + stop
            if stop - start == 1:
                labels[i] = None
        if gone is not None:
            del labels[gone]
        return self._after(equation, result, labels=tuple(labels), box=tuple(box))


# What an operation gives of a view: for each result from where to where it goes along each axis,
# and the axis that it does not have. None if it is not followed.
_Cuts = list[tuple[Box, int | None]] | None


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


# What the operations of a view alone that are followed give: the places of their results, or None.
_VIEWS: dict[Any, Callable[[ViewPlace, JaxprEqn], Sequence[ViewPlace] | None]] = {
    primitives.convert_element_type_p: ViewPlace.kept,
    primitives.reduce_precision_p: ViewPlace.kept,
    primitives.copy_p: ViewPlace.kept,
    primitives.name_p: ViewPlace.kept,
    primitives.transpose_p: ViewPlace.transposed,
    primitives.reshape_p: ViewPlace.reshaped,
    primitives.squeeze_p: ViewPlace.reshaped,
    primitives.broadcast_in_dim_p: ViewPlace.reshaped,
    primitives.slice_p: functools.partial(ViewPlace.cut, cuts_of=_slice),
    lax.split_p: functools.partial(ViewPlace.cut, cuts_of=_split),
}
if hasattr(lax, "unstack_p"):  # JAX 0.10.0 slices instead
    _VIEWS[lax.unstack_p] = functools.partial(ViewPlace.cut, cuts_of=_unstack)


def has_views(x: Any) -> bool:
    """Whether views of an array are followed: real floating numbers of 16 to 64 bits."""
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits >= 16


def _labels(shape: Sequence[int], reshapes: int) -> tuple[ViewLabel, ...]:
    return tuple(None if n == 1 else WeightAxis(reshapes, i) for i, n in enumerate(shape))


def _whole(shape: Sequence[int]) -> Box:
    return tuple((0, n) for n in shape)
