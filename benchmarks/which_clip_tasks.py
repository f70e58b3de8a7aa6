"""Further tasks of which_clip.py: an LSTM as Graves trained his, and two heads on one encoder."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from benchmarks.which_clip_deep_mlp import TASK as DEEP_MLP
from clipgrad._demo import char_rnn as _char_rnn
from clipgrad._demo import task as _task
from clipgrad._demo.digits import Digits, load_pixels
from clipgrad._demo.task import Metrics, Task, normal, zero_weights

_LENGTH, _WIDTH, _BATCH = 120, 32, 8


def _lstm_init(data: Any, random: np.random.Generator) -> Any:
    size, bias = len(data.alphabet), zero_weights(1, 4 * _WIDTH)
    bias[:, _WIDTH : 2 * _WIDTH] = 1
    return {
        "embed": normal(random, size, 4 * _WIDTH, scale=0.5),
        "cell": normal(random, _WIDTH, 4 * _WIDTH, scale=_WIDTH**-0.5),
        "bias": bias,
        "out": normal(random, _WIDTH, size, scale=0.05),
        "out_bias": zero_weights(1, 1, size),
    }


def _lstm_loss(params: Any, text: jax.Array) -> jax.Array:
    def cell(carry: Any, character: jax.Array) -> Any:
        h, memory = carry
        gates = h @ params["cell"] + params["embed"][character] + params["bias"]
        new, forget, out, value = jnp.split(checkpoint_name(gates, "gates"), 4, axis=1)
        memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(new) * jnp.tanh(value)
        h = jax.nn.sigmoid(out) * jnp.tanh(memory)
        return (h, memory), h

    start = jnp.zeros((len(text), _WIDTH))
    _, h = jax.lax.scan(cell, (start, start), text[:, :-1].T)
    return _task.cross_entropy(h @ params["out"] + params["out_bias"], text[:, 1:].T)


def _lstm_sample(data: Any, key: jax.Array) -> jax.Array:
    return data.train[jax.random.randint(key, (_BATCH,), 0, len(data.train))]


GRAVES = dataclasses.replace(
    _char_rnn.TASK,
    name="graves-lstm",
    steps=200,
    load=lambda: _char_rnn.load_text(_LENGTH),
    init=_lstm_init,
    sample=_lstm_sample,
    loss=_lstm_loss,
    tag="gates",
    evaluate=lambda first, params, data: {"nats per character": _lstm_loss(params, data.test)},
)


def _heads_load() -> Digits:
    images, labels = load_pixels()
    return Digits(jnp.asarray(images), jnp.asarray(labels))


def _heads_init(data: Digits, random: np.random.Generator, gain: float) -> Any:
    return {
        "encoder": normal(random, 64, 64, scale=(2 / 64) ** 0.5),
        "class": normal(random, 64, 10, scale=1 / 8),
        "cell": normal(random, 64, 64, scale=gain / 8),
        "pixel": normal(random, 1, 64, scale=1.0),
        "draw": normal(random, 64, scale=1 / 8),
    }


def _encode(params: Any, images: jax.Array) -> jax.Array:
    return jnp.tanh((images - 0.3) @ params["encoder"])


def _heads_loss(params: Any, batch: Digits) -> jax.Array:
    """Cross-entropy of the classes, and squared error of the pixels, one drawn after the other."""
    start = _encode(params, batch.images)
    before = jnp.pad(batch.images[:, :-1], ((0, 0), (1, 0)))

    def cell(h: jax.Array, pixel: jax.Array) -> Any:
        h = checkpoint_name(h, "h")
        h = jnp.tanh(h @ params["cell"] + pixel[:, None] * params["pixel"])
        return h, h @ params["draw"]

    _, drawn = jax.lax.scan(cell, start, before.T)
    entropy = _task.cross_entropy(start @ params["class"], batch.labels)
    return entropy + jnp.square(drawn.T - batch.images).mean()


def _heads_evaluate(first: Any, params: Any, data: Digits) -> Metrics:
    logits = _encode(params, data.test.images) @ params["class"]
    return {
        "accuracy": _task.accuracy(logits, data.test.labels),
        "loss": _heads_loss(params, data.test),
    }


def two_heads(gain: float) -> Task:
    """Digits are classified, and drawn pixel by pixel by an RNN whose weights have this gain."""
    return dataclasses.replace(
        DEEP_MLP,
        name="two-heads",
        steps=200,
        load=_heads_load,
        init=lambda data, random: _heads_init(data, random, gain),
        sample=lambda data, key: data.sample(key, 32),
        loss=_heads_loss,
        tag="h",
        evaluate=_heads_evaluate,
        reached=lambda metrics: metrics["accuracy"] >= 0.9,
    )
