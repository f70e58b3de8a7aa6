"""Batches of examples: their size, on which devices they are, and sums over microbatches."""

import contextlib
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._arrays import (
    AxisName,
    check_tree,
    is_array,
    leaves_with_keys,
    path_string,
    whole_along,
)
from clipgrad._compat import to_varying, varying_axes
from clipgrad._sharding import explicit_sharding
from clipgrad._training import microbatches, scan_sums


def check_microbatch(microbatch: Any) -> None:
    whole = isinstance(microbatch, numbers.Integral) and not isinstance(microbatch, bool)
    if microbatch is not None and not (whole and int(microbatch) >= 1):
        raise ValueError(f"microbatch: got {microbatch!r}, expected a positive integer or None")


def check_divides(microbatch: int | None, size: int) -> None:
    if size % (microbatch or size):
        raise ValueError(f"microbatch: got {microbatch}, expected a divisor of the {size} examples")


def accumulate_over_microbatches(
    of_some: Callable[..., tuple[Any, Any]],
    zeros: Any,
    params: Any,
    batches: tuple[Any, ...],
    count: int,
) -> tuple[Any, Any]:
    """Runs ``of_some`` on each microbatch; adds its first result, concatenates its second."""
    if count == 1:
        return of_some(params, *batches)
    part = microbatches(batches, count)
    run = lambda _, i: (*of_some(params, *part(i)), None)  # noqa: E731
    (total, _), stacked = scan_sums(run, zeros, count)
    return total, jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), stacked)


def on_each_device(params: Any, batch: Any) -> Any:
    """The parameters as varying where the batch does.

    Otherwise `jax.grad` inside `jax.shard_map` adds up the gradients of one example from each
    device before they can be clipped.
    """
    axes = axes_of(batch)
    return jax.tree.map(lambda p: to_varying(p, axes), params) if axes else params


def allow_split_examples(batch: Any, axis_name: AxisName) -> contextlib.AbstractContextManager:
    """Inside, no warning of split parameters along axes that split the batch only.

    `ValueError` if a norm is over one of these: it would be of an example from each device.
    """
    axes = axes_of(batch)
    named = {axis_name} if isinstance(axis_name, str) else set(axis_name or ())
    if axes & named:
        raise ValueError(
            f"axis_name: got {axis_name!r} for a batch whose examples are spread over "
            f"{', '.join(map(repr, sorted(axes & named)))}, expected mapped axes that only the "
            "parameters are spread over: an example is whole on its device, so leave this out"
        )
    return whole_along(axes)


def axes_of(batch: Any) -> frozenset[str]:
    """The mapped axes that a batch varies over."""
    return frozenset().union(*map(varying_axes, jax.tree.leaves(batch)))


def batch_size(batch: Any) -> int:
    """The size of the leading axis that all leaves of a batch share."""
    check_tree("batch", batch)
    entries = leaves_with_keys(batch)
    shapes = {path_string(path) or "the batch": jnp.shape(leaf) for path, leaf in entries}
    sizes = {shape[:1] for shape in shapes.values()}
    if len(sizes) != 1 or sizes <= {(), (0,)}:
        raise ValueError(
            f"batch: got leaves of the shapes {shapes}, expected the same leading axis of 1 or "
            "more in all of them, with one example for each index; write (params, batch), in this "
            "order"
        )
    return sizes.pop()[0]


def check_axes(tree: Any) -> None:
    """Refuses arrays whose types name the mesh axes that they are sharded over."""
    shardings = [explicit_sharding(x) for x in jax.tree.leaves(tree) if is_array(x)]
    axes = {name for s in shardings if s is not None for name in _axis_names(s)}
    if axes:
        raise ValueError(
            f"batch: got arrays on the Explicit mesh axes {', '.join(map(repr, sorted(axes)))}, "
            "expected Auto ones; write jax.make_mesh(shape, names, axis_types="
            "(jax.sharding.AxisType.Auto,) * len(names)), and put parameters and batch on it"
        )


def _axis_names(sharding: Any) -> list[str]:
    parts = [part if isinstance(part, tuple) else (part,) for part in sharding.spec]
    return [name for part in parts for name in part if name is not None]
