"""Steps of adamw with and without a clip: the update alone, and with the gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import clipgrad as cg
from benchmarks import models, trees
from benchmarks.rows import FLOOR, OURS, PEER, Row, Scale, Side, donated, jitted
from benchmarks.subjects.names import NARROW

TITLE = "Steps of adamw"
# Out of reach, so that the step without a clip must give the same numbers.
LIMIT = 1e6
State = tuple[Any, Any]


def optimizers() -> dict[str, tuple[str, optax.GradientTransformation]]:
    """Name: kind and clip, before adamw."""
    return {
        "clipgrad": (OURS, cg.clip_by_global_norm(LIMIT)),
        "clipgrad, stats=True": (OURS, cg.clip_by_global_norm(LIMIT, stats=True)),
        "optax": (PEER, optax.clip_by_global_norm(LIMIT)),
        "no clip": (FLOOR, optax.identity()),
    }


def step_of(tx: optax.GradientTransformation, gradient: Callable) -> Callable:
    """``(params, opt_state), data -> (params, opt_state)``."""

    def step(state: State, data: Any) -> State:
        params, opt_state = state
        updates, opt_state = tx.update(gradient(params, data), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def sides(make: Callable, params: Any, gradient: Callable, data: Any) -> list[Side]:
    """One side for each optimizer; all must reach the same parameters."""
    found = []
    for name, (kind, clip) in optimizers().items():
        tx = optax.chain(clip, optax.adamw(1e-3))
        state = (params, tx.init(params))
        step = step_of(tx, gradient)
        found.append(make(name, kind, step, state, data, numbers=lambda state: state[0]))
    return found


def update(make: Callable, width: int, layers: int) -> list[Side]:
    """The gradients of a transformer are given."""
    params, grads = (trees.normal(trees.transformer(width, layers), 0.05, seed) for seed in (0, 1))
    return sides(make, params, lambda _, grads: grads, grads)


def training(
    make: Callable, width: int, layers: int, length: int, narrow: bool = False
) -> list[Side]:
    """The gradients of a transformer are computed, also in bfloat16."""
    params = trees.normal(trees.transformer(width, layers), width**-0.5)
    data = jax.random.normal(jax.random.key(0), (4, length, width), jnp.float32)
    loss = models.unrolled_transformer
    return sides(make, params, jax.grad(models.in_bfloat16(loss) if narrow else loss), data)


def rows(scale: Scale) -> list[Row]:
    """Both, each with and without donated state."""
    layers, width, small, length = scale(12), scale(384, 16), scale(256, 16), scale(128, 8)
    return [
        Row("update of 21M parameters", lambda: update(jitted, width, layers)),
        Row("update of 21M parameters, donated", lambda: update(donated, width, layers)),
        # The compiler adds up in another order where the norm reads the gradient, too.
        Row("transformer, donated", lambda: training(donated, small, layers, length), 1e-5, 10.0),
        Row(
            "transformer in bfloat16, donated",
            lambda: training(donated, small, layers, length, narrow=True),
            NARROW,
            10.0,
        ),
    ]
