"""The three forms of a sum of squares that stays in range: by a branch, in a stack, and apart.

On one CPU device each sum is a pass over the data, so that a branch adds up again only where the
plain sum is out of range. On a GPU a stack of the three sums is one kernel. Elsewhere, as on a TPU,
a stack would be stored, and sums that are apart share one read.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._compat import by_platform, explicit_sharding, to_varying, varying_axes
from clipgrad._numerics.calls import for_each
from clipgrad._numerics.numbers import real_or_absolute
from clipgrad._numerics.ranges import (
    from_plain,
    in_range,
    is_in_range,
    scale_of_plain,
    scaled_square,
    scaled_squares,
    stacked_squares,
    stacked_sums,
    three_squares,
    unless_plain,
)
from clipgrad._numerics.reductions import Arrays, Groups


@functools.partial(jax.jit, static_argnums=0)
def sums_in_range(
    groups: Groups, plain: list[jax.Array], leaves: Arrays
) -> list[tuple[jax.Array, jax.Array]]:
    """For each group the sum of squares that is in range, and the scale of its elements."""
    if all(leaf.dtype == jnp.float16 for leaf in leaves):  # whose squares float32 holds
        return [(total, jnp.ones_like(total)) for total in plain]
    forms = (_by_branch, _in_stack, _apart_by_leaf)
    cpu, gpu, default = (functools.partial(form, groups) for form in forms)
    return by_platform(plain, leaves, cpu=cpu, gpu=gpu, default=default)


def _by_branch(groups: Groups, plain: list[jax.Array], leaves: Arrays) -> list[Any]:
    """The plain sums, and only if one of them is out of range another pass over the leaves.

    A sum in range stays as it is then, too: in the branch XLA would add up in another order.
    """

    def with_scales(totals: list[jax.Array]) -> list[Any]:
        return list(zip(totals, for_each(scale_of_plain, [()] * len(plain), plain), strict=True))

    in_range, again = _all_in_range(plain), functools.partial(_second_sums, groups, plain, leaves)
    if not groups.joint:  # a branch with half as many results compiles faster
        return with_scales(jax.lax.cond(in_range, lambda: plain, again))
    # The loop of each leaf would compute the scale again, if the branch did not.
    ordinary = [(total, jnp.ones_like(total)) for total in plain]
    return jax.lax.cond(in_range, lambda: ordinary, lambda: with_scales(again()))


def _second_sums(groups: Groups, plain: list[jax.Array], leaves: Arrays) -> list[jax.Array]:
    """For each group the plain sum, or the sum of scaled elements where it is out of range."""
    parts = joined_leaves(leaves) if groups.joint else list(leaves)
    given = groups.per_leaf(plain, parts)
    squares = groups.sums_of(scaled_square, parts, given)
    sums = groups.totals(squares, parts)
    return for_each(unless_plain, [()] * len(plain), plain, sums)


# Leaves of up to 2 ** 14 elements are joined before they are added up again, since XLA compiles one
# loop for all of them: up to 2 ** 20 elements, 4 MB in float32, which are temporaries.
_SMALL, _JOINED = 2**14, 2**20


def joined_leaves(leaves: Arrays) -> list[jax.Array]:
    """The elements in fewer arrays; those whose types are sharded stay apart."""
    kinds: dict[Any, list[jax.Array]] = {}
    total = 0
    for i, leaf in enumerate(leaves):
        apart = leaf.size > min(_SMALL, _JOINED - total) or explicit_sharding(leaf)
        kinds.setdefault(i if apart else (leaf.dtype, varying_axes(leaf)), []).append(leaf)
        total += 0 if apart else leaf.size
    return [_as_one(kind) for kind in kinds.values()]


def _as_one(leaves: Arrays) -> jax.Array:
    if len(leaves) == 1:
        return leaves[0]
    return jax.lax.concatenate([jax.lax.reshape(x, (x.size,)) for x in leaves], 0)


def _all_in_range(plain: list[jax.Array]) -> jax.Array:
    """Whether no plain sum is out of range; in one array, since XLA compiles a long formula slowly.

    Sums whose types are sharded stay apart.
    """
    joined = [jax.lax.reshape(x, (x.size,)) for x in plain if not explicit_sharding(x)]
    totals = [total for total in plain if explicit_sharding(total)]
    totals += [jax.lax.concatenate(joined, 0)] if joined else []
    flags = [jnp.all(is_in_range(total)) for total in totals]
    return functools.reduce(jnp.logical_and, flags)


def _apart_by_leaf(groups: Groups, plain: list[jax.Array], leaves: Arrays) -> list[Any]:
    """Three sums, of which one is known, and the choice of the one that is in range."""
    pairs = groups.sums_of(scaled_squares, leaves, written_out=True)
    down, up = (groups.totals(sums, leaves) for sums in zip(*pairs, strict=True))
    # Written out, as its sums are: of calls the TPU's compiler makes more kernels here.
    return for_each(in_range, [()] * len(plain), down, plain, up, written_out=True)


def _in_stack(groups: Groups, plain: list[jax.Array], leaves: Arrays) -> list[Any]:
    """The three sums in one reduction for each leaf: apart, they end in three kernels on a GPU.

    A reduction of three operands at once would do that, too, but gathers leaves that are sharded.
    """
    del plain
    rows = groups.sums_of(stacked_squares, leaves)
    return _in_range_of_rows(groups.totals(rows, leaves))


def _in_range_of_rows(totals: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    """The choice for each leaf, for those with one norm at once: each would be a kernel."""
    kinds: dict[Any, list[int]] = {}
    for i, total in enumerate(totals):
        kind = (total.dtype, varying_axes(total)) if total.size == 3 else i
        kinds.setdefault(kind, []).append(i)
    rows = [_side_by_side([totals[i] for i in places]) for places in kinds.values()]
    chosen: dict[int, tuple[jax.Array, jax.Array]] = {}
    every = for_each(_in_range_of, [()] * len(rows), rows)
    for places, both in zip(kinds.values(), every, strict=True):
        parts = [_columns(x, [totals[i].shape[1:] for i in places]) for x in both]
        chosen |= zip(places, zip(*parts, strict=True), strict=True)
    return [chosen[i] for i in range(len(totals))]


def _side_by_side(totals: list[jax.Array]) -> jax.Array:
    """The three sums of several norms as columns of one array; the sums of one leaf as they are."""
    if len(totals) == 1:
        return totals[0]
    return jax.lax.concatenate([jax.lax.reshape(x, (3, 1)) for x in totals], 1)


def _columns(found: jax.Array, shapes: list[tuple[int, ...]]) -> list[jax.Array]:
    """The result of each column, in its shape."""
    if len(shapes) == 1:
        return [found]
    parts = jax.lax.split(found, [1] * len(shapes))
    return [jax.lax.reshape(x, shape) for x, shape in zip(parts, shapes, strict=True)]


def _in_range_of(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    return in_range(rows[0], rows[1], rows[2])


def sums_and_nonfinite(leaves: list[jax.Array], dtype: str) -> tuple[jax.Array, jax.Array]:
    """The three sums of squares, and how many elements are NaN or inf."""
    sizes = [real_or_absolute(leaf).astype(dtype) for leaf in leaves]
    if not sizes:
        return jnp.zeros(3, dtype), jnp.zeros((), dtype)
    return by_platform(*sizes, cpu=_all_by_branch, gpu=_all_in_stack, default=_all_apart)


def _all_by_branch(*sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The plain sum; all others follow from it where it is in range, as it almost always is.

    On a CPU each sum is a pass over the data, and a branch that is not taken costs nothing.
    """
    plain = functools.reduce(jnp.add, [jnp.sum(jnp.square(x)) for x in sizes])
    none = to_varying(jnp.zeros((), plain.dtype), varying_axes(plain))

    def known() -> tuple[jax.Array, jax.Array]:
        return jnp.stack(from_plain(plain)), none

    return jax.lax.cond(is_in_range(plain), known, lambda: _all_in_stack(*sizes))


def _all_in_stack(*sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All in one reduction for each leaf, which is one kernel on a GPU."""
    sums = [jnp.sum(jnp.stack(parts_of_sums(x)), range(1, x.ndim + 1)) for x in sizes]
    return _with_nonfinite(functools.reduce(jnp.add, sums))


def _all_apart(*sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums apart, which share one read on a TPU; a stack would be stored there."""
    totals = [[jnp.sum(part) for part in parts_of_sums(x)] for x in sizes]
    return _with_nonfinite([functools.reduce(jnp.add, each) for each in zip(*totals, strict=True)])


def parts_of_sums(size: jax.Array) -> list[jax.Array]:
    """The terms that are added up of real numbers: squares in three ranges, and 1 if not finite."""
    return [*three_squares(size), (~jnp.isfinite(size)).astype(size.dtype)]


def _with_nonfinite(totals: Any) -> tuple[jax.Array, jax.Array]:
    down, plain, up, nonfinite = totals
    return stacked_sums(down, plain, up), nonfinite
