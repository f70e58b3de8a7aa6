"""The result of a diagnosis, for people and for programs."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from clipgrad._arrays import Findings, answers_lookups
from clipgrad._diagnose.finding_kinds import FINDING_KINDS
from clipgrad._diagnose.records import GradientExample, GradientFinding, GradientRow
from clipgrad._errors import first_few, folded

_WORST = 10
_NAME = 50
MOST_EXAMPLES = 3  # alike, a line for each
_NO_FINDING = (
    "nothing is wrong with the gradient",
    "no operation is at fault; these examples stand out:",
)


@answers_lookups("found")
@dataclasses.dataclass(frozen=True)
class GradientDiagnosis:
    """The result of `diagnose`; ``print`` shows it as a report.

    Attributes:
      findings: the faults; "value" and "vjp" findings come first.
      rows: the cotangent norms of all program parts, in forward order.
      notes: parts that were not measured, and decays that are not faults.
      examples: with ``diagnose(..., examples=...)`` the examples whose loss or gradient is not
        finite, or whose gradient norm is a hundred times the median (zero norms not counted).
    """

    findings: tuple[GradientFinding, ...]
    rows: tuple[GradientRow, ...]
    notes: tuple[str, ...]
    examples: tuple[GradientExample, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "findings", Findings(self.findings))

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    @property
    def message(self) -> str:
        """The message of the first finding, or that nothing is wrong."""
        return self.findings[0].message if self.findings else _NO_FINDING[bool(self.examples)]

    def __str__(self) -> str:
        parts = [_written_finding(finding) for finding in self.findings]
        parts += [folded(text) for text in _written_examples(self.examples)]
        parts += [_table(self.findings, self.rows)] if self.findings and self.rows else []
        parts += [folded(f"note: {note}") for note in self.notes]
        return "\n".join(parts if self.findings else [self.message, *parts])

    def plot(self) -> Any:
        """Draws cotangent norms by depth and by scan step, with the findings.

        Returns:
          A matplotlib figure; the extra ``demo`` installs matplotlib.

        Raises:
          ImportError: matplotlib is not installed.
        """
        from clipgrad._diagnose.figure import diagnosis_figure

        return diagnosis_figure(self.rows, self.findings)


def _written_examples(examples: Sequence[GradientExample]) -> list[str]:
    """A line for each example, or one for many whose loss and gradient are not finite alike."""
    alike: dict[str, list[GradientExample]] = {}
    for example in examples:
        is_odd = not math.isfinite(example.loss) and not math.isfinite(example.norm)
        key = example.numbers if is_odd else str(example)
        alike.setdefault(key, []).append(example)
    lines = []
    for numbers, group in alike.items():
        first, last = group[0].index, group[-1].index
        if len(group) <= MOST_EXAMPLES:
            lines += map(str, group)
        elif last - first == len(group) - 1:
            lines.append(f"examples {first} to {last}, each: {numbers}")
        else:
            indices = first_few([str(example.index) for example in group], MOST_EXAMPLES)
            lines.append(f"examples {indices}, each: {numbers}")
    return lines


def _table(findings: tuple[GradientFinding, ...], rows: tuple[GradientRow, ...]) -> str:
    """The ten worst rows in forward order: not finite, else by size, the sick end first."""
    smallest = {finding.kind for finding in findings} <= {"shrinks", "underflow"}
    sign = -1 if smallest else 1

    def badness(row: GradientRow) -> tuple:
        return float(np.max(row.nonfinite)), sign * float(np.max(np.nan_to_num(row.norm)))

    worst = sorted(rows, key=badness, reverse=True)[:_WORST]
    lines = [f"{'cotangent of':<52}{'norm':>10}{'largest':>10}{'not finite':>12}{'zeros':>8}"]
    lines += [_row_line(row) for row in rows if any(row is bad for bad in worst)]
    return "\n".join(lines)


def _row_line(row: GradientRow) -> str:
    name = f"{row.module or f'line {row.line}'}: {row.operation}"
    name = name if len(name) <= _NAME else "..." + name[3 - _NAME :]
    worst = float(np.max(row.norm, initial=0)), float(np.max(row.largest, initial=0))
    numbers = "".join(f"{value:>10.3g}" for value in worst)
    steps = int(np.sum(row.nonfinite))
    bad = f"{steps} of {row.nonfinite.size}" if row.scans else "yes" if steps else "no"
    return f"{name:<52}{numbers}{bad:>12}{np.max(row.zeros):>8.0%}"


def _written_finding(finding: GradientFinding) -> str:
    head = f"{finding.kind}: {FINDING_KINDS[finding.kind]}"
    return "\n".join([head, folded(finding.message, "  ")])
