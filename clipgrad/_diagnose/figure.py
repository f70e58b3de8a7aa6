"""The picture of a diagnosis: the norm of the cotangent by depth, and by step of each scan."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clipgrad._chart import empty_chart
from clipgrad._diagnose.program_units import SCAN
from clipgrad._diagnose.records import GradientFinding, GradientRow
from clipgrad._diagnose.trends import over_steps


def diagnosis_figure(rows: Sequence[GradientRow], findings: Sequence[GradientFinding]) -> Any:
    """A panel of the norm against depth, and one against the step of each scan.

    Raises:
      ImportError: matplotlib is not installed.
    """
    scans = [row for row in rows if row.operation == SCAN]
    chart = empty_chart(10, 4 * (1 + len(scans)))
    panels = chart.subplots(1 + len(scans), 1, squeeze=False)[:, 0]
    norms = [float(np.sqrt(np.sum(np.square(row.norm)))) for row in rows]
    lines = [(row.file, row.line) for row in rows]
    at = [(lines.index((f.file, f.line)), f) for f in findings if (f.file, f.line) in lines]
    _draw_norms(panels[0], norms, at, "part, from the input to the loss", "norm of the cotangent")
    for panel, row in zip(panels[1:], scans, strict=True):
        norms = over_steps(row)
        norms = norms[::-1] if row.reverse else norms
        at = [(f.step, f) for f in findings if f.step is not None and f.step < len(norms)]
        name = row.module or f"line {row.line}"
        _draw_norms(panel, norms, at, "step of the scan", f"norm of the state's cotangent, {name}")
    return chart


def _draw_norms(
    panel: Any, norms: Any, marks: list[tuple[int, GradientFinding]], label: str, title: str
) -> None:
    array = np.where(np.asarray(norms) > 0, norms, np.nan)
    panel.plot(range(len(array)), array, marker=".", color="#0072B2")
    if np.isfinite(array).any():
        panel.set_yscale("log")
    panel.set(xlabel=label, title=title)
    for place, finding in marks:
        panel.axvline(place, color="#D55E00", linestyle="--")
        text = f"{finding.kind}: {finding.operation}"
        panel.annotate(text, (place, 0.95), xycoords=("data", "axes fraction"), color="#D55E00")
