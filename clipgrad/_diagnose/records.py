"""The parts of a diagnosis: findings, rows and examples."""

import dataclasses
from typing import Any

from clipgrad._names import Location


@dataclasses.dataclass(frozen=True)
class GradientFinding:
    """Something wrong with a gradient.

    Attributes:
      kind: "value", "vjp", "sum", "raises", "grows", "shrinks", "underflow" or "zero".
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
      norm: the L2 norm; NaN where an element is NaN or inf.
      largest: the largest magnitude, NaN likewise.
      nonfinite: 1 where an element is NaN or inf, else 0.
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
        return f"example {self.index}{where}: {self.numbers}"

    @property
    def numbers(self) -> str:
        return f"its loss is {self.loss:.3g}, the norm of its gradient {self.norm:.3g}"
