"""A denoising diffusion model of handwritten digits, by Ho, Jain and Abbeel, 2020."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

from clipgrad._demo.digits import Digits, load_pixels
from clipgrad._demo.task import Metrics, Task, normal, zero_weights

_BATCH, _WIDTH, _BLOCKS, _WAVES = 32, 64, 3, 8
# The logarithm of the signal-to-noise ratio runs from this to its negative.
_CLEAREST = 6.0


def _load() -> Digits:
    images, labels = load_pixels()
    return Digits(jnp.asarray(2 * images - 1), jnp.asarray(labels))


def _init(data: Digits, random: np.random.Generator) -> Any:
    he = (2 / _WIDTH) ** 0.5
    return {
        "in": normal(random, 64 + 2 * _WAVES, _WIDTH, scale=(64 + 2 * _WAVES) ** -0.5),
        "blocks": {
            "up": normal(random, _BLOCKS, _WIDTH, _WIDTH, scale=he),
            "down": normal(random, _BLOCKS, _WIDTH, _WIDTH, scale=he / 4),
        },
        "out": zero_weights(_WIDTH, 64),
    }


def _noise(params: Any, noisy: jax.Array, level: jax.Array) -> jax.Array:
    """The noise in each image, as the network sees it."""
    waves = level[:, None] * 2.0 ** jnp.arange(-3, _WAVES - 3)
    h = jnp.concatenate([noisy, jnp.sin(waves), jnp.cos(waves)], axis=1) @ params["in"]

    def block(h: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        h = checkpoint_name(h, "h")
        return h + jax.nn.silu(h @ weights["up"]) @ weights["down"], None

    return jax.lax.scan(block, h, params["blocks"])[0] @ params["out"]


def _sample(data: Digits, key: jax.Array) -> Any:
    images, levels, noise = jax.random.split(key, 3)
    level = jax.random.uniform(levels, (_BATCH,), minval=-_CLEAREST, maxval=_CLEAREST)
    return data.sample(images, _BATCH).images, level, jax.random.normal(noise, (_BATCH, 64))


def _errors(params: Any, batch: Any) -> jax.Array:
    images, level, noise = batch
    signal, spread = (jnp.sqrt(jax.nn.sigmoid(x))[:, None] for x in (level, -level))
    guessed = _noise(params, signal * images + spread * noise, level)
    return jnp.square(guessed - noise).mean(1)


def _loss(params: Any, batch: Any) -> jax.Array:
    return _errors(params, batch).mean()


def _evaluate(first: Any, params: Any, data: Digits) -> Metrics:
    """The error of the noise at levels in the middle, over the images that were not seen."""
    images = data.test.images
    level = jnp.linspace(-4.0, 4.0, len(images))
    noise = jax.random.normal(jax.random.key(0), images.shape)
    return {"error of the noise": _errors(params, (images, level, noise)).mean()}


TASK = Task(
    name="diffusion",
    summary="a diffusion model of digits, Adam",
    goal="error of the noise under 0.3",
    steps=800,
    optimizer=optax.adam(1e-3),
    arms=(),
    load=_load,
    init=_init,
    sample=_sample,
    loss=_loss,
    tag="h",
    evaluate=_evaluate,
    reached=lambda metrics: metrics["error of the noise"] < 0.3,
)
