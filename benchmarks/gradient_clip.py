"""Gradient clips beside those of optax: time to compile and to run, and memory.

Each row is a ratio to the clip of optax on the same gradients, measured in one process, the two
taking turns. "training step" is a whole step of SGD of a small network, so that its ratio says
what a user notices.

Run: python benchmarks/gradient_clip.py [--repeats 9] [--only NAME]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import clipgrad as cg

Pair = tuple[Callable, Callable]
LIMIT = 1.0


def trees() -> dict[str, Any]:
    """Gradients by name: few large leaves, and many small ones."""
    key = jax.random.key(0)
    return {
        "1 leaf of 10M": [jax.random.normal(key, (10_000_000,))],
        "12 stacked leaves, 5M": [jax.random.normal(key, (12, 186, 186)) for _ in range(12)],
        "300 leaves, 1.2M": [jax.random.normal(key, (64, 64)) for _ in range(300)],
        "1000 leaves, 4M": [jax.random.normal(key, (64, 64)) for _ in range(1000)],
    }


def update(tx: optax.GradientTransformation) -> Callable:
    """The update of a clip without state of its own, of gradients that are parameters too."""
    return lambda grads: tx.update(grads, tx.init(grads), grads)[0]


def clips() -> dict[str, Pair]:
    """Name: ours and optax's, as functions of the gradients."""
    return {
        "global norm": (cg.global_norm, optax.tree.norm),
        "clip by value": (update(cg.clip_by_value(LIMIT)), update(optax.clip(LIMIT))),
        "clip by global norm": (
            update(cg.clip_by_global_norm(LIMIT)),
            update(optax.clip_by_global_norm(LIMIT)),
        ),
        "adaptive clip": (
            update(cg.adaptive_grad_clip(0.01)),
            update(optax.adaptive_grad_clip(0.01)),
        ),
    }


def training_step(clip: optax.GradientTransformation) -> Callable:
    """A step of a network of eight layers, as a function of its weights."""
    tx = optax.chain(clip, optax.sgd(0.1))
    data = jax.random.normal(jax.random.key(1), (256, 256))

    def loss(weights: list[jax.Array]) -> jax.Array:
        h = data
        for weight in weights:
            h = jnp.tanh(h @ weight)
        return jnp.mean(h**2)

    def step(weights: list[jax.Array]) -> list[jax.Array]:
        updates, _ = tx.update(jax.grad(loss)(weights), tx.init(weights), weights)
        return optax.apply_updates(weights, updates)

    return step


def cases() -> dict[str, tuple[Pair, Any]]:
    """Name: the pair of functions and what they take."""
    found = {
        f"{c}, {t}": (pair, grads) for c, pair in clips().items() for t, grads in trees().items()
    }
    weights = [jax.random.normal(jax.random.key(i), (256, 256)) / 16 for i in range(8)]
    steps = (
        training_step(cg.clip_by_global_norm(LIMIT)),
        training_step(optax.clip_by_global_norm(LIMIT)),
    )
    return found | {"training step": (steps, weights)}


def compiled(fun: Callable, grads: Any) -> tuple[Callable, float]:
    """The compiled function, and the seconds it took to trace and compile it."""
    start = time.perf_counter()
    program = jax.jit(fun).lower(grads).compile()
    return program, time.perf_counter() - start


def run_time(program: Callable, grads: Any) -> float:
    """Seconds to run a compiled function."""
    start = time.perf_counter()
    jax.block_until_ready(program(grads))
    return time.perf_counter() - start


def measure(pair: Pair, grads: Any, repeats: int) -> str:
    """A row of the table: ours, and the ratio to optax."""
    programs, compile_times = zip(*(compiled(fun, grads) for fun in pair), strict=True)
    times = [[], []]
    for _ in range(repeats):
        for program, kept in zip(programs, times, strict=True):
            kept.append(min(run_time(program, grads) for _ in range(3)))
    ours, theirs = (statistics.median(kept) for kept in times)
    temp = [program.memory_analysis().temp_size_in_bytes / 2**20 for program in programs]
    return (
        f"{compile_times[0]:9.2f} {compile_times[0] / compile_times[1]:6.2f} "
        f"{ours * 1e3:9.2f} {ours / theirs:6.2f} {temp[0]:8.2f} {temp[1]:8.2f}"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="part of the names of the rows")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, optax {optax.__version__}")
    columns = (
        f"{'compile s':>9} {'ratio':>6} {'run ms':>9} {'ratio':>6} {'temp MB':>8} {'optax':>8}"
    )
    print(f"{'':42} {columns}")
    for name, (pair, grads) in cases().items():
        if options.only in name:
            print(f"{name:42} {measure(pair, grads, options.repeats)}", flush=True)


if __name__ == "__main__":
    main()
