"""Two records that were matched: what a judge reads, and what it says."""

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

from clipgrad._compare.line_findings import LinesAlone, lines_alone
from clipgrad._compare.matching import MOST_NAMES, Matching
from clipgrad._compare.pairs import Pair
from clipgrad._compare.record import ENTERS, Graph, Instance, Record, Row
from clipgrad._compare.result import ComparisonFinding
from clipgrad._compare.slices import Slice, made_from, module_of
from clipgrad._errors import first_few
from clipgrad._names import Location


class Verdict(NamedTuple):
    """What a judge says of two records.

    Attributes:
      findings: where they differ.
      notes: what else there is to know.
      dtype: the wider type that one of them ran in, or "".
    """

    findings: Sequence[ComparisonFinding]
    notes: Sequence[str] = ()
    dtype: str = ""


@dataclasses.dataclass(frozen=True)
class Sides:
    """Two records, and how they were matched."""

    a: Record
    b: Record
    matching: Matching

    def of(self, kind: str) -> list[Pair]:
        return [p for p in self.matching.pairs if p.kind == kind]

    def rows(self, pair: Pair) -> tuple[Row, Row]:
        return self.a.rows[pair.a[0]], self.b.rows[pair.b[0]]

    def graphs(self, pair: Pair) -> list[Graph]:
        """The graphs behind a pair: both, or the first alone if the names of its rows differ."""
        row, other = self.rows(pair)
        return self.both if row.name == other.name else self.both[:1]

    @functools.cached_property
    def both(self) -> list[Graph]:
        return [Graph(self.a), Graph(self.b)]

    @property
    def has_lines(self) -> bool:
        """Whether the values of lines are in both records."""
        return self.a.has_lines and self.b.has_lines

    @property
    def agreeing(self) -> list[Pair]:
        """The values that agree."""
        return [p for p in self.of("value") if p.judgment.agrees]

    def behind(self, pair: Pair) -> list[Slice]:
        """The operations between a pair and the values that agree, in both records."""
        return made_from(pair, self.agreeing, self.both)

    def module_of(self, pair: Pair, slices: Sequence[Slice]) -> str | None:
        """The common module of slices of both records; of the first if a pair has two names."""
        return module_of(slices[: len(self.graphs(pair))])

    def at_line(
        self,
        kind: str,
        text: str,
        module: str | None,
        pair: Pair,
        before: Sequence[Pair] = (),
        line: Row | None = None,
    ) -> ComparisonFinding:
        """A finding with the lines of both versions of a pair, or at the row ``line`` instead.

        Its factor is how many times its difference is that of the pairs before.
        """
        row, other = self.rows(pair)
        if self.a.framework == self.b.framework and other.line not in ("", row.line):
            text += f"; in other at {_location(other)}"
        where = _location(line or row)
        text = f"{where}: {text}" if where.file else text
        largest = max((p.judgment.difference for p in before if p.judgment.is_judged), default=0.0)
        growth = pair.judgment.difference / largest if largest else math.inf
        known = growth if math.isfinite(growth) and math.isfinite(largest) else None
        step = row.step(pair.a[1])
        return ComparisonFinding(kind, text, module, step, where.file, where.line, known)

    def place_in_other(self, pair: Pair) -> str:
        """Where a value is in another framework, and which other shape it has there."""
        (row, other), text = self.rows(pair), ""
        if self.a.framework != self.b.framework:
            verb = "enters" if other.view == ENTERS else "leaves"
            text += f"; in {self.b.framework} it {verb} {other.name or 'the model'} ({other.owner}"
            text += f", {os.path.basename(other.line)})" if other.line else ")"
        if row.shape != other.shape:
            text += f", of shape {list(other.shape)} beside {list(row.shape)}"
        return text

    @functools.cached_property
    def paired(self) -> list[set[Instance]]:
        """The values of each record that are in pairs, or have the numbers of an argument."""
        copies = self.matching.copies
        return [{*copies[side], *(p.at(side) for p in self.of("value"))} for side in range(2)]

    @functools.cached_property
    def shares_code(self) -> bool:
        """Whether both versions run one statement."""
        return not {row.statement for row in self.a.rows if row.is_line}.isdisjoint(
            row.statement for row in self.b.rows if row.is_line
        )

    def lines_alone(self, slices: Sequence[Slice]) -> LinesAlone:
        """The lines of one version alone in some slices of both."""
        return lines_alone(slices, self.paired, self.shares_code)

    def rules_in(self, slices: Sequence[Slice]) -> str:
        """The text of the custom rules among some operations; "" if there are none."""
        versions: dict[str, list[str]] = {}
        for part in slices:
            where = "fun" if part.graph.record is self.a else "other"
            for rule in part.rules:
                versions.setdefault(rule, []).append(where)
        texts = [
            f"{rule} in {'both' if set(where) == {'fun', 'other'} else where[0]}"
            for rule, where in sorted(versions.items(), key=lambda item: len(item[1]))
        ]
        kind = "a custom rule" if len(texts) == 1 else "custom rules"
        return f"; {kind} there: {first_few(texts, MOST_NAMES)}" if texts else ""


def _location(row: Row) -> Location:
    file, _, line = row.line.rpartition(":")
    return Location(file, int(line), None) if line.isdigit() else Location(None, None, None)
