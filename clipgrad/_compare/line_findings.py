"""Which line a finding names: one that only one version has, or where both end."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from clipgrad._compare.record import Instance, Record, Row
from clipgrad._compare.slices import Slice
from clipgrad._names import CALL


class LinesAlone(NamedTuple):
    """The first line of each version in a slice that the other has not; None where there is none.

    Attributes:
      a: of the first version.
      b: of the second.
    """

    a: Row | None
    b: Row | None

    @property
    def is_one(self) -> bool:
        """Whether a single version has such a line."""
        return (self.a is None) != (self.b is None)

    @property
    def row(self) -> Row | None:
        """The line of the first version, or else of the second."""
        return self.a or self.b

    @property
    def text(self) -> str:
        """Which version has which line."""
        if self.a is not None and self.b is not None:
            return f"{self.a.words} in fun, {self.b.words} in other"
        row = self.row
        return f"{row.words}, only in {'fun' if self.a else 'other'}" if row else ""


def lines_alone(
    slices: Sequence[Slice], known: Sequence[set[Instance]], shares_code: bool
) -> LinesAlone:
    """The first line in the slice of each version whose value is not known in the other.

    Lines that call others are left out, since their value is that of the last of these, and so are
    values of zeros. Where versions share no code, a line that only moves numbers comes last, since
    the other version moves them elsewhere.
    """
    return LinesAlone(*map(functools.partial(_first_alone, shares_code), slices, known))


def _first_alone(shares_code: bool, part: Slice, pairs: set[Instance]) -> Row | None:
    record = part.graph.record
    ends = dict.fromkeys(end for _, *both in part.steps for end in both)
    alone = [at for at in ends if at not in pairs and _may_differ(record, at)]

    def order(at: Instance) -> tuple[bool, tuple[float, ...]]:
        row = record.rows[at[0]]
        return row.is_copy and not shares_code, row.time(at[1])

    return record.rows[min(alone, key=order)[0]] if alone else None


def _may_differ(record: Record, at: Instance) -> bool:
    """Whether a value is that of a line itself, and is not zero."""
    row = record.rows[at[0]]
    sketch = row.numbers.sketch
    is_zero = sketch is not None and not sketch[at[1]].any()
    return row.is_line and row.view != CALL and not is_zero


def lines_of_ends(slices: Sequence[Slice], ends: Sequence[set[Instance]]) -> LinesAlone:
    """The first line of each version at which its slice ends."""
    first: list[Row | None] = []
    for part, known in zip(slices, ends, strict=True):
        rows = part.graph.record.rows
        last = (rows[to[0]] for _, _, to in part.steps if to in known)
        first.append(next((row for row in last if row.is_line), None))
    return LinesAlone(*first)
