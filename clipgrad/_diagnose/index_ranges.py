"""The indices of gathers and scatters, and which of them are outside of the array.

A scatter drops what is outside, and a gather with `mode="fill"` has its fill value there. What
clamps its indices instead, as `lax.dynamic_slice` does, always finds an element.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from clipgrad._diagnose.levels import wide
from clipgrad._diagnose.tape import Entry


class Indices(NamedTuple):
    """The indices of a gather or a scatter.

    Attributes:
      axes: the axes of the array that are indexed.
      numbers: the indices; their last axis has one for each of ``axes``.
      is_outside: for each number whether it is out of range.
    """

    axes: tuple[int, ...]
    numbers: np.ndarray
    is_outside: np.ndarray

    @property
    def first_outside(self) -> tuple[int, int] | None:
        """The first index that is outside, and its axis."""
        if not self.is_outside.any():
            return None
        first = tuple(np.argwhere(self.is_outside)[0])
        return int(self.numbers[first]), self.axes[first[-1]]

    @property
    def ranges_outside(self) -> str:
        """Those that are outside, such as "12 to 14 on axis 0"."""
        pairs = zip(self.axes, np.moveaxis(self.numbers, -1, 0), strict=True)
        flags = np.moveaxis(self.is_outside, -1, 0)
        outside = [(axis, n[bad]) for (axis, n), bad in zip(pairs, flags, strict=True) if bad.any()]
        return " and ".join(f"{_range(n)} on axis {axis}" for axis, n in outside)


def indices_of(entry: Entry) -> Indices | None:
    """The indices of a gather or a scatter; None for other operations."""
    axes, windows = _axes_and_windows(entry.equation)
    if axes is None:
        return None
    shape = _shape(entry.equation, 0)
    last = np.array([shape[axis] - windows[axis] for axis in axes])
    numbers = wide(entry.ins[1]).astype(np.int64)
    return Indices(tuple(axes), numbers, (numbers < 0) | (numbers > last))


def all_dropped(entry: Entry, operand: int) -> Indices | None:
    """The indices of a gather or a scatter that uses nothing of an operand: all are outside.

    Of a gather those count at which its result has a cotangent.
    """
    indices = indices_of(entry) if _drops(entry.equation) else None
    if indices is None or not indices.is_outside.size:
        return None
    is_dropped: Any = indices.is_outside.any(-1)
    is_used: Any = np.ones_like(is_dropped)
    numbers = entry.equation.params["dimension_numbers"]
    if isinstance(numbers, lax.GatherDimensionNumbers):
        cotangent = entry.out_cotangents[0]
        axes = tuple(axis + entry.tape.runs.axes for axis in numbers.offset_dims)
        is_used = is_used if cotangent is None else np.any(wide(cotangent) != 0, axis=axes)
    elif operand != 2:  # what is written, not what it is written into
        return None
    return indices if is_used.any() and is_dropped[is_used].all() else None


def _range(numbers: np.ndarray) -> str:
    low, high = numbers.min(), numbers.max()
    return f"{low}" if low == high else f"{low} to {high}"


def _drops(equation: JaxprEqn) -> bool:
    return equation.params.get("mode") is lax.GatherScatterMode.FILL_OR_DROP


def _axes_and_windows(equation: JaxprEqn) -> tuple[Sequence[int] | None, Sequence[int]]:
    """The axes that are indexed, and the size along each axis of what one index takes."""
    numbers: Any = equation.params.get("dimension_numbers")
    match numbers:
        case lax.GatherDimensionNumbers():
            return numbers.start_index_map, equation.params["slice_sizes"]
        case lax.ScatterDimensionNumbers():
            updates = _shape(equation, 2)
            sizes = iter(updates[axis] for axis in numbers.update_window_dims)
            single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
            axes = range(len(_shape(equation, 0)))
            windows = [1 if axis in single else next(sizes) for axis in axes]
            return numbers.scatter_dims_to_operand_dims, windows
    return None, ()


def _shape(equation: JaxprEqn, operand: int) -> tuple[int, ...]:
    aval: Any = equation.invars[operand].aval
    return aval.shape
