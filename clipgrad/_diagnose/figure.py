"""The picture of a diagnosis: the norm of the cotangent by depth, and by step of each scan."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clipgrad._chart import empty_chart
from clipgrad._diagnose.records import GradientFinding, GradientRow
from clipgrad._diagnose.trends import finite_norm, over_steps
from clipgrad._diagnose.units import SCAN

_LABELS = 24  # more module names than this can't be read


def diagnosis_figure(rows: Sequence[GradientRow], findings: Sequence[GradientFinding]) -> Any:
    """A panel of the norm against depth, and one against the step of each scan.

    Raises:
      ImportError: matplotlib is not installed.
    """
    scans = [row for row in rows if row.operation == SCAN]
    chart = empty_chart(10, 4 * (1 + len(scans)))
    panels = chart.subplots(1 + len(scans), 1, squeeze=False)[:, 0]
    _by_depth(panels[0], rows, findings)
    for panel, row in zip(panels[1:], scans, strict=True):
        _by_step(panel, row, findings)
    return chart


def _by_depth(panel: Any, rows: Sequence[GradientRow], findings: Sequence[GradientFinding]) -> None:
    norms = [float(np.sqrt(np.sum(np.square(finite_norm(row))))) for row in rows]
    _draw_line(
        panel, norms, "depth, from the input to the loss (the backward pass goes to the left)"
    )
    panel.set_title("norm of the cotangent by module")
    shown = range(0, len(rows), max(1, -(-len(rows) // _LABELS)))
    names = [(rows[i].module or f"line {rows[i].line}")[-32:] for i in shown]
    panel.set_xticks(list(shown), names, rotation=60, ha="right", fontsize=7)
    for finding in findings:
        lines = [(row.file, row.line) for row in rows]
        at = [i for i, row in enumerate(rows) if row.module == finding.module]
        if (finding.file, finding.line) in lines:
            at = [lines.index((finding.file, finding.line))]
        if at:
            _mark(panel, at[0], finding)


def _by_step(panel: Any, row: GradientRow, findings: Sequence[GradientFinding]) -> None:
    norms = over_steps(row)
    _draw_line(panel, norms[::-1] if row.reverse else norms, "step of the scan")
    panel.set_title(f"norm of the state's cotangent, {row.module or f'line {row.line}'}")
    for finding in findings:
        if finding.step is not None and finding.step < len(norms):
            _mark(panel, finding.step, finding)


def _draw_line(panel: Any, norms: Any, label: str) -> None:
    array = np.where(np.asarray(norms) > 0, norms, np.nan)
    panel.plot(range(len(array)), array, marker=".", color="#0072B2")
    if np.isfinite(array).any():
        panel.set_yscale("log")
    panel.set_xlabel(label)
    panel.set_ylabel("norm")


def _mark(panel: Any, place: int, finding: GradientFinding) -> None:
    panel.axvline(place, color="#D55E00", linestyle="--")
    text = f"{finding.kind}: {finding.operation}"
    panel.annotate(text, (place, 0.95), xycoords=("data", "axes fraction"), color="#D55E00")
