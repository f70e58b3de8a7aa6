"""The figure: a row for each task, its loss and its gradient norm, few curves with their names."""

from typing import Any

import numpy as np

from clipgrad._chart import empty_chart
from clipgrad._demo import task
from clipgrad._demo.results import over_seeds, span
from clipgrad._demo.train import Result

# Okabe and Ito's colors, which color-blind readers can tell apart; gray for their yellow.
_COLORS = {
    task.PLAIN: "#000000",
    task.NORM: "#0072B2",
    task.VALUE: "#56B4E9",
    task.ADAPTIVE: "#009E73",
    task.ERROR: "#D55E00",
    task.BOTH: "#CC79A7",
    task.IF_FINITE: "#E69F00",
    task.ZERO_NANS: "#8C8C8C",
}
# How far up and down from the median a panel reaches: an explosion would flatten all the rest.
_UP, _DOWN = 1e7, 1e5


def demo_figure(results: list[Result]) -> Any:
    """A row for each task: the loss, and the gradient norm per step or per time step.

    Drawn are the arms that tell the task's story, each with its outcome in the legend.

    Raises:
      ImportError: matplotlib is not installed.
    """
    chart = empty_chart(14, 3.6 * len(results))
    rows = chart.subfigures(len(results), 1, squeeze=False)
    for part, result in zip(rows[:, 0], results, strict=True):
        _draw_task(part, result)
    return chart


def _draw_task(part: Any, result: Result) -> None:
    part.suptitle(f"{result.task.summary}\n{result.task.note}", fontsize=11)
    runs = [run for run in result.runs if run.arm.label in result.task.shown] or result.runs
    losses, norms = part.subplots(1, 2)
    for panel in (losses, norms):
        panel.set(yscale="log", xlabel="step")
        panel.grid(True, alpha=0.25)
    _draw_panel(losses, "loss", {run.arm.label: run.loss for run in runs})
    if runs[0].through_time is None:
        curves = {run.arm.label: run.norm for run in runs}
        _draw_panel(norms, "gradient norm before any gradient clip", curves)
    else:
        curves = {run.arm.label: np.asarray(run.through_time) for run in runs}
        _draw_panel(norms, f"norm of the gradient of {result.task.tag!r}", curves, up=np.inf)
        norms.set_xlabel("time step (the backward pass goes from right to left)")
    name = next(iter(runs[0].metrics))
    outcomes = [f"{r.arm.label}\n{name} {span(r.metrics[name])}" for r in runs]
    part.legend(losses.lines, outcomes, loc="outside right upper", fontsize=9)


def _draw_panel(panel: Any, quantity: str, curves: dict[str, np.ndarray], up: float = _UP) -> None:
    """The median of each curve between the least and the largest, and how many end in NaN."""
    lost = []
    for label, values in curves.items():
        low, middle, high = (over_seeds(of, values) for of in (np.min, np.median, np.max))
        steps = np.arange(1, len(middle) + 1)
        # Both clips together often act as one of them alone, which must be seen underneath.
        dash = "--" if label == task.BOTH else "-"
        panel.plot(steps, middle, dash, color=_COLORS[label], label=label)
        panel.fill_between(steps, low, high, color=_COLORS[label], alpha=0.15, linewidth=0)
        if bad := sum(not np.isfinite(seed).all() for seed in values):
            lost.append(f"{label}: NaN in {bad} of {len(values)}")
    every = np.concatenate([np.ravel(values) for values in curves.values()])
    seen = every[np.isfinite(every) & (every > 0)]
    if seen.size:
        middle, highest = np.median(seen), seen.max()
        top = min(highest, up * middle)
        panel.set_ylim(max(seen.min(), middle / _DOWN) / 2, top * 2)
        lost += [f"off the scale: up to {highest:.0e}"] if highest > top else []
    panel.set_ylabel(quantity)
    panel.set_title("\n".join(lost), loc="right", fontsize=8)
