"""Blank patches of digits, whose normalization has a NaN gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._demo import task
from clipgrad._demo.digits import Digits, load_pixels
from clipgrad._demo.task import Arm, Metrics, Task, normal, zero_weights

_PATCHES_BATCH = 64


def _load_patches() -> Digits:
    images, labels = load_pixels()
    patches = images.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4)
    return Digits(jnp.asarray(patches), jnp.asarray(labels))


def _init_patches(data: Digits, random: np.random.Generator) -> Any:
    return {
        "embed": normal(random, 4, 16, scale=1 / 2),
        "hidden": normal(random, 256, 64, scale=1 / 16),
        "hidden_bias": zero_weights(1, 64),
        "out": normal(random, 64, 10, scale=1 / 8),
        "out_bias": zero_weights(1, 10),
    }


def _unit(h: jax.Array) -> jax.Array:
    # The derivative of a norm at 0 is 0/0, and every blank patch is at 0.
    return h / (jnp.linalg.norm(h, axis=-1, keepdims=True) + 1e-6)


def mended_unit(h: jax.Array) -> jax.Array:
    """The patches, normalized with the derivative 0 at 0: the cure without a clip."""
    blank = jnp.all(h == 0, axis=-1, keepdims=True)
    return jnp.where(blank, 0, _unit(jnp.where(blank, 1, h)))


def logits(
    params: Any, patches: jax.Array, unit: Callable[[jax.Array], jax.Array] = _unit
) -> jax.Array:
    """The network; ``unit`` is how each patch is normalized."""
    h = unit(checkpoint_name(patches @ params["embed"], "patches"))
    h = jax.nn.relu(h.reshape(len(h), -1) @ params["hidden"] + params["hidden_bias"])
    return h @ params["out"] + params["out_bias"]


def _evaluate_patches(first: Any, params: Any, data: Digits) -> Metrics:
    return {
        "accuracy": task.accuracy(logits(params, data.test.images), data.test.labels),
        "layer 1 moved": jnp.abs(params["embed"] - first["embed"]).max(),
    }


_PATCHES_ERROR_CLIP = cg.ErrorClipByValue(max=1.0, nan=0.0)
_PATCHES_NORM = cg.ClipByGlobalNorm(1.0)

TASK = Task(
    name="blank-patches",
    summary="digits as patches h / (|h| + 1e-6): a blank patch (27%) has a NaN gradient",
    goal="accuracy >= 0.9, all layers trained",
    steps=300,
    optimizer=optax.adam(3e-3),
    arms=(
        Arm(task.PLAIN),
        Arm(task.NORM, _PATCHES_NORM),
        Arm(task.VALUE, cg.ClipByValue(1.0)),
        Arm(task.IF_FINITE, wrap=lambda tx: optax.apply_if_finite(tx, 10**6)),
        Arm(task.ZERO_NANS, wrap=lambda tx: optax.chain(optax.zero_nans(), tx)),
        Arm(task.ERROR, error_clip=_PATCHES_ERROR_CLIP),
        Arm(task.BOTH, _PATCHES_NORM, _PATCHES_ERROR_CLIP),
    ),
    load=_load_patches,
    init=_init_patches,
    sample=lambda data, key: data.sample(key, _PATCHES_BATCH),
    loss=lambda params, batch: task.cross_entropy(logits(params, batch.images), batch.labels),
    tag="patches",
    evaluate=_evaluate_patches,
    reached=lambda metrics: (metrics["accuracy"] >= 0.9) & (metrics["layer 1 moved"] > 0),
    shown=(task.NORM, task.ZERO_NANS, task.ERROR),
    short=150,
    options=task.QUICK,
    note="only the error clip trains every layer: with optax.zero_nans the first one never moves",
)
