"""The result of a comparison, for people and for programs: its findings and its rows."""

import dataclasses
import os
from typing import Any

import numpy as np

from clipgrad._arrays import Findings, answers_lookups
from clipgrad._chart import empty_chart
from clipgrad._errors import folded

_MOST_ROWS = 20
_NAME_WIDTH = 56
_MOST_LABELS = 24  # more names than this can't be read
_CURVE_COLORS = {"value": "#0072B2", "cotangent": "#E69F00"}
# The kinds of findings, in no order. A further one needs a head here, its name in
# `ComparisonFinding.kind` and in the page on two versions, and a place in the order of
# `findings.first`: where it first returns if all outputs and gradients may agree, or after that. A
# wider type has another judge, `ByPrecision`. Without a finding a comparison is ok, so what is no
# fault belongs in the notes.
_COMPARISON_HEADS = {
    "value": "the values differ from here on",
    "vjp": "the values agree, and the cotangents differ from here on",
    "grads": "values and cotangents agree, and a gradient differs",
    "output": "an output differs",
    "argument": "the runs had other arguments",
    "rounding": "precision is lost here",
    "not judged": "neither agreement nor a difference was found",
}


@dataclasses.dataclass(frozen=True)
class ComparisonFinding:
    """A place at which two versions differ.

    Attributes:
      kind: "value", "vjp", "grads", "output", "rounding", "argument", or "not judged": rounding
        decides it.
      message: what differs, and by how much.
      module: the module path, "" outside of modules, None if there is none.
      step: the index in the innermost scan, or None.
      file: the file of the user's line, or None.
      line: its number, or None.
      factor: how much the difference grows there; None where it was 0 before.
      path: the path of the output, of the leaf of the gradient or of the argument, or None.
      ratio: the first version divided by the second, if one factor explains the difference, or
        None; of "rounding" the error of the leaf's gradient divided by its size, inf for an
        overflow.
    """

    kind: str
    message: str
    module: str | None = None
    step: int | None = None
    file: str | None = None
    line: int | None = None
    factor: float | None = None
    path: str | None = None
    ratio: float | None = None


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """A place of both versions: a named value, at one step of the scans around it, or an output.

    Attributes:
      module: the name of the value, such as "encoder/attn" or "model.py:8", or the path of the
        output.
      step: the index in the innermost scan, or None.
      value: the relative difference of the values.
      cotangent: the relative difference of their cotangents, or None.
      value_tolerance: what rounding explains of the difference of the values.
      cotangent_tolerance: what rounding explains of the difference of the cotangents, or None.
      steps: the indices in all scans around it, outermost first.
      kind: "tag", "module", "output", "line" for the value of a user's line, or "enters" for what
        enters the module; beside a dtype also "gradient" for a leaf of it.
    """

    module: str
    step: int | None
    value: float
    cotangent: float | None
    value_tolerance: float
    cotangent_tolerance: float | None = None
    steps: tuple[int, ...] = ()
    kind: str = "module"


