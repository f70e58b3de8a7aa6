"""Averaging gradients over the microbatches of a batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._numbers import at_least_float32

Gradients = Callable[..., tuple[tuple[Any, Any], Any, Any]]


def accumulated(gradients: Gradients, parts: int) -> Gradients:
    """``gradients(params, batch) -> ((loss, aux), grads, stats)`` over microbatches.

    Loss and gradients are averaged, in float32 or wider, statistics added, aux values stacked.
    """

    def averaged(params: Any, batch: Any) -> Any:
        batch = jax.tree.map(lambda leaf: _split(leaf, parts), batch)

        def of_part(i: Any) -> Any:
            return gradients(params, jax.tree.map(lambda leaf: _part(leaf, i), batch))

        def body(total: Any, i: jax.Array) -> Any:
            (loss, aux), grads, stats = of_part(i)
            added = jax.tree.map(lambda t, new: t + new.astype(t.dtype), total, (loss, grads))
            return added, (aux, stats)

        (loss, _), grads, _ = jax.eval_shape(lambda: of_part(0))
        zeros = jax.tree.map(_wide_zeros, (jnp.zeros_like(loss), params), (loss, grads))
        total, (aux, stats) = jax.lax.scan(body, zeros, jnp.arange(parts))
        mean = jax.tree.map(lambda t, s: (t / parts).astype(s.dtype), total, (loss, grads))
        return (mean[0], aux), mean[1], jax.tree.map(lambda field: field.sum(0), stats)

    return averaged


def _split(leaf: jax.Array, parts: int) -> jax.Array:
    if not jnp.ndim(leaf) or leaf.shape[0] % parts:
        raise ValueError(
            f"accumulate: got a batch leaf of shape {jnp.shape(leaf)}, whose leading axis "
            f"{parts} microbatches do not divide"
        )
    # Strided, so that a leading axis that is sharded stays where it is.
    return jnp.reshape(leaf, (leaf.shape[0] // parts, parts, *leaf.shape[1:]))


def _part(leaf: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, i, 1, False)


def _wide_zeros(leaf: Any, shape: Any) -> jax.Array:
    """Zeros placed as a leaf is, in a dtype to sum in."""
    return jnp.zeros_like(leaf, dtype=at_least_float32(shape.dtype))
