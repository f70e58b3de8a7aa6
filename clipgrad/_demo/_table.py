"""The results of a task as a table for the terminal."""

import numpy as np

from clipgrad._demo._curves import short_number, span
from clipgrad._demo._train import Result, Run


def table(result: Result) -> str:
    """What was trained, and a line for each arm."""
    task, runs = result.task, result.runs
    head = ["", *runs[0].metrics, "goal", "finite", "max gradient norm"]
    rows = [head, *map(_table_row, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    seeds = len(runs[0].loss)
    goal = f"goal: {task.goal}  ({seeds} seeds, {result.steps} steps, {result.seconds:.0f} s)"
    notes = [f"note: {task.note}"] if task.note else []
    return "\n".join([f"{task.name}: {task.summary}", goal, *lines, *notes])


def _table_row(run: Run) -> list[str]:
    finite = np.isfinite(run.loss[:, -1])
    spans = [span(values) for values in run.metrics.values()]
    return [run.arm.label, *spans, _share(run.reached), _share(finite), _largest_norm(run.norm)]


def _share(flags: np.ndarray) -> str:
    return f"{flags.sum()} of {flags.size}"


def _largest_norm(norms: np.ndarray) -> str:
    return short_number(norms.max()) if np.isfinite(norms).all() else "NaN"
