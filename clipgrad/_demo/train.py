"""Training all seeds of an arm at once."""

import concurrent.futures
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipgrad as cg
from clipgrad._demo.task import Arm, Task

_CHUNKS = 10


class Run(NamedTuple):
    """What training one arm gave.

    Attributes:
      arm: the way to train.
      loss: the loss before each step, of shape (seeds, steps).
      norm: the norm of the gradients before any gradient clip, likewise.
      through_time: the norm of the gradient that goes back through the tagged variable, after
        any error clip, of shape (seeds, steps, time steps); ``None`` without time steps.
      metrics: those of the task after the last step, each of shape (seeds,).
      reached: whether each seed reached the goal.
      seconds: how long it took, with compilation.
    """

    arm: Arm
    loss: np.ndarray
    norm: np.ndarray
    through_time: np.ndarray | None
    metrics: dict[str, np.ndarray]
    reached: np.ndarray
    seconds: float


class Result(NamedTuple):
    """What all arms of a task gave, after so many steps, in so many seconds."""

    task: Task
    steps: int
    runs: list[Run]
    seconds: float


class _Common(NamedTuple):
    """What all arms of a task share, so that they differ in nothing but how they train.

    ``batches`` makes those of some steps, and has the seeds and the steps as leading axes.
    """

    task: Task
    params: Any
    batches: Callable[[jax.Array], Any]
    evaluate: Callable[[Any], Any]
    steps: int


def train(
    task: Task,
    seeds: int,
    steps: int,
    advance: Callable[[int], Any],
    show: Callable[[Run], Any] = lambda run: None,
) -> Result:
    """Trains every arm of a task, all of them from the same parameters on the same batches.

    Args:
      task: the task.
      seeds: how many seeds.
      steps: how many steps.
      advance: is told how many steps have been made since the last time.
      show: is given each arm's run when it and those before it have ended.
    """
    start = time.perf_counter()
    common = _prepare(task, seeds, steps)
    lock, stopped = threading.Lock(), threading.Event()

    def tick(count: int) -> None:
        if stopped.is_set():
            raise InterruptedError
        with lock:
            advance(count)

    # Models this small keep one core busy each.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            runs = []
            for run in pool.map(functools.partial(_run, common, tick), task.arms):
                runs.append(run)
                show(run)
        finally:
            stopped.set()
    return Result(task, steps, runs, time.perf_counter() - start)


def _prepare(task: Task, seeds: int, steps: int) -> _Common:
    data = task.load()
    each = [task.init(data, np.random.default_rng(seed)) for seed in range(seeds)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))

    def batch(data: Any, key: jax.Array, step: jax.Array) -> Any:
        return task.sample(data, jax.random.fold_in(key, step))

    some = jax.vmap(jax.vmap(batch, in_axes=(None, None, 0)), in_axes=(None, 0, None))
    batches = functools.partial(jax.jit(some), data, keys)
    every = jax.jit(jax.vmap(task.evaluate, in_axes=(0, 0, None)))
    return _Common(task, params, batches, lambda last: every(params, last, data), steps)


def _run(common: _Common, tick: Callable[[int], Any], arm: Arm) -> Run:
    start = time.perf_counter()
    # A thread has JAX's global settings, and optax's Adam fails with strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        params, (loss, norm, through_time) = _train_arm(common, tick, arm)
    metrics = jax.tree.map(np.asarray, common.evaluate(params))
    reached = np.asarray(common.task.reached(metrics))
    seconds = time.perf_counter() - start
    return Run(arm, loss, norm, through_time, metrics, reached, seconds)


def _train_arm(common: _Common, tick: Callable[[int], Any], arm: Arm) -> Any:
    optimizer = arm.optimizer(common.task.optimizer)
    carry = (common.params, jax.vmap(optimizer.init)(common.params))
    chunk = jax.vmap(_chunk(common.task, arm, optimizer))
    compiled = jax.jit(chunk, compiler_options=dict(common.task.options or {}))
    size = _chunk_size(common.steps)
    history = []
    for start in range(0, common.steps, size):
        carry, curves = compiled(carry, common.batches(jnp.arange(start, start + size)))
        history.append(jax.tree.map(np.asarray, curves))
        tick(size)
    return carry[0], jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *history)


def _chunk(task: Task, arm: Arm, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    rules = {task.tag: arm.error_clip}
    watched = cg.value_and_grad_with_stats(task.loss, rules=rules, watch=())

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        loss, grads, stats = watched(params, batch)
        through_time = stats[task.tag].clipped_norm if task.recurrent else None
        updates, state = optimizer.update(grads, state, params)
        curves = (loss, cg.global_norm(grads), through_time)
        return (optax.apply_updates(params, updates), state), curves

    return functools.partial(jax.lax.scan, step)


def _chunk_size(steps: int) -> int:
    """The largest divisor of ``steps`` that makes at least ten chunks: one program for all."""
    return max(d for d in range(1, max(1, steps // _CHUNKS) + 1) if steps % d == 0)
