"""The norms of many groups of leaves, or of slices of them along a first axis.

As in `sums_in_range`, a norm comes from the sum of squares that is in range. But a group has one
sum of several leaves, nothing is joined in arrays and taken apart again, and all leaves share one
branch for what is out of range. So a program with a hundred groups takes little longer to compile.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from clipgrad._arrays.norms import AxisName, mapped_names
from clipgrad._arrays.numbers import real_or_absolute, widest, with_real_dtype
from clipgrad._arrays.ranges import in_range, is_in_range, scaled_squares, three_squares
from clipgrad._arrays.reductions import Arrays, Axes, Groups, reduced_together
from clipgrad._devices import by_platform
from clipgrad._sharding import is_local, on_every_device

Members = Sequence[Sequence[int]]
Terms = Callable[[jax.Array], Sequence[jax.Array]]


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
    by_branch = functools.partial(_unless_out_of_range, **forms)
    gpu = together if all(map(is_local, fixed)) else apart
    return by_platform(*fixed, cpu=by_branch, gpu=gpu, default=apart)


def _unless_out_of_range(*leaves: jax.Array, groups: Groups, members: Members) -> list[jax.Array]:
    """The roots of plain sums, and only if one of them is out of range those of scaled ones."""
    rows = _sums_apart(lambda x: [jnp.square(x)], leaves, groups)
    (plain,) = _totals(rows, leaves, groups, members)
    flags = [jnp.all(is_in_range(total)) for total in plain]

    def again() -> list[jax.Array]:
        rows = _sums_apart(scaled_squares, leaves, groups)
        down, up = _totals(rows, leaves, groups, members)
        return list(map(_root_in_range, down, plain, up))

    with jax.named_scope("out_of_range"):
        is_plain = functools.reduce(jnp.logical_and, flags)
        return jax.lax.cond(is_plain, lambda: list(map(jnp.sqrt, plain)), again)


def _of_three_sums(
    summed: Callable[..., list[Arrays]], *leaves: jax.Array, groups: Groups, members: Members
) -> list[jax.Array]:
    """Three sums of each group, and the root of the one in range."""
    sums = _totals(summed(three_squares, leaves, groups), leaves, groups, members)
    return list(map(_root_in_range, *sums))


def _root_in_range(down: jax.Array, plain: jax.Array, up: jax.Array) -> jax.Array:
    total, scale = in_range(down, plain, up)
    return jnp.sqrt(total) / scale


def _sums_apart(terms: Terms, leaves: Arrays, groups: Groups) -> list[Arrays]:
    """For each leaf the sums of some terms, side by side."""
    assert groups.axes is not None
    pairs = zip(leaves, groups.axes, strict=True)
    return [[jnp.sum(term, axis) for term in terms(leaf)] for leaf, axis in pairs]


def _sums_together(terms: Terms, leaves: Arrays, groups: Groups) -> list[Arrays]:
    """For each leaf the sums of some terms in one reduction, which reads the leaf once."""
    assert groups.axes is not None
    pairs = zip(leaves, groups.axes, strict=True)
    return [reduced_together(terms(leaf), (), axis or ())[0] for leaf, axis in pairs]


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
