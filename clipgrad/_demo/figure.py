"""The figure: a row for each task, its loss and its gradient norm, few curves with their names."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullFormatter

from clipgrad._demo import task
from clipgrad._demo.curves import Band, band, first_nonfinite, over_training, short_number, span
from clipgrad._demo.train import Result, Run

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
_HEIGHT = 3.6
_ROW = 0.1
# Between two labels, as a share of the height of a panel: three lines of text.
_APART = 0.22
# How far up and down from the median a panel reaches: an explosion would flatten all the rest.
_UP, _DOWN = 1e7, 1e5


def demo_figure(results: list[Result]) -> Figure:
    """A row for each task: the loss, and the gradient norm per step or per time step.

    Drawn are the arms that tell the task's story, each with its name and outcome beside it.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.12)
    chart = Figure(figsize=(14, _HEIGHT * len(results)), layout=layout)
    FigureCanvasAgg(chart)
    rows = chart.subfigures(len(results), 1, squeeze=False, hspace=0.04)
    for part, result in zip(rows[:, 0], results, strict=True):
        shown = [run for run in result.runs if run.arm.label in result.task.shown]
        _draw_task(part, result._replace(runs=shown or result.runs))
    return chart


def _draw_task(part: Any, result: Result) -> None:
    part.suptitle(f"{result.task.summary}\n{result.task.note}", fontsize=11)
    losses, norms = part.subplots(1, 2)
    outcomes = {run.arm.label: _outcome(run) for run in result.runs}
    _draw_panel(losses, "loss", {run.arm.label: run.loss for run in result.runs}, outcomes)
    through_time = {run.arm.label: run.through_time for run in result.runs}
    lines = {n: over_training(norms) for n, norms in through_time.items() if norms is not None}
    if lines:
        peaks = {run.arm.label: _peak(run) for run in result.runs}
        _draw_through_time(norms, result.task.tag, lines, peaks)
    else:
        norm = {run.arm.label: run.norm for run in result.runs}
        _draw_panel(norms, "gradient norm before any gradient clip", norm, {})


def _label(axes: Axes, curves: dict[str, np.ndarray], beside: dict[str, str]) -> None:
    """Writes each name, and what is beside it, at the end of its curve; none over another."""
    low, high = np.log(axes.get_ylim())
    ends = {label: values[np.isfinite(values) & (values > 0)] for label, values in curves.items()}
    heights = {n: (np.log(v[-1]) - low) / (high - low) if v.size else 1.0 for n, v in ends.items()}
    heights = {n: height for n, height in heights.items() if ends[n].size or n in beside}
    below = -np.inf
    order = sorted(heights, key=heights.__getitem__)
    for number, label in enumerate(order):
        room = 1 - _APART * (len(order) - number - 0.5)
        below = max(below + _APART, min(max(heights[label], _APART / 2), room))
        axes.annotate(
            "\n".join([label, *filter(None, [beside.get(label)])]),
            xy=(1.015, below),
            xycoords="axes fraction",
            va="center",
            fontsize=9,
            color=_COLORS[label],
        )


def _draw_panel(
    axes: Axes, quantity: str, curves: dict[str, np.ndarray], beside: dict[str, str]
) -> None:
    steps = next(iter(curves.values())).shape[1]
    axes.set(ylabel=quantity, xlabel="step", xscale="log", yscale="log", xlim=(0.9, steps * 1.1))
    axes.grid(True, which="major", alpha=0.25)
    ended = {}
    for label, values in curves.items():
        _draw_curve(axes, label, band(values))
        if any(first_nonfinite(values)):
            ended[label] = values
    shown = _scale(axes, list(curves.values()), len(ended))
    for row, (label, values) in enumerate(ended.items()):
        _draw_end(axes, label, np.clip(values, *shown), 0.95 - row * _ROW)
    _label(axes, {label: band(values).middle for label, values in curves.items()}, beside)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if _decades(axis) < 3.5 else (1,)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def _draw_through_time(
    axes: Axes, tag: str, curves: dict[str, Band], beside: dict[str, str]
) -> None:
    last = len(next(iter(curves.values())).steps)
    axes.set(ylabel=f"norm of the gradient of {tag!r}", yscale="log")
    axes.set(xlabel="time step (the backward pass goes from right to left)")
    axes.set(xlim=(0.5, last + 0.5), ylim=_whole([part for b in curves.values() for part in b[1:]]))
    axes.grid(True, which="major", alpha=0.25)
    for label, line in curves.items():
        _draw_curve(axes, label, line)
        thin: Any = {"color": _COLORS[label], "linewidth": 0.7, "linestyle": _dash(label)}
        axes.plot(line.steps, line.low, line.steps, line.high, **thin)
    _label(axes, {label: line.high for label, line in curves.items()}, beside)


def _whole(curves: list[np.ndarray]) -> tuple[float, float]:
    """The limits that show an explosion up to its top; only what vanishes is cut off."""
    values = _positive_values(curves)
    return max(values.min(), np.median(values) / _DOWN) / 2, values.max() * 2


def _positive_values(curves: list[np.ndarray]) -> np.ndarray:
    values = np.concatenate([c[np.isfinite(c) & (c > 0)] for c in curves]).astype(float)
    return values if values.size else np.array([0.1, 10.0])


def _draw_curve(axes: Axes, label: str, line: Band) -> None:
    color = _COLORS[label]
    axes.fill_between(line.steps, line.low, line.high, color=color, alpha=0.15, linewidth=0)
    axes.plot(line.steps, line.middle, color=color, linewidth=1.8, linestyle=_dash(label))


def _draw_end(axes: Axes, label: str, values: np.ndarray, height: float) -> None:
    """A cross where each seed's curve stops, and one in a row of its own that says so."""
    ends = [(end, seed) for seed, end in enumerate(first_nonfinite(values)) if end]
    style: Any = {"color": _COLORS[label], "marker": "x", "linestyle": "", "markersize": 7}
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
        color=_COLORS[label],
    )


def _scale(axes: Axes, curves: list[np.ndarray], rows: int) -> tuple[float, float]:
    """Sets the limits: rows of crosses lie above the curves, whose shown range is returned."""
    values = _positive_values(curves)
    middle, highest = np.median(values), values.max()
    low, high = max(values.min(), middle / _DOWN), min(highest, middle * _UP)
    height = max(np.log(high / low), 0.1)
    share = 0.05 + rows * _ROW
    axes.set_ylim(low * np.exp(-0.04 * height), high * np.exp(height * share / (1 - share)))
    if highest > high:
        _cut_curves(axes, high, highest)
    return low, high


def _cut_curves(axes: Axes, high: float, highest: float) -> None:
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
    return (0, (4, 2)) if label == task.BOTH else "-"


def _outcome(run: Run) -> str:
    name, values = next(iter(run.metrics.items()))
    return f"{name} {span(values)}\ngoal: {run.reached.sum()} of {run.reached.size} seeds"


def _peak(run: Run) -> str:
    norms = np.asarray(run.through_time)
    finite = np.isfinite(norms)
    parts = [f"up to {short_number(norms[finite].max())}"] if finite.any() else []
    if lost := (~finite).any((1, 2)).sum():
        parts.append(f"NaN in {lost} of {len(norms)}")
    return ", ".join(parts)
