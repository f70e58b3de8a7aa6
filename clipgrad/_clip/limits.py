"""Limits: thresholds as arrays like the norms, never negative in use."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._arrays import Norm
from clipgrad._clip.rule_thresholds import thresholds_by_leaf
from clipgrad._sharding import broadcast_like


def limits_by_leaf(rule: Any, norms: Sequence[Norm]) -> list[jax.Array]:
    """The limit of each norm of a leaf by the main threshold of a rule."""
    return limits_of(thresholds_by_leaf(rule, len(norms)), norms)


def limits_of(thresholds: Sequence[Any], norms: Sequence[Norm]) -> list[jax.Array]:
    """The limit of each norm, computed once for a threshold and all norms of one type."""
    known: dict[Any, jax.Array] = {}
    limits = []
    for threshold, norm in zip(thresholds, norms, strict=True):
        key = id(threshold), jax.typeof(norm.root)
        if key not in known:
            known[key] = limit_of(threshold, norm)
        limits.append(known[key])
    return limits


def limit_of(threshold: Any, norm: Norm) -> jax.Array:
    """A threshold as an array like the norms, in their dtype.

    Raises:
      ValueError: if it does not broadcast to the norms.
    """
    limit = nonnegative(threshold, norm.root.dtype)
    if not broadcasts_into(limit.shape, norm.root.shape):
        raise ValueError(
            f"threshold: got an array of shape {limit.shape}, expected one that broadcasts to the "
            f"norms, of shape {norm.root.shape}"
        )
    return broadcast_like(limit, norm.root)


def broadcasts_into(shape: tuple[Any, ...], target: tuple[Any, ...]) -> bool:
    """Whether an array of a shape broadcasts to another without enlarging it."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(n in (1, size) for n, size in pairs)


def nonnegative(value: Any, dtype: Any) -> jax.Array:
    """A threshold as an array; a negative one acts as 0."""
    if isinstance(value, jax.Array):
        return jnp.maximum(value.astype(dtype), 0)
    return threshold_array(np.maximum(np.asarray(value, np.float64), 0), dtype)


def threshold_array(value: Any, dtype: Any) -> jax.Array:
    """A threshold in the given dtype, without a detour through int32."""
    if isinstance(value, jax.Array):
        return value.astype(dtype)
    with np.errstate(over="ignore"):
        return jnp.asarray(np.asarray(value, np.float64).astype(dtype))
