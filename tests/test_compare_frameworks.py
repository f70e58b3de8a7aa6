"""Models of flax: restarts by orbax, what these lose, and a port from Linen to NNX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import clipgrad as cg

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("users_promotion")]

ADAM = optax.adam(1e-2)
BATCHES = [np.random.default_rng(i).normal(size=(8, 4)).astype("float32") for i in range(5)]


def square(x):
    return jnp.mean(x**2)


# ---- flax, Linen and NNX ----


class LinenNet(linen.Module):
    """Two layers; between them a normalization that keeps statistics, unless they are alone."""

    alone: bool = False

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(8, name="up")(x)
        if not self.alone:
            x = linen.BatchNorm(use_running_average=False, name="norm")(x)
            x = linen.Dropout(0.3, deterministic=False)(x)
        return linen.Dense(1, name="out")(x)


class Trained(TrainState):
    """A state with statistics and a key."""

    mean: dict
    key: jax.Array


def linen_state():
    params, mean = (LinenNet().init(jax.random.key(0), BATCHES[0])[k] for k in KINDS)
    return Trained.create(apply_fn=apply, params=params, tx=ADAM, mean=mean, key=jax.random.key(1))


KINDS = "params", "batch_stats"
apply = LinenNet().apply


@functools.partial(jax.jit, donate_argnums=0)
def linen_step(state, batch):
    use, key = jax.random.split(state.key)

    def loss(params):
        given = {"params": params, "batch_stats": state.mean}
        out, new = state.apply_fn(given, batch, rngs={"dropout": use}, mutable="batch_stats")
        return square(out), new["batch_stats"]

    (value, mean), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads).replace(mean=mean, key=key), {"loss": value}


class NnxNet(nnx.Module):
    """The same in NNX, where the counter of dropout is in the model."""

    def __init__(self, alone=False, dtype="float32"):
        kinds = {"rngs": nnx.Rngs(0, dropout=1), "dtype": dtype}
        self.up, self.out = nnx.Linear(4, 8, **kinds), nnx.Linear(8, 1, **kinds)
        if not alone:
            self.norm, self.drop = nnx.BatchNorm(8, **kinds), nnx.Dropout(0.3, rngs=kinds["rngs"])
        self.alone = alone

    def __call__(self, x):
        x = self.up(x)
        return self.out(x if self.alone else self.drop(self.norm(x)))


def nnx_objects(dtype="float32"):
    model = NnxNet(dtype=dtype)
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)


def object_step(state, batch):
    model, optimizer = state
    value, grads = nnx.value_and_grad(lambda net: square(net(batch)))(model)
    optimizer.update(model, grads)
    return (model, optimizer), {"loss": value}


# ---- a port ----


def of_linen(params, x):
    return square(LinenNet(alone=True).apply({"params": params}, x))


def ported(params):
    """The net in NNX with the numbers of one in Linen."""
    net = NnxNet(alone=True)
    for name, layer in params.items():
        getattr(net, name).kernel[...] = layer["kernel"]
        getattr(net, name).bias[...] = layer["bias"]
    return net


def test_a_port_from_linen_to_nnx():
    x, of_nnx = BATCHES[0], lambda net, x: square(net(x))
    params = LinenNet(alone=True).init(jax.random.key(0), x)["params"]
    names = {"LinenNet/up": "up", "LinenNet/out": "out"}
    against = functools.partial(cg.compare, of_linen, of_nnx, (params, x), names=names)
    found = against(other_args=(ported(params), x))
    assert found.ok and sum(row.kind == "module" for row in found.rows) == 2, str(found)
    assert not [place for place in found.unmatched if place.startswith("gradient")]
    changed = {**params, "out": {**params["out"], "kernel": params["out"]["kernel"] * 1.01}}
    found = against(other_args=(ported(changed), x))
    assert found.findings[0].kind == "value" and "LinenNet/out" in found.findings[0].message
