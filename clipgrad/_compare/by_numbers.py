"""Two records that name nothing alike, such as of JAX and of torch: rows of equal numbers.

A value takes the other's value of equal numbers, in any order of axes, that is nearest in the order
of computation. Parameters do, too, and the gradients are compared in the order of axes in which
the parameters are equal. No names are read.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from clipgrad._compare.judge import Judgment, judge_sketches
from clipgrad._compare.match import instances_of
from clipgrad._compare.record import ENTERS, Instance, Record, Row
from clipgrad._compare.sketches import (
    LARGEST_AT,
    LENGTH,
    NORM_AT,
    NUMBERS,
    part_of,
    turned_sketches,
)
from clipgrad._trees import widened_leaf

NEAR = 0.3  # a relative distance of sketches above which two arrays are not compared further
SAME_NORM = 1e-5  # of two norms of the same numbers
FLOORS = 2  # the rounding of the other framework is as large as that of the program, and is added


class Equal(NamedTuple):
    """An array of equal numbers in the other record: its number, its order of axes, how near."""

    at: int
    order: int
    judgment: Judgment


@dataclasses.dataclass
class Candidates:
    """Arrays of one record, to be found by their numbers; those of one size are compared at once.

    Args:
      rows: the row of each array.
      sketches: its sketches, shape (orders, 515).
    """

    rows: Sequence[Row]
    sketches: Sequence[np.ndarray]

    def __post_init__(self) -> None:
        self._by_size: dict[int, list[int]] = {}
        for i, row in enumerate(self.rows):
            if len(self.sketches[i]):
                self._by_size.setdefault(row.size, []).append(i)
        self._stacked = {
            size: np.concatenate([self.sketches[i] for i in found])
            for size, found in self._by_size.items()
        }

    def of_size(self, size: int) -> list[int]:
        return self._by_size.get(size, [])

    def equal(
        self, row: Row, own: np.ndarray, moved: np.ndarray, rtol: float | None
    ) -> list[Equal]:
        """The arrays that a sketch, shape (515,), is equal to, each in its nearest order."""
        found, at = [], 0
        far = _sketch_distances(own, self._stacked.get(row.size, np.zeros((0, LENGTH))))
        for i in self.of_size(row.size):
            count = len(self.sketches[i])
            near = [k for k in range(count) if far[at + k] < NEAR]
            at += count
            judged = [(k, self.judged(row, own, moved, i, k, rtol)) for k in near]
            agree = [(k, j) for k, j in judged if j.agrees]
            if agree:
                order, judgment = min(agree, key=lambda each: each[1].difference)
                found.append(Equal(i, order, judgment))
        return found

    def permuted(self, row: Row, own: np.ndarray) -> list[int]:
        """The arrays that have the same numbers in an order that is none of their axes.

        Such as the kernel behind an image that is flattened: the norm and the largest are equal.
        """
        sizes = slice(NORM_AT, LARGEST_AT + 1)
        is_same = lambda i: np.allclose(self.sketches[i][0][sizes], own[sizes], SAME_NORM, 0)  # noqa: E731
        return [i for i in self.of_size(row.size) if own[NORM_AT] and is_same(i)]

    def nearest(self, row: Row, own: np.ndarray, moved: np.ndarray, at: int) -> Equal:
        """The judgment of one array in the order of axes that is nearest."""
        order = int(np.argmin(_sketch_distances(own, self.sketches[at])))
        return Equal(at, order, self.judged(row, own, moved, at, order, None))

    def judged(
        self, row: Row, own: np.ndarray, moved: np.ndarray, at: int, order: int, rtol: float | None
    ) -> Judgment:
        eps = max(row.eps, self.rows[at].eps)
        return judge_sketches(own, self.sketches[at][order], FLOORS * moved, eps, rtol)


def _sketch_distances(own: np.ndarray, others: np.ndarray) -> np.ndarray:
    """About how far a sketch is from others, shape (n, 515)."""
    found = np.where(others[:, -1] == own[-1], 0, np.inf)
    for start in (0, NUMBERS):
        mine, its = part_of(own, start), part_of(others, start)
        size = np.maximum(np.linalg.norm(its, axis=1), np.linalg.norm(mine))
        apart = np.linalg.norm(its - mine, axis=1)
        found = np.maximum(found, np.divide(apart, size, where=size > 0, out=np.zeros_like(apart)))
    return found


def numbers_at(row: Row, steps: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray] | None:
    """The sketch of a row at some steps, shape (515,), and its floor; None if not known as one."""
    if row.sketch is None or row.turned or row.sketch[steps].shape[0] != 1:
        return None
    own = row.sketch[steps][0]
    return own, np.zeros(LENGTH) if row.moved is None else row.moved[steps][0]


def sketches_in_orders(row: Row, steps: tuple[int, ...] = ()) -> np.ndarray:
    """The sketches of a row in the orders of axes that are known, shape (orders, 515)."""
    if row.whole is not None and row.size and not row.turned:
        return turned_sketches(widened_leaf(np.asarray(row.whole)), "all")
    return np.zeros((0, LENGTH)) if row.sketch is None else row.sketch[steps]


@dataclasses.dataclass
class EqualValues:
    """The values of a record, and for each those of another one that are equal."""

    a: Record
    b: Record
    rtol: float | None

    def __post_init__(self) -> None:
        self.own, self.others = instances_of(self.a), instances_of(self.b)
        rows = [self.b.rows[i] for i, _ in self.others]
        pairs = zip(rows, self.others, strict=True)
        self.candidates = Candidates(
            rows, [sketches_in_orders(r, steps) for r, (_, steps) in pairs]
        )
        self.known = [numbers_at(self.a.rows[i], steps) for i, steps in self.own]
        self.equal = [
            [] if known is None else self.candidates.equal(self.a.rows[i], *known, self.rtol)
            for known, (i, _) in zip(self.known, self.own, strict=True)
        ]
        self.covered = {found.at for every in self.equal for found in every}

    def partner(self, i: int) -> Equal | None:
        """The equal value that is nearest in the order of computation."""
        here = i / len(self.own)
        far = lambda found: abs(here - found.at / len(self.others))  # noqa: E731
        return min(self.equal[i], key=far, default=None)

    def left(self, i: int, after: int) -> int | None:
        """A value as large as one without an equal that no other is equal to, or None.

        The first after a value of the other record, and one that enters or leaves alike.
        """
        row = self.a.rows[self.own[i][0]]
        found = [j for j in self.candidates.of_size(row.size) if j not in self.covered]
        is_entering = row.view == ENTERS
        alike = [j for j in found if (self.candidates.rows[j].view == ENTERS) == is_entering]
        return min(alike or found, key=lambda j: (j <= after, abs(j - after)), default=None)

    def instance(self, j: int) -> Instance:
        return self.others[j]
