"""The files of a demo: a figure, and all numbers as JSON."""

import importlib.metadata
import json
import platform
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from clipgrad._demo.curves import first_nonfinite, over_training
from clipgrad._demo.train import Result, Run

_DEMO_PACKAGES = ("clipgrad", "jax", "jaxlib", "optax", "numpy", "scikit-learn", "matplotlib")


def write_demo(out: Path, results: list[Result], start: float) -> list[Path]:
    """Writes the figure (PNG) and the numbers (JSON); needs matplotlib."""
    from clipgrad._demo.figure import demo_figure

    paths = [out / "demo.png", out / "demo.json"]
    demo_figure(results).savefig(paths[0], dpi=130)
    paths[1].write_text(report(results, time.perf_counter() - start), encoding="utf-8")
    return paths


def report(results: list[Result], seconds: float) -> str:
    """The settings, the versions and every curve; numbers that are not finite are null."""
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in _DEMO_PACKAGES}
    names, seeds = [result.task.name for result in results], len(results[0].runs[0].loss)
    content = {
        "settings": {"tasks": names, "seeds": seeds},
        "versions": {"python": platform.python_version(), **versions},
        "device": f"{device.platform}: {device.device_kind}",
        "seconds": round(seconds, 1),
        "tasks": {result.task.name: _task(result) for result in results},
    }
    return json.dumps(content, allow_nan=False) + "\n"


def _task(result: Result) -> dict[str, Any]:
    return {
        "summary": result.task.summary,
        "goal": result.task.goal,
        "note": result.task.note,
        "steps": result.steps,
        "seconds": round(sum(run.seconds for run in result.runs), 1),
        "arms": {run.arm.label: _arm_numbers(run) for run in result.runs},
    }


def _arm_numbers(run: Run) -> dict[str, Any]:
    # Over all seeds and training steps: each of them would be a thousand times as long.
    band = None if run.through_time is None else over_training(run.through_time)
    parts = {"min": band.low, "median": band.middle, "max": band.high} if band else {}
    return {
        "gradient_clip": repr(run.arm.gradient_clip) if run.arm.gradient_clip else None,
        "gradient_clip_where": run.arm.where,
        "error_clip": repr(run.arm.error_clip) if run.arm.error_clip else None,
        "seconds": round(run.seconds, 1),
        "gradient_norm_per_time_step": {
            name: [_json_number(norm) for norm in part] for name, part in parts.items()
        }
        or None,
        "seeds": [_seed(run, seed) for seed in range(len(run.loss))],
    }


def _seed(run: Run, seed: int) -> dict[str, Any]:
    loss, norm = run.loss[seed], run.norm[seed]
    return {
        "seed": seed,
        "metrics": {name: _json_number(values[seed]) for name, values in run.metrics.items()},
        "goal_reached": bool(run.reached[seed]),
        "final_loss": _json_number(loss[-1]),
        "max_gradient_norm": _json_number(norm.max()),
        "first_nonfinite_loss_step": first_nonfinite(loss[None])[0],
        "first_nonfinite_gradient_step": first_nonfinite(norm[None])[0],
        "loss": [_json_number(value) for value in loss],
        "gradient_norm": [_json_number(value) for value in norm],
    }


def _json_number(value: Any) -> float | None:
    return float(f"{value:.6g}") if np.isfinite(value) else None
