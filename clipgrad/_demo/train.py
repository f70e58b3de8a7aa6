"""Training all seeds of an arm at once, and as many arms as there are cores."""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipgrad as cg
from clipgrad._demo.task import QUICK, Arm, Task

_CHUNKS = 10


class Run(NamedTuple):
    """The results of training one arm.

    Attributes:
      arm: the way to train.
      loss: the loss before each step, of shape (seeds, steps).
      norm: the norm of the gradients before any gradient clip, likewise.
      through_time: the norm of the gradient that goes back through the tagged variable, after
        any error clip, of shape (seeds, steps, time steps); ``None`` without time steps.
      metrics: the task's metrics after the last step, each of shape (seeds,).
      reached: whether each seed reached the goal.
    """

    arm: Arm
    loss: np.ndarray
    norm: np.ndarray
    through_time: np.ndarray | None
    metrics: dict[str, np.ndarray]
    reached: np.ndarray


class Result(NamedTuple):
    """The results of all arms of a task."""

    task: Task
    runs: list[Run]


def train(
    tasks: Sequence[Task],
    seeds: int,
    advance: Callable[[int], Any],
    show: Callable[[Task, Run], Any] = lambda task, run: None,
) -> list[Result]:
    """Trains the arms of each task, all from the same parameters on the same batches.

    Args:
      tasks: the tasks.
      seeds: how many seeds.
      advance: is told how many steps have been made since the last time.
      show: is given each arm's task and run when it and those before it have ended.
    """
    lock, stopped = threading.Lock(), threading.Event()

    def tick(count: int) -> None:
        if stopped.is_set():
            raise InterruptedError
        with lock:
            advance(count)

    # Models this small keep one core busy each: a core that is free begins with the next task.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            begun = [(t, [pool.submit(r, tick) for r in _trainings(t, seeds)]) for t in tasks]
            for task, runs in begun:
                for run in runs:
                    show(task, run.result())
            return [Result(task, [run.result() for run in runs]) for task, runs in begun]
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)


def _trainings(task: Task, seeds: int) -> list[Callable[..., Run]]:
    """The training of each arm, which waits to be told whom to call after some steps."""
    data = task.load()
    firsts = [task.init(data, np.random.default_rng(seed)) for seed in range(seeds)]
    params = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *firsts)
    keys = jax.vmap(jax.random.key)(np.arange(seeds))

    def batch(data: Any, key: jax.Array, step: jax.Array) -> Any:
        return task.sample(data, jax.random.fold_in(key, step))

    some = jax.vmap(jax.vmap(batch, in_axes=(None, None, 0)), in_axes=(None, 0, None))
    batches = functools.partial(jax.jit(some, compiler_options=QUICK), data, keys)
    each_seed = jax.vmap(task.evaluate, in_axes=(0, 0, None))
    every = jax.jit(each_seed, compiler_options=QUICK)

    def run(arm: Arm, tick: Callable[[int], Any]) -> Run:
        # A thread has JAX's global settings, and optax's Adam fails with strict promotion.
        with jax.numpy_dtype_promotion("standard"):
            last, (loss, norm, through_time) = _train_arm(task, arm, params, batches, tick)
        metrics = jax.tree.map(np.asarray, every(params, last, data))
        reached = np.asarray(task.reached(metrics))
        return Run(arm, loss, norm, through_time, metrics, reached)

    return [functools.partial(run, arm) for arm in task.arms]


def _train_arm(task: Task, arm: Arm, params: Any, batches: Any, tick: Any) -> Any:
    """The last parameters, and the curves over all steps."""
    optimizer = arm.optimizer(task.optimizer)
    carry = (params, jax.jit(jax.vmap(optimizer.init), compiler_options=QUICK)(params))
    chunk = jax.vmap(_chunk(task, arm, optimizer))
    compiled = jax.jit(chunk, compiler_options=dict(task.options or {}))
    most = max(1, task.steps // _CHUNKS)
    size = max(d for d in range(1, most + 1) if task.steps % d == 0)  # one program for all chunks
    history = []
    for start in range(0, task.steps, size):
        carry, curves = compiled(carry, batches(np.arange(start, start + size)))
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
