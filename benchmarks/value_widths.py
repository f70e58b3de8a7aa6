"""CPU seconds of statistics of all values of a transformer, by its width and its layers.

    python -m benchmarks.value_widths [--widths 256 512 768] [--layers 4] [--rounds 9]

Prints a row of a table for each model: the median of the plain gradient's CPU seconds, the median
over the rounds of the ratio to the plain gradient of the same round, with quartiles, and the same
for the plain gradient compiled once more, which shows the noise. CPU seconds are those of all
threads, so that other programs on the machine matter less than for the time on the clock.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.flax_models import Transformer
from benchmarks.subjects.values import FLAX, PLAIN, programs

AGAIN = "plain again"
COLUMNS = (AGAIN, "unused", "rms and max used", "all used", FLAX)


def compiled(width: int, layers: int) -> tuple[dict[str, Callable], tuple[Any, Any]]:
    """The gradient with each kind of statistics, compiled, and its arguments."""
    model = Transformer(False, layers)
    data = jax.random.normal(jax.random.key(1), (8, 128, width))
    params = jax.jit(model.init)(jax.random.key(0), data)
    found = programs(lambda p, x: jnp.mean(model.apply(p, x) ** 2), model.apply, ["**"])
    found[AGAIN] = found[PLAIN]
    return {k: jax.jit(f).lower(params, data).compile() for k, f in found.items()}, (params, data)


def cpu_seconds(run: Callable, args: tuple[Any, Any]) -> float:
    """The CPU seconds of one run, in all threads."""
    start = time.process_time()
    jax.block_until_ready(run(*args))
    return time.process_time() - start


def measured(width: int, layers: int, rounds: int) -> dict[str, list[float]]:
    """The CPU seconds of each program in each round; the order in a round is random."""
    found, args = compiled(width, layers)
    for run in found.values():
        cpu_seconds(run, args)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    order = list(found)
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for name in order:
            seconds[name].append(cpu_seconds(found[name], args))
    return seconds


def cell(seconds: list[float], plain: list[float]) -> str:
    """The median of the ratios and their quartiles."""
    ratios = [own / other for own, other in zip(seconds, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def main(arguments: list[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", nargs="+", type=int, default=[256, 512, 768])
    parser.add_argument("--layers", nargs="+", type=int, default=[4])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    print("| layers | width | plain, s |", " | ".join(COLUMNS), "|")
    print(f"|--:|--:|--:|{'---|' * len(COLUMNS)}")
    for layers in options.layers:
        for width in options.widths:
            seconds = measured(width, layers, options.rounds)
            plain = seconds[PLAIN]
            cells = [cell(seconds[name], plain) for name in COLUMNS]
            middle = f"{statistics.median(plain):.2f}"
            print("|", " | ".join([str(layers), str(width), middle, *cells]), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
