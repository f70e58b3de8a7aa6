"""The results of a task as a table for the terminal, a line as soon as it is known."""

import numpy as np

from clipgrad._demo.curves import short_number, span
from clipgrad._demo.task import Task
from clipgrad._demo.train import Run

# As wide as the widest label, and as the range of two numbers with some NaN.
_LABEL, _SPAN, _SHARE = 24, 20, 8


def head(task: Task, seeds: int, steps: int, metrics: list[str]) -> str:
    """The task, and the names of the columns."""
    names = _table_line("", metrics, "goal", "finite", "max gradient norm")
    goal = f"goal: {task.goal}  ({seeds} seeds, {steps} steps)"
    return "\n".join([f"{task.name}: {task.summary}", goal, names, "-" * len(names)])


def row(run: Run) -> str:
    """The results of one arm."""
    finite = np.isfinite(run.loss[:, -1])
    spans = [span(values) for values in run.metrics.values()]
    largest = short_number(run.norm.max()) if np.isfinite(run.norm).all() else "NaN"
    return _table_line(run.arm.label, spans, _share(run.reached), _share(finite), largest)


def foot(task: Task) -> list[str]:
    """The note of a task, beside its metrics."""
    return [f"note: {task.note}"] if task.note else []


def _table_line(label: str, spans: list[str], goal: str, finite: str, largest: str) -> str:
    columns = [label.ljust(_LABEL), *(text.ljust(_SPAN) for text in spans)]
    return "".join([*columns, goal.ljust(_SHARE), finite.ljust(_SHARE), largest])


def _share(flags: np.ndarray) -> str:
    return f"{flags.sum()} of {flags.size}"
