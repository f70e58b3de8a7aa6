"""Cuts and programs without a fault of flax and Equinox: more rows of `zero_cuts`."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from tests.diagnose import zero_cuts
from tests.diagnose.zero_cuts import KEY, X

CUTS: list[zero_cuts.Cut] = []
HEALTHY: list = []
cut = functools.partial(zero_cuts.cut, table=CUTS)
healthy = functools.partial(zero_cuts.healthy, table=HEALTHY)


class Router(nn.Module):
    """A router that takes the best expert, and the softmax over its logit."""

    @nn.compact
    def __call__(self, x):
        logits = nn.Dense(4, name="gate")(x)
        best, chosen = lax.top_k(logits, 1)
        gates = jax.nn.softmax(best, axis=-1)  # cut
        experts = self.param("experts", nn.initializers.normal(), (4, 4))
        return jnp.sum(gates * (experts[chosen[0]] * x))


class OneFeature(nn.Module):
    """A normalization over one feature."""

    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm()(nn.Dense(1)(x))  # cut


class Quantized(eqx.Module):
    """A layer that rounds its weight."""

    layer: eqx.nn.Linear

    def __call__(self, x):
        weight = jnp.round(self.layer.weight * 4)  # cut
        return weight @ x + self.layer.bias


class Gate(nnx.Module):
    """A gate that is compared."""

    def __init__(self, rngs):
        self.gate = nnx.Linear(4, 4, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        open_ = self.gate(x) > 0  # cut
        return self.out(open_ * x)


GRAPH, GATE = nnx.split(Gate(nnx.Rngs(0)))


@cut("one element", Router().init(KEY, X), "['params']['gate']['kernel']", at=Router)
def linen_router(p, x):
    return jnp.sum(Router().apply(p, x))


@cut("cancels", OneFeature().init(KEY, X), "['params']['Dense_0']['kernel']", at=OneFeature)
def linen_one_feature(p, x):
    return jnp.sum(OneFeature().apply(p, x))


@cut("flat", Quantized(eqx.nn.Linear(4, 2, key=KEY)), ".layer.weight", at=Quantized)
def equinox_rounds(p, x):
    return jnp.sum(p(x))


@cut("comparison", GATE, "['gate']['kernel']", at=Gate)
def nnx_gate(p, x):
    return jnp.sum(nnx.merge(GRAPH, p)(x))


@healthy(eqx.nn.MLP(4, 1, 5, 2, key=KEY))
def equinox(p, x):
    return jnp.sum(p(x))


@healthy(GATE)
def nnx_soft_gate(p, x):
    model = nnx.merge(GRAPH, p)
    return jnp.sum(model.out(jax.nn.sigmoid(model.gate(x)) * x))
