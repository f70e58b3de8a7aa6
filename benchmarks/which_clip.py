"""Which clip trains best: each way to clip at its own learning rate and threshold.

Each way is trained at every learning rate and threshold of a grid on the seeds of the sweep. The
cell with the best mean of the first metric is trained on the seeds of the comparison, which are
others. "fixed" is the task without its cause, and without a clip. Tasks are those of the demo, and
those of which_clip_*.py; they are small: all of them take half an hour on one core.

Run: python benchmarks/which_clip.py [--task NAME ...] [--out docs]

It writes which_clip.json, every number of every grid, and prints the table of docs/which_clip.md.
With --task it leaves what which_clip.json has of other tasks as it is, and with --missing all that
it has.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from which_clip_tasks import GRAVES, two_heads

import clipgrad as cg
from benchmarks.which_clip_adding import TASK as ADDING
from benchmarks.which_clip_deep_mlp import TASK as DEEP_MLP
from benchmarks.which_clip_diffusion import TASK as DIFFUSION
from benchmarks.which_clip_language import TASK as LANGUAGE
from benchmarks.which_clip_language import warmed_up
from benchmarks.which_clip_pendulum import TASK as PENDULUM
from benchmarks.which_clip_ppo import TASK as PPO
from benchmarks.which_clip_ppo import OnPolicy
from benchmarks.which_clip_private import TASK as PRIVATE
from benchmarks.which_clip_private import with_noise
from clipgrad._demo import TASKS
from clipgrad._demo import blank_patches as _blank_patches
from clipgrad._demo import task as _task
from clipgrad._demo.task import Task

SWEPT, COMPARED = (200, 201), (10, 11, 12, 13, 14)
_NAMES = "rate", "threshold"


class Clips(NamedTuple):
    """The rules of a way.

    Attributes:
      norm: the rule before the optimizer.
      error: the rule in the backward pass.
      example: the rule for each example's gradient.
      every: after how many time steps the gradient is cut off, by ``stop_gradient``.
      adapting: a rule in the backward pass with an adaptive threshold.
      noise: the limit of each example that noise is added for.
      keeps: whether what the rule before the optimizer cuts off is kept for later (U-Clip).
      zero_nans: whether NaN in the gradient is replaced by 0.
      skips: whether steps far out of the ordinary are skipped.
    """

    norm: Any = None
    error: Any = None
    example: Any = None
    every: Any = None
    adapting: Any = None
    noise: Any = None
    keeps: bool = False
    zero_nans: bool = False
    skips: bool = False


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
      clips: its rules, of a threshold.
      thresholds: those to try; ``(None,)`` without one.
      task: what is trained if not the task as it is.
      optimizer: the optimizer, of its learning rate, if not that of the study.
      static: whether a threshold is a number of Python: a program for each of them.
    """

    clips: Callable[[Any], Clips] = lambda threshold: Clips()
    thresholds: Sequence[float | None] = (None,)
    task: Task | None = None
    optimizer: Callable[[Any], optax.GradientTransformation] | None = None
    static: bool = False


@dataclasses.dataclass(frozen=True)
class Study:
    """A task, and the ways to train it that are compared.

    Attributes:
      task: the task.
      optimizer: the optimizer, of its learning rate.
      rates: the learning rates to try.
      ways: the ways by name.
    """

    task: Task
    optimizer: Callable[[Any], optax.GradientTransformation]
    rates: Sequence[float]
    ways: Mapping[str, Way]


def norm(threshold: Any) -> Clips:
    """One norm for all gradients."""
    return Clips(norm=cg.ClipByGlobalNorm(threshold))


def error_by_value(threshold: Any) -> Clips:
    """An error clip of each element."""
    return Clips(error=cg.ErrorClipByValue(threshold))


def error_without_nan(threshold: Any) -> Clips:
    """The same, with 0 for NaN."""
    return Clips(error=cg.ErrorClipByValue(threshold, nan=0.0))


def error_by_row(threshold: Any) -> Clips:
    """An error clip of each example."""
    return Clips(error=cg.ClipByNorm(threshold, axis=-1))


def per_example(threshold: Any) -> Clips:
    """The norm of each example's gradient."""
    return Clips(example=cg.ClipByGlobalNorm(threshold))


def adaptive(threshold: cg.AdaptiveThreshold) -> Way:
    """A norm clip at a threshold from the norms so far; only the learning rate is swept."""
    return Way(lambda _: norm(threshold))


