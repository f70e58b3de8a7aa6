"""The effect of a clip, as sums that add up over steps, uses and devices."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from clipgrad._arrays import (
    AxisName,
    Groups,
    Norm,
    accumulator,
    added_up,
    added_up_apart,
    answers_lookups,
    check_tree,
    clippable_leaves,
    clippable_paths,
    count_true,
    count_unless,
    flags_of_bits,
    from_plain,
    if_else,
    in_one_kernel,
    is_clippable,
    mapped_names,
    real_or_absolute,
    root_of_sums,
    stacked_sums,
    sums_of_groups,
    sums_of_norm,
    three_squares,
    total_over_devices,
    tree_size,
    unless_out_of_range,
    widest,
)
from clipgrad._compat import exportable, to_varying, varying_axes
from clipgrad._sharding import broadcast_like, on_every_device


@exportable
@answers_lookups("stats")
class ClipStats(NamedTuple):
    r"""Statistics from one clip of a gradient or cotangent tree.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> stats = cg.types.ClipStats.of(jnp.array([3.0, 4.0]), jnp.array([3.0, 1.0]))
      >>> print(stats.norm, stats.clipped, stats.fraction)
      5.0 True 0.5

    Attributes:
      before: sums of squares before the clip, shape ``(..., 3)``.
      after: sums of squares after the clip, shape ``(..., 3)``.
      changed: the number of elements that the clip changed: for a norm rule all elements in groups
        (the tree, leaves, slices, units) that the rule scaled; for a value rule or a function the
        elements that differ. Counts are floating, exact up to 2 ** 24 in float32.
      nonfinite: the number of elements that were NaN or inf before the clip.
      size: the number of elements.

    All attributes are sums over elements, so you can add statistics from several places, scan
    steps, vmap lanes or devices; norms and scales are computed from the sums. Squares are summed
    three times: of elements scaled down, as they are, and scaled up. The norm comes from the sum
    that is in range, so it is right from 1.2e-38 to 3.4e38 (the third sum is 0 if the second is
    large enough). Under `jax.jit` unused attributes are not computed.
    """

    before: jax.Array
    after: jax.Array
    changed: jax.Array
    nonfinite: jax.Array
    size: jax.Array

    def __repr__(self) -> str:
        """Norms and counts; the types of what is traced, abstract, or not on this machine."""
        shapes = [getattr(x, "shape", ()) for x in self]
        if any(shape[-1:] != (3,) for shape in shapes[:2]):  # other things, such as shardings
            return f"ClipStats{_in_parentheses(self._fields, map(repr, self))}"
        if all(map(_is_here, self)):
            shown = _shown_numbers(self)
        else:
            shapes[:2] = [shape[:-1] for shape in shapes[:2]]
            shown = [f"{x.dtype}{[*shape]}" for x, shape in zip(self, shapes, strict=True)]
        return f"ClipStats{_in_parentheses(('norm', 'clipped_norm', *self._fields[2:]), shown)}"

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
    def all_zero(self) -> jax.Array:
        """1 if all elements were exactly zero before the clip, as where a gradient is cut; else 0.

        0 if there are no elements.
        """
        is_zero = jnp.all(self.before == 0, axis=-1) & (self.nonfinite == 0) & (self.size > 0)
        return is_zero.astype(self.size.dtype)

    @classmethod
    def zero(cls, shape: tuple[int, ...] = (), dtype: Any = jnp.float32) -> "ClipStats":
        """Statistics of an empty tree, the ``probe`` of `clip_cotangent`.

        Args:
          shape: the leading axes, such as ``(steps,)`` for a probe that you scan over.
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


def _in_parentheses(names: Iterable[str], values: Iterable[str]) -> str:
    return f"({', '.join(map('='.join, zip(names, values, strict=True)))})"


def _is_here(field: Any) -> bool:
    """Whether the numbers of an array can be shown, here and now."""
    if isinstance(field, jax.Array) and not isinstance(field, Tracer):
        return field.is_fully_addressable and not field.is_deleted()
    return isinstance(field, np.ndarray | np.generic)


