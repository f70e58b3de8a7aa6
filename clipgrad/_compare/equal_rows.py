"""Two records that name nothing alike, such as of JAX and of torch: rows of equal numbers.

Each value is matched with a value of the other record that has equal numbers, in any order of axes;
of several, with the one that is nearest in the order of computation. Parameters are matched in the
same way, and their gradients are compared in the order of axes in which the parameters are equal.
No names are read.
"""

import collections
from typing import NamedTuple

import numpy as np

from clipgrad._arrays import widened_leaf
from clipgrad._compare.judge import Judgment, judge_sketches
from clipgrad._compare.pairs import Pair, instances_of
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
      instances, others: those of both records, in the order of time.
      known: the numbers of each instance of the first record, or None.
      equal: for each of these the equal instances of the second record, in their nearest orders.
      covered: the instances of the second record that are equal to any of the first.
    """

    def __init__(self, a: Record, b: Record, kind: str, rtol: float | None) -> None:
        self.a, self.b, self.rtol = a, b, rtol
        self.instances, self.others = instances_of(a, kind), instances_of(b, kind)
        self.known = [numbers_at(a.rows[i], steps) for i, steps in self.instances]
        self._sketches = [sketches_in_orders(b.rows[j], steps) for j, steps in self.others]
        self._of_size: dict[int, list[int]] = collections.defaultdict(list)
        for j, sketches in enumerate(self._sketches):
            if len(sketches):
                self._of_size[self.other(j).size].append(j)
        self.equal = [self._equal(i) for i in range(len(self.instances))]
        self.covered = {equal.at for every in self.equal for equal in every}

    def row(self, i: int) -> Row:
        return self.a.rows[self.instances[i][0]]

    def other(self, j: int) -> Row:
        return self.b.rows[self.others[j][0]]

    def of_size(self, i: int) -> list[int]:
        """Those of the second record that are as large as one of the first."""
        return self._of_size[self.row(i).size]

    def partner(self, i: int) -> Equal | None:
        """The equal row that is nearest in the order of computation."""
        here = i / len(self.instances)
        far = lambda equal: abs(here - equal.at / len(self.others))  # noqa: E731
        return min(self.equal[i], key=far, default=None)

    def permuted(self, i: int) -> list[int]:
        """The rows of the other record with the same numbers in an order that is none of axes.

        Such as the kernel behind a flattened image. The norm and the largest element are equal.
        """
        known = self.known[i]
        if known is None or self.equal[i] or not known[0][NORM_AT]:
            return []
        is_same = lambda j: np.allclose(self._sketches[j][0][SIZES], known[0][SIZES], SAME_NORM, 0)  # noqa: E731
        return [j for j in self.of_size(i) if is_same(j)]

    def left(self, i: int, after: int) -> Equal | None:
        """For a row without an equal, a row of the other record that may stand in its place.

        It has as many elements, and is equal to none itself. Of several it is one that enters or
        leaves a module alike, and the first behind the row ``after``. None if there is none.
        """
        is_entering = self.row(i).view == ENTERS
        uncovered = [j for j in self.of_size(i) if j not in self.covered]
        alike = [j for j in uncovered if (self.other(j).view == ENTERS) == is_entering]
        j = min(alike or uncovered, key=lambda j: (j <= after, abs(j - after)), default=None)
        known = self.known[i]
        if j is None or known is None:
            return None
        return self._judged(i, j, int(np.argmin(_sketch_distances(known[0], self._sketches[j]))))

    def _equal(self, i: int) -> list[Equal]:
        equal: list[Equal] = []
        if (known := self.known[i]) is None:
            return equal
        for j in self.of_size(i):
            near = np.flatnonzero(_sketch_distances(known[0], self._sketches[j]) < NEAR)
            agree = [e for k in near if (e := self._judged(i, j, int(k))).judgment.agrees]
            equal += [min(agree, key=lambda e: e.judgment.difference)] if agree else []
        return equal

    def _judged(self, i: int, j: int, order: int) -> Equal:
        known, sketch = self.known[i], self._sketches[j][order]
        assert known is not None  # it has candidates
        return Equal(j, order, judged(self.row(i), known, self.other(j), sketch, self.rtol))


def turned_gradients(a: Record, b: Record, pair: Pair, rtol: float | None) -> Pair | None:
    """Two gradients in the order of axes in which their parameters are equal; None: as they are."""
    row, other = a.rows[pair.a[0]], b.rows[pair.b[0]]
    parameter, other_parameter = a.rows[row.node], b.rows[other.node]
    known, unturned = numbers_at(parameter), numbers_at(other_parameter)
    if known is None or unturned is None or parameter.size != other_parameter.size:
        return None
    is_equal = lambda x: judged(parameter, known, other_parameter, x, rtol).agrees  # noqa: E731
    if is_equal(unturned[0]):  # its other orders take time
        return None
    orders = enumerate(sketches_in_orders(other_parameter))
    order, sketches = next((k for k, x in orders if is_equal(x)), 0), sketches_in_orders(other)
    gradient = numbers_at(row)
    if order == 0 or order >= len(sketches) or gradient is None:
        return None
    return pair._replace(judgment=judged(row, gradient, other, sketches[order], rtol), order=order)


def judged(row: Row, known: Moved, other: Row, sketch: np.ndarray, rtol: float | None) -> Judgment:
    """The judgment of a row beside one of another framework, in an order of axes."""
    numbers, moved = known
    return judge_sketches(numbers, sketch, FLOORS * moved, max(row.eps, other.eps), rtol)


def _sketch_distances(sketch: np.ndarray, others: np.ndarray) -> np.ndarray:
    """About how far a sketch is from others, shape (n, 515)."""
    distances = np.where(others[:, -1] == sketch[-1], 0, np.inf)
    for start in (0, NUMBERS):
        mine, theirs = part_of(sketch, start), part_of(others, start)
        size = np.maximum(np.linalg.norm(theirs, axis=1), np.linalg.norm(mine))
        apart = np.linalg.norm(theirs - mine, axis=1)
        relative = np.divide(apart, size, where=size > 0, out=np.zeros_like(apart))
        distances = np.maximum(distances, relative)
    return distances


def numbers_at(row: Row, steps: tuple[int, ...] = ()) -> Moved | None:
    """The numbers of a row at some steps; None if they are not known as one array."""
    _, sketch, moved, _ = row.numbers
    if sketch is None or row.turned or sketch.shape[-2] > 1:
        return None
    return sketch[steps][0], np.zeros(LENGTH) if moved is None else moved[steps][0]


def sketches_in_orders(row: Row, steps: tuple[int, ...] = ()) -> np.ndarray:
    """The sketches of a row in the orders of axes that are known, shape (orders, 515)."""
    _, sketch, _, whole = row.numbers
    if sketch is not None and whole is not None and row.size and not row.turned:
        return turned_sketches(widened_leaf(np.asarray(whole)), "all")
    is_one = sketch is not None and (row.turned or sketch.shape[-2] == 1)
    return sketch[steps] if sketch is not None and is_one else np.zeros((0, LENGTH))
