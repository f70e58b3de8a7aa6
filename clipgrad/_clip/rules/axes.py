"""Units: the axes of a leaf that a norm is over."""

from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp

from clipgrad._arrays import Axes, is_clippable, with_paths

ReducedAxes = int | tuple[int, ...] | None
UnitAxis = ReducedAxes | Callable[[str, Any], ReducedAxes]


def check_axis(name: str, axis: Any) -> ReducedAxes:
    """``axis`` with a list made a tuple; `TypeError` for what is not an axis."""
    if axis is None or (isinstance(axis, int) and not isinstance(axis, bool)):
        return axis
    if isinstance(axis, (tuple, list)) and all(isinstance(a, int) for a in axis):
        return tuple(axis)
    raise TypeError(
        f"{name}: got {axis!r} of type {type(axis).__name__}, expected an int, a tuple of them or "
        "None; for optax.inject_hyperparams name it in static_args"
    )


def check_unit_axis(name: str, axis: Any) -> UnitAxis:
    """``axis``, if it is axes or a function from a path and a leaf to these."""
    return cast(UnitAxis, axis) if callable(axis) else check_axis(name, axis)


def unit_axes(axis: UnitAxis, tree: Any) -> list[Axes]:
    """For each leaf that is clipped the axes that a unit of it spans; ``None``: the whole leaf."""
    leaves = [(path, jnp.asarray(leaf)) for path, leaf in with_paths(tree) if is_clippable(leaf)]

    def axes(path: str, leaf: Any) -> ReducedAxes:
        """All but the last, the outputs of a kernel as JAX libraries lay it out, if none given."""
        if callable(axis):
            return axis(path, leaf)
        return axis if axis is not None else tuple(range(leaf.ndim - 1)) if leaf.ndim > 1 else None

    return [reduced_axes(axes(path, leaf), path, leaf) for path, leaf in leaves]


def reduced_axes(axis: ReducedAxes, path: str, leaf: Any) -> Axes:
    """The axes, counted from the front, over which a norm of this leaf is computed."""
    axis = check_axis("axis", axis)
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
