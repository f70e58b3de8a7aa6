"""Sums of squares that stay in range: on a CPU by a branch, on a GPU together, elsewhere apart.

On one CPU device each sum is a pass over the data, so that a branch adds up again only where the
plain sum is out of range. Where a leaf is on one device a GPU takes the three sums in one
reduction, which reads the leaf once; of a leaf that is spread XLA would gather the whole. There,
and on a TPU, three sums that stand apart share one read.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._arrays.by_leaf import Joined, for_each
from clipgrad._arrays.numbers import (
    flags_of_bits,
    if_else,
    in_one_program,
    nan_unless,
    real_or_absolute,
    square,
)
from clipgrad._arrays.ranges import (
    from_plain,
    in_range,
    is_in_range,
    scale_of_plain,
    scaled_square,
    scaled_squares,
    stacked_sums,
    three_squares,
    unless_plain,
)
from clipgrad._arrays.reductions import Arrays, Groups, reduced_together
from clipgrad._compat import to_varying, varying_axes
from clipgrad._devices import by_platform
from clipgrad._sharding import explicit_sharding, is_local, on_one_device

# For each group the root of a sum of squares, the scale of its elements, and a divisor: the root
# that is NaN where it is not finite, and small where it is 0.
Roots = list[tuple[jax.Array, jax.Array, jax.Array]]


def roots_in_range(groups: Groups, counts: tuple[float, ...], leaves: Arrays) -> Roots:
    """The root of the sum of squares in range of each group, divided by its count."""
    return in_one_program(_roots_in_range, 0, 1)(groups, counts, leaves)


def _roots_in_range(groups: Groups, counts: tuple[float, ...], leaves: Arrays) -> Roots:
    # Eagerly one operation after the other, so that results round as optax's do.
    plain = groups.totals(groups.sums_of(_plain_sum, leaves), leaves)
    return _rescued(groups, counts, plain, leaves)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _rescued(
    groups: Groups, counts: tuple[float, ...], plain: list[jax.Array], leaves: Arrays
) -> Roots:
    apart, joined = Joined.of(plain, apart=True), Joined.of(plain)
    forms = (_by_branch, apart), (_on_gpu(groups, leaves), joined), (_in_three_sums, joined)
    if all(leaf.dtype == jnp.float16 for leaf in leaves):  # whose squares float32 holds
        forms = (_as_they_are, apart), (_as_they_are, joined), (_as_they_are, joined)

    def rooted(form: Callable[..., Any], joined: Joined) -> Callable[..., Roots]:
        def roots(plain: list[jax.Array], leaves: Arrays) -> Roots:
            rows, sums, scales = form(groups, joined, plain, leaves)
            each = [jnp.full(x.shape, n, x.dtype) for x, n in zip(plain, counts, strict=True)]
            found = for_each(_root, [()] * len(sums), sums, scales, rows.join(each))
            return list(zip(*map(rows.part, zip(*found, strict=True)), strict=True))

        return roots

    cpu, gpu, default = (rooted(*form) for form in forms)
    return by_platform(plain, leaves, cpu=cpu, gpu=gpu, default=default)


def _root(total: jax.Array, scale: jax.Array, count: jax.Array) -> Any:
    total = total / count
    finite = nan_unless(jnp.isfinite(total), total)
    return jnp.sqrt(total), scale, jnp.sqrt(if_else(total == 0, nothing(total), finite))


def nothing(total: jax.Array) -> float:
    """A small sum of squares to divide by the root of, instead of 0.

    A second derivative divides by the third power of that root, which must not be 0.
    """
    return 2.0 ** (jnp.finfo(total.dtype).minexp // 2 - 1)


# Each form gives sums and their scales, and how they are joined.


def _on_gpu(groups: Groups, leaves: Arrays) -> Callable[..., Any]:
    """The form for a GPU, which has no kernel for several sums over leading axes."""
    if not all(map(is_local, leaves)):
        return _in_three_sums
    whole = groups.joint or all(axes is None for axes in groups.axes or ())
    return _in_one_reduction if whole else _by_branch if on_one_device(leaves) else _in_three_sums


def _as_they_are(groups: Groups, joined: Joined, plain: list[jax.Array], leaves: Arrays) -> Any:
    del groups, leaves
    sums = joined.join(plain)
    return joined, sums, list(map(jnp.ones_like, sums))


def _by_branch(groups: Groups, joined: Joined, plain: list[jax.Array], leaves: Arrays) -> Any:
    """The plain sums, and only if one of them is out of range another pass over the leaves.

    A sum in range stays as it is then, too: in the branch XLA would add up in another order. They
    are joined in the branch, of which a GPU copies each result, and not behind it: XLA compiles
    what is computed of many parts of one array slowly.
    """
    sums = joined.join(plain)
    flags = [jnp.all(is_in_range(x)) for x in joined_leaves(sums)]

    def again() -> list[jax.Array]:
        parts = joined_leaves(leaves) if groups.joint else leaves
        squares = groups.sums_of(_scaled_sum, parts, groups.per_leaf(plain, parts))
        return joined.join(list(map(unless_plain, plain, groups.totals(squares, parts))))

    with jax.named_scope("out_of_range"):
        totals = jax.lax.cond(functools.reduce(jnp.logical_and, flags), lambda: sums, again)
    apart = Joined.of(plain, apart=True)
    return apart, joined.part(totals), list(map(scale_of_plain, plain))


def _in_one_reduction(
    groups: Groups, joined: Joined, plain: list[jax.Array], leaves: Arrays
) -> Any:
    """The three sums of each leaf in one reduction, and the choice of the one in range."""
    del plain
    rows = groups.sums_of(_three_together, leaves)
    return _chosen(joined, *(groups.totals(sums, leaves) for sums in zip(*rows, strict=True)))


def _in_three_sums(groups: Groups, joined: Joined, plain: list[jax.Array], leaves: Arrays) -> Any:
    """Three sums, of which one is known, and the choice of the one in range."""
    rows = groups.sums_of(_scaled_apart, leaves)
    down, up = (groups.totals(sums, leaves) for sums in zip(*rows, strict=True))
    return _chosen(joined, down, plain, up)


def _chosen(joined: Joined, *sums: list[jax.Array]) -> Any:
    totals, scales = zip(*map(in_range, *map(joined.join, sums)), strict=True)
    return joined, totals, scales


def _plain_sum(axes: tuple[int, ...], keep: bool, leaf: jax.Array) -> jax.Array:
    return jnp.sum(square(leaf), axis=axes, keepdims=keep)


def _scaled_sum(axes: tuple[int, ...], keep: bool, leaf: jax.Array, plain: jax.Array) -> jax.Array:
    return jnp.sum(scaled_square(leaf, plain), axis=axes, keepdims=keep)


def _scaled_apart(axes: tuple[int, ...], keep: bool, leaf: jax.Array) -> list[jax.Array]:
    return [jnp.sum(x, axis=axes, keepdims=keep) for x in scaled_squares(leaf)]


def _three_together(axes: tuple[int, ...], keep: bool, leaf: jax.Array) -> list[jax.Array]:
    size = real_or_absolute(leaf)
    front = tuple(i % leaf.ndim for i in axes)
    sums, _ = reduced_together(three_squares(size), (), front)
    return [jnp.expand_dims(x, front) for x in sums] if keep else sums


# Leaves of up to 2 ** 14 elements are joined before they are added up again, since XLA compiles one
# loop for all of them: up to 2 ** 20 elements, 4 MB in float32, which are temporaries.
_SMALL, _JOINED = 2**14, 2**20


def joined_leaves(leaves: Arrays) -> list[jax.Array]:
    """The elements in fewer arrays; those whose types are sharded stay apart."""
    kinds: list[Any] = []
    total = 0
    for i, leaf in enumerate(leaves):
        apart = leaf.size > min(_SMALL, _JOINED - total) or explicit_sharding(leaf)
        kinds.append(i if apart else (leaf.dtype, varying_axes(leaf)))
        total += 0 if apart else leaf.size
    return Joined.by(kinds, leaves, part_of=lambda number: number).join(leaves)


def sums_and_nonfinite(leaves: list[jax.Array], dtype: str) -> tuple[jax.Array, jax.Array]:
    """The three sums of squares, and how many elements are NaN or inf."""
    sizes = [real_or_absolute(leaf).astype(dtype) for leaf in leaves]
    if not sizes:
        return jnp.zeros(3, dtype), jnp.zeros((), dtype)
    gpu = all_together if all(map(is_local, sizes)) else all_apart
    return by_platform(*sizes, cpu=all_by_branch, gpu=gpu, default=all_apart)


def all_by_branch(*sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The plain sum; all others follow from it where it is in range, as it almost always is."""
    plain = functools.reduce(jnp.add, [jnp.sum(jnp.square(x)) for x in sizes])
    none = to_varying(jnp.zeros((), plain.dtype), varying_axes(plain))

    def known() -> tuple[jax.Array, jax.Array]:
        return jnp.stack(from_plain(plain)), none

    return jax.lax.cond(is_in_range(plain), known, lambda: all_apart(*sizes))


def all_together(*sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All sums of a leaf in one reduction."""
    axes = [tuple(range(x.ndim)) for x in sizes]
    pairs = zip(sizes, axes, strict=True)
    return _totals_of_leaves([reduced_together(_summands(x), (), each)[0] for x, each in pairs])


def all_apart(*sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums apart, which share one read on a TPU; a stack would be stored there."""
    return _totals_of_leaves([[jnp.sum(term) for term in _summands(x)] for x in sizes])


def _summands(size: jax.Array) -> list[jax.Array]:
    """The terms of sums of real numbers: squares in three ranges, and 1 if not finite."""
    return [*three_squares(size), flags_of_bits(size)[0]]


def _totals_of_leaves(sums: list[list[jax.Array]]) -> tuple[jax.Array, jax.Array]:
    *squares, nonfinite = (functools.reduce(jnp.add, each) for each in zip(*sums, strict=True))
    return stacked_sums(*squares), nonfinite
