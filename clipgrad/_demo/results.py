"""The results of the demo: a line of a table for each way to train, and all numbers."""

import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from clipgrad._demo.task import Task
from clipgrad._demo.train import Result, Run

_DEMO_PACKAGES = ("clipgrad", "jax", "jaxlib", "optax", "numpy", "scikit-learn", "matplotlib")
_LINE = "{:24}{:8}{:8}{:20}{}"


def over_seeds(of: Callable[..., Any], curves: np.ndarray) -> np.ndarray:
    """A number of each column, as `np.max` of it, without what is not finite; NaN of nothing."""
    columns = (column[np.isfinite(column)] for column in curves.reshape(-1, curves.shape[-1]).T)
    return np.array([of(column) if column.size else np.nan for column in columns])


def span(values: np.ndarray) -> str:
    """The range of some numbers, for people: ``0.914..0.930, 2 NaN``."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "NaN"
    ends = dict.fromkeys(f"{end:#.3g}".rstrip(".") for end in (finite.min(), finite.max()))
    lost = values.size - finite.size
    return "..".join(ends) + (f", {lost} NaN" if lost else "")


def head(task: Task, run: Run) -> str:
    names = _LINE.format("", "goal", "finite", "max gradient norm", " | ".join(run.metrics))
    goal = f"goal: {task.goal}  ({len(run.loss)} seeds, {task.steps} steps)"
    return "\n".join([f"{task.name}: {task.summary}", goal, names, "-" * len(names)])


def row(run: Run) -> str:
    shares = [f"{x.sum()} of {x.size}" for x in (run.reached, np.isfinite(run.loss[:, -1]))]
    metrics = " | ".join(map(span, run.metrics.values()))
    return _LINE.format(run.arm.label, *shares, span(run.norm.max(keepdims=True)[0]), metrics)


def report(results: list[Result]) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "versions": {name: importlib.metadata.version(name) for name in _DEMO_PACKAGES},
        "device": f"{device.platform}: {device.device_kind}",
        "tasks": {result.task.name: _task(result) for result in results},
    }


def _task(result: Result) -> dict[str, Any]:
    told = {name: getattr(result.task, name) for name in ("summary", "goal", "note", "steps")}
    return told | {"arms": {run.arm.label: _arm(run) for run in result.runs}}


def _arm(run: Run) -> dict[str, Any]:
    # Over all seeds and training steps: each of them would be a thousand times as long.
    range_of = {"min": np.min, "median": np.median, "max": np.max}
    norms = run.through_time
    return {
        "gradient_clip": run.arm.gradient_clip and repr(run.arm.gradient_clip),
        "error_clip": run.arm.error_clip and repr(run.arm.error_clip),
        "gradient_norm_per_time_step": None
        if norms is None
        else {name: over_seeds(of, norms) for name, of in range_of.items()},
        "seeds": [
            {
                "metrics": {name: values[seed] for name, values in run.metrics.items()},
                "goal_reached": run.reached[seed],
                "loss": run.loss[seed],
                "gradient_norm": run.norm[seed],
            }
            for seed in range(len(run.loss))
        ],
    }
