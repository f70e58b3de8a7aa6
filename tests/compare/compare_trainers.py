"""A training step on one device, the same step in `shard_map`, and the faults that such steps had.

The parts of the sharded step are functions of a dictionary; a fault replaces some of them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.helpers import array

DEVICES, ROWS, WIDTH = 8, 4, 6
LIMIT, RATE, DECAY = 0.05, 0.1, 0.01
AXIS = "data"


def numbers(*shape, seed):
    return array(np.random.default_rng(seed).normal(size=shape))


def mesh():
    return jax.make_mesh((DEVICES,), (AXIS,), axis_types=(AxisType.Auto,))


def placed(tree, *spec):
    return jax.device_put(tree, NamedSharding(mesh(), P(*spec)))


def new_state():
    params = {
        "frozen": numbers(1, WIDTH, seed=1),
        "w": numbers(WIDTH, WIDTH, seed=2) / 2,
        "experts": numbers(DEVICES, WIDTH, WIDTH, seed=3) / 2,
        "out": numbers(WIDTH, seed=4),
    }
    return {
        "params": params,
        "momentum": jax.tree.map(lambda p: 0.01 * p, params),
        "mean": numbers(WIDTH, seed=5),
        "variance": numbers(WIDTH, seed=6) ** 2,
        "key": jax.random.key(7),
        "count": jnp.asarray(3),
    }


def new_batch():
    return {
        "x": numbers(DEVICES, ROWS, WIDTH, seed=9),
        "y": numbers(DEVICES, ROWS, seed=10),
        "weight": jnp.ones((DEVICES, ROWS)),
    }


def group_loss(params, batch, key):
    """The weighted sum of errors of a device's rows, with its expert, and what they have hidden."""
    hidden = jnp.tanh((batch["x"] + lax.stop_gradient(params["frozen"])) @ params["w"])
    kept = jax.random.bernoulli(key, 0.8, hidden.shape).astype(hidden.dtype)
    mixed = hidden * kept + jnp.tanh(hidden @ params["experts"])
    errors = (mixed @ params["out"] - batch["y"]) ** 2
    return jnp.sum(batch["weight"] * errors), hidden


def squares(tree):
    return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree))


def update(state, grads, scale, rate=RATE, decay=DECAY):
    """Momentum of clipped gradients, and weight decay that no clip acts on."""
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g * scale, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - rate * (m + decay * p), state["params"], momentum)
    return momentum, {**params, "frozen": state["params"]["frozen"]}


def moments(state, mean, variance):
    return 0.9 * state["mean"] + 0.1 * mean, 0.9 * state["variance"] + 0.1 * variance


def limited(norm):
    return jnp.minimum(1.0, LIMIT / norm)


@jax.jit
def plain_step(state, batch):
    """The step on one device."""
    folded = jax.random.fold_in(state["key"], state["count"])
    keys = jax.vmap(functools.partial(jax.random.fold_in, folded))(jnp.arange(DEVICES))

    def loss(params):
        axes = {**dict.fromkeys(params), "experts": 0}
        total, hidden = jax.vmap(group_loss, in_axes=(axes, 0, 0))(params, batch, keys)
        return jnp.sum(total) / jnp.sum(batch["weight"]), hidden

    (value, hidden), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
    norm = jnp.sqrt(squares(grads))
    momentum, params = update(state, grads, limited(norm))
    rows = hidden.reshape(-1, WIDTH)
    mean, variance = moments(state, jnp.mean(rows, axis=0), jnp.var(rows, axis=0))
    new = {"params": params, "momentum": momentum, "mean": mean, "variance": variance}
    new |= {"key": jax.random.split(state["key"])[0], "count": state["count"] + 1}
    expert_norm = jnp.sqrt(squares(grads["experts"]))
    return new, {"loss": value, "grad_norm": norm, "expert_norm": expert_norm}


# ---- the same in shard_map, in parts ----


def own_key(state):
    folded = jax.random.fold_in(state["key"], state["count"])
    return jax.random.fold_in(folded, lax.axis_index(AXIS))


def local_gradient(params, batch, key):
    """The sum of weighted errors of the device's rows, their gradient, and what is hidden."""
    (total, hidden), grads = jax.value_and_grad(group_loss, has_aux=True)(params, batch, key)
    return total, grads, hidden


def all_of(x):
    return lax.psum(x, AXIS)


