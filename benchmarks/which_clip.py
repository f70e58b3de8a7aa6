"""Which clip trains best: tasks of the demo, each way to clip at its own learning rate and threshold.

Each way is swept over learning rates and thresholds on some seeds, and trained with the best of
them on other seeds. "mended" is the task with its cause mended instead of a clip. Models are
small, so that all of it takes half an hour on one core.

Run: python benchmarks/which_clip.py [--task NAME ...] [--out docs]

It writes which_clip.json, with each number of each grid, and which_clip.table.md, the table of
docs/which_clip.md. With --task it leaves the other tasks in which_clip.json as they are.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipgrad as cg
from clipgrad._demo._task import Task

SWEPT, COMPARED = (100, 101), (0, 1, 2, 3, 4)
Rules = tuple[Any, Any]


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
      rules: the rule before the optimizer and the rule in the backward pass, of a threshold.
      thresholds: those to try; one that means nothing for a way without a clip.
      task: what is trained if not the task as it is.
    """

    rules: Callable[[Any], Rules]
    thresholds: Sequence[float] = (1.0,)
    task: Task | None = None


@dataclasses.dataclass(frozen=True)
class Study:
    """A task, and the ways to train it that are compared.

    Attributes:
      task: the task.
      optimizer: the optimizer, of its learning rate.
      rates: the learning rates to try.
      ways: the ways by name.
      larger_is_better: whether the first metric of the task is.
    """

    task: Task
    optimizer: Callable[[Any], optax.GradientTransformation]
    rates: Sequence[float]
    ways: Mapping[str, Way]
    larger_is_better: bool = False


def train(
    study: Study, way: Way, cells: Sequence[tuple[float, float]], seeds: Sequence[int]
) -> Any:
    """The metrics of each cell (learning rate, threshold) and seed, each of shape (cells, seeds)."""
    task = way.task or study.task
    data = task.load()
    starts = [task.init(data, np.random.default_rng(seed)) for seed in seeds]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    keys = jax.vmap(jax.random.key)(jnp.array(seeds))

    def one(first: Any, key: jax.Array, rate: jax.Array, threshold: jax.Array) -> Any:
        return _train_one(study, way, task, data, first, key, rate, threshold)

    each_seed = jax.vmap(one, in_axes=(0, 0, None, None))
    each_cell = jax.vmap(each_seed, in_axes=(None, None, 0, 0))
    rates, thresholds = (jnp.array(numbers) for numbers in zip(*cells, strict=True))
    metrics = jax.jit(each_cell)(params, keys, rates, thresholds)
    return {name: np.asarray(values, float) for name, values in metrics.items()}


def _train_one(
    study: Study, way: Way, task: Task, data: Any, first: Any, key: Any, rate: Any, threshold: Any
) -> Any:
    before_optimizer, in_backward = way.rules(threshold)
    optimizer = optax.chain(cg.gradient_clip(before_optimizer), study.optimizer(rate))
    gradient = jax.grad(cg.error_clip_by_name(task.loss, {task.tag: in_backward}))

    def step(carry: Any, number: jax.Array) -> Any:
        params, state = carry
        grads = gradient(params, task.sample(data, jax.random.fold_in(key, number)))
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    start = (first, optimizer.init(first))
    (params, _), _ = jax.lax.scan(step, start, jnp.arange(task.steps))
    metrics = task.evaluate(first, params, data)
    return metrics | {"reached": task.reached(metrics)}


def study_way(study: Study, way: Way) -> dict[str, Any]:
    """The sweep of a way, its best cell, and what that gives on the seeds of the comparison."""
    start = time.perf_counter()
    cells = list(itertools.product(study.rates, way.thresholds))
    swept = train(study, way, cells, SWEPT)
    name = next(iter(swept))
    sign = -1 if study.larger_is_better else 1
    means = swept[name].mean(1)
    best = int(np.where(np.isfinite(means), sign * means, np.inf).argmin())
    compared = train(study, way, cells[best : best + 1], COMPARED)
    return {
        "sweep": [
            {"rate": rate, "threshold": threshold, name: _numbers(values)}
            for (rate, threshold), values in zip(cells, swept[name], strict=True)
        ],
        "rate": cells[best][0],
        "threshold": cells[best][1],
        "metrics": {key: _numbers(values[0]) for key, values in compared.items()},
        "seconds": round(time.perf_counter() - start),
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    """Four digits of each; null for what is not finite."""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in values]
