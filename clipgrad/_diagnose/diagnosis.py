"""What a diagnosis says, for people and for programs."""

import dataclasses
import textwrap
from typing import Any

import numpy as np

from clipgrad._diagnose.places import Location

_LINE_WIDTH = 100
_WORST = 10
_NAME = 50
_HEADS = {
    "value": "the value is not finite",
    "vjp": "the backward pass makes NaN or inf",
    "grows": "the gradient grows on its way back",
    "shrinks": "the gradient shrinks on its way back",
    "underflow": "the gradient underflows",
}


@dataclasses.dataclass(frozen=True)
class GradientFinding:
    """Something wrong with a gradient.

    Attributes:
      kind: "value", "vjp", "grows", "shrinks" or "underflow".
      file: the file of the user's line.
      line: its number.
      operation: JAX's name of the operation, or the name of the function with a rule of its own.
      module: the module path, "" outside of modules.
      step: the index in the innermost scan, or None.
      message: what happens, and what to write instead.
      factor: the growth or decay per step or module going backward, or None.
      device: the coordinates of the device in a `jax.shard_map` or `jax.pmap`, such as "data=5",
        the first of several; None outside, and if it is every device.
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


@dataclasses.dataclass(frozen=True)
class GradientDiagnosis:
    """What `diagnose` found.

    Attributes:
      findings: what is wrong; a "value" and a "vjp" finding first.
      rows: the cotangents of all parts of the program in forward order.
      notes: what was left out.
      examples: with ``diagnose(..., examples=...)`` those whose loss or gradient is not finite, or
        whose gradient has more than a hundred times the norm of the median.
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
        parts += [_wrapped(str(example), "") for example in self.examples]
        parts += [_table(self.findings, self.rows)] if self.findings and self.rows else []
        parts += [_wrapped(f"note: {note}", "") for note in self.notes]
        return "\n".join(parts if self.findings else ["nothing is wrong with the gradient", *parts])

    def plot(self) -> Any:
        """The norm of the cotangent by depth, and by step of each scan, with the findings marked.

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
    return "\n".join([head, _wrapped(finding.message, "  ")])


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text, _LINE_WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
