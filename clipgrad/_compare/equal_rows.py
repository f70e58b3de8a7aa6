"""Two records that name nothing alike, such as of JAX and of torch: rows of equal numbers.

A value takes the other's value of equal numbers, in any order of axes, that is nearest in the order
of computation. Parameters do, too, and the gradients are compared in the order of axes in which
the parameters are equal. No names are read.
"""

import collections
from typing import NamedTuple

import numpy as np

from clipgrad._arrays import widened_leaf
from clipgrad._compare.judge import Judgment, judge_sketches
from clipgrad._compare.pairs import instances_of
from clipgrad._compare.record import ENTERS, Record, Row
from clipgrad._compare.sketches import (
    LENGTH,
    NORM_AT,
    NUMBERS,
    SIZES,
    part_of,
    turned_sketches,
)

NEAR = 0.3  # a relative distance of sketches above which two arrays are not compared further
SAME_NORM = 1e-5  # of two norms of the same numbers
FLOORS = 2  # the rounding of the other framework is as large as that of the program, and is added

Moved = tuple[np.ndarray, np.ndarray]  # a sketch, shape (515,), and how far rounding moves it


class Equal(NamedTuple):
    """An array of equal numbers in the other record: its number, its order of axes, how near."""

    at: int
    order: int
    judgment: Judgment


class EqualRows:
    """The rows of one kind in two records, and for each of the first those that are equal.

    Attributes:
      own, others: the instances of both records, in the order of time.
      known: the numbers of each of the first, or None.
      equal: those of the second that are equal to each of the first, in their nearest orders.
      covered: those of the second that are equal to any.
    """

    def __init__(self, a: Record, b: Record, kind: str, rtol: float | None) -> None:
        self.a, self.b, self.rtol = a, b, rtol
        self.own, self.others = instances_of(a, kind), instances_of(b, kind)
        self.known = [numbers_at(a.rows[i], steps) for i, steps in self.own]
        self._sketches = [sketches_in_orders(b.rows[j], steps) for j, steps in self.others]
        self._of_size: dict[int, list[int]] = collections.defaultdict(list)
        for j, sketches in enumerate(self._sketches):
            if len(sketches):
                self._of_size[self.other(j).size].append(j)
        self.equal = [self._equal(i) for i in range(len(self.own))]
        self.covered = {found.at for every in self.equal for found in every}

    def row(self, i: int) -> Row:
        return self.a.rows[self.own[i][0]]

    def other(self, j: int) -> Row:
        return self.b.rows[self.others[j][0]]

    def of_size(self, i: int) -> list[int]:
        """Those of the second record that are as large as one of the first."""
        return self._of_size[self.row(i).size]

    def partner(self, i: int) -> Equal | None:
        """The equal row that is nearest in the order of computation."""
        here = i / len(self.own)
        far = lambda found: abs(here - found.at / len(self.others))  # noqa: E731
        return min(self.equal[i], key=far, default=None)

    def permuted(self, i: int) -> list[int]:
        """Those that have the same numbers in an order that is none of their axes.

        Such as the kernel behind an image that is flattened: the norm and the largest are equal.
        """
        known = self.known[i]
        if known is None or self.equal[i] or not known[0][NORM_AT]:
            return []
        is_same = lambda j: np.allclose(self._sketches[j][0][SIZES], known[0][SIZES], SAME_NORM, 0)  # noqa: E731
        return [j for j in self.of_size(i) if is_same(j)]

    def left(self, i: int, after: int) -> Equal | None:
        """A row as large as one without an equal that no other is equal to, or None.

        The first after a row of the other record, and one that enters or leaves alike.
        """
        is_entering = self.row(i).view == ENTERS
        found = [j for j in self.of_size(i) if j not in self.covered]
        alike = [j for j in found if (self.other(j).view == ENTERS) == is_entering]
        j = min(alike or found, key=lambda j: (j <= after, abs(j - after)), default=None)
        known = self.known[i]
        if j is None or known is None:
            return None
        return self._judged(i, j, int(np.argmin(_sketch_distances(known[0], self._sketches[j]))))

    def _equal(self, i: int) -> list[Equal]:
        found: list[Equal] = []
        if (known := self.known[i]) is None:
            return found
        for j in self.of_size(i):
            near = np.flatnonzero(_sketch_distances(known[0], self._sketches[j]) < NEAR)
            agree = [e for k in near if (e := self._judged(i, j, int(k))).judgment.agrees]
            found += [min(agree, key=lambda e: e.judgment.difference)] if agree else []
        return found

    def _judged(self, i: int, j: int, order: int) -> Equal:
        known, sketch = self.known[i], self._sketches[j][order]
        assert known is not None  # it has candidates
        return Equal(j, order, judged(self.row(i), known, self.other(j), sketch, self.rtol))


def judged(row: Row, known: Moved, its: Row, sketch: np.ndarray, rtol: float | None) -> Judgment:
    """The judgment of a row beside one of another framework, in an order of axes."""
    own, moved = known
    return judge_sketches(own, sketch, FLOORS * moved, max(row.eps, its.eps), rtol)


def _sketch_distances(own: np.ndarray, others: np.ndarray) -> np.ndarray:
    """About how far a sketch is from others, shape (n, 515)."""
    found = np.where(others[:, -1] == own[-1], 0, np.inf)
    for start in (0, NUMBERS):
        mine, its = part_of(own, start), part_of(others, start)
        size = np.maximum(np.linalg.norm(its, axis=1), np.linalg.norm(mine))
        apart = np.linalg.norm(its - mine, axis=1)
        found = np.maximum(found, np.divide(apart, size, where=size > 0, out=np.zeros_like(apart)))
    return found


def numbers_at(row: Row, steps: tuple[int, ...] = ()) -> Moved | None:
    """The numbers of a row at some steps; None if they are not known as one array."""
    _, sketch, moved, _ = row.numbers
    if sketch is None or row.turned:
        return None
    return sketch[steps][0], np.zeros(LENGTH) if moved is None else moved[steps][0]


def sketches_in_orders(row: Row, steps: tuple[int, ...] = ()) -> np.ndarray:
    """The sketches of a row in the orders of axes that are known, shape (orders, 515)."""
    _, sketch, _, whole = row.numbers
    if sketch is not None and whole is not None and row.size and not row.turned:
        return turned_sketches(widened_leaf(np.asarray(whole)), "all")
    return np.zeros((0, LENGTH)) if sketch is None else sketch[steps]
