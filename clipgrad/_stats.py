"""The effect of a clip, as sums that add up over steps, uses and devices."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._compat import (
    broadcast_like,
    by_platform,
    explicit_sharding,
    exportable,
    to_varying,
    varying_axes,
)
from clipgrad._numerics import (
    AxisName,
    Norm,
    joined_leaves,
    root_of_sums,
    slice_norms,
    sums_and_nonfinite,
    sums_of_norm,
    total_over_devices,
    tree_size,
    widest,
)
from clipgrad._rules import is_own
from clipgrad._trees import check_tree, clippable_leaves, clippable_paths, is_clippable

# For each group of elements the norm that it was scaled from, and the limit.
Limits = Sequence[tuple[Norm, jax.Array]]


@exportable
class ClipStats(NamedTuple):
    r"""Statistics of a clip of a tree of gradients or cotangents.

    All fields are sums over elements, so that statistics of several places, scan steps, vmap
    lanes or devices add up field by field; norms and scales are derived from the sums.
    Squares are summed three times, of elements scaled down, as they are, and scaled up: the
    norm comes from the sum that is in range, so it is right from 1.2e-38 to 3.4e38; the sum
    scaled up is 0 if the plain one is large enough. Under `jax.jit` unused fields are not
    computed.

    Attributes:
      before: sums of squares before the clip, shape ``(..., 3)``.
      after: sums of squares after the clip, shape ``(..., 3)``.
      changed: the number of elements that the clip changed; if a rule scales a group (a tree,
        a leaf, a unit) by its L2 norm, all of its elements count. Counts are floating, exact up to
        2 ** 24 in float32.
      nonfinite: the number of elements that were NaN or inf before the clip.
      size: the number of elements.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> stats = cg.types.ClipStats.of(jnp.array([3.0, 4.0]), jnp.array([3.0, 1.0]))
      >>> print(stats.norm, stats.clipped, stats.fraction)
      5.0 True 0.5
    """

    before: jax.Array
    after: jax.Array
    changed: jax.Array
    nonfinite: jax.Array
    size: jax.Array

    @property
    def norm(self) -> jax.Array:
        """The L2 norm before the clip."""
        return root_of_sums(self.before)

    @property
    def clipped_norm(self) -> jax.Array:
        """The L2 norm after the clip."""
        return root_of_sums(self.after)

    @property
    def scale(self) -> jax.Array:
        """The ratio of the norm after the clip to the norm before; 1 if that was 0."""
        norm = self.norm
        return jnp.where(norm == 0, 1, self.clipped_norm / jnp.where(norm == 0, 1, norm))

    @property
    def clipped(self) -> jax.Array:
        """Whether the clip changed anything."""
        return self.changed > 0

    @property
    def fraction(self) -> jax.Array:
        """The share of the elements that the clip changed; 0 if there are none."""
        return self.changed / jnp.maximum(self.size, 1)

    @property
    def zeros(self) -> jax.Array:
        """1 if all elements were exactly zero before the clip, as where a gradient is cut; else 0.

        Of no elements it is 0.
        """
        is_zero = jnp.all(self.before == 0, axis=-1) & (self.nonfinite == 0) & (self.size > 0)
        return is_zero.astype(self.size.dtype)

    @classmethod
    def zero(cls, shape: tuple[int, ...] = (), dtype: Any = jnp.float32) -> "ClipStats":
        """Statistics of an empty tree, the ``probe`` of `clip_cotangent`.

        Args:
          shape: the leading axes, such as ``(steps,)`` for a probe that a scan runs over.
          dtype: float32 or float64.

        Raises:
          ValueError: for another dtype.
        """
        if jnp.dtype(dtype).name not in ("float32", "float64"):
            raise ValueError(f"dtype: got {jnp.dtype(dtype).name}, expected float32 or float64")
        shapes = [(*shape, 3)] * 2 + [shape] * 3
        return cls(*(jnp.zeros(s, dtype) for s in shapes))

    @classmethod
    def of(cls, before: Any, after: Any, dtype: Any = None) -> "ClipStats":
        """The statistics of a clip, from the trees before and after it.

        Leaves that clips do not measure (integers, ``None``, PRNG keys, ...) are not counted.

        Args:
          before: the tree that was clipped.
          after: the clipped tree.
          dtype: float32 or float64; by default float64 if a leaf is.

        Raises:
          ValueError: if the clipped tree has other leaves, or leaves of other shapes.
        """
        check_tree("before", before)
        _check_same(before, after)
        dtype = stats_dtype(before) if dtype is None else jnp.dtype(dtype).name
        off = after is before
        return _of(clippable_leaves(before), None if off else clippable_leaves(after), dtype)


def _check_same(before: Any, after: Any) -> None:
    """Raises `ValueError` for trees that differ in the leaves that are measured."""
    if after is before:
        return
    check_tree("after", after)
    if jax.tree.structure(before) != jax.tree.structure(after):
        paths, others = clippable_paths(before), clippable_paths(after)
        if paths != others:
            raise ValueError(f"after: got the leaves {others}, expected those of before, {paths}")
    for b, a in zip(clippable_leaves(before), clippable_leaves(after), strict=True):
        if a.shape != b.shape:
            raise ValueError(
                f"after: got a leaf of shape {a.shape}, expected that of before, {b.shape}"
            )


@functools.partial(jax.jit, static_argnums=2)
def _of(before: list[jax.Array], after: list[jax.Array] | None, dtype: str) -> ClipStats:
    """Traced once for leaves of the same shapes; ``None`` after a clip that is off."""
    sums, nonfinite = sums_and_nonfinite(before, dtype)
    one = _one(sums[1])
    size = jnp.array(float(sum(leaf.size for leaf in before)), dtype) * one
    if after is None:
        # Three products with the same number are one kernel on a GPU.
        return ClipStats(sums, sums, 0 * size, nonfinite * one, size)
    masks = [_differ(b, a) for b, a in zip(before, after, strict=True)]
    clipped, _ = sums_and_nonfinite(after, dtype)
    return ClipStats(sums, clipped, _count_true(masks, dtype), nonfinite, size)


def stats_dtype(tree: Any) -> str:
    """The dtype of the statistics of a tree."""
    return widest([x for x in jax.tree.leaves(tree) if is_clippable(x) and hasattr(x, "dtype")])


def count_nonfinite(tree: Any, axis_name: AxisName = None, by_rows: bool = False) -> jax.Array:
    """The number of elements of a tree that are NaN or inf.

    With ``by_rows`` it is counted in fewer kernels on a GPU, of which XLA makes two for each sum.
    """
    leaves, count = clippable_leaves(tree), _count_by_rows if by_rows else _count_true
    dtype, masks = widest(leaves), [~jnp.isfinite(leaf) for leaf in leaves]
    if axis_name is None:
        return count(masks, dtype)
    counts = [count([mask], dtype) for mask in masks]
    return total_over_devices(counts, leaves, axis_name)


def stats_of_clip(rule: Any, tree: Any, clipped: Any, norms: Sequence[Any]) -> ClipStats:
    """The statistics of a tree that a rule has clipped by these norms.

    Where they are L2 norms all follows from them, and nothing is summed over the elements, except
    that NaN and inf are counted if there are any.
    """
    limits = _known_limits(rule, tree, norms)
    if limits is None:
        return measured_stats(rule, tree, clipped)
    if rule.acts_on == "tree":
        return _of_tree(tree, limits, rule)
    return _of_leaves(clippable_leaves(tree), limits)


def stats_by_leaf(rule: Any, tree: Any, clipped: Any, norms: Sequence[Any]) -> dict[str, ClipStats]:
    """The statistics of each leaf by path."""
    limits = _known_limits(rule, tree, norms)
    if limits is None:
        return _measured_by_leaf(rule, tree, clipped)
    return _tree_by_leaf(tree, limits, rule) if rule.acts_on == "tree" else _by_leaf(tree, limits)


def _known_limits(rule: Any, tree: Any, norms: Sequence[Any]) -> Limits | None:
    return rule.l2_limits(tree, norms) if norms and is_own(rule) else None


def measured_stats(rule: Any, before: Any, after: Any, dtype: Any = None) -> ClipStats:
    """The statistics of what a rule has clipped, from the trees before and after it."""
    del rule
    return ClipStats.of(before, after, dtype)


def _measured_by_leaf(rule: Any, before: Any, after: Any) -> dict[str, ClipStats]:
    dtype = stats_dtype(before)
    pairs = zip(clippable_leaves(before), clippable_leaves(after), strict=True)
    stats = [measured_stats(rule, *pair, dtype) for pair in pairs]
    return dict(zip(clippable_paths(before), stats, strict=True))


def _of_tree(tree: Any, limits: Limits, rule: Any) -> ClipStats:
    """The statistics of a tree that was scaled as a whole."""
    ((norm, limit),) = limits
    finite = jnp.isfinite(norm.root)
    (bad,) = _counts_unless(finite, [tree], rule.axis_name)
    size = tree_size(tree, rule.axis_name)
    return scaled_stats(norm.value, limit, rule.changes(norm, limit), finite, bad, size)


def _tree_by_leaf(tree: Any, limits: Limits, rule: Any) -> dict[str, ClipStats]:
    """The statistics of each leaf, from the sums that make up the norm."""
    ((norm, limit),) = limits
    axis_name = rule.axis_name
    paths, leaves = clippable_paths(tree), clippable_leaves(tree)
    clips, finite = rule.changes(norm, limit), jnp.isfinite(norm.root)
    bad = _counts_unless(finite, leaves, axis_name)
    stats = {}
    for i, part in enumerate(slice_norms(leaves, [None] * len(leaves), axis_name=axis_name)):
        root, scale = (x.reshape(()).astype(norm.root.dtype) for x in part[:2])
        share = root / jnp.where(norm.root == 0, 1, norm.root) * (norm.scale / scale)
        size = tree_size(leaves[i], axis_name).astype(root.dtype)
        count = bad[i].astype(root.dtype)
        stats[paths[i]] = scaled_stats(root / scale, limit * share, clips, finite, count, size)
    return stats


def _of_leaves(leaves: list[jax.Array], limits: Limits) -> ClipStats:
    """The statistics of leaves that were scaled, or groups in them, each by its norm."""
    groups = _joined_groups(leaves, limits)
    finite = [jnp.all(jnp.isfinite(norm.root)) for norm, _, _ in groups]
    (bad,) = _counts_unless(functools.reduce(jnp.logical_and, finite), [leaves], None)
    stats = [
        scaled_stats(norm.value, limit, norm.exceeds(limit), jnp.isfinite(norm.root), bad, size)
        for norm, limit, size in groups
    ]
    total = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), stats)
    return total._replace(nonfinite=bad)


def _by_leaf(tree: Any, limits: Limits) -> dict[str, ClipStats]:
    """The statistics of each leaf."""
    dtype, leaves = stats_dtype(tree), clippable_leaves(tree)
    stats = [_of_leaves([leaf], [own]) for leaf, own in zip(leaves, limits, strict=True)]
    cast = [jax.tree.map(lambda x: x.astype(dtype), of_leaf) for of_leaf in stats]
    return dict(zip(clippable_paths(tree), cast, strict=True))


def _joined_groups(leaves: list[jax.Array], limits: Limits) -> list[Any]:
    """Norms, limits and sizes of groups, one array for all leaves.

    XLA compiles a formula of a thousand norms slowly, and on a GPU would make a kernel for each
    of them, were they not one array behind the barrier. Norms whose types are sharded stay apart.
    """
    groups, joined, dtype = [], [], widest(leaves)
    for leaf, (norm, limit) in zip(leaves, limits, strict=True):
        size = np.full(norm.root.shape, leaf.size / max(norm.root.size, 1), dtype)
        row = [x.astype(dtype) for x in (norm.root, norm.scale, broadcast_like(limit, norm.root))]
        (groups if explicit_sharding(norm.root) else joined).append((*row, size))
    if joined:
        *columns, sizes = zip(*joined, strict=True)
        arrays = [jnp.concatenate([jnp.ravel(x) for x in column]) for column in columns]
        sizes = np.concatenate([size.ravel() for size in sizes])
        groups.append((*jax.lax.optimization_barrier(arrays), sizes))
    return [(Norm.of(root, scale), limit, jnp.asarray(size)) for root, scale, limit, size in groups]


@functools.partial(jax.jit, inline=True)
def scaled_stats(
    value: jax.Array,
    limit: jax.Array,
    clips: jax.Array,
    finite: jax.Array,
    nonfinite: jax.Array,
    size: jax.Array,
) -> ClipStats:
    """The statistics of groups of ``size`` elements, scaled from known norms to limits."""
    before = sums_of_norm(value)
    after = jnp.where(clips, sums_of_norm(limit), before)
    after = jnp.where(finite, after, jnp.nan)
    rows = (before, after, jnp.where(clips, size, 0), size * _one(before[1]))
    before, after, changed, size = (jnp.sum(x, range(x.ndim - value.ndim, x.ndim)) for x in rows)
    return ClipStats(before, after, changed, nonfinite, size)


def _counts_unless(finite: jax.Array, trees: list[Any], axis_name: AxisName) -> list[jax.Array]:
    """The number of NaN and inf in each tree; counted only if there are any.

    On a GPU XLA would compute both sides of the branch: without one it counts where it scales.
    """
    axes = varying_axes(finite)

    def by_rows(finite: jax.Array, parts: list[list[jax.Array]]) -> list[jax.Array]:
        del finite
        return [to_varying(count_nonfinite(part, axis_name, by_rows=True), axes) for part in parts]

    def if_any(join: bool, finite: jax.Array, parts: list[list[jax.Array]]) -> list[jax.Array]:
        def zeros() -> list[jax.Array]:
            return [to_varying(jnp.zeros((), widest(part)), axes) for part in parts]

        def counts() -> list[jax.Array]:
            # Of what is joined XLA compiles one loop.
            arrays = [joined_leaves(part) if join else part for part in parts]
            return [to_varying(count_nonfinite(x, axis_name), axes) for x in arrays]

        return jax.lax.cond(finite, zeros, counts)

    # JAX cannot mark them inside of the branch, if `jax.vmap` makes a choice of it.
    leaves = [[to_varying(x, axes) for x in clippable_leaves(tree)] for tree in trees]
    cpu, default = (functools.partial(if_any, join) for join in (True, False))
    return by_platform(finite, leaves, cpu=cpu, gpu=by_rows, default=default)


def _one(total: jax.Array) -> jax.Array:
    """1, computed from a sum over the elements so that vmap counts the elements of every lane."""
    return ((total == total) | (total != total)).astype(total.dtype)


def _count_true(masks: Sequence[jax.Array], dtype: str) -> jax.Array:
    """The number of true elements of masks."""
    parts = [part.astype(jnp.uint32) for mask in masks for part in _countable(mask)]
    return _total_of_counts([(part, part.size) for part in parts], dtype)


def _count_by_rows(masks: Sequence[jax.Array], dtype: str) -> jax.Array:
    """The number, by rows first: XLA counts these where a GPU scales; one shape together."""
    kinds: dict[Any, list[jax.Array]] = {}
    for part in (part for mask in masks for part in _countable(mask)):
        kinds.setdefault((part.shape, explicit_sharding(part)), []).append(part)
    totals = []
    for parts in kinds.values():
        size, rows = parts[0].size, list(map(_counts_of_rows, parts))
        number = max((2**32 - 1) // max(size, 1), 1)  # of parts that 32 bits count
        for some in (rows[i : i + number] for i in range(0, len(rows), number)):
            totals.append((functools.reduce(jnp.add, some), size * len(some)))
    return _total_of_counts(totals, dtype)


# The counts of rows of 64 elements or more, and the flags of vectors of up to 2 ** 16 elements,
# are stored; other leaves are counted at once, so that temporaries stay small.
_COUNTED_ROW, _COUNTED_VECTOR = 64, 2**16


def _counts_of_rows(mask: jax.Array) -> jax.Array:
    """Counts of the true elements of a mask, which add up to all of them."""
    flags = mask.astype(jnp.uint32)
    if mask.ndim == 1 and mask.size <= _COUNTED_VECTOR:
        return flags
    has_rows = mask.ndim > 1 and mask.shape[-1] >= _COUNTED_ROW
    return _sum_of_counts(flags, (mask.ndim - 1,) if has_rows else tuple(range(mask.ndim)))


def _sum_of_counts(counts: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jax.lax.reduce(counts, jnp.uint32(0), jnp.add, axes)


def _total_of_counts(counts: Sequence[tuple[jax.Array, int]], dtype: str) -> jax.Array:
    """The sum of arrays of counts, given with how many elements were counted in each.

    They are added up as integers as long as 32 bits hold them: so XLA adds up over devices once.
    """
    total, count, size = jnp.zeros((), dtype), jnp.uint32(0), 0
    for part, number in counts:
        if size + number >= 2**32:
            total, count, size = total + count.astype(dtype), jnp.uint32(0), 0
        count, size = count + _sum_of_counts(part, tuple(range(part.ndim))), size + number
    return total + count.astype(dtype)


def _countable(mask: jax.Array) -> list[jax.Array]:
    """Parts of a mask that are so small that 32 bits count their elements."""
    number = -(-mask.size // 2**31)
    if number < 2:
        return [mask]
    axis = max(range(mask.ndim), key=lambda i: mask.shape[i])
    return jnp.array_split(mask, number, axis)


def _differ(before: jax.Array, after: jax.Array) -> jax.Array:
    return (before != after) & ~(jnp.isnan(before) & jnp.isnan(after))
