"""What optax and JAX's documentation offer, where it takes a few lines of one's own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def by_leaf(max_norm: float) -> optax.GradientTransformation:
    """The norm of each leaf by the means of optax, which has no such clip."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        clipped = jax.tree.map(lambda g: g * jnp.minimum(1, max_norm / optax.tree.norm(g)), updates)
        return clipped, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def update_of(tx: optax.GradientTransformation) -> Callable[..., Any]:
    """The update of a clip without state of its own, as a function of gradients and weights."""
    return lambda grads, params=None: tx.update(grads, tx.init(grads), params)[0]


def custom_vjp_clip(limit: float) -> Callable[[jax.Array], jax.Array]:
    """A clip of the cotangent by hand, as in JAX's documentation."""

    @jax.custom_vjp
    def clip(x: jax.Array) -> jax.Array:
        return x

    clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -limit, limit),))
    return clip
