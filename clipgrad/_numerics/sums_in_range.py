"""The forms of a sum of squares that stays in range: by a branch, together, in a stack, and apart.

On one device each sum may be a pass over the data, so that a branch adds up again only where the
plain sum is out of range. On one GPU what is added up of a whole array is one reduction of several
operands, which reads it once; several GPUs would gather for it. Elsewhere, as on a TPU, sums that
are apart share one read; a GPU's compiler joins them only where they read no result of a matrix
product.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._compat import (
    by_platform,
    explicit_sharding,
    is_local,
    on_one_device,
    to_varying,
    varying_axes,
)
from clipgrad._numerics.calls import at_once, for_each, in_one, kinds_of, parted
from clipgrad._numerics.numbers import flags_of_bits, real_or_absolute, with_real_dtype
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
from clipgrad._numerics.reductions import Arrays, Groups, reduced_together


@functools.partial(jax.jit, static_argnums=0)
def sums_in_range(
    groups: Groups, plain: list[jax.Array], leaves: Arrays
) -> list[tuple[jax.Array, jax.Array]]:
    """For each group the sum of squares that is in range, and the scale of its elements."""
    if all(leaf.dtype == jnp.float16 for leaf in leaves):  # whose squares float32 holds
        return [(total, jnp.ones_like(total)) for total in plain]
    forms = (_by_branch, _on_gpu, _apart_by_leaf)
    cpu, gpu, default = (functools.partial(form, groups) for form in forms)
    return by_platform(plain, leaves, cpu=cpu, gpu=gpu, default=default)


def _on_gpu(groups: Groups, plain: list[jax.Array], leaves: Arrays) -> list[Any]:
    by_rows = groups.by_rows(leaves)
    if groups.joint and all(map(is_local, leaves)):
        return _joint_together(groups, plain, leaves)
    if not groups.joint and on_one_device(leaves) and (len(leaves) > 1 or not by_rows):
        return _by_branch(groups, plain, leaves, join=True)
    form = _apart_by_leaf if by_rows else _in_stack
    return form(groups, plain, leaves)


def _by_branch(groups: Groups, plain: list[jax.Array], leaves: Arrays, join: bool = False) -> Any:
    """The plain sums, and only if one of them is out of range another pass over the leaves.

    A sum in range stays as it is then, too: in the branch XLA would add up in another order. With
    ``join`` the sums of a kind are one array, of which a GPU copies fewer. Apart, XLA compiles the
    kernels of equal leaves once.
    """
    kinds = kinds_of([(x,) for x in plain]) if join else [[i] for i in range(len(plain))]
    ordinary = [in_one([plain[i] for i in places]) for places in kinds]
    flags = [jnp.all(is_in_range(x)) for x in joined_leaves(plain)]
    in_range = functools.reduce(jnp.logical_and, flags)

    def with_scales(totals: list[jax.Array]) -> list[Any]:
        return list(zip(totals, map(scale_of_plain, ordinary), strict=True))

    def again() -> list[jax.Array]:
        parts = joined_leaves(leaves) if groups.joint else leaves
        squares = groups.sums_of(scaled_square, parts, groups.per_leaf(plain, parts))
        found = list(map(unless_plain, plain, groups.totals(squares, parts)))
        return [in_one([found[i] for i in places]) for places in kinds]

    with jax.named_scope("out_of_range"):
        if groups.joint:  # the loop of each leaf would compute the scale, if the branch did not
            known = [(x, jnp.ones_like(x)) for x in ordinary]
            return jax.lax.cond(in_range, lambda: known, lambda: with_scales(again()))
        # A branch with half as many results compiles faster.
        found = with_scales(jax.lax.cond(in_range, lambda: ordinary, again))
    results: dict[int, Any] = {}
    for places, pair in zip(kinds, found, strict=True):
        parts = (parted(x, [plain[i].shape for i in places]) for x in pair)
        results |= zip(places, zip(*parts, strict=True), strict=True)
    return [results[i] for i in range(len(plain))]


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
    return list(map(in_one, kinds.values()))


def _apart_by_leaf(groups: Groups, plain: list[jax.Array], leaves: Arrays) -> list[Any]:
    """Three sums, of which one is known, and the choice of the one that is in range."""
    pairs = groups.sums_of(scaled_squares, leaves, written_out=True)
    down, up = (groups.totals(sums, leaves) for sums in zip(*pairs, strict=True))
    return at_once(in_range, down, plain, up)


def _in_stack(groups: Groups, plain: list[jax.Array], leaves: Arrays) -> list[Any]:
    """The three sums in one reduction of a stack, whose leaves several GPUs do not gather.

    It reads a leaf three times; apart, the sums of small leaves are three kernels and take longer.
    """
    del plain
    totals = groups.totals(groups.sums_of(stacked_squares, leaves), leaves)
    return at_once(in_range, *zip(*totals, strict=True))


def _joint_together(groups: Groups, plain: list[jax.Array], leaves: Arrays) -> list[Any]:
    """The three sums of each leaf in one reduction, and the choice of the one in range."""
    del plain
    static = [(dtype,) for dtype in groups.dtypes(leaves)]
    rows = for_each(_squares_together, static, leaves)
    return at_once(in_range, *(groups.totals(sums, leaves) for sums in zip(*rows, strict=True)))


def _squares_together(dtype: str, leaf: jax.Array) -> list[jax.Array]:
    size = real_or_absolute(with_real_dtype(leaf, dtype))
    return reduced_together(three_squares(size), (), tuple(range(size.ndim)))[0]


def sums_and_nonfinite(leaves: list[jax.Array], dtype: str) -> tuple[jax.Array, jax.Array]:
    """The three sums of squares, and how many elements are NaN or inf."""
    sizes = [real_or_absolute(leaf).astype(dtype) for leaf in leaves]
    if not sizes:
        return jnp.zeros(3, dtype), jnp.zeros((), dtype)
    return by_platform(*sizes, cpu=_all_by_branch, gpu=_all_together, default=_all_apart)


def _all_by_branch(*sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The plain sum; all others follow from it where it is in range, as it almost always is.

    On a CPU each sum is a pass over the data, and a branch that is not taken costs nothing.
    """
    plain = functools.reduce(jnp.add, [jnp.sum(jnp.square(x)) for x in sizes])
    none = to_varying(jnp.zeros((), plain.dtype), varying_axes(plain))

    def known() -> tuple[jax.Array, jax.Array]:
        return jnp.stack(from_plain(plain)), none

    return jax.lax.cond(is_in_range(plain), known, lambda: _all_apart(*sizes))


def _all_together(*sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All sums of a leaf in one reduction, where that is on one device."""
    if not all(map(is_local, sizes)):
        return _all_apart(*sizes)
    return _totals_of_leaves(
        [reduced_together(_summands(x), (), tuple(range(x.ndim)))[0] for x in sizes]
    )


def _all_apart(*sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums apart, which share one read on a TPU; a stack would be stored there."""
    return _totals_of_leaves([[jnp.sum(term) for term in _summands(x)] for x in sizes])


def _summands(size: jax.Array) -> list[jax.Array]:
    """The terms of sums of real numbers: squares in three ranges, and 1 if not finite."""
    return [*three_squares(size), flags_of_bits(size)[0]]


def _totals_of_leaves(sums: list[list[jax.Array]]) -> tuple[jax.Array, jax.Array]:
    *squares, nonfinite = (functools.reduce(jnp.add, each) for each in zip(*sums, strict=True))
    return stacked_sums(*squares), nonfinite
