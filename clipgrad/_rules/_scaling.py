"""Scaling a leaf so that its norm does not exceed a limit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._norms import Norm
from clipgrad._numbers import times, widen
from clipgrad._rules._thresholds import nonnegative

# How a widened leaf is shrunk, given its root and limit. The rules differ in the order of the
# multiplication and the division, so that each rounds as the optax function of its name does.
Formula = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def scale_down(leaf: jax.Array, norm: Norm, limit: Any, formula: Formula) -> jax.Array:
    """The leaf itself where its norm is within the limit, bit for bit; shrunk elsewhere.

    All divisors are replaced with 1 where they are not used, so that derivatives through this
    are finite. A group whose norm is not finite becomes NaN.
    """
    dtype = norm.root.dtype
    limit = jnp.broadcast_to(nonnegative(limit, dtype), norm.root.shape)
    clips = norm.exceeds(limit)
    divisor = jnp.where(jnp.isfinite(norm.root), norm.root, jnp.nan)
    divisor, limit = jnp.where(clips, divisor, 1), jnp.where(clips, limit, 1)
    shrunk = formula(times(widen(leaf, dtype.name), norm.scale), divisor, limit)
    return jnp.where(clips, shrunk.astype(leaf.dtype), leaf)
