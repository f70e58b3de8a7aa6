"""All that this room asks of rules, clips and statistics."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._clip import (
    AutoNorm,
    ClipByBlockRMS,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipStats,
    clip_grads,
    nonfinite_counts,
    scaled_stats,
    stats_dtype,
)
from clipgrad._clip import as_rule as as_rule
from clipgrad._clip import check_policy as check_policy
from clipgrad._clip import is_rule as is_rule
from clipgrad._clip import raise_for_counts as raise_for_counts
from clipgrad._numerics import Norm, accumulator
from clipgrad._per_example.squares import Squares


def axis_name_of(rule: Any) -> Any:
    """The mapped axes that a rule says its norm is over."""
    return getattr(rule, "axis_name", None)


def why_elements(rule: Any) -> str | None:
    """Why a rule needs each example's gradient itself; None if norms are enough."""
    reason = f"{rule!r} does not scale whole leaves by L2 norms"
    if axis_name_of(rule):
        return reason
    if rule is None or type(rule) is ClipByBlockRMS:
        return None
    if type(rule) is AutoNorm or type(rule) is ClipByGlobalNorm and rule.ord == 2:
        return None
    if type(rule) is ClipByNorm and rule.ord == 2 and rule.axis is None:
        return None
    return reason


def clipped(rule: Any, where: Any, grads: Any, params: Any) -> tuple[Any, ClipStats]:
    """The gradient of one example, clipped as it is."""
    return clip_grads(grads, rule, params, where=where, nonfinite="propagate")


def bad_counts(grads: Any) -> Any:
    """The number of elements of each leaf that are NaN or inf, for `raise_for_counts`."""
    return nonfinite_counts(grads)


class Scaling(NamedTuple):
    """The numbers by which the gradients of the examples are scaled.

    Attributes:
      weights: of each leaf, the numbers of the examples.
      ok: which examples are not left out; ``None``: all.
      stats: what the rule does with each example.
    """

    weights: list[jax.Array]
    ok: jax.Array | None
    stats: ClipStats


def scaling_of(rule: Any, leave_out: bool, params: Sequence[Any], squares: Squares) -> Scaling:
    """The scales of leaves whose squares have the shape (leaves, examples).

    ``leave_out``: examples whose gradient is not finite in one of the leaves.
    """
    finite, ok = jnp.isfinite(squares.total), None
    # Nobody knows how many elements of a leaf whose norm is not finite are bad: all count.
    sizes = np.asarray([jnp.size(p) for p in params], squares.total.dtype).reshape(-1, 1)
    bad = jnp.sum(sizes * (~finite).astype(sizes.dtype), axis=0)
    if leave_out:
        ok = jnp.all(finite, axis=0)
        squares = Squares(*(jnp.where(ok, x, jnp.zeros_like(x)) for x in squares))
    kinds = [accumulator(jnp.asarray(p)) for p in params]
    by_leaf = rule is not None and rule.acts_on != "tree"
    alike = kinds if by_leaf else list(dict.fromkeys(kinds))
    ones = [jnp.ones((), kind) for kind in alike]
    form = functools.partial(
        _scales_by_leaf if by_leaf else _scales_of_all, rule, list(params), ones
    )
    numbers, stats = jax.vmap(form, in_axes=(1, 0))(squares, bad)
    places = range(len(kinds)) if by_leaf else [alike.index(kind) for kind in kinds]
    return Scaling([numbers[i] for i in places], ok, stats)


def _scales_of_all(
    rule: Any, params: Any, ones: list, leaves: Squares, bad: jax.Array
) -> tuple[list[jax.Array], ClipStats]:
    """One number for all leaves of a dtype: XLA would compute the number of each leaf again."""
    whole, dtype = leaves.over_axis().norm(), stats_dtype(params)
    bad = bad.astype(dtype)
    total = jnp.array(float(sum(jnp.size(p) for p in params)), dtype)
    if rule is None:
        no_limit = jnp.full_like(whole.root, jnp.inf)
        stats = _stats(whole, no_limit, whole.exceeds(no_limit), bad, total)
        return ones, stats._replace(after=stats.before, changed=0 * stats.changed)
    ((norm, limit),) = rule.l2_limits(params, [whole])
    return rule.scale(ones, [whole]), _stats(norm, limit, rule.changes(norm, limit), bad, total)


def _scales_by_leaf(
    rule: Any, params: Any, ones: list, leaves: Squares, bad: jax.Array
) -> tuple[list[jax.Array], ClipStats]:
    dtype, mean = stats_dtype(params), type(rule) is ClipByBlockRMS
    sizes = [float(jnp.size(p)) for p in params]
    norms = [
        Squares(leaves.total[i].astype(one.dtype), leaves.exponent[i]).norm(
            max(size, 1.0) if mean else 1.0
        )
        for i, (size, one) in enumerate(zip(sizes, ones, strict=True))
    ]
    bad = bad.astype(dtype)
    each = [
        _stats(n, limit, rule.changes(n, limit), bad, jnp.array(size, n.root.dtype))
        for (n, limit), size in zip(rule.l2_limits(params, norms), sizes, strict=True)
    ]
    stats = jax.tree.map(lambda *fields: sum(x.astype(dtype) for x in fields), *each)
    return list(rule.scale(ones, norms)), stats._replace(nonfinite=bad)


def _stats(
    norm: Norm, limit: jax.Array, clips: jax.Array, bad: jax.Array, size: jax.Array
) -> ClipStats:
    return scaled_stats(norm.value, limit, clips, jnp.isfinite(norm.root), bad, size)
