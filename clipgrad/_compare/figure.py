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
    shown = [_draw_differences(panel, rows, what) for what in _CURVE_COLORS]
    if any(shown):
        panel.set_yscale("log")
        panel.legend()
    panel.set_ylabel("relative difference")
    panel.set_xlabel("depth, from the input to the output")
    at = range(0, len(rows), max(1, -(-len(rows) // _MOST_LABELS)))
    steps = ["" if row.step is None else f", {row.step}" for row in rows]
    labels = [f"{rows[i].module[-32:]}{steps[i]}" for i in at]
    panel.set_xticks(list(at), labels, rotation=60, ha="right", fontsize=7)
    for finding in findings:
        name = finding.path if finding.module is None else finding.module
        is_at = [f"{x.module}/".startswith(f"{name}/") for x in rows]  # or inside of the module
        places = [i for i, x in enumerate(rows) if is_at[i] and finding.step in (None, x.step)]
        if places:
            place = (places[0], 0.95)
            panel.axvline(places[0], color="#D55E00", linestyle="--")
            panel.annotate(finding.kind, place, xycoords=("data", "axes fraction"), color="#D55E00")
    return chart


def _draw_differences(panel: Any, rows: Sequence[ComparisonRow], what: str) -> bool:
    """Draw differences above zero, and their tolerance; return whether there are any."""
    curves = []
    for name in (what, f"{what}_tolerance"):
        array = np.asarray([getattr(row, name) for row in rows], np.float64)  # None is NaN
        curves.append(np.where((array > 0) & np.isfinite(array), array, np.nan))
    style = {"color": _CURVE_COLORS[what]}
    if np.isfinite(curves[1]).any():
        panel.plot(curves[0], marker=".", label=what, **style)
        panel.plot(curves[1], linestyle=":", label=f"{what}: what rounding explains", **style)
    return any(np.isfinite(curve).any() for curve in curves)
