"""Rows of two records that should be the same, in the order of time."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from clipgrad._compare.judge import Judgment
from clipgrad._compare.record import Instance, Record

NO_JUDGMENT = Judgment(0.0, 0.0, is_judged=False)


class Pair(NamedTuple):
    """Rows of both records that should be the same, at one step, and how they differ.

    Attributes:
      kind: the kind of the rows.
      a: the row and the steps in the first record.
      b: those in the second one.
      judgment: how they differ.
      order: the number of the order of axes in the second one, among its `sketches_in_orders`,
        where it has several. The numbers of a row are read by that function and `numbers_at`.
    """

    kind: str
    a: Instance
    b: Instance
    judgment: Judgment = NO_JUDGMENT
    order: int | None = None

    def at(self, side: int) -> Instance:
        """The row and the steps in the first record, 0, or in the second."""
        return self.b if side else self.a


def in_time(a: Record, pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs in the order of time in the first record."""
    return sorted(pairs, key=lambda p: a.rows[p.a[0]].time(p.a[1]))


def cotangent_pairs(a: Record, b: Record, values: Iterable[Pair]) -> list[Pair]:
    """The cotangents of pairs of values, where both records have one; they are not judged."""
    ours, theirs = ({r.rows[i].node: i for i in r.of("cotangent")} for r in (a, b))
    return [
        Pair("cotangent", (ours[i], at), (theirs[j], steps), order=order)
        for _, (i, at), (j, steps), _, order in values
        if i in ours and j in theirs
    ]


def instances_of(record: Record, kind: str = "value") -> list[Instance]:
    """The rows of a kind at each step, in the order of time."""
    instances = [
        (i, steps)
        for i in record.of(kind)
        for steps in itertools.product(*map(range, record.rows[i].steps))
    ]
    return sorted(instances, key=lambda at: record.rows[at[0]].time(at[1]))
