"""Which line to tell: the one that only one version has, or the last of a way that both have."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from clipgrad._compare.record import Instance, Record, Row
from clipgrad._compare.slices import Slice
from clipgrad._names import CALL


class LinesAlone(NamedTuple):
    """The first line of each version in a slice that the other has not; None where there is none.

    Attributes:
      own: of the first version.
      other: of the second.
    """

    own: Row | None
    other: Row | None

    @property
    def is_one(self) -> bool:
        """Whether a single version has such a line."""
        return (self.own is None) != (self.other is None)

    @property
    def row(self) -> Row | None:
        """The line of the first version, or else of the second."""
        return self.own or self.other

    @property
    def text(self) -> str:
        """Which version has which line."""
        if self.own is not None and self.other is not None:
            return f"{self.own.words} in fun, {self.other.words} in other"
        row = self.row
        return f"{row.words}, only in {'fun' if self.own else 'other'}" if row else ""


def lines_alone(
    slices: Sequence[Slice], known: Sequence[set[Instance]], shares_code: bool
) -> LinesAlone:
    """The first lines in the slices of both versions that are not known in the other.

    The value of a line that calls others is that of the last of them, and zeros say nothing. A line
    that only moves numbers comes last where versions share no code: the other moves them elsewhere.
    """
    return LinesAlone(*map(functools.partial(_first_alone, shares_code), slices, known))


def _first_alone(shares_code: bool, own: Slice, pairs: set[Instance]) -> Row | None:
    record = own.graph.record
    ends = dict.fromkeys(end for _, *both in own.steps for end in both)
    alone = [at for at in ends if at not in pairs and _is_told(record, at)]

    def order(at: Instance) -> tuple[bool, tuple[float, ...]]:
        row = record.rows[at[0]]
        return row.is_copy and not shares_code, row.time(at[1])

    return record.rows[min(alone, key=order)[0]] if alone else None


def _is_told(record: Record, at: Instance) -> bool:
    row = record.rows[at[0]]
    sketch = row.numbers.sketch
    is_zero = sketch is not None and not sketch[at[1]].any()
    return row.is_line and row.view != CALL and not is_zero


def lines_of_ends(slices: Sequence[Slice], ends: Sequence[set[Instance]]) -> LinesAlone:
    """The first line of each version at which its slice ends."""
    first: list[Row | None] = []
    for own, known in zip(slices, ends, strict=True):
        rows = own.graph.record.rows
        last = (rows[to[0]] for _, _, to in own.steps if to in known)
        first.append(next((row for row in last if row.is_line), None))
    return LinesAlone(*first)
