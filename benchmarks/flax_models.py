"""A flax transformer, whose modules have names."""

from typing import Any

import flax.linen as nn
import jax


class Block(nn.Module):
    """A block of a transformer."""

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        """As `nn.scan` wants it."""
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        h = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(h), None


class Transformer(nn.Module):
    """Blocks, one after the other or scanned."""

    scanned: bool
    blocks: int = 12

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits."""
        if self.scanned:
            options = {
                "variable_axes": {"params": 0, "intermediates": 0},
                "split_rngs": {"params": True},
            }
            x = nn.scan(Block, length=self.blocks, **options)(name="layers")(x, None)[0]
        else:
            for i in range(self.blocks):
                x = Block(name=f"block_{i}")(x)[0]
        return nn.Dense(64)(nn.LayerNorm()(x))
