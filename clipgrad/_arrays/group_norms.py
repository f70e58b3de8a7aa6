"""The norms of many groups of leaves, or of slices of them along a first axis.

As in `sums_in_range`, a norm comes from a sum of squares that is in range. But a group has one sum
of several leaves, and nothing is joined in arrays and taken apart again. One CPU adds up in
float64, in whose range all squares of float32 are: a hundred groups compile like plain sums.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from clipgrad._arrays.norms import AxisName, mapped_names
from clipgrad._arrays.numbers import real_or_absolute, widest, with_real_dtype
from clipgrad._arrays.ranges import in_range, three_squares
from clipgrad._arrays.reductions import Arrays, Axes, Groups, reduced_together
from clipgrad._devices import by_platform
from clipgrad._sharding import is_local, on_every_device

Members = Sequence[Sequence[int]]
Sums = Callable[[jax.Array, tuple[int, ...]], Arrays]


def group_norms(
    leaves: Sequence[jax.Array],
    axes: Sequence[Axes],
    members: Members,
    axis_name: AxisName = None,
) -> list[jax.Array]:
    """For each group the norms of its members, the leaves at these places, over their axes.

    ``axes`` has the axes of each leaf, ``None``: all. The leaves of a group keep the same others.
    Norms are constants to differentiation, in the widest dtype that a norm of a leaf has.
    """
    if not leaves:
        return []
    dtype = widest(leaves)
    fixed = [real_or_absolute(with_real_dtype(jax.lax.stop_gradient(x), dtype)) for x in leaves]
    pairs = zip(axes, fixed, strict=True)
    over = tuple(tuple(range(x.ndim)) if each is None else each for each, x in pairs)
    groups = Groups(over, mapped_names(axis_name))
    forms = {"groups": groups, "members": members}
    apart = functools.partial(_of_three_sums, _sums_apart, **forms)
    together = functools.partial(_of_three_sums, _sums_together, **forms)
    wide = functools.partial(_of_wide_sums, **forms)
    gpu = together if all(map(is_local, fixed)) else apart
    return by_platform(*fixed, cpu=wide if dtype == "float32" else apart, gpu=gpu, default=apart)


def _of_wide_sums(*leaves: jax.Array, groups: Groups, members: Members) -> list[jax.Array]:
    """The roots of sums in float64, in whose range are the squares of all float32 numbers."""
    with jax.enable_x64(True):
        rows = _of_each(_wide_sum, leaves, groups)
        (totals,) = _totals(rows, leaves, groups, members)
        return [jnp.sqrt(total).astype(jnp.float32) for total in totals]


def _of_three_sums(
    summed: Sums, *leaves: jax.Array, groups: Groups, members: Members
) -> list[jax.Array]:
    """Three sums of each group, and the root of the one in range."""
    sums = _totals(_of_each(summed, leaves, groups), leaves, groups, members)
    return list(map(_root_in_range, *sums))


def _root_in_range(down: jax.Array, plain: jax.Array, up: jax.Array) -> jax.Array:
    total, scale = in_range(down, plain, up)
    return jnp.sqrt(total) / scale


def _of_each(sums: Sums, leaves: Arrays, groups: Groups) -> list[Arrays]:
    """For each leaf its sums over its axes."""
    assert groups.axes is not None
    return [sums(x, axes or ()) for x, axes in zip(leaves, groups.axes, strict=True)]


# What is done for each leaf is traced once for all leaves of a shape and dtype.
_traced_once = functools.partial(jax.jit, static_argnums=1, inline=True)


@_traced_once
def _wide_sum(leaf: jax.Array, axes: tuple[int, ...]) -> Arrays:
    return [jnp.sum(jnp.square(leaf.astype(jnp.float64)), axes)]


@_traced_once
def _sums_apart(leaf: jax.Array, axes: tuple[int, ...]) -> Arrays:
    """Three sums side by side."""
    return [jnp.sum(term, axes) for term in three_squares(leaf)]


@_traced_once
def _sums_together(leaf: jax.Array, axes: tuple[int, ...]) -> Arrays:
    """Three sums in one reduction, which reads the leaf once."""
    return reduced_together(three_squares(leaf), (), axes)[0]


def _totals(
    rows: list[Arrays], leaves: Arrays, groups: Groups, members: Members
) -> list[list[jax.Array]]:
    """For each term the sums of the groups, from those of the leaves on this device."""
    columns = [groups.totals(column, leaves) for column in zip(*rows, strict=True)]
    found = []
    for column in columns:
        parts = [on_every_device(x) for x in column]
        found.append([functools.reduce(jnp.add, [parts[i] for i in each]) for each in members])
    return found
