"""By what each example's gradient is scaled, from the norms of its leaves."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._numerics import Norm, accumulator
from clipgrad._per_example.squares import Squares
from clipgrad._rules import AutoNorm, ClipByBlockRMS, ClipByGlobalNorm, ClipByNorm
from clipgrad._stats import ClipStats, scaled_stats, stats_dtype


def why_direct(rule: Any) -> str | None:
    """Why a rule needs each example's gradient itself; None if norms are all that it needs."""
    reason = f"{rule!r} does not scale whole leaves by L2 norms"
    if getattr(rule, "axis_name", None):
        return reason
    if rule is None or type(rule) is ClipByBlockRMS:
        return None
    if type(rule) in (ClipByGlobalNorm, AutoNorm) and rule.ord == 2:
        return None
    if type(rule) is ClipByNorm and rule.ord == 2 and rule.axis is None:
        return None
    return reason


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """The number that multiplies the gradient of each leaf; leaves share a number."""

    numbers: tuple[jax.Array, ...]
    # The number of each leaf; None where it is not clipped.
    places: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})

    def of(self, leaf: int) -> jax.Array | None:
        """The number of a leaf."""
        place = self.places[leaf]
        return None if place is None else self.numbers[place]

    def among(self, flags: Sequence[bool]) -> "Weights":
        """The weights of all leaves, where only the leaves with a flag have been counted."""
        places = iter(self.places)
        return Weights(self.numbers, tuple(next(places) if flag else None for flag in flags))


def example_scales(
    rule: Any, params: Any, leaves: Squares, bad: jax.Array
) -> tuple[Weights, ClipStats]:
    """The scales of the leaves of each example, and what they do.

    ``params`` has the leaves that are clipped, and `None` in place of others. The squares have the
    shape (leaves, examples); of each example ``bad`` elements are NaN or inf.
    """
    kinds = [accumulator(jnp.asarray(p)) for p in jax.tree.leaves(params)]
    alike = list(dict.fromkeys(kinds)) if rule is None or rule.acts_on == "tree" else []
    places = [alike.index(kind) for kind in kinds] if alike else range(len(kinds))

    form, ones = (_scales_of_all, alike) if alike else (_scales_by_leaf, kinds)
    of_one = functools.partial(form, rule, params, ones=[jnp.ones((), kind) for kind in ones])
    numbers, stats = jax.vmap(of_one, in_axes=(1, 0))(leaves, bad)
    return Weights(tuple(numbers), tuple(places)), stats


def _scales_of_all(
    rule: Any, params: Any, leaves: Squares, bad: jax.Array, ones: list[jax.Array]
) -> tuple[list[jax.Array], ClipStats]:
    """One number for all leaves of a dtype: XLA would compute the number of each leaf again."""
    whole, dtype = leaves.over_axis().norm(), stats_dtype(params)
    bad = bad.astype(dtype)
    total = jnp.array(float(sum(jnp.size(p) for p in jax.tree.leaves(params))), dtype)
    if rule is None:
        no_limit = jnp.full_like(whole.root, jnp.inf)
        stats = _stats(whole, no_limit, whole.exceeds(no_limit), bad, total)
        return ones, stats._replace(after=stats.before, changed=0 * stats.changed)
    ((norm, limit),) = rule.l2_limits(params, [whole])
    return rule.scale(ones, [whole]), _stats(norm, limit, rule.changes(norm, limit), bad, total)


def _scales_by_leaf(
    rule: Any, params: Any, leaves: Squares, bad: jax.Array, ones: list[jax.Array]
) -> tuple[list[jax.Array], ClipStats]:
    """A number for each leaf."""
    dtype, mean = stats_dtype(params), type(rule) is ClipByBlockRMS
    sizes = [float(jnp.size(p)) for p in jax.tree.leaves(params)]
    own = [jax.tree.map(lambda x, i=i: x[i], leaves) for i in range(len(sizes))]
    norms = [
        leaf._replace(total=leaf.total.astype(one.dtype)).norm(max(size, 1.0) if mean else 1.0)
        for leaf, size, one in zip(own, sizes, ones, strict=True)
    ]
    pairs = zip(rule.l2_limits(params, norms), sizes, strict=True)
    bad = bad.astype(dtype)
    each = [
        _stats(n, limit, rule.changes(n, limit), bad, jnp.array(size, n.root.dtype))
        for (n, limit), size in pairs
    ]
    stats = jax.tree.map(lambda *fields: sum(x.astype(dtype) for x in fields), *each)
    scales = jax.tree.leaves(rule.scale(jax.tree.structure(params).unflatten(ones), norms))
    return scales, stats._replace(nonfinite=bad)


def _stats(
    norm: Norm, limit: jax.Array, clips: jax.Array, bad: jax.Array, size: jax.Array
) -> ClipStats:
    return scaled_stats(norm.value, limit, clips, jnp.isfinite(norm.root), bad, size)
