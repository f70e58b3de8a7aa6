"""A small transformer that reads text, warmed up for too short a time, with bad batches in it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

from clipgrad._demo import char_rnn as _char_rnn
from clipgrad._demo import task as _task
from clipgrad._demo.task import Metrics, Task, normal

_BATCH, _LENGTH, _WIDTH, _LAYERS, _HEADS = 8, 32, 32, 2, 2
_BAD_STEPS, _OUTLIERS = 0.02, 0.01


def _load() -> Any:
    """The help texts, and one number more: a token that training meets now and then."""
    data = _char_rnn.load_text(_LENGTH)
    return data._replace(alphabet=jnp.arange(len(data.alphabet) + 1))


def _init(data: Any, random: np.random.Generator) -> Any:
    size, scale = len(data.alphabet), _WIDTH**-0.5
    embed = normal(random, size, _WIDTH, scale=0.5)
    embed[-1] *= 30  # as an embedding that weight decay has not reached, or a glitch token
    return {
        "embed": embed,
        "place": normal(random, _LENGTH, _WIDTH, scale=0.1),
        "layers": {
            "attention": normal(random, _LAYERS, _WIDTH, 3 * _WIDTH, scale=scale),
            "joined": normal(random, _LAYERS, _WIDTH, _WIDTH, scale=scale),
            "up": normal(random, _LAYERS, _WIDTH, 4 * _WIDTH, scale=scale),
            "down": normal(random, _LAYERS, 4 * _WIDTH, _WIDTH, scale=scale / 2),
        },
        "out": normal(random, _WIDTH, size, scale=scale),
    }


def _sample(data: Any, key: jax.Array) -> jax.Array:
    """Rows of text. In one step of fifty they are noise; one token of a hundred is the outlier."""
    rows, bad, noise, rare = jax.random.split(key, 4)
    size = len(data.alphabet)
    text = data.train[jax.random.randint(rows, (_BATCH,), 0, len(data.train))]
    text = jnp.where(jax.random.uniform(rare, text.shape) < _OUTLIERS, size - 1, text)
    noise = jax.random.randint(noise, text.shape, 0, size)
    return jnp.where(jax.random.uniform(bad) < _BAD_STEPS, noise, text)


def _attention(weights: Any, h: jax.Array) -> jax.Array:
    parts = (h @ weights["attention"]).reshape(*h.shape[:2], 3, _HEADS, -1)
    query, key, value = (parts[:, :, i] for i in range(3))
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return mixed.reshape(h.shape) @ weights["joined"]


def _rms(h: jax.Array) -> jax.Array:
    return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)


def _loss(params: Any, text: jax.Array) -> jax.Array:
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

    @jax.checkpoint
    def layer(h: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        h = checkpoint_name(h, "h")
        h = h + _attention(weights, _rms(h))
        return h + jax.nn.gelu(_rms(h) @ weights["up"]) @ weights["down"], None

    h = half["embed"][text[:, :-1]] + half["place"]
    h, _ = jax.lax.scan(layer, h, half["layers"])
    return _task.cross_entropy((_rms(h) @ half["out"]).astype(jnp.float32), text[:, 1:])


def _evaluate(first: Any, params: Any, data: Any) -> Metrics:
    return {"nats per character": _loss(params, data.test)}


def warmed_up(rate: Any, steps: int = 5) -> optax.GradientTransformation:
    """AdamW whose learning rate rises for so many steps, and then stays."""
    return optax.adamw(lambda count: rate * jnp.minimum(1.0, (count + 1) / steps), b2=0.95)


TASK = Task(
    name="language",
    summary="a transformer reads text in bfloat16, with bad batches and an outlier token, AdamW",
    goal="under 2.6 nats per character of unseen text",
    steps=200,
    optimizer=warmed_up(1e-2),
    arms=(),
    load=_load,
    init=_init,
    sample=_sample,
    loss=_loss,
    tag="h",
    evaluate=_evaluate,
    reached=lambda metrics: metrics["nats per character"] < 2.6,
)