def skipped(threshold: Any) -> Clips:
    """Steps far out of the ordinary are skipped, others clipped."""
    return norm(threshold)._replace(skips=True)


def today(norms: Sequence[float], **more: Way) -> dict[str, Way]:
    """What trainers of today use: norm clips, adaptive ones, skipped steps, and per example."""
    found = {
        "no clip": Way(),
        "norm": Way(norm, norms),
        "percentile 10": adaptive(cg.PercentileThreshold(10, window=128)),
        "percentile 90": adaptive(cg.PercentileThreshold(90, window=128)),
        "z-score": adaptive(cg.ZScoreThreshold()),
        "skip spikes": Way(lambda threshold: Clips(skips=True)),
        "skip spikes + norm": Way(skipped, norms),
        "per example": Way(per_example, norms),
    }
    return found | {name.replace("_", " "): way for name, way in more.items()}


def error_by_percentile(percentile: float) -> Clips:
    """An error clip by norm, at a percentile of the last 64 norms of each scan step."""
    threshold = cg.PercentileThreshold(percentile, window=64)
    return Clips(adapting=cg.ClipByNorm(threshold))


def auto_norm(gamma: Any) -> Clips:
    """All gradients scaled to about norm 1."""
    return Clips(norm=cg.AutoNorm(1.0, gamma))


def u_clip(threshold: Any) -> Clips:
    """A norm clip that keeps what it cuts off for later steps."""
    return norm(threshold)._replace(keeps=True)


PERCENTILES = (10.0, 50.0, 90.0)
# Where the norm clip has two thresholds.
FEWER = (10.0, 90.0)


