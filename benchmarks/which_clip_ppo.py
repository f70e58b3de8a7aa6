"""Proximal policy optimization of a pole on a cart, several updates from each batch of rollouts."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

from clipgrad._demo.task import Metrics, Task, normal, zero_weights

_CARTS, _TIMES, _ROUNDS, _PARTS, _WIDTH = 16, 128, 4, 4, 32
_DISCOUNT, _TRACE, _RANGE, _VALUE, _ENTROPY = 0.99, 0.95, 0.2, 0.5, 0.01
_LONGEST = 500


@dataclasses.dataclass(frozen=True)
class OnPolicy(Task):
    """A task whose batches are made with the parameters that are trained.

    Attributes:
      collect: the batches of some gradient steps, stacked, of the parameters and a PRNG key.
    """

    collect: Callable[[Any, jax.Array], Any] = lambda params, key: None


class _Steps(NamedTuple):
    """Steps of carts: what was seen and done, and what it was worth."""

    seen: jax.Array
    action: jax.Array
    log_probability: jax.Array
    advantage: jax.Array
    worth: jax.Array


def _init(data: Any, random: np.random.Generator) -> Any:
    scale = (1 / _WIDTH) ** 0.5
    return {
        "in": normal(random, 4, _WIDTH, scale=1.0),
        "hidden": normal(random, _WIDTH, _WIDTH, scale=scale),
        "bias": zero_weights(2, _WIDTH),
        "action": normal(random, _WIDTH, 2, scale=0.01),
        "value": normal(random, _WIDTH, scale=scale),
    }


def _policy(params: Any, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits of the two actions, and the value."""
    h = jnp.tanh(seen @ params["in"] + params["bias"][0])
    h = jnp.tanh(checkpoint_name(h, "h") @ params["hidden"] + params["bias"][1])
    return jax.nn.log_softmax(h @ params["action"]), h @ params["value"]


def _move(state: jax.Array, action: jax.Array) -> jax.Array:
    """A fiftieth of a second, after Barto, Sutton and Anderson, 1983."""
    place, speed, angle, turn = state
    force = jnp.where(action == 1, 10.0, -10.0)
    push = (force + 0.05 * turn**2 * jnp.sin(angle)) / 1.1
    bend = 9.8 * jnp.sin(angle) - jnp.cos(angle) * push
    bend /= 0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1)
    faster = push - 0.05 * bend * jnp.cos(angle) / 1.1
    return state + 0.02 * jnp.array([speed, faster, turn, bend])


def _fell(state: jax.Array) -> jax.Array:
    return (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > 0.2095)


def _start(key: jax.Array) -> jax.Array:
    return jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)


def _rollout(params: Any, key: jax.Array) -> _Steps:
    """The steps of one cart, which starts again where it falls."""

    def step(state: jax.Array, key: jax.Array) -> Any:
        draw, again = jax.random.split(key)
        log_probabilities, value = _policy(params, state)
        action = jax.random.categorical(draw, log_probabilities)
        after = _move(state, action)
        fell = _fell(after)
        known = state, action, log_probabilities[action], value, fell
        return jnp.where(fell, _start(again), after), known

    first, *keys = jax.random.split(key, _TIMES + 1)
    last, (seen, action, chosen, value, fell) = jax.lax.scan(step, _start(first), jnp.stack(keys))
    following = jnp.append(value[1:], _policy(params, last)[1]) * ~fell
    surprise = 1.0 + _DISCOUNT * following - value

    def add(later: jax.Array, now: Any) -> Any:
        found = now[0] + _DISCOUNT * _TRACE * later * ~now[1]
        return found, found

    _, advantage = jax.lax.scan(add, jnp.zeros(()), (surprise, fell), reverse=True)
    return _Steps(seen, action, chosen, advantage, advantage + value)


def _collect(params: Any, key: jax.Array) -> _Steps:
    rolled, *orders = jax.random.split(key, 1 + _ROUNDS)
    steps = jax.vmap(_rollout, (None, 0))(params, jax.random.split(rolled, _CARTS))
    steps = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)
    advantage = (steps.advantage - steps.advantage.mean()) / (steps.advantage.std() + 1e-8)
    orders = [jax.random.permutation(order, _CARTS * _TIMES) for order in orders]
    parts = jnp.concatenate(orders).reshape(_ROUNDS * _PARTS, -1)
    return jax.tree.map(lambda x: x[parts], steps._replace(advantage=advantage))


def _loss(params: Any, steps: _Steps) -> jax.Array:
    log_probabilities, value = _policy(params, steps.seen)
    chosen = jnp.take_along_axis(log_probabilities, steps.action[:, None], 1)[:, 0]
    ratio = jnp.exp(chosen - steps.log_probability)
    bounded = jnp.clip(ratio, 1 - _RANGE, 1 + _RANGE)
    gain = jnp.minimum(ratio * steps.advantage, bounded * steps.advantage)
    entropy = -(jnp.exp(log_probabilities) * log_probabilities).sum(1)
    return (_VALUE * jnp.square(value - steps.worth) - gain - _ENTROPY * entropy).mean()


def _evaluate(first: Any, params: Any, data: Any) -> Metrics:
    """By how many steps of 500 the pole falls too early, over 32 starts."""

    def step(carry: Any, _: None) -> Any:
        state, stands = carry
        state = _move(state, _policy(params, state)[0].argmax())
        stands &= ~_fell(state)
        return (state, stands), stands

    def length(key: jax.Array) -> jax.Array:
        carry = _start(key), jnp.array(True)
        return jax.lax.scan(step, carry, None, length=_LONGEST)[1].sum()

    lengths = jax.vmap(length)(jax.random.split(jax.random.key(0), 32))
    lost = _LONGEST - lengths.mean()
    healthy = jnp.isfinite(sum(leaf.sum() for leaf in jax.tree.leaves(params)))
    return {"lost steps": jnp.where(healthy, lost, jnp.nan)}


TASK = OnPolicy(
    name="ppo",
    summary="a policy learns to balance a pole, PPO with Adam",
    goal="under 50 of 500 steps lost",
    steps=100,
    optimizer=optax.adam(1e-3),
    arms=(),
    load=lambda: jnp.zeros(()),
    init=_init,
    sample=lambda data, key: None,
    loss=_loss,
    tag="h",
    evaluate=_evaluate,
    reached=lambda metrics: metrics["lost steps"] < 50,
    collect=_collect,
)
