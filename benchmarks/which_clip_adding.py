"""The adding problem, which an RNN solves only if it remembers over 50 steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._demo import task as _task
from clipgrad._demo.task import Arm, Metrics, Task, normal, zero_weights

_BATCH, _LENGTH, _WIDTH, _TEST_ROWS = 32, 50, 64, 1000


class _Sums(NamedTuple):
    """Sequences of (number, mark), and the sum of the two marked numbers of each."""

    sequences: jax.Array
    sums: jax.Array


def _make(key: jax.Array, size: int) -> _Sums:
    values, first, second = jax.random.split(key, 3)
    numbers = jax.random.uniform(values, (size, _LENGTH))
    half = _LENGTH // 2
    early = jax.random.randint(first, (size,), 0, half)
    late = jax.random.randint(second, (size,), half, _LENGTH)
    marks = jax.nn.one_hot(early, _LENGTH) + jax.nn.one_hot(late, _LENGTH)
    return _Sums(jnp.stack([numbers, marks], -1), (numbers * marks).sum(1))


def _init(data: _Sums, random: np.random.Generator) -> Any:
    return {
        "in": normal(random, 2, _WIDTH, scale=0.1),
        "cell": np.eye(_WIDTH, dtype=np.float32),
        "cell_bias": zero_weights(1, _WIDTH),
        "out": normal(random, _WIDTH, scale=0.1),
        "out_bias": zero_weights(1),
    }


def _loss(params: Any, batch: _Sums) -> jax.Array:
    def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        h = checkpoint_name(h, "h")
        return jax.nn.relu(h @ params["cell"] + x @ params["in"] + params["cell_bias"]), None

    start = jnp.zeros((len(batch.sums), _WIDTH))
    h, _ = jax.lax.scan(cell, start, batch.sequences.swapaxes(0, 1))
    return jnp.square(h @ params["out"] + params["out_bias"] - batch.sums).mean()


def _evaluate(first: Any, params: Any, data: _Sums) -> Metrics:
    return {"squared error": _loss(params, data)}


_ERROR_CLIP = cg.ClipByNorm(0.1)
_NORM = cg.ClipByGlobalNorm(1.0)

TASK = Task(
    name="adding",
    summary="an IRNN adds two marked numbers out of 50 (guessing the mean: 0.167), Adam",
    goal="squared error under 0.05",
    steps=1200,
    optimizer=optax.adam(1e-3),
    arms=(
        Arm(_task.PLAIN),
        Arm(_task.NORM, _NORM),
        Arm(_task.ERROR, error_clip=_ERROR_CLIP),
        Arm(_task.BOTH, _NORM, _ERROR_CLIP),
    ),
    load=lambda: _make(jax.random.key(0), _TEST_ROWS),
    init=_init,
    sample=lambda data, key: _make(key, _BATCH),
    loss=_loss,
    tag="h",
    evaluate=_evaluate,
    reached=lambda metrics: metrics["squared error"] < 0.05,
    recurrent=True,
)
