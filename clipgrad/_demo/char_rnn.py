"""A character RNN on the help texts of the standard library."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._demo import task
from clipgrad._demo.task import Arm, Task, normal, zero_weights

_TEXT_BATCH, _TEXT_LENGTH, _TEXT_WIDTH, _TEXT_TEST_ROWS = 12, 40, 96, 256


class _Text(NamedTuple):
    """Rows of numbered characters; ``alphabet`` has an entry for each that there is."""

    train: jax.Array
    test: jax.Array
    alphabet: jax.Array


def load_text(length: int = _TEXT_LENGTH) -> _Text:
    """The help texts, in rows of so many characters and the one after them."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics))
    alphabet, numbers = np.unique(list(text), return_inverse=True)
    rows = numbers[: len(text) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    rows = jnp.asarray(np.random.default_rng(0).permutation(rows), jnp.int32)
    return _Text(rows[_TEXT_TEST_ROWS:], rows[:_TEXT_TEST_ROWS], jnp.arange(len(alphabet)))


def _init_text(data: _Text, random: np.random.Generator) -> Any:
    size = len(data.alphabet)
    return {
        "embed": normal(random, size, _TEXT_WIDTH, scale=0.1),
        "cell": normal(random, _TEXT_WIDTH, _TEXT_WIDTH, scale=_TEXT_WIDTH**-0.5),
        "cell_bias": zero_weights(1, _TEXT_WIDTH),
        "out": normal(random, _TEXT_WIDTH, size, scale=0.05),
        "out_bias": zero_weights(1, 1, size),
    }


def _sample(data: _Text, key: jax.Array) -> jax.Array:
    return data.train[jax.random.randint(key, (_TEXT_BATCH,), 0, len(data.train))]


def _text_loss(params: Any, text: jax.Array) -> jax.Array:
    def cell(h: jax.Array, character: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = checkpoint_name(h, "h")
        h = jnp.tanh(h @ params["cell"] + params["embed"][character] + params["cell_bias"])
        return h, h

    _, h = jax.lax.scan(cell, jnp.zeros((len(text), _TEXT_WIDTH)), text[:, :-1].T)
    return task.cross_entropy(h @ params["out"] + params["out_bias"], text[:, 1:].T)


_TEXT_ERROR_CLIP = cg.ErrorClipByValue(max=3e-4)
_TEXT_NORM = cg.ClipByGlobalNorm(1.0)

TASK = Task(
    name="char-rnn",
    summary="a tanh RNN reads Python's help texts, SGD at learning rate 1",
    goal="under 2.5 nats per character of unseen text",
    steps=400,
    optimizer=optax.sgd(1.0),
    arms=(
        Arm(task.PLAIN),
        Arm(task.NORM, _TEXT_NORM),
        Arm(task.ERROR, error_clip=_TEXT_ERROR_CLIP),
        Arm(task.BOTH, _TEXT_NORM, _TEXT_ERROR_CLIP),
    ),
    load=load_text,
    init=_init_text,
    sample=_sample,
    loss=_text_loss,
    tag="h",
    evaluate=lambda first, params, data: {"nats per character": _text_loss(params, data.test)},
    reached=lambda metrics: metrics["nats per character"] < 2.5,
    recurrent=True,
    short=350,
    options={"xla_backend_optimization_level": 1},
    note="the norm clip wins: begin with it, an error clip does not replace it",
)
