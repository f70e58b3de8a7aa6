"""By what each example's gradient is scaled, from the norms of its leaves."""

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
    if rule is None or type(rule) is ClipByBlockRMS:
        return None
    if type(rule) in (ClipByGlobalNorm, AutoNorm) and rule.ord == 2 and not rule.axis_name:
        return None
    if type(rule) is ClipByNorm and rule.ord == 2 and rule.axis is None:
        return None
    return f"{rule!r} does not scale whole leaves by L2 norms"


def example_scales(
    rule: Any, params: Any, leaves: Sequence[Squares]
) -> tuple[list[jax.Array], ClipStats]:
    """The scales of the leaves of each example, and what they do.

    ``params`` has the leaves that are clipped, and `None` in place of others.
    """

    def of_one(leaves: Sequence[Squares]) -> tuple[list[jax.Array], ClipStats]:
        return _scales_of_one(rule, params, leaves)

    return jax.vmap(of_one)(list(leaves))


def _scales_of_one(
    rule: Any, params: Any, leaves: Sequence[Squares]
) -> tuple[list[jax.Array], ClipStats]:
    leaves_of_params, structure = jax.tree.flatten(params)
    kinds, dtype = [jnp.asarray(p) for p in leaves_of_params], stats_dtype(params)
    sizes = [float(p.size) for p in kinds]
    ones = [jnp.ones((), accumulator(p)) for p in kinds]
    together = Squares.sum(leaves)
    whole, bad = together.norm(), together.nonfinite.astype(dtype)
    total = jnp.array(sum(sizes), dtype)
    if rule is None:
        no_limit = jnp.full_like(whole.root, jnp.inf)
        stats = _stats(whole, no_limit, whole.exceeds(no_limit), bad, total)
        return ones, stats._replace(after=stats.before, changed=0 * stats.changed)
    if rule.acts_on == "tree":
        ((norm, limit),) = rule.l2_limits(params, [whole])
        return rule.scale(ones, [whole]), _stats(norm, limit, rule.changes(norm, limit), bad, total)
    mean = type(rule) is ClipByBlockRMS
    norms = [
        leaf.norm(max(size, 1.0) if mean else 1.0) for leaf, size in zip(leaves, sizes, strict=True)
    ]
    pairs = zip(rule.l2_limits(params, norms), sizes, strict=True)
    each = [
        _stats(n, limit, rule.changes(n, limit), bad, jnp.array(size, n.root.dtype))
        for (n, limit), size in pairs
    ]
    stats = jax.tree.map(lambda *fields: sum(x.astype(dtype) for x in fields), *each)
    scales = jax.tree.leaves(rule.scale(structure.unflatten(ones), norms))
    return scales, stats._replace(nonfinite=bad)


def _stats(
    norm: Norm, limit: jax.Array, clips: jax.Array, bad: jax.Array, size: jax.Array
) -> ClipStats:
    return scaled_stats(norm.value, limit, clips, jnp.isfinite(norm.root), bad, size)
