"""Clips of the gradient of each example."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import clipgrad as cg
from benchmarks import models
from benchmarks.rows import FLOOR, OURS, PEER, Absent, Row, Scale, Side, jitted, optional

TITLE = "Clip of each example's gradient"
LIMIT = 1.0


def loss(params: Any, example: Any) -> jax.Array:
    """The loss of one example."""
    x, y = example
    return jnp.mean((models.mlp(params, x[None]) - y) ** 2)


def optax_sum(params: Any, batch: Any) -> Any:
    """The sum by the means of optax, from the stacked gradients of all examples."""
    stacked = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
    return optax.per_example_global_norm_clip(stacked, LIMIT)[0]


def sides(widths: list[int], examples: int, microbatch: int | None) -> list[Side | Absent]:
    """Ours, optax's without microbatches, jax-privacy's, and the gradient without a clip."""
    params = models.mlp_params(widths)
    keys = jax.random.split(jax.random.key(1))
    batch = tuple(
        10 * jax.random.normal(key, (examples, n), jnp.float32)
        for key, n in zip(keys, (widths[0], widths[-1]), strict=True)
    )
    ours = cg.clip_per_example(
        loss, cg.ClipByGlobalNorm(LIMIT), reduce="sum", microbatch=microbatch
    )

    def privacy(clipping: Any) -> Side:
        theirs = clipping.clipped_grad(
            loss, l2_clip_norm=LIMIT, keep_batch_dim=False, microbatch_size=microbatch
        )
        return jitted("jax-privacy", PEER, theirs, params, batch)

    def unclipped(params: Any, batch: Any) -> Any:
        return jax.grad(lambda p: jnp.sum(jax.vmap(loss, (None, 0))(p, batch)))(params)

    return [
        jitted("clipgrad", OURS, lambda p, b: ours(p, b)[1], params, batch),
        jitted("optax, all at once", PEER, optax_sum, params, batch),
        optional("jax-privacy", "jax_privacy.clipping", privacy),
        jitted("no clip", FLOOR, unclipped, params, batch, numbers=None),
    ]


def rows(scale: Scale) -> list[Row]:
    """All examples at once, and in microbatches."""
    widths, batch = [scale(784, 8), scale(512, 8), scale(512, 8), 10], 64
    return [
        Row("MLP of 0.67M, batch 64", lambda: sides(widths, batch, None), 1e-5),
        Row("MLP of 0.67M, batch 64 in parts of 16", lambda: sides(widths, batch, 16), 1e-5),
    ]
