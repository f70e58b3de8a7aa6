"""The figure: loss and gradient norm of every arm per step, and per time step of an RNN."""

import textwrap
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullFormatter

from clipgrad._demo import _task
from clipgrad._demo._curves import Band, band, first_nonfinite, over_training, short_number, span
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
_KEY = "line: median, band: range of {} seeds over nearby steps"
_TIME_KEY = """The gradient of {!r} at each time step:
the backward pass goes from right to left.
line: median, band: range of {} seeds over {} steps"""
_NOTE_WIDTH = 60
_ROW = 0.075
_HEIGHT = 4.3
# How far up and down from the median a panel reaches: an explosion would flatten all the rest.
_UP, _DOWN = 1e7, 1e5


def figure_of_results(results: list[Result]) -> Figure:
    """For each task: loss on the left, gradient norm in the middle, the legend.

    Below them, if it has time steps: the gradient norm at each of them.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.12)
    heights = [_HEIGHT * (2 if _bands_through_time(result) else 1) for result in results]
    chart = Figure(figsize=(15, sum(heights)), layout=layout)
    FigureCanvasAgg(chart)
    rows = chart.subfigures(len(results), 1, squeeze=False, hspace=0.04, height_ratios=heights)
    for part, result in zip(rows[:, 0], results, strict=True):
        _draw_task(part, result)
    return chart


def _draw_task(part: Any, result: Result) -> None:
    part.suptitle(f"{result.task.name}: {result.task.summary}", fontsize=12, fontweight="bold")
    through_time = _bands_through_time(result)
    grid = part.add_gridspec(2 if through_time else 1, 3, width_ratios=[1, 1, 0.78])
    losses, norms, legend = (part.add_subplot(grid[0, column]) for column in range(3))
    _draw_panel(losses, "loss", {run.arm.label: run.loss for run in result.runs})
    norm = {run.arm.label: run.norm for run in result.runs}
    _draw_panel(norms, "gradient norm before any gradient clip", norm)
    seeds, goal = len(result.runs[0].loss), f"goal: {result.task.goal}"
    note = textwrap.wrap(result.task.note, _NOTE_WIDTH)
    key = "\n".join([_KEY.format(seeds), goal, *note])
    _draw_legend(legend, key, map(_outcome, result.runs))
    if through_time:
        _draw_through_time(part.add_subplot(grid[1, :2]), through_time)
        key = _TIME_KEY.format(result.task.tag, seeds, result.steps)
        _draw_legend(part.add_subplot(grid[1, 2]), key, map(_peak, result.runs))


def _bands_through_time(result: Result) -> dict[str, Band]:
    norms = {run.arm.label: run.through_time for run in result.runs}
    return {label: over_training(each) for label, each in norms.items() if each is not None}


def _draw_legend(axes: Axes, title: str, handles: Iterable[Line2D]) -> None:
    axes.set_axis_off()
    box = axes.legend(
        handles=list(handles),
        loc="center left",
        borderaxespad=0,
        frameon=False,
        title=title,
        title_fontsize=9,
        alignment="left",
        labelspacing=0.9,
        fontsize=9,
    )
    box.set_in_layout(False)


def _draw_panel(axes: Axes, quantity: str, curves: dict[str, np.ndarray]) -> None:
    steps = next(iter(curves.values())).shape[1]
    axes.set(ylabel=quantity, xlabel="step", xscale="log", yscale="log", xlim=(0.9, steps * 1.1))
    axes.grid(True, which="major", alpha=0.25)
    ended = {}
    for label, values in curves.items():
        _draw_curve(axes, label, band(values))
        if any(first_nonfinite(values)):
            ended[label] = values
    shown = _set_scale(axes, list(curves.values()), len(ended))
    for row, (label, values) in enumerate(ended.items()):
        _draw_end(axes, label, np.clip(values, *shown), 0.95 - row * _ROW)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if _decades(axis) < 3.5 else (1,)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def _draw_through_time(axes: Axes, curves: dict[str, Band]) -> None:
    last = len(next(iter(curves.values())).steps)
    axes.set(ylabel="gradient norm after any error clip", xlabel="time step", yscale="log")
    axes.set(xlim=(0.5, last + 0.5), ylim=_whole([part for b in curves.values() for part in b[1:]]))
    axes.grid(True, which="major", alpha=0.25)
    for label, line in curves.items():
        _draw_curve(axes, label, line)
        thin: Any = {"color": _COLOURS[label], "linewidth": 0.7, "linestyle": _dash(label)}
        axes.plot(line.steps, line.low, line.steps, line.high, **thin)


def _whole(curves: list[np.ndarray]) -> tuple[float, float]:
    """The limits that show an explosion up to its top; only what vanishes is cut off."""
    values = _positive_values(curves)
    return max(values.min(), np.median(values) / _DOWN) / 2, values.max() * 2


def _positive_values(curves: list[np.ndarray]) -> np.ndarray:
    values = np.concatenate([c[np.isfinite(c) & (c > 0)] for c in curves]).astype(float)
    return values if values.size else np.array([0.1, 10.0])


def _draw_curve(axes: Axes, label: str, line: Band) -> None:
    colour = _COLOURS[label]
    axes.fill_between(line.steps, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(line.steps, line.middle, color=colour, linewidth=1.8, linestyle=_dash(label))


def _draw_end(axes: Axes, label: str, values: np.ndarray, height: float) -> None:
    """A cross where each seed's curve stops, and one in a row of its own that says so."""
    ends = [(end, seed) for seed, end in enumerate(first_nonfinite(values)) if end]
    style: Any = {"color": _COLOURS[label], "marker": "x", "linestyle": "", "markersize": 7}
    last = [(end - 1, values[seed, end - 2]) for end, seed in ends if end > 1]
    axes.plot([step for step, _ in last], [value for _, value in last], **style)
    across = axes.get_xaxis_transform()
    steps = [end for end, _ in ends]
    axes.plot(steps, [height] * len(steps), transform=across, **style)
    late = max(steps) ** 2 > values.shape[1]
    axes.annotate(
        f"{label}: NaN in {len(ends)} of {len(values)}",
        xy=(min(steps) if late else max(steps), height),
        xycoords=across,
        xytext=(-8 if late else 8, 0),
        textcoords="offset points",
        ha="right" if late else "left",
        va="center",
        fontsize=9,
        color=_COLOURS[label],
    )


