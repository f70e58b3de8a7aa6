"""A net in Linen and the same one in NNX, and a training step of NNX's objects."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

ADAM = optax.adam(1e-2)
BATCHES = [np.random.default_rng(i).normal(size=(8, 4)).astype("float32") for i in range(5)]


def square(x):
    return jnp.mean(x**2)


class LinenNet(linen.Module):
    """Two layers."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(1, name="out")(linen.Dense(8, name="up")(x))


class NnxNet(nnx.Module):
    """The same in NNX; between them a normalization and dropout, unless they are alone."""

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