def _shown_numbers(stats: ClipStats) -> list[str]:
    """The norms and the counts of statistics, wherever JAX is just now."""
    # What somebody prints is no part of a program that is traced, and may be NaN.
    with jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):
        stats = ClipStats(*map(np.asarray, stats))  # type: ignore[arg-type]
        norms = [np.asarray(norm) for norm in (stats.norm, stats.clipped_norm)]
    counts = [np.asarray(count) for count in stats[2:]]
    each = [str(x[()]) if not x.ndim else _in_a_line(x) for x in norms]
    return each + [f"{float(x):.9g}" if not x.ndim else _in_a_line(x) for x in counts]


def _in_a_line(array: np.ndarray) -> str:
    return " ".join(np.array2string(array, threshold=16, edgeitems=3).split())


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
    sums, nonfinite = _sums_and_nonfinite(before, dtype)
    one = _one(sums[1])
    size = jnp.array(float(sum(leaf.size for leaf in before)), dtype) * one
    if after is None:
        # Three products with the same number are one kernel on a GPU.
        return ClipStats(sums, sums, 0 * size, nonfinite * one, size)
    masks = [_differ(b, a) for b, a in zip(before, after, strict=True)]
    clipped, _ = _sums_and_nonfinite(after, dtype)
    return ClipStats(sums, clipped, count_true(masks, dtype), nonfinite, size)


def _sums_and_nonfinite(leaves: list[jax.Array], dtype: str) -> tuple[jax.Array, jax.Array]:
    """The three sums of squares, and how many elements are NaN or inf."""
    if not leaves:
        return jnp.zeros(3, dtype), jnp.zeros((), dtype)
    sizes = [real_or_absolute(leaf).astype(dtype) for leaf in leaves]
    return added_up(_summands, sizes, Groups.one(len(sizes)), _stacked, _by_branch)[0]


def _summands(size: jax.Array) -> list[jax.Array]:
    """The terms of sums of real numbers: squares in three ranges, and 1 if not finite."""
    return [*three_squares(size), flags_of_bits(size)[0]]