def reduced(grads, weight):
    """The mean over all rows; each device has the gradient of its expert to itself."""
    total = all_of(weight)
    return {k: (g if k == "experts" else all_of(g)) / total for k, g in grads.items()}


def norms(grads, local):
    del local
    rest = {k: g for k, g in grads.items() if k != "experts"}
    experts = all_of(squares(grads["experts"]))
    return jnp.sqrt(squares(rest) + experts), jnp.sqrt(experts)


def batch_moments(hidden):
    mean = lax.pmean(jnp.mean(hidden, axis=0), AXIS)
    return mean, lax.pmean(jnp.mean(jnp.square(hidden - mean[None]), axis=0), AXIS)


RIGHT = {
    "key": own_key,
    "local": local_gradient,
    "reduced": reduced,
    "norms": norms,
    "scale": limited,
    "update": update,
    "moments": batch_moments,
    "next_key": lambda state: jax.random.split(state["key"])[0],
}


def sharded_step(**replaced):
    """The step in `shard_map`, with some parts replaced."""
    part = RIGHT | replaced

    def device_step(state, batch):
        # A device's part has a leading axis of length 1 for its expert and its rows.
        params = {**state["params"], "experts": state["params"]["experts"][0]}
        batch = jax.tree.map(lambda x: x[0], batch)
        weight = jnp.sum(batch["weight"])
        total, local, hidden = part["local"](params, batch, part["key"](state))
        grads = part["reduced"](local, weight)
        norm, expert_norm = part["norms"](grads, local)
        whole = {**grads, "experts": grads["experts"][None]}
        momentum, new_params = part["update"](state, whole, part["scale"](norm))
        mean, variance = moments(state, *part["moments"](hidden))
        new = {"params": new_params, "momentum": momentum, "mean": mean, "variance": variance}
        new |= {"key": part["next_key"](state), "count": state["count"] + 1}
        value = all_of(total) / all_of(weight)
        return new, {"loss": value, "grad_norm": norm, "expert_norm": expert_norm}

    state_specs = jax.tree.map(lambda _: P(), new_state())
    state_specs["params"]["experts"] = state_specs["momentum"]["experts"] = P(AXIS)
    specs = (state_specs, P(AXIS))
    mapped = jax.shard_map(
        device_step, mesh=mesh(), in_specs=specs, out_specs=(state_specs, P()), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0)


class StepFault(NamedTuple):
    """A fault: the parts replaced, the paths that may be the first wrong one, and the ratio."""

    parts: dict
    first: tuple
    ratio: float | None = None  # of the right step to the wrong one
    means: str = ""


def norms_added(grads, local):
    return norms(grads, local)[0], all_of(jnp.sqrt(squares(grads["experts"])))


def in_bfloat16(grads, weight):
    narrow = {k: g.astype(jnp.bfloat16).astype(jnp.float32) for k, g in grads.items()}
    return reduced(narrow, weight)


def mean_of_variances(hidden):
    return batch_moments(hidden)[0], lax.pmean(jnp.var(hidden, axis=0), AXIS)


def shared_key(state):
    return jax.random.fold_in(state["key"], state["count"])


GRADIENT = ("1/grad_norm", "1/expert_norm", "0/momentum/experts", "0/momentum/out")
GRADIENT += ("0/momentum/w", "1/loss")
EXPERTS = ("1/expert_norm", "0/momentum/experts")
EIGHTH, DEVICES_MEAN = 1 / DEVICES, "devices"

FAULTS = {
    "the gradient is a sum": StepFault(
        {"reduced": lambda g, w: jax.tree.map(lambda x: x * DEVICES, reduced(g, w))},
        GRADIENT, EIGHTH, DEVICES_MEAN,
    ),
    "experts not averaged": StepFault(
        {"reduced": lambda g, w: {**reduced(g, w), "experts": g["experts"] / w}},
        EXPERTS, EIGHTH, DEVICES_MEAN,
    ),
    "norms of parts added": StepFault(
        {"norms": norms_added}, ("1/expert_norm",)
    ),
    "the mean of variances": StepFault({"moments": mean_of_variances}, ("0/variance",)),
    "one key for all devices": StepFault({"key": shared_key}, (*GRADIENT, "0/mean")),
    "the key is used again": StepFault({"next_key": lambda state: state["key"]}, ("0/key",)),
    "gradients summed in bfloat16": StepFault({"reduced": in_bfloat16}, GRADIENT),
}  # fmt: skip
