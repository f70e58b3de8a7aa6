"""Seconds: programs that take turns, medians, and the spread of their ratios."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

Sample = Callable[[], dict[str, float]]
Times = dict[str, list[float]]

ROUNDS = 11
CALLS = 5
# The threads of one library wait actively for a while after their work.
PAUSE = 0.01


class Clock:
    """What programs are timed by: the clock on the wall, or the CPU seconds of all threads."""

    read = staticmethod(time.perf_counter)


def seconds(call: Callable[[], Any]) -> float:
    """What a call takes; it must wait for its result."""
    start = Clock.read()
    call()
    return Clock.read() - start


def running(call: Callable[[], Any]) -> Sample:
    """Samples of the time to run a call."""
    return lambda: {"run": seconds(call)}


def compiled(fun: Callable, args: tuple, donated: tuple[int, ...] = ()) -> tuple[Any, dict]:
    """The compiled function, and the CPU seconds to trace and to compile it.

    The caches of JAX are empty, as a user's first call finds them.
    """
    jax.clear_caches()
    start = time.process_time()
    # A function of its own, since JAX keeps what it traced by function.
    traced = jax.jit(lambda *args: fun(*args), donate_argnums=donated).lower(*args)
    between = time.process_time()
    program = traced.compile()
    return program, {"trace": between - start, "compile": time.process_time() - between}


def take_turns(samples: Mapping[str, Sample], budget: float) -> dict[str, Times]:
    """Times by name and phase, of programs that take turns: A B A B ...

    A turn keeps the fastest of a few calls, as many for each program. The first round warms up and
    does not count, but for a program that takes longer than the budget: it is run once.
    """
    first = {name: sample() for name, sample in samples.items()}
    kept = {name: {p: [t] for p, t in times.items()} for name, times in first.items()}
    taken = {name: sum(times.values()) for name, times in first.items()}
    quick = [name for name in samples if taken[name] <= budget]
    round_seconds = sum(taken[name] for name in quick)
    if not quick:
        return kept
    rounds = int(np.clip(budget / round_seconds, 3, ROUNDS))
    calls = int(np.clip(budget / round_seconds / rounds, 1, CALLS))
    kept |= {name: {phase: [] for phase in first[name]} for name in quick}
    for turn in range(rounds):
        for name in _rotated(quick, turn):
            time.sleep(PAUSE)
            found = [samples[name]() for _ in range(calls)]
            for phase, times in kept[name].items():
                times.append(min(sample[phase] for sample in found))
    return kept


def _rotated(names: list[str], turn: int) -> list[str]:
    """Each program comes first in its turn; in every second one the others go backwards.

    So none always runs after the same one.
    """
    start = turn % len(names)
    first, *others = names[start:] + names[:start]
    return [first, *(others[::-1] if turn % 2 else others)]


def spread(values: list[float]) -> dict[str, float]:
    """The median and the quartiles."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "low": float(low), "high": float(high), "n": len(values)}


def ratios(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """The median and the quartiles of the ratios, one for each round; one if one ran once."""
    if len(ours) != len(theirs):
        return spread([float(np.median(ours) / np.median(theirs))])
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])