def _set_scale(axes: Axes, curves: list[np.ndarray], rows: int) -> tuple[float, float]:
    """Sets the limits: rows of crosses lie above the curves, whose shown range is returned."""
    values = _positive_values(curves)
    middle, highest = np.median(values), values.max()
    low, high = max(values.min(), middle / _DOWN), min(highest, middle * _UP)
    height = max(np.log(high / low), 0.1)
    share = 0.05 + rows * _ROW
    axes.set_ylim(low * np.exp(-0.04 * height), high * np.exp(height * share / (1 - share)))
    if highest > high:
        _cut(axes, high, highest)
    return low, high


def _cut(axes: Axes, high: float, highest: float) -> None:
    """Ends the curves at a line that says how far they go on."""
    bottom, top = np.log(axes.get_ylim())
    below = Rectangle((0, 0), 1, (np.log(high) - bottom) / (top - bottom), transform=axes.transAxes)
    for artist in [*axes.lines, *axes.collections]:
        artist.set_clip_path(below)
    axes.axhline(high, color="0.5", linewidth=0.8, linestyle=":")
    axes.annotate(
        f"off the scale: up to {highest:.0e}",
        xy=(0.99, high),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8,
        color="0.35",
    )


def _decades(axis: Any) -> float:
    low, high = axis.get_view_interval()
    return float(np.log10(high / low))


def _dash(label: str) -> Any:
    """Both clips together often act as one of them alone, which must be seen underneath."""
    return (0, (4, 2)) if label == _task.BOTH else "-"


def _outcome(run: Run) -> Line2D:
    name, values = next(iter(run.metrics.items()))
    goal = f"goal {run.reached.sum()} of {run.reached.size}"
    return _handle(run.arm.label, f"{name} {span(values)}, {goal}")


def _handle(label: str, result: str) -> Line2D:
    colour, dash = _COLOURS[label], _dash(label)
    return Line2D([], [], color=colour, linestyle=dash, linewidth=2.4, label=f"{label}\n{result}")


def _peak(run: Run) -> Line2D:
    norms = np.asarray(run.through_time)
    finite = np.isfinite(norms)
    parts = [f"up to {short_number(norms[finite].max())}"] if finite.any() else []
    if lost := (~finite).any((1, 2)).sum():
        parts.append(f"NaN in {lost} of {len(norms)}")
    return _handle(run.arm.label, ", ".join(parts))
