"""Scaling a leaf so that its norm does not exceed a limit."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._norms import Norm
from clipgrad._numbers import over, times, widen
from clipgrad._rules._thresholds import broadcasts_into, nonnegative

# How a leaf is shrunk, given its norm and limit, in the ordinary range. The rules write it in
# different ways, so that each rounds as the optax function of its name does.
Formula = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def divide_first(leaf: jax.Array, root: jax.Array, limit: jax.Array) -> jax.Array:
    """``leaf / root * limit``: the formula of the rules by norm, and of all out of that range."""
    return times(over(leaf, root), limit)


def scale_down(leaf: jax.Array, norm: Norm, limit: Any, formula: Formula) -> jax.Array:
    """The leaf itself where its norm is within the limit, bit for bit; shrunk elsewhere.

    A group whose norm is not finite becomes NaN. Derivatives are finite, at zero too.
    """
    limit = nonnegative(limit, norm.root.dtype)
    if not broadcasts_into(limit.shape, norm.root.shape):
        raise ValueError(
            f"threshold: got an array of shape {limit.shape}, expected one that broadcasts to the "
            f"norms, of shape {norm.root.shape}"
        )
    limit = jnp.broadcast_to(limit, norm.root.shape)
    return _compiled(formula, leaf, norm, limit)


# One program also when called eagerly, so that jax_debug_nans sees none of the branches not taken.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _compiled(formula: Formula, leaf: jax.Array, norm: Norm, limit: jax.Array) -> jax.Array:
    return _scale_down(formula, leaf, norm, limit)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _scale_down(formula: Formula, leaf: jax.Array, norm: Norm, limit: jax.Array) -> jax.Array:
    return _select(formula, leaf, norm, limit, norm.root)


@_scale_down.defjvp
def _scale_down_jvp(formula: Formula, primals: Any, tangents: Any) -> Any:
    """Differentiates with divisors of 1 where they are not used: they may be 0 there.

    Only here, since XLA rounds a division by a select differently from one by a norm.
    """

    def safe(leaf: jax.Array, norm: Norm, limit: jax.Array) -> jax.Array:
        clips = norm.exceeds(limit)
        used = clips & (limit > 0)
        root, divisor = jnp.where(used, norm.root, 1), jnp.where(used, limit, 1)
        shrunk = _select(formula, leaf, norm, divisor, root, clips)
        return jnp.where(clips & (limit == 0) & jnp.isfinite(norm.root), 0, shrunk)

    return _scale_down(formula, *primals), jax.jvp(safe, primals, tangents)[1]


def _select(
    formula: Formula,
    leaf: jax.Array,
    norm: Norm,
    limit: jax.Array,
    root: jax.Array,
    clips: jax.Array | None = None,
) -> jax.Array:
    wide = widen(leaf, root.dtype.name)
    extreme = divide_first(times(wide, norm.scale), root, limit)
    shrunk = jnp.where(norm.scale == 1, formula(wide, root, limit), extreme)
    shrunk = jnp.where(jnp.isfinite(norm.root), shrunk, jnp.nan).astype(leaf.dtype)
    return jnp.where(norm.exceeds(limit) if clips is None else clips, shrunk, leaf)
