"""A loop of training with the flight recorder and without."""

import tempfile
from collections.abc import Callable
from typing import Any

import jax
import optax

import clipgrad as cg
from benchmarks import models, timing, trees
from benchmarks.rows import FLOOR, OURS, Row, Scale, Side

TITLE = "Flight recorder"


def loop(
    name: str, kind: str, given: tuple, steps: int, record: Callable, halt: bool = True
) -> Side:
    """Some steps that are dispatched ahead with donated buffers; the last one is waited for."""
    params, batch = given
    tx = optax.adamw(1e-3)
    tx = cg.skip_spikes(tx, halt=halt, sigma=None)
    step = cg.train_step(models.unrolled_transformer, tx)

    def run() -> Any:
        state = step.init(params)
        for _ in range(steps):
            state, metrics = step(state, batch)
            record(state, batch, metrics["loss"])
        return jax.block_until_ready(state)

    def numbers() -> Any:
        return jax.device_get(run().params)

    return Side(name, kind, timing.running(run), numbers, {})


def sides(width: int, layers: int, length: int, steps: int) -> list[Side]:
    """All take the same steps."""
    params = trees.normal(trees.transformer(width, layers), width**-0.5)
    batch = jax.random.normal(jax.random.key(0), (4, length, width), "float32")
    recorder = cg.FlightRecorder(tempfile.mkdtemp())
    given = (params, batch), steps
    return [
        loop("recorded", OURS, *given, lambda s, b, loss: recorder.record(s, b, loss=loss)),
        loop("not recorded", FLOOR, *given, lambda *_: None),
        loop("without halt", FLOOR, *given, lambda *_: None, halt=False),
    ]


def rows(scale: Scale) -> list[Row]:
    """A step of tens of milliseconds, and one of a few."""
    layers, width, length = scale(6), scale(256, 16), scale(64, 8)
    return [
        Row("six layers, 10 steps", lambda: sides(width, layers, length, 10), 1e-5, 30.0),
        Row("two layers, 100 steps", lambda: sides(64, 2, 32, scale(100)), 1e-5, 30.0),
    ]
