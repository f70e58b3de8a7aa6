r"""Norms that neither overflow, nor underflow, nor lose low precision.

A norm is ``root / scale``. In the ordinary case the scale is 1 and the root is what
``sqrt(sum(g ** 2))`` gives, bit by bit. Where that sum leaves its range, the squares of elements
times a power of two are summed. On one CPU device a branch does so only then. On accelerators, and
where a branch would double the collectives in the program, they are summed always, of leaves scaled
down and up, and one of the three sums is chosen: no wait for the host, and one all-reduce.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from clipgrad._compat import by_platform, explicit_sharding, varying_axes
from clipgrad._numerics.calls import for_each
from clipgrad._numerics.numbers import (
    accumulator,
    if_else,
    over,
    real_or_absolute,
    real_product,
    times,
    with_real_dtype,
)
from clipgrad._numerics.reductions import Arrays, Axes, Groups
from clipgrad._trees import clippable_leaves

AxisName = str | Sequence[str] | None


class _Range(NamedTuple):
    """Exponents of two: what norms a plain sum of squares is right for, and two scales.

    Norms from 2 ** low to 2 ** high are read off the plain sum: elements that matter for them have
    squares in range. Larger norms are read off the sum of elements times 2 ** down, with room for
    2 ** 50 of the largest; smaller ones off that of elements times 2 ** up, whose smallest have
    squares in range.
    """

    low: int
    high: int
    down: int
    up: int


_RANGES = {"float32": _Range(-30, 50, -90, 73), "float64": _Range(-450, 450, -550, 600)}


# What is done for each leaf is traced once for all leaves of a shape and dtype.
_traced_once = functools.partial(jax.jit, inline=True)


def _bounded_product(size: jax.Array, scale: jax.Array) -> jax.Array:
    """A product to be squared: of that alone XLA would make ``(x * x) * (c * c)``.

    Both factors would be out of range. It does so where the scale is a constant.
    """
    return jnp.maximum(size * scale, jnp.finfo(size.dtype).min)


@_traced_once
def scaled_squares(size: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Squares of real numbers scaled down, and scaled up, which stop where they are not used.

    The bounds change no sum that is used. They are on one side only: two make a clamp, for which
    XLA's CPU loops take another buffer.
    """
    rule = _RANGES[size.dtype.name]
    down = _bounded_product(size, jnp.array(2.0**rule.down, size.dtype))
    largest = 2.0 ** (rule.low + rule.up)
    up = jnp.minimum(size * jnp.array(2.0**rule.up, size.dtype), largest)
    return jnp.square(down), jnp.minimum(jnp.square(up), largest**2)


@_traced_once
def stacked_squares(size: jax.Array) -> jax.Array:
    """Squares of real numbers scaled down, as they are, and scaled up, along a first axis.

    Those scaled up may be inf where they are not used. No bound is needed: XLA moves no factor
    out of a square of several operands, and a bound would cost a buffer of the leaf's size.
    """
    rule = _RANGES[size.dtype.name]
    down, up = (jnp.array(2.0**n, size.dtype) for n in (rule.down, rule.up))
    return jnp.square(jnp.stack([size * down, size, size * up]))


@_traced_once
def bounded_square(size: jax.Array) -> jax.Array:
    """The plain square, which stops at a large number where it is not used."""
    rule = _RANGES[size.dtype.name]
    # One number, but as an array: in a minimum with a number XLA's CPU loops lose NaN, for a select
    # they take a buffer, and so they do for a factor that is used twice.
    limit = size * jnp.array(2.0 ** (rule.down - 1), size.dtype)
    return jnp.minimum(jnp.square(size), jnp.maximum(limit, 2.0 ** (2 * rule.high)))


