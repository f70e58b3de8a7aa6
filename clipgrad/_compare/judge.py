"""Real differences: beyond a dtype's rounding, and beyond what rounding does to the numbers."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from clipgrad._compare.record import Row
from clipgrad._compare.sketches import LARGEST_AT, LENGTH, NORM_AT, NUMBERS, part_of

RUNS = 8  # with other roundings: their root mean square is right to about 1 / 4
EQUAL_ROUNDINGS = 4  # of the dtype; two orders of one sum differ by fewer
# A sum in float32 on a CPU may lose more than its terms do: right pairs differ by up to 1.8 floors.
# Floors of a program that computes in half precision are above this one.
FLOORS_IN_FLOAT32, MOST_IN_FLOAT32 = 4, 2.0**-13
UNJUDGED = 0.1  # what rounding moves by more is judged only by
CLEAR = 4  # times the floor


class Judgment(NamedTuple):
    """Whether two versions of a value differ.

    Attributes:
      difference: the norm of the difference over the numbers that are not equal, relative to the
        norm of the other version there, or of the first one if the other is zero; inf if they are
        not finite in different ways.
      tolerance: what rounding explains, in the same measure.
      is_judged: whether rounding leaves anything to judge.
      sizes: the norm and the largest magnitude of both versions, where they are known.
    """

    difference: float
    tolerance: float
    is_judged: bool = True
    sizes: tuple[tuple[float, float], ...] = ()

    @property
    def differs(self) -> bool:
        return self.is_judged and not self.difference <= self.tolerance

    @property
    def agrees(self) -> bool:
        return self.is_judged and self.difference <= self.tolerance


def floor_of(own: Mapping[int, Any], runs: Iterable[Mapping]) -> dict[int, np.ndarray]:
    """The movement of numbers by rounding: the root mean square over runs of each."""
    total, count = {key: np.zeros(x.shape) for key, x in own.items()}, 0
    for run in runs:
        count += 1
        for key, x in own.items():
            total[key] = np.hypot(total[key], _distances(x, run[key]))
    return {key: x / math.sqrt(max(1, count)) for key, x in total.items()}


def _distances(own: np.ndarray, moved: np.ndarray) -> np.ndarray:
    same = (own == moved) | (np.isnan(own) & np.isnan(moved))
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(moved - own)
        return np.where(same, 0, np.where(np.isnan(distance), np.inf, distance))


def judge_rows(
    own: Row,
    other: Row,
    at: Any,
    its: Any,
    rtol: float | None,
    floors: float = 1,
    start: np.ndarray | None = None,
) -> Judgment | None:
    """Compare a row with another one, each at some steps; None where no numbers are known.

    The floor is the first row's or else the other's, so many times. A row that is an update has the
    sketch of what it started from.
    """
    ours, theirs = own.numbers, other.numbers
    measured = ours.moved if ours.moved is not None else theirs.moved
    if ours.exact and theirs.exact:
        is_same = ours.exact == theirs.exact and own.shape == other.shape
        moves = rtol is None and measured is not None and bool(np.any(measured))
        return Judgment(float(not is_same), 0.0, is_same or not moves)
    if own.kind != "value" and own.kind != "cotangent" and own.shape != other.shape:
        return Judgment(math.inf, 0.0)
    if ours.sketch is None or theirs.sketch is None:
        is_known = any(x.sketch is not None or x.exact for x in (ours, theirs))
        return Judgment(1.0, 0.0) if is_known and own.kind == "output" else None
    x, y = ours.sketch[at], theirs.sketch[its]
    moved = np.zeros(x.shape)
    if rtol is None and measured is not None:
        moved = floors * measured[at if ours.moved is not None else its]
    return judge_sketches(x, y, moved, max(own.eps, other.eps), rtol, start)


def judge_sketches(
    own: np.ndarray,
    other: np.ndarray,
    moved: np.ndarray,
    eps: float,
    rtol: float | None,
    start: np.ndarray | None = None,
) -> Judgment:
    """Compare the sketches of two versions of a value, shape (..., 515), as `judge` does."""
    sizes = tuple(
        (float(np.linalg.norm(x[..., NORM_AT])), float(np.max(x[..., LARGEST_AT])))
        for x in (own, other)
    )
    if not np.array_equal(own[..., LENGTH - 1], other[..., LENGTH - 1]):
        return Judgment(math.inf, 0.0, not np.any(moved[..., LENGTH - 1]), sizes)
    start = np.zeros(own.shape) if start is None else start
    found = []
    for at in (0, NUMBERS):
        one, two, floor, before = (part_of(x, at) for x in (own, other, moved, start))
        found.append(judge(one, two, floor, eps, rtol, before))
    worst = max(found, key=lambda j: (j.differs, not j.is_judged, j.difference))
    return worst._replace(sizes=sizes)


def judge(
    own: np.ndarray,
    other: np.ndarray,
    floor: np.ndarray,
    eps: float,
    rtol: float | None,
    start: Any = 0.0,
) -> Judgment:
    r"""Compare two versions of some numbers, shape (...), in float64.

    With :math:`S` the numbers that are not equal, the versions differ if
    :math:`\lVert a - b\rVert_S > \max(4 \epsilon \lVert b\rVert_S, \lVert f\rVert_S, \min(4
    \lVert f\rVert_S, 2^{-13} \lVert b\rVert_S))`: they are judged by what rounding does to these
    numbers. Of what rounding moves by more than 10 % only a difference of four times the floor is
    judged. A parameter after a step is moved by 10 % if its update is, however small that is.

    Args:
      own: the numbers in the first version.
      other: those in the second.
      floor: how far rounding moves each number; see `floor_of`.
      eps: one rounding of the dtype.
      rtol: the tolerance that replaces all this, or None.
      start: the numbers that the first version is an update of, or 0.
    """
    # With room for differences and sums of the largest numbers.
    own, other, floor, start = (np.ravel(x) * 2.0**-4 for x in (own, other, floor, start))
    finite = np.isfinite(own)
    is_stable = _relative(_norm(floor[finite]), _norm((own - start)[finite])) <= UNJUDGED
    odd = ~np.isfinite(own) | ~np.isfinite(other)
    if not np.array_equal(own[odd], other[odd], equal_nan=True):
        return Judgment(math.inf, rtol or EQUAL_ROUNDINGS * eps, rtol is not None or is_stable)
    unequal = ~odd & (own != other)
    distance = _norm(own[unequal] - other[unequal])
    size = _norm(other[unequal]) or _norm(own[unequal])
    found = _relative(distance, size)
    if rtol is not None:
        return Judgment(found, rtol)
    moved = _norm(floor[unequal])
    if not math.isfinite(moved):
        return Judgment(found, math.inf, found == 0)
    least = min(_relative(FLOORS_IN_FLOAT32 * moved, size), MOST_IN_FLOAT32)
    tolerance = max(EQUAL_ROUNDINGS * eps, _relative(moved, size), least)
    is_judged = is_stable or found <= EQUAL_ROUNDINGS * eps or distance > CLEAR * moved
    return Judgment(found, tolerance, is_judged)


def _relative(distance: float, size: float) -> float:
    """A distance relative to a size: nothing is no difference, also beside nothing."""
    return 0.0 if distance == 0 else math.inf if size == 0 else float(distance / size)


def _norm(x: np.ndarray) -> float:
    """The L2 norm, without overflow and underflow of squares."""
    largest = float(np.max(np.abs(x), initial=0))
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(np.linalg.norm(x / largest))
