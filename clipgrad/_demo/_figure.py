"""The figure: loss and gradient norm per step of every arm."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from clipgrad._demo import _task
from clipgrad._demo._curves import band, first_nonfinite, span
from clipgrad._demo._train import Result, Run

# Okabe and Ito's colours, which the colour-blind can tell apart; grey for their yellow.
_COLOURS = {
    _task.PLAIN: "#000000",
    _task.NORM: "#0072B2",
    _task.VALUE: "#56B4E9",
    _task.ADAPTIVE: "#009E73",
    _task.ERROR: "#D55E00",
    _task.BOTH: "#CC79A7",
    _task.IF_FINITE: "#E69F00",
    _task.ZERO_NANS: "#8C8C8C",
}
_ROW = 0.075


def figure(results: list[Result]) -> Figure:
    """A row for each task: loss on the left, gradient norm on the right, then the legend."""
    chart = Figure(figsize=(13, 4.2 * len(results)), layout="constrained")
    FigureCanvasAgg(chart)
    rows = chart.subfigures(len(results), 1, squeeze=False)[:, 0]
    for part, result in zip(rows, results):
        _draw_task(part, result)
    return chart


def _draw_task(part: Any, result: Result) -> None:
    part.suptitle(f"{result.task.name}: {result.task.summary}", fontsize=12, fontweight="bold")
    losses, norms = part.subplots(1, 2)
    _draw_panel(losses, "loss", {run.arm.label: run.loss for run in result.runs})
    _draw_panel(norms, "norm of the raw gradient", {r.arm.label: r.norm for r in result.runs})
    handles = [_handle(run) for run in result.runs]
    seeds = len(result.runs[0].loss)
    norms.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(1.02, 0.5),
        frameon=False,
        title=f"line: median, band: range of {seeds} seeds\n(n/{seeds}): {result.task.goal}",
        alignment="left",
        labelspacing=0.8,
        fontsize=9,
    )


def _draw_panel(axes: Axes, title: str, curves: dict[str, np.ndarray]) -> None:
    steps = next(iter(curves.values())).shape[1]
    axes.set(title=title, xlabel="step", xscale="log", yscale="log", xlim=(0.9, steps * 1.05))
    axes.grid(True, which="major", alpha=0.25)
    ended = {}
    for label, values in curves.items():
        _draw_curve(axes, label, values)
        if any(first_nonfinite(values)):
            ended[label] = values
    _leave_room(axes, list(curves.values()), len(ended))
    for row, (label, values) in enumerate(ended.items()):
        _draw_end(axes, label, values, row)


def _draw_curve(axes: Axes, label: str, values: np.ndarray) -> None:
    low, middle, high = band(values)
    steps = np.arange(1, len(middle) + 1)
    colour = _COLOURS[label]
    axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(steps, middle, color=colour, linewidth=1.6, linestyle=_dash(label))


def _draw_end(axes: Axes, label: str, values: np.ndarray, row: int) -> None:
    ends = [end for end in first_nonfinite(values) if end]
    style: Any = {"color": _COLOURS[label], "marker": "x", "linestyle": "", "markersize": 7}
    before = [(e - 1, v[e - 2]) for e, v in zip(first_nonfinite(values), values) if e and e > 1]
    axes.plot([step for step, _ in before], [value for _, value in before], **style)
    height = 0.95 - row * _ROW
    axes.plot(ends, [height] * len(ends), transform=axes.get_xaxis_transform(), **style)
    first, last = min(ends), max(ends)
    late = last > np.sqrt(values.shape[1]) * 2
    axes.annotate(
        f"{label}: NaN in {len(ends)} of {len(values)}",
        xy=(first if late else last, height),
        xycoords=axes.get_xaxis_transform(),
        xytext=(-8 if late else 8, 0),
        textcoords="offset points",
        ha="right" if late else "left",
        va="center",
        fontsize=9,
        color=_COLOURS[label],
    )


def _leave_room(axes: Axes, curves: list[np.ndarray], rows: int) -> None:
    values = np.concatenate([c[np.isfinite(c) & (c > 0)] for c in curves])
    low, high = (values.min(), values.max()) if values.size else (0.1, 10.0)
    share = 0.05 + rows * _ROW
    top = np.log(high) + np.log(high / low) * share / (1 - share)
    axes.set_ylim(low * 0.9, max(np.exp(top), high * 1.1))


def _dash(label: str) -> Any:
    """Both clips together often act as one of them alone: it must be seen underneath."""
    return (0, (4, 2)) if label == _task.BOTH else "-"


def _handle(run: Run) -> Line2D:
    name, values = next(iter(run.metrics.items()))
    label = f"{run.arm.label}\n{name} {span(values)}  ({run.reached.sum()}/{run.reached.size})"
    colour = _COLOURS[run.arm.label]
    return Line2D([], [], color=colour, linestyle=_dash(run.arm.label), linewidth=2, label=label)
