"""Steps of adamw whose gradients, parameters and updates are measured by module."""

from collections.abc import Callable
from typing import Any

import jax
import optax

import clipgrad as cg
from benchmarks import models, trees
from benchmarks.rows import FLOOR, OURS, Row, Scale, Side, donated, traced
from benchmarks.subjects.names import NARROW
from benchmarks.subjects.steps import step_of

TITLE = "Norms of gradients, parameters and updates"


def unrolled(scale: Scale) -> tuple[Callable, tuple[Any, Any], None]:
    """Twelve layers of ten leaves."""
    width = scale(256, 16)
    params = trees.normal(trees.transformer(width, scale(12)), width**-0.5)
    return models.unrolled_transformer, (params, models.normal(1, 4, scale(128, 8), width)), None


def scanned(scale: Scale) -> tuple[Callable, tuple[Any, Any], str]:
    """The same layers in ten leaves; each layer has norms of its own."""
    return models.scanned_transformer, models.scanned_args(scale)(), "*"


def sides(make: Callable, model: Callable, narrow: bool) -> list[Side]:
    """The watched step and the plain one; both must reach the same parameters."""
    loss, (params, data), stacked = model()
    adamw = optax.adamw(1e-3)
    watched = cg.watch_updates(adamw, stacked=stacked)
    gradient = jax.grad(models.in_bfloat16(loss) if narrow else loss)
    both = []
    for name, kind, tx in (("clipgrad", OURS, watched), ("not watched", FLOOR, adamw)):
        state = (params, tx.init(params))
        step = step_of(tx, gradient)
        both.append(make(name, kind, step, state, data))
    return both


def stepping(name: str, kind: str, step: Callable, state: Any, data: Any) -> Side:
    """The time of a step, into the memory of its state."""
    return donated(name, kind, step, state, data, numbers=lambda state: state[0])


def first_call(name: str, kind: str, step: Callable, state: Any, data: Any) -> Side:
    """The time to trace and compile a step, of which only the parameters can be compared."""
    side = traced(name, kind, step, state, data)
    return side._replace(numbers=lambda: side.numbers()[0])


def rows(scale: Scale) -> list[Row]:
    """Each model's step in both types, and its first call."""
    table = []
    for name, make in {"unrolled": unrolled, "scanned": scanned}.items():
        model = lambda make=make: make(scale)  # noqa: E731
        table += [
            Row(
                f"{name} transformer, donated",
                lambda m=model: sides(stepping, m, False),
                1e-5,
                20.0,
            ),
            Row(
                f"{name} transformer in bfloat16, donated",
                lambda m=model: sides(stepping, m, True),
                NARROW,
                20.0,
            ),
            Row(f"{name} transformer", lambda m=model: sides(first_call, m, False), budget=20.0),
        ]
    return table
