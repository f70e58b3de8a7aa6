"""A deep residual network without normalisation, at a learning rate that is too high."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._demo import task as _task
from clipgrad._demo.digits import Digits, load_pixels
from clipgrad._demo.task import Arm, Metrics, Task, normal

_BATCH, _WIDTH, _BLOCKS = 64, 64, 8


def _load_digits() -> Digits:
    images, labels = load_pixels()
    return Digits(jnp.asarray((images - 0.3) / 0.37), jnp.asarray(labels))


def _init(data: Digits, random: np.random.Generator) -> Any:
    he = (2 / _WIDTH) ** 0.5
    return {
        "in": normal(random, 64, _WIDTH, scale=(2 / 64) ** 0.5),
        "blocks": {
            "up": normal(random, _BLOCKS, _WIDTH, _WIDTH, scale=he),
            "down": normal(random, _BLOCKS, _WIDTH, _WIDTH, scale=he),
        },
        "out": normal(random, _WIDTH, 10, scale=_WIDTH**-0.5),
    }


def _logits(params: Any, images: jax.Array) -> jax.Array:
    def block(h: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        h = checkpoint_name(h, "h")
        return h + jax.nn.relu(jax.nn.relu(h) @ weights["up"]) @ weights["down"], None

    h, _ = jax.lax.scan(block, images @ params["in"], params["blocks"])
    return h @ params["out"]


def _loss(params: Any, batch: Digits) -> jax.Array:
    return _task.cross_entropy(_logits(params, batch.images), batch.labels)


def _evaluate(first: Any, params: Any, data: Digits) -> Metrics:
    return {"accuracy": _task.accuracy(_logits(params, data.test.images), data.test.labels)}


_ERROR_CLIP = cg.ErrorClipByValue(max=1e-3)
_NORM = cg.ClipByGlobalNorm(1.0)

TASK = Task(
    name="deep-mlp",
    summary="8 residual blocks without normalisation on digits, SGD at learning rate 0.1",
    goal="accuracy >= 0.9",
    steps=300,
    optimizer=optax.sgd(0.1, momentum=0.9, nesterov=True),
    arms=(
        Arm(_task.PLAIN),
        Arm(_task.NORM, _NORM),
        Arm(_task.ADAPTIVE, cg.AdaptiveClip(0.01, axis=-2), where="^(in|blocks)"),
        Arm(_task.ERROR, error_clip=_ERROR_CLIP),
        Arm(_task.BOTH, _NORM, _ERROR_CLIP),
    ),
    load=_load_digits,
    init=_init,
    sample=lambda data, key: data.sample(key, _BATCH),
    loss=_loss,
    tag="h",
    evaluate=_evaluate,
    reached=lambda metrics: metrics["accuracy"] >= 0.9,
)
