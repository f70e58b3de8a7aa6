"""The scales of the gradients of examples by a rule, from their norms."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._arrays import Norm, accumulator, tree_norm
from clipgrad._clip import (
    AutoNorm,
    ClipByBlockRMS,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipStats,
    MeasuringRule,
    scaled_stats,
    stats_dtype,
)
from clipgrad._per_example.norms_of_arrays import side_by_side


def axis_name_of(rule: Any) -> Any:
    """The mapped axes that a rule says its norm is over."""
    return rule.axis_name if isinstance(rule, MeasuringRule) else None


def why_elements(rule: Any) -> str | None:
    """Why a rule needs each example's gradient itself; None if norms are enough."""
    if rule is None:
        return None
    scales = type(rule) in (AutoNorm, ClipByBlockRMS, ClipByGlobalNorm, ClipByNorm)
    if scales and rule.axis is None and not rule.axis_name and rule.ord == 2:
        return None
    return f"{rule!r} does not scale whole leaves by L2 norms"


class Scaling(NamedTuple):
    """The numbers by which the gradients of the examples are scaled.

    Attributes:
      weights: of each leaf, the numbers of the examples; ``None``: 1.
      ok: which examples are not left out; ``None``: all.
      stats: what the rule does with each example.
    """

    weights: list[jax.Array | None]
    ok: jax.Array | None
    stats: ClipStats


def scaling_of(
    rule: Any, leave_out: bool, params: Sequence[Any], norms: Sequence[jax.Array]
) -> Scaling:
    """The scales of leaves that have these norms for the examples.

    ``leave_out``: examples whose gradient is not finite in one of the leaves.
    """
    each, ok = side_by_side(norms), None
    # Nobody knows how many elements of a leaf whose norm is not finite are bad: all count.
    sizes = np.asarray([jnp.size(p) for p in params], each.dtype)
    finite = jnp.isfinite(each)
    bad = jnp.sum(jnp.where(finite, 0, sizes), axis=1)
    if leave_out:
        ok = jnp.all(finite, axis=1)
        each = jnp.where(ok[:, None], each, 0)
    weights, stats = jax.vmap(functools.partial(_scales, rule, list(params)))(each, bad)
    return Scaling(weights, ok, stats)


def _scales(
    rule: Any, params: list[Any], each: jax.Array, bad: jax.Array
) -> tuple[list[jax.Array | None], ClipStats]:
    """The scale of each leaf for one example, whose leaves have these norms."""
    dtype, kinds = stats_dtype(params), [accumulator(jnp.asarray(p)) for p in params]
    bad, sizes = bad.astype(dtype), np.asarray([jnp.size(p) for p in params], dtype)
    if rule is None:
        norm = tree_norm(each).value
        stats = scaled_stats(norm, norm, np.False_, np.True_, bad, sizes.sum())
        return [None] * len(params), stats
    if rule.acts_on == "tree":
        # One number for all leaves of a dtype: XLA would compute the number of each leaf again.
        alike, norms, sizes = list(dict.fromkeys(kinds)), [tree_norm(each)], sizes.sum()
    else:
        counts = np.maximum(sizes, 1) if type(rule) is ClipByBlockRMS else np.ones_like(sizes)
        roots = [each[i].astype(kind) / counts[i] ** 0.5 for i, kind in enumerate(kinds)]
        alike, norms = kinds, [Norm.of(root, jnp.ones_like(root)) for root in roots]
    scales = list(rule.scale([jnp.ones((), kind) for kind in alike], norms))
    groups = jax.tree.map(lambda x: x.astype(dtype), rule.l2_limits(params, norms))
    norm, limit = jax.tree.map(lambda *x: jnp.stack(x), *groups)
    clips, finite = rule.changes(norm, limit), jnp.isfinite(norm.root)
    stats = scaled_stats(norm.value, limit, clips, finite, bad, sizes)
    if rule.acts_on == "tree":
        scales = [scales[alike.index(kind)] for kind in kinds]
    return scales, stats
