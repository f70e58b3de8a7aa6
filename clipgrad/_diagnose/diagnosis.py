"""The result of a diagnosis, for people and for programs."""

import dataclasses
from typing import Any

import numpy as np

from clipgrad._errors import folded
from clipgrad._names import Location


@dataclasses.dataclass(frozen=True)
class GradientFinding:
    """Something wrong with a gradient.

    Attributes:
      kind: "value", "vjp", "raises", "grows", "shrinks", "underflow" or "zero".
      file: the file of the user's line.
      line: its number.
      operation: JAX's name of the operation, or the name of the function with a rule of its own.
      module: the module path, "" outside of modules.
      step: the index in the innermost scan, or None.
      message: what happens, and what to write instead.
      factor: the growth or decay per step or module going backward, or None.
      device: the coordinates of the device in a `jax.shard_map` or `jax.pmap`, such as "data=5",
        the first of several; None outside, and if it is every device.
      leaf: of a "zero" finding the argument whose gradient is zero, such as "args[0]['w']"; of
        several that are cut at one place all, joined by ", "; "" for other findings.
      cause: of a "zero" finding what cuts it, as in the table of `docs/zero.md`; "" for others.
    """

    kind: str
    file: str | None
    line: int | None
    operation: str
    module: str
    step: int | None
    message: str
    factor: float | None = None
    device: str | None = None
    leaf: str = ""
    cause: str = ""


@dataclasses.dataclass(frozen=True)
class GradientRow:
    """The cotangents of what leaves a part of a module, or of what a scan carries.

    Numbers are arrays with one leading axis for each scan around the part, outermost first.

    Attributes:
      module: the module path, "" outside of modules.
      file: the file of the user's line.
      line: its number.
      operation: the last operation of the part, or "scan" for what a scan carries.
      shape: of the largest variable.
      dtype: of the largest variable.
      scans: the lengths of the scans around it.
      norm: the L2 norm of the finite elements.
      largest: their largest magnitude.
      nonfinite: how many elements are NaN or inf.
      zeros: the share of elements that are exactly zero.
      is_layer: whether a matrix product or a convolution is in the part.
      reverse: whether the innermost scan runs from its last step to its first.
    """

    module: str
    file: str | None
    line: int | None
    operation: str
    shape: tuple[int, ...]
    dtype: str
    scans: tuple[int, ...]
    norm: Any
    largest: Any
    nonfinite: Any
    zeros: Any
    is_layer: bool
    reverse: bool

    @property
    def location(self) -> str:
        """The file and the line, relative to the current folder if they are inside of it."""
        return str(Location(self.file, self.line, None))


@dataclasses.dataclass(frozen=True)
class GradientExample:
    """An example of the batch that is worse than the others.

    Attributes:
      index: its place in the batch.
      loss: its own loss.
      norm: the norm of its own gradient.
      device: where it is on the mesh, such as "data=5"; "" if the batch is not spread.
    """

    index: int
    loss: float
    norm: float
    device: str

    def __str__(self) -> str:
        where = f" (device {self.device})" if self.device else ""
        return f"example {self.index}{where}: its loss is {self.loss:.3g}, the norm of its " + (
            f"gradient {self.norm:.3g}"
        )


_WORST = 10
_NAME = 50
_NO_FINDING = (
    "nothing is wrong with the gradient",
    "no operation is at fault; these examples stand out:",
)
_HEADS = {
    "raises": "an operation raises an error",
    "value": "the value is not finite",
    "vjp": "the backward pass creates NaN or inf",
    "grows": "the gradient grows in the backward pass",
    "shrinks": "the gradient shrinks in the backward pass",
    "underflow": "the gradient underflows",
    "zero": "the gradient is exactly zero",
}


@dataclasses.dataclass(frozen=True)
class GradientDiagnosis:
    """The result of `diagnose`; ``print`` shows it as a report.

    Attributes:
      findings: the faults; a "value" and a "vjp" finding come first.
      rows: the cotangents of all parts of the program, in forward order.
      notes: the parts that were not measured, and decays that are not faults.
      examples: with ``diagnose(..., examples=...)`` the examples whose loss or gradient is not
        finite, or whose gradient has a norm above a hundred times the median.
    """

    findings: tuple[GradientFinding, ...]
    rows: tuple[GradientRow, ...]
    notes: tuple[str, ...]
    examples: tuple[GradientExample, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def __str__(self) -> str:
        parts = [_written_finding(finding) for finding in self.findings]
        parts += [folded(str(example)) for example in self.examples]
        parts += [_table(self.findings, self.rows)] if self.findings and self.rows else []
        parts += [folded(f"note: {note}") for note in self.notes]
        return "\n".join(parts if self.findings else [_NO_FINDING[bool(self.examples)], *parts])

    def plot(self) -> Any:
        """Draws the norm of the cotangent by depth and by step of each scan, with the findings.

        Returns:
          A figure of matplotlib, which the extra ``demo`` installs.

        Raises:
          ImportError: matplotlib is not installed.
        """
        from clipgrad._diagnose.figure import diagnosis_figure

        return diagnosis_figure(self.rows, self.findings)


def _table(findings: tuple[GradientFinding, ...], rows: tuple[GradientRow, ...]) -> str:
    """The ten worst rows in forward order: not finite, else by size, the sick end first."""
    smallest = {finding.kind for finding in findings} <= {"shrinks", "underflow"}
    sign = -1 if smallest else 1

    def badness(row: GradientRow) -> tuple:
        return float(np.sum(row.nonfinite)) > 0, sign * float(np.max(row.norm, initial=0))

    worst = sorted(rows, key=badness, reverse=True)[:_WORST]
    lines = [f"{'cotangent of':<52}{'norm':>10}{'largest':>10}{'not finite':>12}{'zeros':>8}"]
    lines += [_row_line(row) for row in rows if any(row is bad for bad in worst)]
    return "\n".join(lines)


def _row_line(row: GradientRow) -> str:
    name = f"{row.module or f'line {row.line}'}: {row.operation}"
    name = name if len(name) <= _NAME else "..." + name[3 - _NAME :]
    worst = float(np.max(row.norm, initial=0)), float(np.max(row.largest, initial=0))
    numbers = "".join(f"{value:>10.3g}" for value in worst)
    return f"{name:<52}{numbers}{np.sum(row.nonfinite):>12.0f}{np.max(row.zeros):>8.0%}"


def _written_finding(finding: GradientFinding) -> str:
    head = f"{finding.kind}: {_HEADS[finding.kind]}"
    return "\n".join([head, folded(finding.message, "  ")])
