"""Digits learned with the noise of differentially private training (DP-SGD)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.which_clip_deep_mlp import TASK as DEEP_MLP
from clipgrad._demo import task as _task
from clipgrad._demo.digits import Digits
from clipgrad._demo.task import Metrics, normal, zero_weights

BATCH = 256
# Standard deviations of the noise in a sum of clipped gradients, in units of the limit.
NOISE = 4.0


def _init(data: Digits, random: np.random.Generator) -> Any:
    return {
        "in": normal(random, 64, 32, scale=(2 / 64) ** 0.5),
        "in_bias": zero_weights(32),
        "out": normal(random, 32, 10, scale=32**-0.5),
        "out_bias": zero_weights(10),
    }


def _logits(params: Any, images: jax.Array) -> jax.Array:
    h = jax.nn.relu(images @ params["in"] + params["in_bias"])
    return h @ params["out"] + params["out_bias"]


def _loss(params: Any, batch: Digits) -> jax.Array:
    return _task.cross_entropy(_logits(params, batch.images), batch.labels)


def _evaluate(first: Any, params: Any, data: Digits) -> Metrics:
    return {"accuracy": _task.accuracy(_logits(params, data.test.images), data.test.labels)}


TASK = dataclasses.replace(
    DEEP_MLP,
    name="private-digits",
    steps=100,
    init=_init,
    sample=lambda data, key: data.sample(key, BATCH),
    loss=_loss,
    tag="",
    evaluate=_evaluate,
    reached=lambda metrics: metrics["accuracy"] >= 0.8,
)


def with_noise(grads: Any, key: jax.Array, limit: Any) -> Any:
    """A mean of clipped gradients, plus the noise of DP-SGD for a limit of each."""
    leaves, structure = jax.tree.flatten(grads)
    keys = jax.random.split(key, len(leaves))
    scale = NOISE * limit / BATCH
    noise = [scale * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return structure.unflatten(list(map(jnp.add, leaves, noise)))
