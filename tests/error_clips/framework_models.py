"""A transformer of flax, as flax's examples have it, and its loss."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers import array

X = array(np.random.default_rng(1).normal(size=(2, 5, 8)))


class Block(nn.Module):
    """The encoder block of flax's examples."""

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attn")(nn.LayerNorm()(x))
        h = nn.Dense(8, name="down")(nn.gelu(nn.Dense(16, name="up")(nn.LayerNorm()(x))))
        return x + h


class Transformer(nn.Module):
    """Blocks, one after the other."""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(3, name="head")(nn.LayerNorm()(x))


def linen(module):
    params = jax.jit(module.init)(jax.random.key(0), X)
    return params, lambda params, x: jnp.mean(jnp.sin(module.apply(params, x)) ** 2)
