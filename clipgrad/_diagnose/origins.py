"""Where a fault is from: an argument, a constant, an operation, a sum of cotangents, or a cut.

The questions of `guilty.py`, and `zero_source` of `cut_facts.py`, answer with these; findings and
causes tell them apart by `match`, so that a further kind of `Origin` needs a case in each `match`
of the room. They are dataclasses, not tuples, so that an operation never equals a constant that it
reads.
"""

import dataclasses
import enum
from typing import Any

from clipgrad._diagnose.tape import Entry, Tape

TapeVariable = tuple[Tape, Any]  # a tape, and a variable of its program


@dataclasses.dataclass(frozen=True)
class Argument:
    """An input of the loss, by its number: what is wrong with it is so before the loss runs."""

    number: int


@dataclasses.dataclass(frozen=True)
class Constant:
    """A constant of the program; ``reader`` reads it, or is None if the loss itself is it."""

    reader: Entry | None = None


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that makes good into bad, or whose VJP does."""

    entry: Entry

    @property
    def step(self) -> int | None:
        """The step of the innermost scan around; None outside of scans."""
        return _last(self.entry.tape.steps)

    @property
    def order(self) -> tuple[int, ...]:
        """The place in time, to compare with those of others."""
        return self.entry.order


@dataclasses.dataclass(frozen=True)
class Carry:
    """What a scan, the ``entry``, carries into one of its steps."""

    entry: Entry
    step: int


@dataclasses.dataclass(frozen=True)
class Sum:
    """Finite cotangents of the uses of one value, which are added up."""

    value: Argument | Operation | Carry

    @property
    def order(self) -> tuple[int, ...]:
        """The place in time; an argument is before all operations."""
        return () if isinstance(self.value, Argument) else self.value.entry.order


class Way(enum.Enum):
    """The way in which a cotangent ends at an operand, as far as the tape shows it."""

    OPERATION = "the operation passes nothing back"
    BRANCH = "the branch that is taken does not read it"
    CARRY = "nothing reads what the next step of the scan gets"
    CANCELS = "the cotangents of its uses add up to zero"
    EMPTY = "the operation takes no element of it"
    CONTROL = "it only chooses a branch, or ends a loop"


@dataclasses.dataclass(frozen=True)
class Cut:
    """An operand without a cotangent, of an operation whose result has one.

    Attributes:
      entry: the operation.
      operand: the number of the operand.
      way: how it ends there.
      is_at_each_step: whether it ends at every step of the scan around, not at one of them.
    """

    entry: Entry
    operand: int
    way: Way = Way.OPERATION
    is_at_each_step: bool = False

    @property
    def step(self) -> int | None:
        """The step of the innermost scan; None outside of scans, and if it is at every step."""
        return None if self.is_at_each_step else _last(self.entry.tape.steps)


@dataclasses.dataclass(frozen=True)
class Raised:
    """An operation in which a callback raises an error."""

    entry: Entry
    is_backward: bool


Origin = Argument | Constant | Operation  # of a value
Fault = Operation | Sum  # of a cotangent that is not finite
Located = Operation | Carry | Cut  # what has a line


def _last(steps: tuple[int, ...]) -> int | None:
    return steps[-1] if steps else None
