"""A pendulum is swung up by a network that is trained through the simulation of its motion."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._demo import task as _task
from clipgrad._demo.task import Arm, Task, normal, zero_weights

_PENDULUM_BATCH, _PENDULUM_LENGTH, _PENDULUM_WIDTH, _PENDULUM_TEST_ROWS = 32, 200, 32, 256
_PENDULUM_STEP, _GRAVITY, _TORQUE = 0.05, 15.0, 3.0


def _starts(key: jax.Array, size: int) -> jax.Array:
    """Any angle, which is 0 when the pendulum stands, and a small speed."""
    angle, speed = jax.random.split(key)
    angles = jax.random.uniform(angle, (size,), minval=-jnp.pi, maxval=jnp.pi)
    return jnp.stack([angles, jax.random.uniform(speed, (size,), minval=-1.0)], -1)


def _init_pendulum(data: jax.Array, random: np.random.Generator) -> Any:
    return {
        "in": normal(random, 3, _PENDULUM_WIDTH, scale=3**-0.5),
        "in_bias": zero_weights(1, _PENDULUM_WIDTH),
        "hidden": normal(random, _PENDULUM_WIDTH, _PENDULUM_WIDTH, scale=_PENDULUM_WIDTH**-0.5),
        "hidden_bias": zero_weights(1, _PENDULUM_WIDTH),
        "out": normal(random, _PENDULUM_WIDTH, scale=0.1 * _PENDULUM_WIDTH**-0.5),
    }


def _torque(params: Any, state: jax.Array) -> jax.Array:
    """The torque, which is too weak to lift the pendulum without swinging."""
    angle, speed = state.T
    seen = jnp.stack([jnp.cos(angle), jnp.sin(angle), speed / 8], -1)
    h = jnp.tanh(seen @ params["in"] + params["in_bias"])
    h = jnp.tanh(h @ params["hidden"] + params["hidden_bias"])
    return 2 * jnp.tanh(h @ params["out"])


def loss(params: Any, starts: jax.Array, every: Any = _PENDULUM_LENGTH) -> jax.Array:
    """The mean cost over all steps: far from standing, fast, or with much torque.

    No gradient goes back further than to the last step whose number ``every`` divides.
    """

    def step(state: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.where(number % every == 0, jax.lax.stop_gradient(state), state)
        state = checkpoint_name(state, "state")
        torque = _torque(params, state)
        angle, speed = state.T
        speed = speed + _PENDULUM_STEP * (_GRAVITY * jnp.sin(angle) + _TORQUE * torque)
        angle = angle + _PENDULUM_STEP * speed
        cost = 1 - jnp.cos(angle) + 0.01 * speed**2 + 0.001 * torque**2
        return jnp.stack([angle, speed], -1), cost.mean()

    return jax.lax.scan(step, starts, jnp.arange(_PENDULUM_LENGTH))[1].mean()


_PENDULUM_ERROR_CLIP = cg.ClipByNorm(1e-3, axis=-1)
_PENDULUM_NORM = cg.ClipByGlobalNorm(0.1)

TASK = Task(
    name="pendulum",
    summary="a network swings a pendulum up, trained through 200 steps of its motion, Adam",
    goal="cost under 0.45 for unseen starts",
    steps=300,
    optimizer=optax.adam(3e-3),
    arms=(
        Arm(_task.PLAIN),
        Arm(_task.NORM, _PENDULUM_NORM),
        Arm(_task.ERROR, error_clip=_PENDULUM_ERROR_CLIP),
        Arm(_task.BOTH, _PENDULUM_NORM, _PENDULUM_ERROR_CLIP),
    ),
    load=lambda: _starts(jax.random.key(7), _PENDULUM_TEST_ROWS),
    init=_init_pendulum,
    sample=lambda data, key: _starts(key, _PENDULUM_BATCH),
    loss=loss,
    tag="state",
    evaluate=lambda first, params, data: {"cost": loss(params, data)},
    reached=lambda metrics: metrics["cost"] < 0.45,
    recurrent=True,
    note="a gradient that is cut off after 20 steps does better than any of these",
)