def of_others(norms: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> dict[str, Way]:
    """Error clips that find their threshold, alone and with a norm clip; AUTO-S and U-Clip."""
    joint = both(error_by_percentile, norms[len(norms) // 2])
    return {
        "adaptive error clip": Way(error_by_percentile, percentiles, static=True),
        "adaptive error clip + norm": Way(joint, percentiles, static=True),
        "auto norm": Way(auto_norm, (0.01, 1.0)),
        "u-clip": Way(u_clip, norms),
    }


def private_norm(threshold: Any) -> Clips:
    """DP-SGD: the norm of each example's gradient, and noise."""
    return per_example(threshold)._replace(noise=threshold)


def private_auto_norm(gamma: Any) -> Clips:
    """DP-SGD with AUTO-S: each example's gradient scaled to about norm 1, and noise."""
    return Clips(example=cg.AutoNorm(1.0, gamma), noise=1.0)


def truncated(every: Any) -> Clips:
    """Back-propagation through so many time steps, and a norm clip."""
    return Clips(norm=cg.ClipByGlobalNorm(1.0), every=every)


def both(error: Callable[[Any], Clips], max_norm: float) -> Callable[[Any], Clips]:
    """An error clip, and a norm clip of a threshold that stays."""
    return lambda threshold: error(threshold)._replace(norm=cg.ClipByGlobalNorm(max_norm))


def error_clips(norms: Sequence[float], errors: Sequence[float]) -> dict[str, Way]:
    """Error clips of each example, alone and with a norm clip."""
    return {
        "error clip": Way(error_by_row, errors),
        "error clip + norm": Way(both(error_by_row, norms[len(norms) // 2]), errors),
    }


def ways(
    norms: Sequence[float], error: Callable[[Any], Clips], errors: Sequence[float], **more: Way
) -> dict[str, Way]:
    """No clip, norm, error clip and both; then those of ``more``."""
    found = {
        "no clip": Way(),
        "norm": Way(norm, norms),
        "error clip": Way(error, errors),
        "error clip + norm": Way(both(error, norms[len(norms) // 2]), errors),
    }
    return found | {name.replace("_", " "): way for name, way in more.items()}


def _mended_patches() -> Task:
    logits = functools.partial(_blank_patches.logits, unit=_blank_patches.mended_unit)

    def loss(params: Any, batch: Any) -> jax.Array:
        return _task.cross_entropy(logits(params, batch.images), batch.labels)

    return dataclasses.replace(_blank_patches.TASK, loss=loss)


def _from_identity() -> Task:
    """Residual blocks that start as the identity: the last weights of each are 0."""

    def init(data: Any, random: np.random.Generator) -> Any:
        params = DEEP_MLP.init(data, random)
        blocks = params["blocks"] | {"down": 0 * params["blocks"]["down"]}
        return params | {"blocks": blocks}

    return dataclasses.replace(DEEP_MLP, init=init)


_NESTEROV = functools.partial(optax.sgd, momentum=0.9, nesterov=True)
_MOMENTUM = functools.partial(optax.sgd, momentum=0.9)

STUDIES = {
    study.task.name: study
    for study in (
        Study(
            TASKS["blank-patches"], optax.adam, (1e-3, 3e-3, 1e-2, 3e-2),
            ways(
                (0.3, 1.0, 3.0), error_without_nan, (1e-4, 1e-3, 1e-2, 1.0),
                zero_nans=Way(lambda threshold: Clips(zero_nans=True)),
                fixed=Way(task=_mended_patches()),
                fixed_plus_norm=Way(norm, (0.1, 0.3, 1.0, 3.0), _mended_patches()),
            ) | of_others((0.3, 1.0, 3.0)),
        ),
        Study(
            TASKS["char-rnn"], optax.sgd, (0.1, 0.3, 1.0, 3.0, 10.0),
            ways((0.1, 0.3, 1.0), error_by_value, (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3))
            | of_others((0.1, 0.3, 1.0)),
        ),
        Study(
            ADDING, optax.adam, (3e-4, 1e-3, 3e-3, 1e-2),
            ways((0.1, 1.0, 10.0), error_by_row, (1e-3, 1e-2, 1e-1)) | of_others((0.1, 1.0, 10.0)),
        ),
        Study(
            DEEP_MLP, _NESTEROV, (1e-3, 1e-2, 1e-1, 1.0),
            ways(
                (0.3, 1.0, 3.0), error_by_value, (1e-4, 1e-3, 1e-2, 1e-1),
                fixed=Way(task=_from_identity()),
            ) | of_others((0.3, 1.0, 3.0)),
        ),
        Study(
            GRAVES, _MOMENTUM, (0.3, 1.0, 3.0, 10.0, 30.0),
            ways((0.03, 0.1, 0.3, 1.0), error_by_value, (1e-4, 1e-3, 1e-2, 1e-1))
            | of_others((0.03, 0.1, 0.3, 1.0)),
        ),
        Study(
            two_heads(4.0), _MOMENTUM, (0.003, 0.01, 0.03, 0.1, 0.3),
            ways(
                (0.1, 1.0, 10.0, 100.0, 1e3), error_by_row, (1e-6, 1e-5, 1e-4, 1e-3),
                fixed=Way(task=two_heads(1.0)),
                fixed_plus_norm=Way(norm, (0.1, 1.0, 10.0, 100.0), two_heads(1.0)),
            ) | of_others((0.1, 1.0, 10.0, 100.0, 1e3)),
        ),
        Study(
            PENDULUM, optax.adam, (1e-3, 3e-3, 1e-2, 3e-2, 0.1),
            ways(
                (1e-3, 0.1, 1.0, 10.0), error_by_row, (3e-4, 1e-3, 3e-3, 1e-2),
                per_example=Way(per_example, (0.1, 1.0, 10.0, 100.0)),
                truncated_plus_norm=Way(truncated, (10.0, 20.0, 40.0)),
            ) | of_others((1e-3, 0.1, 1.0, 10.0)),
        ),
        Study(
            LANGUAGE, warmed_up, (3e-3, 1e-2, 3e-2),
            today(
                (0.1, 1.0),
                warmed_up_longer=Way(optimizer=functools.partial(warmed_up, steps=60)),
                warmed_up_longer_plus_norm=Way(
                    norm, (0.1, 1.0), None, functools.partial(warmed_up, steps=60)
                ),
            )
            | error_clips((0.1, 1.0), (1e-3, 1e-2)) | of_others((0.1, 1.0), FEWER),
        ),
        Study(
            PPO, optax.adam, (1e-3, 3e-3, 1e-2),
            today((0.1, 0.5))
            | error_clips((0.1, 0.5), (1e-3, 1e-2)) | of_others((0.1, 0.5), FEWER),
        ),
        Study(
            DIFFUSION, optax.adam, (1e-3, 3e-3, 1e-2),
            today((0.1, 0.5, 2.0))
            | error_clips((0.1, 0.5, 2.0), (1e-4, 1e-3, 1e-2)) | of_others((0.1, 0.5, 2.0)),
        ),
        Study(
            PRIVATE, optax.sgd, (0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
            {
                "per example + noise": Way(private_norm, (0.03, 0.1, 0.3, 1.0, 3.0)),
                "auto norm per example + noise": Way(private_auto_norm, (0.01,)),
                "no clip, no noise": Way(),
            },
        ),
    )
}  # fmt: skip


def train(study: Study, way: Way, cells: Sequence[tuple], seeds: Sequence[int]) -> dict[str, Any]:
    """The metrics of each cell (learning rate, threshold) and seed, of shape (cells, seeds)."""
    if not way.static:
        return train_at_once(study, way, cells, seeds)
    found: dict[tuple, dict[str, Any]] = {}
    for threshold in dict.fromkeys(cell[1] for cell in cells):
        fixed = dataclasses.replace(way, clips=lambda _, t=threshold: way.clips(t), static=False)
        own = [cell for cell in cells if cell[1] == threshold]
        metrics = train_at_once(study, fixed, own, seeds)
        for i, cell in enumerate(own):
            found[cell] = {name: values[i] for name, values in metrics.items()}
    return {name: np.stack([found[cell][name] for cell in cells]) for name in found[cells[0]]}


def train_at_once(
    study: Study, way: Way, cells: Sequence[tuple], seeds: Sequence[int]
) -> dict[str, Any]:
    """The same, in one program."""
    task = way.task or study.task
    data = task.load()
    starts = [task.init(data, np.random.default_rng(seed)) for seed in seeds]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    keys = jax.vmap(jax.random.key)(jnp.array(seeds))
    one = functools.partial(_train_one, study, way, task, data)
    each_cell = jax.vmap(jax.vmap(one, (0, 0, None, None)), (None, None, 0, 0))
    numbers = [jnp.array([cell[i] or 0.0 for cell in cells]) for i in range(2)]
    metrics = jax.jit(each_cell)(params, keys, *numbers)
    return {name: np.asarray(values, float) for name, values in metrics.items()}


def _train_one(
    study: Study, way: Way, task: Task, data: Any, first: Any, key: Any, rate: Any, threshold: Any
) -> Any:
    clips = way.clips(threshold)
    clip = cg.u_clip(clips.norm) if clips.keeps else cg.gradient_clip(clips.norm)
    clip = optax.zero_nans() if clips.zero_nans else clip
    optimizer = optax.chain(clip, (way.optimizer or study.optimizer)(rate))
    optimizer = cg.skip_spikes(optimizer) if clips.skips else optimizer
    histories, gradient = _gradient(task, clips)

    def update(carry: Any, batch: Any) -> Any:
        params, state, kept = carry
        grads, kept = gradient(params, batch, kept)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state, kept), None

    def step(carry: Any, number: jax.Array) -> Any:
        drawn = jax.random.fold_in(key, number)
        if isinstance(task, OnPolicy):
            return jax.lax.scan(update, carry, task.collect(carry[0], drawn))
        return update(carry, task.sample(data, drawn))

    start = (first, optimizer.init(first), histories(first, data, key))
    (params, *_), _ = jax.lax.scan(step, start, jnp.arange(task.steps))
    metrics = task.evaluate(first, params, data)
    return metrics | {"reached": task.reached(metrics)}


def _gradient(task: Task, clips: Clips) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What a clip keeps at first, and the gradient and what it keeps then."""
    if clips.noise is not None:
        private = _plain_gradient(task, clips)

        def noisy(params: Any, batch: Any, key: Any) -> Any:
            key, own = jax.random.split(key)
            return with_noise(private(params, batch), own, clips.noise), key

        return lambda params, data, key: jax.random.fold_in(key, task.steps), noisy
    if clips.adapting is None:
        plain = _plain_gradient(task, clips)
        return lambda *_: None, lambda params, batch, kept: (plain(params, batch), kept)
    clip = cg.adaptive_error_clip(task.loss, {task.tag: clips.adapting})

    def adapted(params: Any, batch: Any, kept: Any) -> Any:
        _, grads, kept, _ = clip(kept, params, batch)
        return grads, kept

    return lambda params, data, key: clip.init(params, _a_batch(task, params, data, key)), adapted


def _a_batch(task: Task, params: Any, data: Any, key: Any) -> Any:
    if isinstance(task, OnPolicy):
        return jax.tree.map(lambda leaf: leaf[0], task.collect(params, key))
    return task.sample(data, key)


def _plain_gradient(task: Task, clips: Clips) -> Callable[[Any, Any], Any]:
    if clips.every is not None:
        loss: Any = task.loss
        return jax.grad(functools.partial(loss, every=clips.every))
    if clips.example is None:
        rules = {task.tag: clips.error} if task.tag else {}
        return jax.grad(cg.error_clip_by_name(task.loss, rules))

    def loss_of_one(params: Any, example: Any) -> jax.Array:
        return task.loss(params, jax.tree.map(lambda leaf: leaf[None], example))

    clipped = cg.clip_per_example(loss_of_one, clips.example)
    return lambda params, batch: clipped(params, batch)[1]


def measure(study: Study, way: Way) -> dict[str, Any]:
    """The sweep of a way, its best cell, and what that gives on the seeds of the comparison."""
    start = time.perf_counter()
    cells = list(itertools.product(study.rates, way.thresholds))
    swept = train(study, way, cells, SWEPT)
    name = first_metric(swept)
    means = swept[name].mean(1) * (-1 if larger_is_better(name) else 1)
    best = int(np.where(np.isfinite(means), means, np.inf).argmin())
    compared = train(study, way, cells[best : best + 1], COMPARED)
    return {
        "sweep": [
            dict(zip(_NAMES, cell, strict=True)) | {name: _numbers(values)}
            for cell, values in zip(cells, swept[name], strict=True)
        ],
        "best": dict(zip(_NAMES, cells[best], strict=True)),
        "metrics": {key: _numbers(values[0]) for key, values in compared.items()},
        "seconds": round(time.perf_counter() - start),
    }


def first_metric(metrics: Mapping[str, Any]) -> str:
    """The name of the metric that decides; a compiled program returns them sorted by name."""
    return next(name for name in metrics if name != "reached")


def larger_is_better(metric: str) -> bool:
    """Whether a metric is: accuracy is, losses and errors are not."""
    return metric == "accuracy"


def _numbers(values: np.ndarray) -> list[float | None]:
    """Four digits of each; null for what is not finite."""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in values]


def table(content: Mapping[str, Any]) -> str:
    """The Markdown table of what was measured."""
    lines = [
        "| task | way | learning rate | threshold | best seed | median | worst seed | goal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, task in content["tasks"].items():
        lines += [_row(name, task, way, result) for way, result in task["ways"].items()]
    return "\n".join(lines)


def _row(name: str, task: Mapping[str, Any], way: str, result: Mapping[str, Any]) -> str:
    values = result["metrics"][task["metric"]]
    worst = -np.inf if larger_is_better(task["metric"]) else np.inf
    ordered = sorted([worst if value is None else value for value in values])
    ordered = ordered[::-1] if larger_is_better(task["metric"]) else ordered
    shown = [_short(ordered[i]) for i in (0, len(ordered) // 2, -1)]
    cell = [_best(result, part) for part in _NAMES]
    reached = f"{int(sum(result['metrics']['reached']))} of {len(values)}"
    return f"| {' | '.join([name, way, *cell, *shown, reached])} |"


def _best(result: Mapping[str, Any], part: str) -> str:
    """The best learning rate or threshold, with a star at an end of the grid."""
    best, tried = result["best"][part], {cell[part] for cell in result["sweep"]}
    if all(value is None for value in result["metrics"][first_metric(result["metrics"])]):
        return "-"
    return _short(best) + ("*" if len(tried) > 1 and best in (min(tried), max(tried)) else "")


def _short(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:.3g}".replace("e-0", "e-") if np.isfinite(number) else "NaN"


def main() -> None:
    """Measures the tasks that are asked for, and writes what was found after each way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--missing", action="store_true", help="only ways that the file lacks")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs"))
    arguments = parser.parse_args()
    path = arguments.out / "which_clip.json"
    content = json.loads(path.read_text()) if path.exists() else {"tasks": {}}
    known = content["tasks"]
    for name in arguments.task:
        study = STUDIES[name]
        measured = known[name]["ways"] if arguments.missing and name in known else {}
        for way in [way for way in study.ways if way not in measured]:
            measured[way] = measure(study, study.ways[way])
            known[name] = _task_of(study, measured)
            content = {
                "versions": {"jax": jax.__version__, "optax": optax.__version__},
                "device": jax.devices()[0].platform,
                "seeds": {"sweep": SWEPT, "comparison": COMPARED},
                "tasks": {name: known[name] for name in STUDIES if name in known},
            }
            path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    print(table(content))


def _task_of(study: Study, measured: Mapping[str, Any]) -> dict[str, Any]:
    ordered = {way: measured[way] for way in study.ways if way in measured}
    metric = first_metric(next(iter(ordered.values()))["metrics"])
    return {"goal": study.task.goal, "metric": metric, "ways": ordered}


if __name__ == "__main__":
    main()