@answers_lookups("found")
@dataclasses.dataclass(frozen=True)
class GradientComparison:
    """The result of `compare`; ``print`` shows it as a report.

    Attributes:
      ok: whether all outputs and gradients were compared, and agree; for a dtype, whether no
        gradient leaf has lost too much precision.
      findings: the places where the versions differ, in the order of computation.
      rows: every place that both versions have, with relative differences.
      unmatched: places that only one version has.
      notes: further remarks, such as places that are mostly rounding error.
      dtype: the name of the wider dtype, or "" for two versions.
    """

    ok: bool
    findings: tuple[ComparisonFinding, ...]
    rows: tuple[ComparisonRow, ...]
    unmatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dtype: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "findings", Findings(self.findings))

    @property
    def message(self) -> str:
        """The message of the first finding, or that there is no difference."""
        if self.findings:
            return self.findings[0].message
        count = len(self.rows)
        if self.dtype:
            return f"no gradient has lost its precision{_largest_errors(self.rows)}"
        return f"no difference beyond rounding, at {count} place{'s' * (count != 1)}"

    def __str__(self) -> str:
        parts = [] if self.findings else [self.message]
        if self.findings and self.dtype and self.rows:
            parts.append(f"precision is lost{_largest_errors(self.rows)}")
        parts += [_written(finding) for finding in self.findings]
        if self.rows and (self.findings or self.dtype):
            parts += _row_table(self.rows, "error" if self.dtype else "difference")
        parts += [folded(f"not matched: {place}") for place in self.unmatched]
        return "\n".join(parts + [folded(f"note: {note}") for note in self.notes])

    def plot(self) -> Any:
        """Draws relative differences by depth, for values and cotangents, with the findings.

        Returns:
          A matplotlib figure; the extra ``demo`` installs matplotlib.

        Raises:
          ImportError: matplotlib is not installed.
        """
        chart, rows = empty_chart(10, 5), self.rows
        panel = chart.subplots()
        for what, color in _CURVE_COLORS.items():
            _draw_curve(panel, [getattr(row, what) for row in rows], ".-", color, what)
            tolerance = [getattr(row, f"{what}_tolerance") for row in rows]
            _draw_curve(panel, tolerance, ":", color, f"{what}: what rounding explains")
        if panel.lines:
            panel.legend()
        panel.set(ylabel="relative difference", xlabel="depth, from the input to the output")
        at = range(0, len(rows), max(1, -(-len(rows) // _MOST_LABELS)))
        steps = ["" if row.step is None else f", {row.step}" for row in rows]
        labels = [f"{rows[i].module[-32:]}{steps[i]}" for i in at]
        panel.set_xticks(list(at), labels, rotation=60, ha="right", fontsize=7)
        for f in self.findings:
            name = f.path if f.module is None else f.module
            is_at = [f"{x.module}/".startswith(f"{name}/") for x in rows]  # or inside of the module
            places = [i for i, x in enumerate(rows) if is_at[i] and f.step in (None, x.step)]
            for at in places[:1]:
                panel.axvline(at, color="#D55E00", linestyle="--")
                panel.annotate(f.kind, (at, 0.95), xycoords=("data", "axes fraction"))
        return chart


def _draw_curve(panel: Any, numbers: list, style: str, color: str, label: str) -> None:
    """Draw what is above zero, if there is anything."""
    x = np.asarray(numbers, np.float64)  # None is NaN
    is_shown = (x > 0) & np.isfinite(x)
    if is_shown.any():
        panel.semilogy(np.where(is_shown, x, np.nan), style, color=color, label=label)


def _written(finding: ComparisonFinding) -> str:
    where = finding.path if finding.module is None else finding.module
    line = f"{os.path.basename(finding.file)}:{finding.line}" if finding.file else ""
    at = "" if where is None else f": {where or line or 'outside of modules'}"
    step = "" if finding.step is None else f", step {finding.step}"
    head = f"{finding.kind}: {_COMPARISON_HEADS[finding.kind]}{at}{step}"
    return f"{folded(head)}\n{folded(finding.message, '  ')}"


def _largest_errors(rows: tuple[ComparisonRow, ...]) -> str:
    """The largest relative error of a value, of a cotangent and of a gradient, and where it is."""
    errors = []
    for what, field, is_meant in (
        ("value", "value", lambda row: row.kind != "gradient"),
        ("cotangent", "cotangent", lambda row: row.cotangent is not None),
        ("gradient", "value", lambda row: row.kind == "gradient"),
    ):
        chosen = [row for row in rows if is_meant(row)]
        if chosen:
            worst = max(chosen, key=lambda row: getattr(row, field))
            errors.append(f"{getattr(worst, field):.1e} of the {what} of {worst.module}")
    return f"; the largest relative errors: {', '.join(errors)}" if errors else ""


def _row_table(rows: tuple[ComparisonRow, ...], what: str) -> list[str]:
    """The rows with the largest differences beyond rounding, in the order of computation."""
    worst = sorted(rows, key=_excess, reverse=True)[:_MOST_ROWS]
    head = f"relative {what}"
    lines = [f"{head:<{_NAME_WIDTH}}{'step':>6}{'value':>10}{'cotangent':>12}"]
    return lines + [_line(row) for row in rows if any(row is bad for bad in worst)]


def _excess(row: ComparisonRow) -> tuple[float, float]:
    """The difference of a row in what rounding explains; and, where that is all, by itself."""
    value = row.value / (row.value_tolerance or 1e-300)
    if row.cotangent is None:
        return value, row.value
    back = row.cotangent / (row.cotangent_tolerance or 1e-300)
    return max(value, back), max(row.value, row.cotangent)


def _line(row: ComparisonRow) -> str:
    heads = {"enters": "into ", "gradient": "gradient of "}
    name = heads.get(row.kind, "") + row.module
    name = name if len(name) < _NAME_WIDTH else "..." + name[4 - _NAME_WIDTH :]
    step = "" if row.step is None else row.step
    cotangent = "" if row.cotangent is None else f"{row.cotangent:.1e}"
    return f"{name:<{_NAME_WIDTH}}{step:>6}{row.value:>10.1e}{cotangent:>12}"