def _stacked(*sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    *squares, nonfinite = sums
    return stacked_sums(*squares), nonfinite


def _by_branch(_: Any, sizes: Sequence[jax.Array]) -> list[Any]:
    """The plain sum; all others follow from it where it is in range, as it almost always is."""
    plain = functools.reduce(jnp.add, [jnp.sum(jnp.square(x)) for x in sizes])

    def known() -> list[Any]:
        none = to_varying(jnp.zeros((), plain.dtype), varying_axes(plain))
        return [(jnp.stack(from_plain(plain)), none)]

    def again() -> list[Any]:
        return added_up_apart(_summands, (), sizes, Groups.one(len(sizes)), _stacked)

    return unless_out_of_range([plain], known, again)


def stats_dtype(tree: Any) -> str:
    """The dtype of the statistics of a tree."""
    return widest([x for x in jax.tree.leaves(tree) if is_clippable(x) and hasattr(x, "dtype")])


def stats_of_limits(rule: Any, tree: Any, limits: Sequence[tuple[Norm, jax.Array]]) -> ClipStats:
    """The statistics of a tree whose groups a rule has scaled from these L2 norms to the limits.

    Nothing is summed over the elements, except that NaN and inf are counted if there are any.
    """
    leaves, names = clippable_leaves(tree), ()
    if rule.acts_on == "tree":
        names = mapped_names(rule.axis_name)
        sizes = [tree_size(tree, names)]
    else:
        pairs = zip(leaves, limits, strict=True)
        sizes = [np.full(n.root.shape, x.size / max(n.root.size, 1)) for x, (n, _) in pairs]
    numbers = functools.partial(_stats_of_norms, rule.changes)
    if len(limits) == 1 and not limits[0][0].root.ndim:
        ((norm, limit),) = limits
        groups = (norm.root, norm.scale, limit, jnp.asarray(sizes[0], norm.root.dtype))
        stats, bad = in_one_kernel(numbers, *groups), norm.nonfinite
    else:
        groups = _groups_in_one(limits, sizes, widest(leaves))
        stats, bad = numbers(*groups), None
    if bad is None:
        bad = count_unless(jnp.all(jnp.isfinite(groups[0])), leaves, names)
    return stats._replace(nonfinite=bad)


def _stats_of_norms(
    changes: Callable[[Norm, jax.Array], jax.Array],
    root: jax.Array,
    scale: jax.Array,
    limit: jax.Array,
    size: jax.Array,
) -> ClipStats:
    """The statistics of groups whose norms and limits are known, but for NaN and inf."""
    norm, finite = Norm(root, scale, root), jax.lax.is_finite(root)
    none = jax.lax.full((), 0, root.dtype)
    return scaled_stats(norm.value, limit, changes(norm, limit), finite, none, size)


def _groups_in_one(
    limits: Sequence[tuple[Norm, jax.Array]], sizes: Sequence[Any], dtype: str
) -> tuple[jax.Array, ...]:
    """Roots, scales, limits and sizes of all groups, an array each.

    XLA compiles a formula of a thousand norms slowly, and would have it in a thousand kernels.
    """
    columns = [(n.root, n.scale, broadcast_like(limit, n.root)) for n, limit in limits]

    def row(arrays: Sequence[Any]) -> jax.Array:
        flat = [jnp.ravel(on_every_device(x)).astype(dtype) for x in arrays]
        return jnp.concatenate([*flat, jnp.zeros(0, dtype)])

    root, scale, limit = map(row, zip(*columns, strict=True)) if columns else [row([])] * 3
    size = row([jnp.asarray(size, dtype) for size in sizes])
    root, scale, limit = jax.lax.optimization_barrier((root, scale, limit))
    return root, scale, limit, size


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
    clipped = if_else(finite, if_else(clips, limit, value), jnp.nan)
    # A choice of two that are equal: vmap counts the elements of every lane.
    size = if_else(finite, size, size)
    rows = (sums_of_norm(value), sums_of_norm(clipped), if_else(clips, size, 0), size)
    if value.ndim:
        rows = [jnp.sum(x, range(x.ndim - value.ndim, x.ndim)) for x in rows]
    before, after, changed, size = rows
    return ClipStats(before, after, changed, nonfinite, size)


def groups_that_differ(rule: Any, before: Any, after: Any) -> list[jax.Array]:
    """For each group of a norm rule whether an element of it differs, on any device."""
    leaves, clipped = clippable_leaves(before), clippable_leaves(after)
    axes = None if rule.acts_on == "tree" else rule.group_axes(before)
    parts = [_differ(b, a).astype(accumulator(b)) for b, a in zip(leaves, clipped, strict=True)]
    return [n > 0 for n in sums_of_groups(parts, leaves, axes, rule.axis_name)]


def elements_of_groups(groups: Sequence[jax.Array], tree: Any, dtype: Any) -> jax.Array:
    """The number of elements, on this device, in those groups of a tree that are chosen.

    One group is the whole tree; else each leaf has an array of groups, with the reduced axes.
    """
    leaves = clippable_leaves(tree)
    groups = list(groups) * len(leaves) if len(groups) == 1 else groups
    pairs = zip(leaves, groups, strict=True)
    each = [jnp.sum(jnp.where(g, x.size / max(g.size, 1), 0).astype(dtype)) for x, g in pairs]
    return functools.reduce(jnp.add, each, jnp.zeros((), dtype))


def stats_over_devices(
    each: Sequence[ClipStats], leaves: Sequence[jax.Array], axis_name: AxisName
) -> ClipStats:
    """The statistics of all devices that the leaves are spread over, from those of each leaf."""
    fields = [total_over_devices(x, leaves, axis_name) for x in zip(*each, strict=True)]
    return ClipStats(*fields) if each else ClipStats.zero()


def _one(total: jax.Array) -> jax.Array:
    """1, computed from a sum over the elements so that vmap counts the elements of every lane."""
    return ((total == total) | (total != total)).astype(total.dtype)


def _differ(before: jax.Array, after: jax.Array) -> jax.Array:
    return (before != after) & ~(jnp.isnan(before) & jnp.isnan(after))
