"""Measures the first program of `diagnose` beside the plain gradient, on 100M parameters.

    python -m benchmarks.diagnosis [mlp] [transformer] [--small]

Prints for each model the seconds of CPU of one run, and the bytes that the compiled program needs
beside its arguments, for both; and the ratios.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import clipgrad as cg
from clipgrad import _jaxpr

RUNS = 5


def mlp(width: int, depth: int) -> tuple[Callable, tuple]:
    """Layers in a Python loop, a batch of 32."""
    keys = jax.random.split(jax.random.key(0), depth)
    params = [jax.random.normal(key, (width, width)) * width**-0.5 for key in keys]

    def loss(params, x):
        for w in params:
            x = x + jax.nn.gelu(x @ w)
        return jnp.mean(x**2)

    return loss, (params, jax.random.normal(jax.random.key(1), (32, width)))


def transformer(width: int, depth: int) -> tuple[Callable, tuple]:
    """A scan of blocks with attention, a batch of two sequences of 64 tokens."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (width, 4 * width), (width, 4 * width), (4 * width, width)
    params = [
        jax.random.normal(key, (depth, *shape)) * width**-0.5
        for key, shape in zip(keys, shapes, strict=True)
    ]

    def normed(x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

    def block(x, layer):
        mixed, up, down = layer
        q, k, v, out = jnp.split(normed(x) @ mixed, 4, axis=-1)
        scores = jax.nn.softmax(q @ k.swapaxes(-1, -2) * width**-0.5)
        x = x + scores @ v * jax.nn.sigmoid(out)
        return x + jax.nn.gelu(normed(x) @ up) @ down, None

    def loss(params, x):
        return jnp.mean(lax.scan(block, x, tuple(params))[0] ** 2)

    return loss, (params, jax.random.normal(jax.random.key(1), (2, 64, width)))


class Measured:
    """`jax.jit` that remembers what a run of the program takes."""

    def __init__(self, fun: Callable):
        self._fun = fun
        self.seconds, self.bytes = float("nan"), 0

    def __call__(self, *args: Any) -> Any:
        """The result; the median of the seconds of CPU of some runs is kept."""
        compiled = jax.jit(self._fun).lower(*args).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        self.bytes = memory.temp_size_in_bytes + memory.output_size_in_bytes
        seconds = []
        result = None
        for _ in range(RUNS + 1):
            del result
            started = time.process_time()
            result = jax.block_until_ready(compiled(*args))
            seconds.append(time.process_time() - started)
        self.seconds = statistics.median(seconds[1:])
        return result


def first_program(loss: Callable, args: tuple) -> Measured:
    """The first program that `diagnose` compiles."""
    programs: list[Measured] = []

    def measured(fun: Callable) -> Measured:
        programs.append(Measured(fun))
        return programs[-1]

    usual = _jaxpr.jit_for_one_call
    _jaxpr.jit_for_one_call = lambda program: measured
    try:
        assert cg.diagnose(loss, args).ok
    finally:
        _jaxpr.jit_for_one_call = usual
    return programs[0]


def main(names: list[str], *, small: bool) -> None:
    """Print a line for each model."""
    sizes = {"mlp": (256, 4) if small else (2048, 24), "transformer": (64, 4)}
    sizes["transformer"] = (64, 4) if small else (832, 12)
    for name in names:
        loss, args = {"mlp": mlp, "transformer": transformer}[name](*sizes[name])
        count = sum(x.size for x in jax.tree.leaves(args[0]))
        plain = Measured(jax.value_and_grad(loss))
        plain(*args)
        first = first_program(loss, args)
        print(
            f"{name}, {count / 1e6:.0f}M parameters: gradient {plain.seconds:.2f} s, "
            f"{plain.bytes / 2**20:.0f} MiB; diagnose's first program {first.seconds:.2f} s, "
            f"{first.bytes / 2**20:.0f} MiB; ratios {first.seconds / plain.seconds:.2f} and "
            f"{first.bytes / plain.bytes:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    chosen = [name for name in sys.argv[1:] if not name.startswith("-")]
    main(chosen or ["mlp", "transformer"], small="--small" in sys.argv)