@_traced_once
def in_range(down: jax.Array, plain: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of three sums of squares the one that is in range, and the scale of its elements."""
    rule = _RANGES[plain.dtype.name]
    is_large = (down > 2.0 ** (2 * (rule.high + rule.down))) & ~jnp.isnan(plain)
    is_small = (plain < 2.0 ** (2 * rule.low)) & (up > 0)
    total = if_else(is_large, down, if_else(is_small, up, plain))
    return total, _range_scale(is_large, is_small, plain)


def is_in_range(plain: jax.Array) -> jax.Array:
    """Whether a plain sum of squares can be read; not if it is NaN."""
    rule = _RANGES[plain.dtype.name]
    return (plain >= 2.0 ** (2 * rule.low)) & (plain <= 2.0 ** (2 * rule.high))


@_traced_once
def from_plain(plain: jax.Array) -> tuple[jax.Array, ...]:
    """All three sums of squares, from a plain one that is in range."""
    rule = _RANGES[plain.dtype.name]
    high, down = 2.0 ** (2 * rule.high), 2.0**rule.down
    # A bound between two factors, of which XLA would make one that is out of range.
    return jnp.minimum(plain * down, high * down) * down, plain, jnp.zeros_like(plain)


@_traced_once
def if_needed(up: jax.Array, plain: jax.Array) -> jax.Array:
    """A sum of squares scaled up, 0 where the plain sum is large enough to be read.

    So it is after sums have been added up: where their total is too small, each of them is.
    """
    return if_else(plain < 2.0 ** (2 * _RANGES[plain.dtype.name].low), up, 0)


def _chosen_scale(is_large: jax.Array, is_small: jax.Array, like: jax.Array) -> jax.Array:
    """The power of two that brings elements into the middle of the range."""
    rule, one = _RANGES[like.dtype.name], jnp.ones_like(like)
    return if_else(is_large, 2.0**rule.down, if_else(is_small, 2.0**rule.up, one))


def _range_scale(is_large: jax.Array, is_small: jax.Array, like: jax.Array) -> jax.Array:
    """The scale as a quotient: XLA computes it once.

    It would compute a choice, with all the sums that it depends on, in the loop of each leaf.
    """
    rule, one = _RANGES[like.dtype.name], jnp.ones_like(like)
    inverse = if_else(is_large, 2.0**-rule.down, if_else(is_small, 2.0**-rule.up, one))
    return 1 / inverse


class Norm(NamedTuple):
    """A norm as the quotient of a ``root`` in the middle of the range and a ``scale``.

    Attributes:
      root: not finite where an element is not.
      scale: a power of two, 1 in the ordinary range.
      divisor: the root to compare with and to divide by: NaN where it is not finite, small where
        it is 0. As in optax it is a square root, not a choice of two, and all that a clip uses:
        XLA rounds quotients of anything else otherwise.
    """

    root: jax.Array
    scale: jax.Array
    divisor: jax.Array

    @classmethod
    def of(cls, root: jax.Array, scale: jax.Array) -> "Norm":
        """The norm ``root / scale``."""
        divisor = if_else(root == 0, _nothing(root) ** 0.5, root)
        return cls(root, scale, if_else(jnp.isfinite(root), divisor, jnp.nan))

    @property
    def value(self) -> jax.Array:
        """The norm itself; inf where it is larger than its dtype can hold."""
        return self.root / self.scale

    def exceeds(self, limit: jax.Array) -> jax.Array:
        """Whether the norm is above the limit, or not finite."""
        return _exceeds(self.root, self.scale, limit)


# One program also when called eagerly: under jax_debug_infs the scaled limit may be inf in it.
@functools.partial(jax.jit, inline=True)
def _exceeds(root: jax.Array, scale: jax.Array, limit: jax.Array) -> jax.Array:
    return ~(jnp.isfinite(root) & (root <= limit * scale))


class _Kind(NamedTuple):
    """A kind of norm: its order, and whether of the mean instead of the sum (rms)."""

    ord: float
    mean: bool = False


def global_norm(tree: Any, ord: float = 2, axis_name: AxisName = None) -> jax.Array:
    r"""The norm of all leaves of a tree as one vector, $(\sum_i |g_i|^p)^{1/p}$.

    Guarantees:
      * Squares are summed in float32, in float64 if a leaf is float64, never in a narrower
        dtype, and the result has that dtype.
      * A finite tree whose squares over- or underflow still has the right norm.
      * On a float32 tree in the ordinary range it is bit-identical to ``optax.tree.norm``.
      * Its derivative is finite everywhere; at zero it is 0.
      * An empty tree has norm 0 for every ``ord``. ``None``, integer, boolean, ``float0`` and
        PRNG-key leaves are not counted; complex leaves count with their absolute values.
      * NaN anywhere gives NaN; otherwise inf anywhere gives inf.

    Args:
      tree: a pytree of gradients.
      ord: the order $p$, a number in (0, inf].
      axis_name: inside `jax.shard_map`, `jax.pmap` or ``jax.vmap(axis_name=...)``, the name or
        names of the mapped axes that the tree is spread over. Where `jax.shard_map` tracks what
        varies (its default), a leaf that is the same on all devices is counted once, if JAX knows
        it (a result of `jax.lax.all_gather` counts as one that varies); elsewhere
        (``check_vma=False``, `jax.pmap`, `jax.vmap`) every leaf counts as spread, a leaf that is
        the same once for each device. Without it, the norm is that of the part on each device,
        with a warning where `jax.shard_map` tracks that a leaf varies; ``()`` says that this is
        meant. Under `jax.jit` it is not needed.

    Returns:
      A scalar array, float32 or float64.

    Raises:
      ValueError: if ``ord`` is not in (0, inf], or ``axis_name`` is not a mapped axis here.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> cg.global_norm({"w": jnp.array([3.0]), "b": jnp.array([4.0], jnp.bfloat16)})
      Array(5., dtype=float32)
      >>> cg.global_norm(jnp.full(4, 300.0, jnp.float16))    # 4 * 300 ** 2 is inf in float16
      Array(600., dtype=float32)
    """
    warn_of_parts("global_norm", clippable_leaves(tree), axis_name)
    return tree_norm(tree, ord, axis_name).value


# The mapped axes along which each device has all that is measured.
_WHOLE_ALONG = jax.make_user_context(())


def whole_along(axes: Iterable[str]) -> contextlib.AbstractContextManager:
    """Inside, `warn_of_parts` does not warn of leaves that vary over these mapped axes."""
    return _WHOLE_ALONG(tuple(sorted(axes)))


def warn_of_parts(
    caller: str, leaves: Sequence[Any], axis_name: AxisName, slices: bool = False
) -> None:
    """Warns of leaves that vary over a mapped axis which nobody has named.

    Then each device has the norm of its own part. An empty ``axis_name`` says that this is meant.
    With ``slices``, any does: JAX tracks that a leaf varies, and not along which of its axes, so
    only the caller knows which mapped axes cut a slice.
    """
    if axis_name is not None and (slices or not axis_name):
        return
    named = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    unnamed = sorted(frozenset().union(*map(varying_axes, leaves)) - {*named, *_WHOLE_ALONG.value})
    if unnamed:
        every = (*named, *unnamed)
        axes = repr(every[0]) if len(every) == 1 else repr(every)
        warnings.warn(
            f"{caller}: got leaves that vary over {', '.join(map(repr, unnamed))}, a mapped axis "
            "that axis_name does not name, so that each device has the norm of its own part; "
            f"write axis_name={axes} for the norm of the whole, or axis_name=() if each device is "
            "meant to have its own",
            stacklevel=4,
        )


def tree_norm(tree: Any, ord: float = 2, axis_name: AxisName = None) -> Norm:
    """`global_norm` as a `Norm`, which can be larger than its dtype can hold."""
    kind, names = _Kind(check_order(ord)), _names(axis_name)
    leaves = clippable_leaves(tree)
    if not leaves:
        return Norm.of(jnp.float32(0), jnp.float32(1))
    return _group_norms(leaves, Groups(None, names), kind)[0]


def slice_norms(
    leaves: Sequence[Any],
    axes: Sequence[Axes],
    ord: float = 2,
    axis_name: AxisName = None,
    mean: bool = False,
) -> list[Norm]:
    """An array of norms for each leaf, reduced over its axes, which are kept with size 1.

    ``mean=True`` divides the sum by the number of its terms first: the root mean square.
    """
    kind, names = _Kind(check_order(ord), mean), _names(axis_name)
    return _group_norms(list(leaves), Groups(tuple(axes), names), kind) if leaves else []


def tree_size(tree: Any, axis_name: AxisName = None) -> jax.Array:
    """The number of elements of a tree that are clipped, in the dtype of its norm."""
    leaves = clippable_leaves(tree)
    if not axis_name:
        return jnp.array(float(sum(leaf.size for leaf in leaves)), widest(leaves))
    sizes = [jnp.array(float(leaf.size), widest(leaves)) for leaf in leaves]
    return total_over_devices(sizes, leaves, axis_name)


def total_over_devices(
    local: Sequence[jax.Array], leaves: Sequence[jax.Array], axis_name: AxisName = None
) -> jax.Array:
    """The sum of one number for each leaf, and over the devices on which the leaf differs."""
    groups = Groups(None, _names(axis_name))
    return groups.totals(local, leaves)[0] if leaves else jnp.zeros((), widest(leaves))


def widest(leaves: Sequence[Any]) -> str:
    """The dtype of a norm over all of these leaves."""
    return max([accumulator(leaf) for leaf in leaves], default="float32")


def check_order(ord: float) -> float:
    """The order of a norm, if it is one: a number in (0, inf]."""
    if isinstance(ord, (jax.Array, np.ndarray, np.generic)) and not isinstance(ord, Tracer):
        ord = ord.item()
    if isinstance(ord, bool) or not isinstance(ord, (int, float)) or not ord > 0:
        raise ValueError(
            f"ord: got {ord!r}, expected a number in (0, inf], not a tracer, such as 2 or jnp.inf; "
            "for optax.inject_hyperparams name it in static_args"
        )
    return int(ord) if ord < math.inf and ord == int(ord) else float(ord)


def _names(axis_name: AxisName) -> tuple[str, ...]:
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    for name in names:
        try:
            jax.lax.axis_index(name)
        except NameError:
            raise ValueError(
                f"axis_name: got {name!r}, which is not a mapped axis here; expected the name of "
                "an axis of an enclosing shard_map, pmap or vmap; under jit leave axis_name out"
            ) from None
    return names


def _group_norms(leaves: list[jax.Array], groups: Groups, kind: _Kind) -> list[Norm]:
    norms = _differentiable_norms(groups, kind, leaves)
    return [norm._replace(scale=jax.lax.stop_gradient(norm.scale)) for norm in norms]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _differentiable_norms(groups: Groups, kind: _Kind, leaves: list[jax.Array]) -> list[Norm]:
    if kind.ord != 2:
        return _norms_of_order(groups, kind.ord, leaves)
    # Eagerly one operation after the other, so that results round as optax's do.
    plain = groups.totals(groups.sums_of_squares(leaves, _wide_dtypes(groups, leaves)), leaves)
    counts = _counts(groups, kind.mean, leaves)
    totals, scales = zip(*_sums_in_range(groups, plain, leaves), strict=True)
    # Written out, or the TPU's compiler makes more kernels.
    return for_each(_root, [(count,) for count in counts], totals, scales, written_out=True)


@functools.partial(jax.jit, static_argnums=0)
def _sums_in_range(
    groups: Groups, plain: list[jax.Array], leaves: Arrays
) -> list[tuple[jax.Array, jax.Array]]:
    """For each group the sum of squares that is in range, and the scale of its elements."""
    if all(leaf.dtype == jnp.float16 for leaf in leaves):  # whose squares float32 holds
        return [(total, jnp.ones_like(total)) for total in plain]
    forms = (_rescued, _stacked_sums, _separate)
    cpu, gpu, default = (functools.partial(form, groups) for form in forms)
    return by_platform(plain, leaves, cpu=cpu, gpu=gpu, default=default)


def _rescued(groups: Groups, plain: list[jax.Array], leaves: Arrays) -> list[Any]:
    """The plain sums, and only if one of them is out of range another pass over the leaves.

    A sum in range stays as it is then, too: in the branch XLA would add up in another order.
    """

    def totals() -> list[jax.Array]:
        return _second_sums(groups, plain, leaves)

    def with_scales(totals: list[jax.Array]) -> list[Any]:
        return list(zip(totals, for_each(_scale_of_plain, [()] * len(plain), plain), strict=True))

    in_range = _all_in_range(plain)
    if not groups.joint:  # a branch with half as many results compiles faster
        return with_scales(jax.lax.cond(in_range, lambda: plain, totals))
    # The loop of each leaf would compute the scale again, if the branch did not.
    ordinary = [(total, jnp.ones_like(total)) for total in plain]
    return jax.lax.cond(in_range, lambda: ordinary, lambda: with_scales(totals()))


def _second_sums(groups: Groups, plain: list[jax.Array], leaves: Arrays) -> list[jax.Array]:
    """For each group the plain sum, or that of scaled elements where it is out of range."""
    parts = joined_leaves(leaves) if groups.joint else list(leaves)
    given = groups.per_leaf(plain, parts)
    squares = groups.sums_of(_scaled_square, parts, _wide_dtypes(groups, parts), given)
    sums = groups.totals(squares, parts)
    return for_each(_unless_plain, [()] * len(plain), plain, sums)


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


def _scale_of_plain(plain: jax.Array) -> jax.Array:
    return _chosen_scale(*_out_of_range(plain), plain)


def _unless_plain(plain: jax.Array, total: jax.Array) -> jax.Array:
    """A scaled sum; the plain one if that is in range or NaN, which a scaled sum may lose."""
    is_large, is_small = _out_of_range(plain)
    return if_else(is_large | is_small, total, plain)


def _out_of_range(plain: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether a plain sum is too large, and too small."""
    rule = _RANGES[plain.dtype.name]
    return plain > 2.0 ** (2 * rule.high), plain < 2.0 ** (2 * rule.low)


def _all_in_range(plain: list[jax.Array]) -> jax.Array:
    """Whether no plain sum is out of range; in one array, since XLA compiles a long formula slowly.

    Sums whose types are sharded stay apart.
    """
    joined = [jax.lax.reshape(x, (x.size,)) for x in plain if not explicit_sharding(x)]
    totals = [total for total in plain if explicit_sharding(total)]
    totals += [jax.lax.concatenate(joined, 0)] if joined else []
    flags = [jnp.all(is_in_range(total)) for total in totals]
    return functools.reduce(jnp.logical_and, flags)


def _separate(groups: Groups, plain: list[jax.Array], leaves: Arrays) -> list[Any]:
    """Three sums, of which one is known, and the choice of the one that is in range."""
    dtypes = _wide_dtypes(groups, leaves)
    pairs = groups.sums_of(_squares_apart, leaves, dtypes, written_out=True)
    down, up = (groups.totals(sums, leaves) for sums in zip(*pairs, strict=True))
    # Written out, as its sums are: of calls the TPU's compiler makes more kernels here.
    return for_each(in_range, [()] * len(plain), down, plain, up, written_out=True)


def _squares_apart(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
    return scaled_squares(real_or_absolute(leaf))


def _stacked_sums(groups: Groups, plain: list[jax.Array], leaves: Arrays) -> list[Any]:
    """The three sums in one reduction for each leaf: apart, they end in three kernels on a GPU.

    A reduction of three operands at once would do that, too, but gathers leaves that are sharded.
    """
    del plain
    rows = groups.sums_of(_squares_stacked, leaves, _wide_dtypes(groups, leaves))
    return _in_range_of_rows(groups.totals(rows, leaves))


def _squares_stacked(leaf: jax.Array) -> jax.Array:
    return stacked_squares(real_or_absolute(leaf))


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
        parts = [_apart(x, [totals[i].shape[1:] for i in places]) for x in both]
        chosen |= zip(places, zip(*parts, strict=True), strict=True)
    return [chosen[i] for i in range(len(totals))]


def _side_by_side(totals: list[jax.Array]) -> jax.Array:
    """The three sums of several norms as columns of one array; those of one leaf as they are."""
    if len(totals) == 1:
        return totals[0]
    return jax.lax.concatenate([jax.lax.reshape(x, (3, 1)) for x in totals], 1)


def _apart(found: jax.Array, shapes: list[tuple[int, ...]]) -> list[jax.Array]:
    """The result of each column, in its shape."""
    if len(shapes) == 1:
        return [found]
    parts = jax.lax.split(found, [1] * len(shapes))
    return [jax.lax.reshape(x, shape) for x, shape in zip(parts, shapes, strict=True)]


def _in_range_of(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    return in_range(rows[0], rows[1], rows[2])


def _scaled_square(leaf: jax.Array, plain: jax.Array) -> jax.Array:
    """The sum of these is used if the plain one is out of range: too large, or else too small."""
    rule = _RANGES[plain.dtype.name]
    scale = if_else(plain > 1, jnp.full_like(plain, 2.0**rule.down), 2.0**rule.up)
    return jnp.square(_bounded_product(real_or_absolute(leaf), scale))


def _counts(groups: Groups, mean: bool, leaves: Arrays) -> list[float]:
    """The divisor of the sums of squares."""
    return [float(max(n, 1)) if mean else 1.0 for n in groups.sizes_over_devices(leaves)]


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _root(count: float, total: jax.Array, scale: jax.Array) -> Norm:
    """The root of a sum of squares, or of their mean."""
    total = total if count == 1 else total / count
    finite = if_else(jnp.isfinite(total), total, jnp.nan)
    return Norm(jnp.sqrt(total), scale, jnp.sqrt(if_else(total == 0, _nothing(total), finite)))


def _nothing(total: jax.Array) -> float:
    """A small sum of squares to divide by the root of, in place of 0."""
    return 2.0 ** (jnp.finfo(total.dtype).minexp + 6)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _norms_of_order(groups: Groups, ord: float, leaves: Arrays) -> list[Norm]:
    sizes = [jnp.abs(g) for g in _wide_leaves(groups, leaves)]
    largest = groups.maxima(sizes, leaves)
    scales = [_scale_of(m) for m in largest]
    tops = [m * s for m, s in zip(largest, scales, strict=True)]
    if ord == math.inf:
        return [Norm.of(top, s) for top, s in zip(tops, scales, strict=True)]
    # Not the maximum itself: it may be a subnormal number that acts as 0.
    tops = [jnp.where((top > 0) & jnp.isfinite(top), top, 1) for top in tops]
    shrunk = zip(sizes, groups.per_leaf(scales, leaves), groups.per_leaf(tops, leaves), strict=True)
    totals = groups.sums([(g * s / t) ** ord for g, s, t in shrunk], leaves)
    return [Norm.of(x ** (1 / ord) * t, s) for x, t, s in zip(totals, tops, scales, strict=True)]


@_differentiable_norms.defjvp
def _norms_jvp(groups: Groups, kind: _Kind, primals: Any, tangents: Any) -> Any:
    r"""$d\,\mathrm{root} = \mathrm{scale} \sum \mathrm{Re}(\bar w\,dg)$, weights w bounded."""
    (leaves,), (dleaves,) = primals, tangents
    norms = _differentiable_norms(groups, kind, leaves)
    weights = _weights_of_norms(groups, kind, leaves, norms)
    terms = [
        real_product(w, with_real_dtype(dg, w.real.dtype.name))
        for w, dg in zip(weights, dleaves, strict=True)
    ]
    sums = groups.sums(terms, leaves)
    pairs = zip(sums, norms, strict=True)
    droots = [(total * norm.scale, norm.scale) for total, norm in pairs]
    return norms, [Norm(d, jnp.zeros_like(scale), d) for d, scale in droots]


def _weights_of_norms(
    groups: Groups, kind: _Kind, leaves: Arrays, norms: list[Norm]
) -> list[jax.Array]:
    """The derivative of each norm by its elements; 0 where the norm is 0."""
    roots = groups.per_leaf([jnp.where(n.root > 0, n.root, 1) for n in norms], leaves)
    scales = groups.per_leaf([n.scale for n in norms], leaves)
    units = [
        over(times(with_real_dtype(g, r.dtype.name), s), r)
        for g, s, r in zip(leaves, scales, roots, strict=True)
    ]
    sizes = [jnp.abs(jnp.where(u == 0, 1, u)) for u in units]
    if kind.ord < math.inf:
        counts = _counts(groups, kind.mean, leaves)
        counts = counts * len(leaves) if groups.joint else counts
        return [
            times(over(u, size), size ** (kind.ord - 1) / n)
            for u, size, n in zip(units, sizes, counts, strict=True)
        ]
    # XLA may divide a batch of rows by reciprocals, so that x / x is not 1: compare products.
    ties = [
        ((jnp.abs(with_real_dtype(g, r.dtype.name)) * s == r) & (u != 0)).astype(u.real.dtype)
        for g, s, r, u in zip(leaves, scales, roots, units, strict=True)
    ]
    counts = groups.per_leaf(groups.sums(ties, leaves), leaves)
    shares = [
        tie / jnp.maximum(n, 1) / size for tie, n, size in zip(ties, counts, sizes, strict=True)
    ]
    return [times(u, share) for u, share in zip(units, shares, strict=True)]


def _scale_of(largest: jax.Array) -> jax.Array:
    """A power of two that brings the largest element into the middle of the range."""
    rule = _RANGES[largest.dtype.name]
    is_large = (largest > 2.0**rule.high) & jnp.isfinite(largest)
    return _range_scale(is_large, largest < 2.0**rule.low, largest)


def _wide_leaves(groups: Groups, leaves: Arrays) -> list[jax.Array]:
    """The leaves in the dtype of their sums."""
    pairs = zip(leaves, _wide_dtypes(groups, leaves), strict=True)
    return [with_real_dtype(leaf, dtype) for leaf, dtype in pairs]


def _wide_dtypes(groups: Groups, leaves: Arrays) -> list[str]:
    """The dtypes of the sums of leaves, the widest of their group."""
    return [widest(leaves)] * len(leaves) if groups.joint else list(map(accumulator, leaves))


@functools.partial(jax.jit, inline=True, static_argnums=2)
def sums_by_largest(size: jax.Array, largest: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The three sums of squares of magnitudes over some axes, where the largest is known.

    They are read off one sum, of elements times the power of two that the largest needs: one pass
    over the data, and no branch. The three are stacked along a last axis.
    """
    rule = _RANGES[size.dtype.name]
    is_large = largest > 2.0 ** (rule.high - 10)
    is_small = largest < 2.0 ** (rule.low - 5)
    scale = _chosen_scale(is_large, is_small, largest)
    total = jnp.sum(jnp.square(size * jnp.expand_dims(scale, axes)), axes)
    inverse = 1 / scale
    plain = total * inverse * inverse
    down = if_else(is_large, total, if_else(is_small, 0, from_plain(plain)[0]))
    up = if_else(is_small, total, plain * 2.0**rule.up * 2.0**rule.up)
    return jnp.stack([down, plain, if_needed(if_else(is_large, 0, up), plain)], -1)
