"""The picture of a comparison: the relative differences by depth."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clipgrad._chart import empty_chart
from clipgrad._compare.comparison import ComparisonFinding, ComparisonRow

_MOST_LABELS = 24  # more names than this can't be read
_CURVE_COLORS = {"value": "#0072B2", "cotangent": "#E69F00"}


def comparison_figure(rows: Sequence[ComparisonRow], findings: Sequence[ComparisonFinding]) -> Any:
    """A curve of the values' differences and one of the cotangents', with what rounding explains.

    Raises:
      ImportError: matplotlib is not installed.
    """
    chart = empty_chart(10, 5)
    panel = chart.subplots()
    shown = [
        _draw_differences(panel, rows, "value"),
        _draw_differences(panel, rows, "cotangent"),
    ]
    if any(shown):
        panel.set_yscale("log")
        panel.legend()
    panel.set_ylabel("relative difference")
    panel.set_xlabel("depth, from the input to the output")
    at = range(0, len(rows), max(1, -(-len(rows) // _MOST_LABELS)))
    panel.set_xticks(
        list(at), [_row_label(rows[i]) for i in at], rotation=60, ha="right", fontsize=7
    )
    for finding in findings:
        _mark_finding(panel, rows, finding)
    return chart


def _draw_differences(panel: Any, rows: Sequence[ComparisonRow], what: str) -> bool:
    """Draw differences above zero, and their tolerance; return whether there are any."""
    curves = [_numbers(rows, name) for name in (what, f"{what}_tolerance")]
    style = {"color": _CURVE_COLORS[what]}
    if np.isfinite(curves[1]).any():
        panel.plot(curves[0], marker=".", label=what, **style)
        panel.plot(curves[1], linestyle=":", label=f"{what}: what rounding explains", **style)
    return any(np.isfinite(curve).any() for curve in curves)


def _numbers(rows: Sequence[ComparisonRow], name: str) -> np.ndarray:
    values = [getattr(row, name) for row in rows]
    array = np.asarray([np.nan if x is None else x for x in values], np.float64)
    return np.where((array > 0) & np.isfinite(array), array, np.nan)


def _row_label(row: ComparisonRow) -> str:
    step = "" if row.step is None else f", {row.step}"
    return f"{row.module[-32:]}{step}"


def _mark_finding(panel: Any, rows: Sequence[ComparisonRow], finding: ComparisonFinding) -> None:
    name = finding.path if finding.module is None else finding.module
    at = [i for i, row in enumerate(rows) if _is_at(row, str(name), finding.step)]
    if at:
        panel.axvline(at[0], color="#D55E00", linestyle="--")
        place = (at[0], 0.95)
        panel.annotate(finding.kind, place, xycoords=("data", "axes fraction"), color="#D55E00")


def _is_at(row: ComparisonRow, name: str, step: int | None) -> bool:
    """Whether a row is of a module, or inside of it."""
    return f"{row.module}/".startswith(f"{name}/") and (step is None or row.step == step)
