"""Units: the axes of a leaf that a norm is over."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax.numpy as jnp

from clipgrad._numerics import Axes
from clipgrad._trees import is_clippable, nearest, selects, with_paths

ReducedAxes = int | tuple[int, ...] | None
# A mapping is stored as its items, since a rule's static fields must be hashable.
UnitAxis = ReducedAxes | Callable[[str, Any], ReducedAxes] | tuple[tuple[str, ReducedAxes], ...]


def check_axis(axis: Any) -> ReducedAxes:
    """``axis`` with a list made a tuple; `TypeError` for what is not an axis."""
    if axis is None or (isinstance(axis, int) and not isinstance(axis, bool)):
        return axis
    if isinstance(axis, (tuple, list)) and all(isinstance(a, int) for a in axis):
        return tuple(axis)
    raise TypeError(
        f"axis: got {axis!r} of type {type(axis).__name__}, expected an int, a tuple of them or "
        "None; for optax.inject_hyperparams name it in static_args"
    )


def check_unit_axis(axis: Any) -> UnitAxis:
    """``axis`` in a hashable form: axes, a function, or pairs of expressions and axes."""
    if callable(axis):
        return cast(UnitAxis, axis)
    pairs = tuple(axis.items()) if isinstance(axis, Mapping) else axis
    if not is_mapping(pairs):
        return check_axis(None if isinstance(axis, Mapping) else axis)
    for expression, _ in pairs:
        if not isinstance(expression, str):
            raise TypeError(f"axis: got {expression!r} as a key, expected an expression on paths")
        selects(expression, (), "axis")
    return tuple((expression, check_axis(axes)) for expression, axes in pairs)


def is_mapping(axis: Any) -> bool:
    """Whether ``axis`` is the items of a mapping from expressions on paths."""
    return isinstance(axis, tuple) and bool(axis) and all(isinstance(a, tuple) for a in axis)


def unit_axes(axis: UnitAxis, tree: Any) -> list[Axes]:
    """For each leaf that is clipped the axes that a unit of it spans; ``None``: the whole leaf."""
    entries = with_paths(tree)
    axis_of = axis if callable(axis) else _by_path(axis, [path for path, _ in entries])
    arrays = [(path, jnp.asarray(leaf)) for path, leaf in entries if is_clippable(leaf)]
    return [reduced_axes(axis_of(path, leaf), path, leaf) for path, leaf in arrays]


def _by_path(axis: UnitAxis, paths: list[str]) -> Callable[[str, Any], ReducedAxes]:
    """A function from a path and a leaf to the axes of its units."""
    given: dict[str, Any] = dict.fromkeys(paths, axis) if isinstance(axis, (int, tuple)) else {}
    if is_mapping(axis):
        given = {}
        for expression, axes in reversed(axis):  # type: ignore
            flags = selects(expression, paths, "axis")
            if not any(flags):
                raise ValueError(
                    f"axis: got {expression!r}, expected an expression that selects a leaf; "
                    f"{nearest(expression, paths)}"
                )
            given |= {path: axes for path, flag in zip(paths, flags, strict=True) if flag}

    def axes(path: str, leaf: Any) -> ReducedAxes:
        """All but the last, the outputs of a kernel as JAX libraries lay it out, if none given."""
        return given.get(path, tuple(range(leaf.ndim - 1)) if leaf.ndim >= 2 else None)

    return axes


def reduced_axes(axis: ReducedAxes, path: str, leaf: Any) -> Axes:
    """The axes, counted from the front, over which a norm of this leaf is computed."""
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
