"""Pairs of losses as people write them: with a planted difference, and equal ones."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax import named_scope as scope
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.helpers import array

DEVICES = 4


class Draw:
    """Random numbers of one dtype, the same ones each time."""

    def __init__(self, dtype):
        self._rng, self._dtype = np.random.default_rng(3), dtype

    def __call__(self, *shape, by=1.0):
        return array(self._rng.normal(size=shape) * by, self._dtype)


class LossPair(NamedTuple):
    """Two losses, their arguments by a `Draw`, and of a planted difference what is found."""

    fun: Callable
    other: Callable
    args: Callable[[Draw], tuple]
    finding: tuple | None = None  # kind, module, step


# ---- recurrent networks ----


def lstm(layer=None, time=None, reverse=False):
    """Layers of LSTM cells, of which one at one time may be wrong."""

    def cell(carry, inputs, w, i):
        (h, c), (x, t) = carry, inputs
        with scope("gates"):
            write, keep, show, new = jnp.split(jnp.concatenate([x, h], -1) @ w, 4, -1)
        with scope("state"):
            c = jax.nn.sigmoid(keep) * c + jax.nn.sigmoid(write) * jnp.tanh(new)
            if layer is not None:
                c = c * jnp.where((i == layer) & (t == time), 1.02, 1.0).astype(c.dtype)
        h = jax.nn.sigmoid(show) * jnp.tanh(c)
        return (h, c), h

    def layer_of(xs, weights):
        start = (jnp.zeros(xs.shape[1:], xs.dtype),) * 2
        step_of_cell = lambda carry, x: cell(carry, x, *weights)  # noqa: E731
        with scope("time"):
            return lax.scan(step_of_cell, start, (xs, jnp.arange(len(xs))), reverse=reverse)[
                1
            ], None

    def loss(params, xs):
        with scope("layers"):
            xs, _ = lax.scan(layer_of, xs, (params["cells"], jnp.arange(2)))
        with scope("read"):
            return jnp.mean((xs[0 if reverse else -1] @ params["out"]) ** 2)

    return loss


def lstm_args(draw):
    return {"cells": draw(2, 8, 16, by=0.5), "out": draw(4, 3)}, draw(5, 3, 4)


# ---- losses of several parts ----


def policy(stopped=True):
    def loss(params, batch):
        seen, actions, returns, old = batch
        with scope("policy"):
            logits = jax.nn.log_softmax(seen @ params["policy"])
            new = logits[jnp.arange(len(seen)), actions]
        with scope("value"):
            value = (seen @ params["value"])[:, 0]
        with scope("advantage"):
            gain = returns - (lax.stop_gradient(value) if stopped else value)
        with scope("surrogate"):
            change = jnp.exp(new - old)
            objective = jnp.minimum(change * gain, jnp.clip(change, 0.8, 1.2) * gain)
        return -jnp.mean(objective) + 0.5 * jnp.mean((value - returns) ** 2)

    return loss


def policy_args(draw):
    params = {"policy": draw(6, 4, by=0.3), "value": draw(6, 1)}
    return params, (draw(9, 6), jnp.arange(9) % 4, draw(9), draw(9, by=0.2) - 1.4)


def lengths(safe=True):
    """Norms, one of them of zeros."""

    def loss(params, x):
        with scope("linear"):
            y = x @ params["a"]
            y = jnp.where(jnp.arange(len(y))[:, None] == 2, 0 * y, y)
        with scope("norm"):
            size = jnp.sum(y * y, -1)
            root = jnp.sqrt(jnp.where(size > 0, size, 1) if safe else size)
            norms = jnp.where(size > 0, root, 0)
        with scope("out"):
            return jnp.mean(norms)

    return loss


def lengths_args(draw):
    return {"a": draw(5, 6)}, draw(8, 5)


# ---- layouts ----


def centered(averaged=True, axis=None):
    """A network whose hidden values have the mean of the batch taken from them."""

    def loss(params, batch):
        with scope("encoder"):
            h = jnp.tanh(batch[0] @ params["a"])
        with scope("statistics"):
            mean = h.mean(0, keepdims=True)
            mean = lax.pmean(mean, axis) if axis and averaged else mean
        with scope("decoder"):
            mean_loss = jnp.mean(((h - mean) @ params["b"] - batch[1]) ** 2)
        return lax.pmean(mean_loss, axis) if axis else mean_loss

    return loss


def over_devices(loss, specs, check):
    devices = jax.devices()[:DEVICES]
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Auto,), devices=devices)
    return jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check)


def by_rows(averaged=True, check=False):
    return over_devices(centered(averaged, "d"), (P(), P("d")), check)


def rows_args(draw):
    return {"a": draw(5, 8), "b": draw(8, 5)}, (draw(12, 5), draw(12, 5))


# ---- one formula in several ways ----


def long_mean(parts):
    def loss(params, x):
        with scope("act"):
            h = jnp.tanh(x * params["a"] + params["b"])
        with scope("mean"):
            return jnp.mean(jnp.mean((h**2).reshape(parts, -1), 0))

    return loss


def long_mean_args(draw):
    return {"a": draw(1), "b": draw(1)}, draw(200000)


def masked(fill):
    def loss(params, x):
        with scope("softmax"):
            mask = jnp.arange(9)[None] < 6
            weights = jax.nn.softmax(jnp.where(mask, x @ params["w"], fill))
        with scope("out"):
            return jnp.mean((weights @ params["v"]) ** 2)

    return loss


def masked_args(draw):
    return {"w": draw(6, 9), "v": draw(9, 4)}, draw(10, 6)


def planted(fun: Callable, args: Callable, finding: tuple, *wrong: Any, **parts: Any) -> LossPair:
    """A loss, and the same made with a fault."""
    return LossPair(fun(), fun(*wrong, **parts), args, finding)


PLANTED = {
    "one layer at one time": planted(
        lstm, lstm_args, ("value", "layers/time/state", 2), layer=1, time=2
    ),
    "advantage not stopped": planted(policy, policy_args, ("vjp", "advantage", None), False),
    "NaN behind where": planted(lengths, lengths_args, ("vjp", "norm", None), False),
    # A mean that is the same on each device in one version alone is not matched: the next is named.
    "statistics of one device": LossPair(by_rows(), by_rows(False), rows_args, ("value", "", None)),
}  # fmt: skip

EQUAL = {
    "rows over devices": LossPair(centered(), by_rows(), rows_args),
    "rows over devices, tracked": LossPair(centered(), by_rows(check=True), rows_args),
    "mean in parts": LossPair(long_mean(1), long_mean(500), long_mean_args),
    "masks": LossPair(masked(-1e9), masked(-jnp.inf), masked_args),
}  # fmt: skip
