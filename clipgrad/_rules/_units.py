"""Units: which axes of a leaf a norm is taken over."""

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from clipgrad._reductions import Axes

Axis = int | tuple[int, ...] | None
# A mapping is held as its items, since a rule's static fields must be hashable.
UnitAxis = Axis | Callable[[str, Any], Axis] | tuple[tuple[str, Axis], ...]


def check_axis(axis: Any) -> Axis:
    """``axis`` with a list made a tuple.

    Raises:
      TypeError: if it is neither an integer nor several nor ``None``.
    """
    if axis is None or (isinstance(axis, int) and not isinstance(axis, bool)):
        return axis
    if isinstance(axis, (tuple, list)) and all(isinstance(a, int) for a in axis):
        return tuple(axis)
    raise TypeError(
        f"axis: got {axis!r} of type {type(axis).__name__}, expected an int, a tuple of them or "
        "None; for optax.inject_hyperparams name it in static_args"
    )


def check_unit_axis(axis: Any) -> UnitAxis:
    """``axis`` in a hashable form: axes, a function, or pairs of expressions and axes.

    Raises:
      TypeError: if it is none of these.
      ValueError: if an expression does not compile.
    """
    if callable(axis):
        return cast(UnitAxis, axis)
    if isinstance(axis, Mapping) and not axis:
        return None
    pairs = axis.items() if isinstance(axis, Mapping) else axis
    if isinstance(axis, Mapping) or is_mapping(axis):
        return tuple((_compiled(pattern), check_axis(axes)) for pattern, axes in pairs)
    return check_axis(axis)


def is_mapping(axis: Any) -> bool:
    """Whether ``axis`` holds the items of a mapping from path expressions."""
    return isinstance(axis, tuple) and bool(axis) and all(isinstance(a, tuple) for a in axis)


def unmatched(axis: UnitAxis, paths: list[str]) -> list[str]:
    """The expressions of ``axis`` that match none of the paths."""
    patterns = [pattern for pattern, _ in axis] if is_mapping(axis) else []  # type: ignore
    return [p for p in patterns if not any(re.search(p, path) for path in paths)]


def unit_axes(axis: UnitAxis, path: str, leaf: Any) -> Axes:
    """The axes that a unit of this leaf spans; ``None``: the whole leaf."""
    if callable(axis):
        return reduced_axes(axis(path, leaf), path, leaf)
    if is_mapping(axis):
        for pattern, axes in axis:  # type: ignore
            if re.search(pattern, path):
                return reduced_axes(axes, path, leaf)
    elif axis is not None:
        return reduced_axes(axis, path, leaf)  # type: ignore
    return tuple(range(leaf.ndim - 1)) if leaf.ndim >= 2 else None


def reduced_axes(axis: Axis, path: str, leaf: Any) -> Axes:
    """The axes, counted from the front, over which a norm of this leaf is taken.

    Raises:
      ValueError: if the leaf lacks one of them, or one is named twice.
    """
    axis = check_axis(axis)
    if axis is None:
        return None
    axes = (axis,) if isinstance(axis, int) else axis
    front = tuple(a % leaf.ndim for a in axes if -leaf.ndim <= a < leaf.ndim)
    if len(set(front)) != len(axes):
        raise ValueError(
            f"axis: got {axis!r} for {path or 'the leaf'} of shape {leaf.shape}, expected distinct "
            f"axes below {leaf.ndim}"
        )
    return front


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"axis: {pattern!r} is no regular expression: {error}") from None
    return pattern
