"""Places of views of weights in their leaves.

A view is a leaf that was transposed, reshaped, cast or cut, or that a scan hands out step by step.
Each axis of a view has a label, which says what axis of the leaf it is. So two views of one leaf
can be compared, whatever was done to them.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from clipgrad._compat import to_varying, varying_axes
from clipgrad._programs import bind

Label = Any
KEEPING = {"convert_element_type", "reduce_precision", "copy", "copy_p", "name"}
RESHAPES = {"reshape", "squeeze", "broadcast_in_dim", "expand_dims"}


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
    """A scan around a use: the label of the axis of the leaf that it goes along.

    A scan that uses the same weight in all its steps, as a recurrence does, has no ``axis``.
    """

    length: int
    is_along: bool
    axis: Label | None = None


class ViewPlace(NamedTuple):
    """The place of a view in its leaf.

    Attributes:
      leaf: the number of the leaf.
      labels: of the axes of the view; ``None`` for an axis of size 1.
      box: from where to where the view goes, along each axis of the leaf.
      frame: the reshapes that have split or merged axes: labels are of their result.
      scans: the scans around, outermost first.
      steps: how the view is made of the leaf, casts left out.
    """

    leaf: int
    labels: tuple[Label, ...]
    box: tuple[tuple[int, int], ...]
    frame: tuple[Any, ...] = ()
    scans: tuple[Scan, ...] = ()
    steps: tuple[ViewStep, ...] = ()

    @classmethod
    def of_leaf(cls, leaf: int, shape: Sequence[int]) -> "ViewPlace":
        """The place of a whole leaf."""
        return cls(leaf, _labels(len(shape)), tuple((0, n) for n in shape))

    def in_scan(self, length: int, is_along: bool) -> "ViewPlace":
        """The place of what a step of a scan gets: one index of the first axis, or all."""
        if not is_along:
            return self._replace(scans=(*self.scans, Scan(length, False)))
        scan = Scan(length, True, self.labels[0])
        return self._replace(labels=self.labels[1:], scans=(*self.scans, scan))

    def meets(self, other: "ViewPlace") -> bool:
        """Whether both are of the same part of a leaf, or of parts that overlap."""
        pairs = zip(self.box, other.box, strict=True)
        return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in pairs)

    def results(self, equation: JaxprEqn) -> list["ViewPlace | None"]:
        """The places of the results of an equation of the view alone; ``None``: not followed."""
        name, params = equation.primitive.name, equation.params
        old, new = (v.aval.shape for v in (equation.invars[0], equation.outvars[0]))  # type: ignore
        if name in KEEPING:
            return [self]
        if name == "transpose":
            labels = tuple(self.labels[i] for i in params["permutation"])
            return [self._after(equation, labels=labels)]
        if name in RESHAPES and math.prod(old) == math.prod(new):
            return [self._reshaped(equation, old, new)]
        cuts = [] if self.frame else _cuts(name, params, old)
        found: list[ViewPlace | None] = [self._cut(equation, *cut) for cut in enumerate(cuts)]
        return found or [None] * len(equation.outvars)

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

    def _after(self, equation: JaxprEqn, result: int = 0, **changed: Any) -> "ViewPlace":
        depth = sum(scan.is_along for scan in self.scans)
        step = ViewStep(depth, equation, result)
        return self._replace(steps=(*self.steps, step), **changed)

    def _reshaped(self, equation: JaxprEqn, old: Sequence[int], new: Sequence[int]) -> "ViewPlace":
        if [n for n in old if n != 1] == [n for n in new if n != 1]:
            rest = iter([k for k, n in zip(self.labels, old, strict=True) if n != 1])
            labels = tuple(None if n == 1 else next(rest) for n in new)
            return self._after(equation, labels=labels)
        frame = (*self.frame, (self.labels, tuple(new)))
        return self._after(equation, labels=_labels(len(new), frame), frame=frame)

    def _cut(self, equation: JaxprEqn, result: int, cut: Sequence[tuple[int, int]]) -> "ViewPlace":
        box = list(self.box)
        for label, (start, stop) in zip(self.labels, cut, strict=True):
            if label is not None:
                first = box[label[1]][0]
                box[label[1]] = first + start, first + stop
        return self._after(equation, result, box=tuple(box))


def _cuts(name: str, params: Any, shape: Sequence[int]) -> list[list[tuple[int, int]]]:
    """From where to where each result of an operation goes along each axis; none: another one."""
    if name == "slice" and not params["strides"]:
        return [list(zip(params["start_indices"], params["limit_indices"], strict=True))]
    if name != "split":
        return []
    axis, stops = params["axis"], itertools.accumulate(params["sizes"])
    whole = [(0, n) for n in shape]
    pairs = zip(params["sizes"], stops, strict=True)
    return [[*whole[:axis], (stop - n, stop), *whole[axis + 1 :]] for n, stop in pairs]


def has_views(x: Any) -> bool:
    """Whether views of an array are followed: real floating numbers of 16 to 64 bits."""
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits >= 16


def _labels(rank: int, frame: Sequence[Any] = ()) -> tuple[Label, ...]:
    return tuple((len(frame), axis) for axis in range(rank))
