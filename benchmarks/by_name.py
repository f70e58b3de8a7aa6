"""Trace and run time of clips and statistics by name, beside the plain gradient.

A decoder with 88 tagged sites (as many as MaxText has), unrolled; an RNN whose tagged state is
scanned; and flax transformers of twelve layers without any tag, unrolled and scanned, of which all
modules are clipped and watched, or the blocks alone. Each row is a ratio to the plain gradient of
the same model, measured in one process, the variants taking turns.

Run: python benchmarks/by_name.py [--repeats 7] [--models transformer]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg

RULE = cg.ErrorClipByValue(max=1.0)


def rms_norm(x: jax.Array) -> jax.Array:
    """The layer's normalisation."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def decoder(params: Any, x: jax.Array) -> jax.Array:
    """Twenty-two layers of attention and MLP with four tags each."""
    for i, layer in enumerate(params):
        x = checkpoint_name(x, f"input{i}")
        y = rms_norm(x)
        query, key, value = (jnp.tanh(y @ layer[name]) for name in ("query", "key", "value"))
        scores = jax.nn.softmax(checkpoint_name(query, f"query{i}") @ key.T / 8.0)
        x = x + checkpoint_name(scores @ value, f"out{i}")
        x = x + checkpoint_name(jax.nn.gelu(rms_norm(x) @ layer["up"]) @ layer["down"], f"mlp{i}")
    return jnp.mean(rms_norm(x) ** 2)


def rnn(params: Any, xs: jax.Array) -> jax.Array:
    """A tanh RNN with a tagged state."""

    def cell(h, x):
        h = checkpoint_name(jnp.tanh(h @ params + x), "h")
        return h, h

    return jnp.mean(jax.lax.scan(cell, jnp.zeros_like(xs[0]), xs)[1] ** 2)


class Block(nn.Module):
    """A block of a transformer."""

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        """As `nn.scan` wants it."""
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        h = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(h), None


class Transformer(nn.Module):
    """Twelve blocks, one after the other or scanned."""

    scanned: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits."""
        if self.scanned:
            options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x = nn.scan(Block, length=12, **options)(name="layers")(x, None)[0]
        else:
            for i in range(12):
                x = Block(name=f"block_{i}")(x)[0]
        return nn.Dense(64)(nn.LayerNorm()(x))


def transformer(scanned: bool) -> tuple[Callable, Any, Any]:
    """The loss of a transformer, its parameters and data."""
    model, data = Transformer(scanned), jax.random.normal(jax.random.key(1), (4, 128, 256))
    params = model.init(jax.random.key(0), data)
    return lambda params, x: jnp.mean(model.apply(params, x) ** 2), params, data


def models() -> dict[str, tuple[Callable, Any, Any, list[str]]]:
    """Name: function, parameters, data, and the names."""
    keys = jax.random.split(jax.random.key(0), 3)
    names = ("query", "key", "value", "up", "down")
    layers = [{n: jax.random.normal(keys[0], (64, 64)) / 8 for n in names} for _ in range(22)]
    tags = [f"{kind}{i}" for i in range(22) for kind in ("input", "query", "out", "mlp")]
    recurrent = jax.random.normal(keys[0], (128, 128)) / 11
    return {
        "decoder, 88 sites": (decoder, layers, jax.random.normal(keys[1], (256, 64)), tags),
        "RNN, 200 steps": (rnn, recurrent, jax.random.normal(keys[2], (200, 16, 128)), ["h"]),
        "unrolled transformer, modules": (*transformer(False), ["**"]),
        "unrolled transformer, blocks": (*transformer(False), ["*/block_*"]),
        "scanned transformer, modules": (*transformer(True), ["**"]),
    }


def variants(fun: Callable, tags: list[str]) -> dict[str, Callable]:
    """The plain gradient, and what this library makes of it."""
    rules = dict.fromkeys(tags, RULE)

    def norms(*args):
        value, grads, stats = cg.value_and_grad_with_stats(fun, watch=tags)(*args)
        return value, grads, {name: s.norm for name, s in stats.items()}

    return {
        "plain": jax.value_and_grad(fun),
        "clip by name": jax.value_and_grad(cg.error_clip_by_name(fun, rules)),
        "watch, norms used": norms,
        "watch, all used": cg.value_and_grad_with_stats(fun, watch=tags),
        "clip and watch": cg.value_and_grad_with_stats(fun, rules=rules),
        "clip everywhere": jax.value_and_grad(cg.error_clip_everywhere(fun, RULE)),
    }


def trace_time(fun: Callable, args: tuple) -> float:
    """Seconds to trace a function anew."""
    start = time.perf_counter()
    jax.jit(lambda *args: fun(*args)).trace(*args)
    return time.perf_counter() - start


def run_time(compiled: Callable, args: tuple) -> float:
    """Seconds to run a compiled function."""
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    return time.perf_counter() - start


def measure(repeats: int, chosen: str) -> None:
    """Prints a table for each model."""
    tables = {name: model for name, model in models().items() if chosen in name}
    for model, (fun, params, data, tags) in tables.items():
        every, args = variants(fun, tags), (params, data)
        compiled = {name: jax.jit(f).lower(*args).compile() for name, f in every.items()}
        for name in every:
            run_time(compiled[name], args)
        traces, runs = ({name: [] for name in every} for _ in range(2))
        for _ in range(repeats):
            for name, f in every.items():
                traces[name].append(trace_time(f, args))
                runs[name].append(min(run_time(compiled[name], args) for _ in range(5)))
        print(f"\n{model} ({jax.devices()[0].device_kind}, JAX {jax.__version__})")
        print(f"{'':20} {'trace ms':>9} {'ratio':>6} {'run ms':>8} {'ratio':>6} {'temp MB':>8}")
        for name in every:
            trace, run = (statistics.median(times[name]) for times in (traces, runs))
            base = [statistics.median(times["plain"]) for times in (traces, runs)]
            temp = compiled[name].memory_analysis().temp_size_in_bytes / 2**20
            print(
                f"{name:20} {trace * 1e3:9.1f} {trace / base[0]:6.2f} {run * 1e3:8.2f} "
                f"{run / base[1]:6.2f} {temp:8.2f}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--models", default="", help="only those whose name has this text")
    options = parser.parse_args()
    measure(options.repeats, options.models)
