"""Scaling a leaf so that its norm does not exceed a limit."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._norms import Norm
from clipgrad._numbers import over, times, widen
from clipgrad._rules._thresholds import broadcasts_into, nonnegative


def limit_of(threshold: Any, norm: Norm) -> jax.Array:
    """A threshold as an array like the norms, in their dtype."""
    limit = nonnegative(threshold, norm.root.dtype)
    if not broadcasts_into(limit.shape, norm.root.shape):
        raise ValueError(
            f"threshold: got an array of shape {limit.shape}, expected one that broadcasts to the "
            f"norms, of shape {norm.root.shape}"
        )
    return jnp.broadcast_to(limit, norm.root.shape)


def scale_down(leaf: jax.Array, norm: Norm, threshold: Any) -> jax.Array:
    """The leaf itself where its norm is within the limit, bit for bit; scaled to it elsewhere.

    A group whose norm is not finite becomes NaN. Derivatives are finite, at zero too, since no
    divisor is 0. In the ordinary range the scale is 1, and what is computed for each element is
    what optax computes, so that XLA makes the same program of it and the optimizer behind it.
    """
    limit = limit_of(threshold, norm)
    wide = times(widen(leaf, norm.root.dtype.name), norm.scale)
    shrunk = times(over(wide, norm.divisor), limit).astype(leaf.dtype)
    return jnp.where(_is_within(norm, limit), leaf, shrunk)


# One program also when called eagerly: under jax_debug_infs the scaled limit may be inf in it.
@functools.partial(jax.jit, inline=True)
def _is_within(norm: Norm, limit: jax.Array) -> jax.Array:
    return norm.divisor <= limit * norm.scale
