"""Training steps that are right under their layout, each beside the same step on one device.

Weights are float32; `dtype` is the type in which most of them compute.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.compare.compare_trainers import AXIS, mesh, numbers, placed


class RightStep(NamedTuple):
    """Two versions of a step, and their arguments."""

    fun: Callable[..., Any]
    other: Callable[..., Any]
    args: tuple
    other_args: tuple | None = None


def params():
    first, last = numbers(8, 16, seed=20) / 3, numbers(16, 8, seed=21) / 4
    return {"in": first, "scale": jnp.ones((1, 16)), "out": last}


def batch(rows=16):
    return numbers(rows, 8, seed=22), numbers(rows, 8, seed=23)


def loss(params, batch, dtype):
    params, (x, y) = jax.tree.map(lambda x: x.astype(dtype), (params, batch))
    hidden = jnp.tanh(x @ params["in"]) * params["scale"]
    return squares(hidden @ params["out"], y)


def squares(predicted, y):
    return jnp.mean(jnp.square(predicted.astype(jnp.float32) - y.astype(jnp.float32)))


def both(dtype):
    return jax.value_and_grad(functools.partial(loss, dtype=dtype))


OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def stepped(value_and_grad, optimizer=OPTIMIZER):
    """A step of an optimizer, of a function that returns the loss and the gradient."""

    def step(params, opt_state, batch):
        value, grads = value_and_grad(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = {"loss": value, "grad_norm": cg.global_norm(grads)}
        return optax.apply_updates(params, updates), opt_state, metrics

    return jax.jit(step)


def state():
    return params(), OPTIMIZER.init(params())


def in_shards(gradient, check):
    return jax.shard_map(
        gradient, mesh=mesh(), in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=check
    )


def beside(dtype, other, args=None):
    """The plain step, and another one of the same arguments."""
    return RightStep(stepped(both(dtype)), stepped(other), (*state(), batch()), args)


def with_pmean(dtype):
    return beside(dtype, in_shards(lambda *args: lax.pmean(both(dtype)(*args), AXIS), False))


def by_the_compiler(dtype, **specs):
    """GSPMD: the same program, with other layouts of parameters and batch."""
    specs = {name: specs.get(name, ()) for name in params()}
    placed_params = {name: placed(p, *specs[name]) for name, p in params().items()}
    moments = jax.tree.map(jnp.asarray, OPTIMIZER.init(placed_params))
    return beside(dtype, both(dtype), (placed_params, moments, placed(batch(), AXIS)))


def accumulated(dtype):
    def gradient(params, batch):
        parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
        values = lax.map(lambda part: both(dtype)(params, part), parts)
        return jax.tree.map(lambda x: jnp.mean(x, axis=0), values)

    return beside(dtype, gradient)


def of_this_library(dtype):
    optimizer = optax.chain(cg.clip_by_global_norm(0.5), optax.adamw(1e-2))
    loss_of_dtype = functools.partial(loss, dtype=dtype)
    one = cg.train_step(loss_of_dtype, optimizer)
    four = cg.train_step(loss_of_dtype, optimizer, accumulate=4)
    args = (one.init(params()), batch())
    return RightStep(one, four, args, (placed(args[0]), placed(args[1], AXIS)))


def of_nnx(dtype):
    from flax import nnx

    from tests.compare.compare_flax import BATCHES, nnx_objects, object_step

    (step, state), rows = (nnx.jit(object_step), nnx_objects(dtype)), jnp.asarray(BATCHES[0])
    return RightStep(step, step, (state, rows), (state, placed(rows, AXIS)))


def synchronized_variance():
    """A variance as a difference of means, in which digits cancel; a skew on the batch's mean."""

    def step(params, x, mean_of):
        h = x @ params["w"]
        mean, square = mean_of((h.mean(0), (h**2).mean(0)))
        variance = square - mean**2
        out = jnp.tanh((h - mean) / jnp.sqrt(variance + 1e-5))
        return mean_of({"mean": mean, "variance": variance, "loss": jnp.mean(out**3)})

    sharded = jax.shard_map(
        lambda params, x: step(params, x, lambda tree: lax.pmean(tree, AXIS)),
        mesh=mesh(),
        in_specs=(P(), P(AXIS)),
        out_specs=P(),
        check_vma=False,
    )
    skew = jnp.linspace(0, 2, 32)[:, None]
    args = {"w": numbers(5, 6, seed=50)}, numbers(32, 5, seed=52) + skew
    return RightStep(lambda p, x: step(p, x, lambda tree: tree), jax.jit(sharded), args)


SPLIT = {"in": (AXIS,), "scale": (None, AXIS), "out": (AXIS,)}
STEPS = {
    "shard_map with pmean": with_pmean,
    "GSPMD": by_the_compiler,
    "FSDP": lambda dtype: by_the_compiler(dtype, **SPLIT),
    "accumulation": accumulated,
    "train_step": of_this_library,
    "NNX": of_nnx,
}
OF_FLOAT32 = {
    "synchronized variance": synchronized_variance,
}


def with_another_leaf(dtype):
    """A gradient of which one leaf is 10 % larger."""

    def gradient(params, batch):
        value, grads = both(dtype)(params, batch)
        return value, {**grads, "scale": grads["scale"] * jnp.float32(1.1)}

    return beside(dtype, gradient)


def with_another_limit(dtype):
    optimizer = optax.chain(optax.clip_by_global_norm(0.55), optax.adamw(1e-2))
    args = (*state(), batch())
    return RightStep(stepped(both(dtype)), stepped(both(dtype), optimizer), args)


# Faults, each with the path of one of the outputs that differ.
MIXED_FAULTS = {
    "a leaf's gradient, 10 %": (with_another_leaf, "1/1/0/mu/scale"),
    "the clip's limit, 10 %": (with_another_limit, "1/1/0/mu/out"),
}
