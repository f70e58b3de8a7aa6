"""What each example's clip takes to trace and compile, for a transformer of unrolled layers.

``python -m benchmarks.per_example_compile 3 8`` prints CPU seconds and operations of the lowered
program for each number of layers, beside the plain gradient; the programs take turns. With
``--translation`` the model has as many layers in an encoder and in a decoder that attends to it, as
flax's example for WMT, and one table of embeddings for source, target and logits.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import clipgrad as cg

TOKENS, WIDTH, POSITIONS, EXAMPLES = 64, 32, 16, 16


class Block(nn.Module):
    """One layer: attention and two dense layers, each after a normalization."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The layer's output."""
        x = x + nn.SelfAttention(num_heads=2, deterministic=True)(nn.LayerNorm()(x))
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h)


class LanguageModel(nn.Module):
    """A transformer whose layers are not scanned."""

    layers: int

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        """The logits of the next token."""
        places = self.param("places", nn.initializers.normal(0.02), (POSITIONS, WIDTH))
        x = nn.Embed(TOKENS, WIDTH)(ids) + places
        for _ in range(self.layers):
            x = Block()(x)
        return nn.Dense(TOKENS)(nn.LayerNorm()(x))


class CrossBlock(nn.Module):
    """One layer of a decoder: it attends to itself, to the encoder, and has two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array, encoded: jax.Array) -> jax.Array:
        """The layer's output."""
        mask, heads = nn.make_causal_mask(x[..., 0]), {"num_heads": 2, "deterministic": True}
        x = x + nn.SelfAttention(**heads)(nn.LayerNorm()(x), mask)
        x = x + nn.MultiHeadDotProductAttention(**heads)(nn.LayerNorm()(x), encoded, encoded)
        h = nn.relu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h)


class Translation(nn.Module):
    """An encoder and a decoder with one table of embeddings."""

    layers: int

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        """The logits of the next token of a text that is translated to itself."""
        table = nn.Embed(TOKENS, WIDTH)
        places = self.param("places", nn.initializers.normal(0.02), (POSITIONS, WIDTH))
        encoded, x = table(ids) + places, table(ids) + places
        for _ in range(self.layers):
            encoded = Block()(encoded)
        encoded = nn.LayerNorm()(encoded)
        for _ in range(self.layers):
            x = CrossBlock()(x, encoded)
        return table.attend(nn.LayerNorm()(x)) / WIDTH**0.5


def functions(
    layers: int, model: type[nn.Module] = LanguageModel
) -> tuple[dict[str, Callable[..., Any]], tuple[Any, Any]]:
    """What is compared, by name, and its arguments."""
    net: Any = model(layers)
    ids = jax.random.randint(jax.random.key(0), (EXAMPLES, POSITIONS), 0, TOKENS)
    params = net.init(jax.random.key(1), ids[0])["params"]

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(jnp.asarray(net.apply({"params": params}, ids))[:-1])
        return -jnp.mean(jnp.take_along_axis(scores, ids[1:, None], axis=-1))

    def mean(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(loss, (None, 0))(params, batch))

    rule = cg.ClipByGlobalNorm(1.0)
    found: dict[str, Callable[..., Any]] = {"plain gradient": jax.value_and_grad(mean)}
    for method in ("direct", "one pass", "two passes"):
        found[method] = cg.clip_per_example(loss, rule, method=method)
    return found, (params, ids)


def measured(function: Callable[..., Any], arguments: tuple) -> tuple[float, int]:
    """CPU seconds to trace and compile, and the operations of the lowered program."""
    start = time.process_time()
    lowered = jax.jit(lambda *args: function(*args)).lower(*arguments)
    traced = time.process_time()
    count = len(re.findall(r"^ *%\S+ = ", lowered.as_text(), re.MULTILINE))
    before = time.process_time()
    lowered.compile()
    return traced - start + time.process_time() - before, count


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--translation", action="store_true")
    options = parser.parse_args()
    for layers in options.layers:
        model = Translation if options.translation else LanguageModel
        found, arguments = functions(layers, model)
        seconds: dict[str, list[float]] = {name: [] for name in found}
        counts = {}
        for _ in range(options.repeats):
            for name, function in found.items():
                taken, counts[name] = measured(function, arguments)
                seconds[name].append(taken)
        plain = statistics.median(seconds["plain gradient"])
        for name, each in seconds.items():
            middle = statistics.median(each)
            row = f"{middle:7.2f} s {middle / plain:5.2f} {counts[name]:7} operations"
            print(f"{layers:3} layers  {name:14} {row}", flush=True)


if __name__ == "__main__":
    main()
