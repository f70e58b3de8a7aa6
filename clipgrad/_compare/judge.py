"""Real differences: beyond a dtype's rounding, and beyond what rounding does to the numbers."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from clipgrad._compare.record import Numbers, Row
from clipgrad._compare.sketches import LARGEST_AT, LENGTH, NORM_AT, NUMBERS, part_of

RUNS = 8  # with other roundings: their root mean square is right to about 1 / 4
EQUAL_ROUNDINGS = 4  # of the dtype; two orders of one sum differ by fewer
# A sum in float32 on a CPU may lose more than its terms do: right pairs differ by up to 1.8 floors.
# Floors of a program that computes in half precision are above this one.
FLOORS_IN_FLOAT32, MOST_IN_FLOAT32 = 4, 2.0**-13
UNJUDGED = 0.1  # of what rounding moves by more, only a difference of
CLEAR = 4  # times the floor is judged


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


def floor_of(numbers: Mapping[int, Any], runs: Iterable[Mapping]) -> dict[int, np.ndarray]:
    """The movement of numbers by rounding: the root mean square over runs of each."""
    total, count = {key: np.zeros(x.shape) for key, x in numbers.items()}, 0
    for run in runs:
        count += 1
        for key, x in numbers.items():
            total[key] = np.hypot(total[key], _distances(x, run[key]))
    return {key: x / math.sqrt(max(1, count)) for key, x in total.items()}


def _distances(numbers: np.ndarray, moved: np.ndarray) -> np.ndarray:
    same = (numbers == moved) | (np.isnan(numbers) & np.isnan(moved))
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(moved - numbers)
        return np.where(same, 0, np.where(np.isnan(distance), np.inf, distance))


def judge_rows(
    a: Row,
    b: Row,
    at_a: Any,
    at_b: Any,
    rtol: float | None,
    floors: float = 1,
    start: np.ndarray | None = None,
) -> Judgment | None:
    """Compare a row with another one, each at some steps; None where no numbers are known.

    The floor is that of ``a``, or else of ``b``, times ``floors``. If ``a`` is an update of an
    argument, ``start`` is the sketch of that.
    """
    ours, theirs = a.numbers, b.numbers
    measured = ours.moved if ours.moved is not None else theirs.moved
    if ours.exact and theirs.exact:
        is_same = ours.exact == theirs.exact and a.shape == b.shape
        moves = rtol is None and measured is not None and bool(np.any(measured))
        return Judgment(float(not is_same), 0.0, is_same or not moves)
    if a.kind != "value" and a.kind != "cotangent" and a.shape != b.shape:
        return Judgment(math.inf, 0.0)
    if ours.sketch is None or theirs.sketch is None or _copies(ours) != _copies(theirs):
        is_known = any(x.sketch is not None or x.exact for x in (ours, theirs))
        return Judgment(1.0, 0.0) if is_known and a.kind == "output" else None
    x, y = ours.sketch[at_a], theirs.sketch[at_b]
    moved = np.zeros(x.shape)
    if rtol is None and measured is not None:
        moved = floors * measured[at_a if ours.moved is not None else at_b]
    return judge_sketches(x, y, moved, max(a.eps, b.eps), rtol, start)


def _copies(numbers: Numbers) -> int:
    """On how many devices a row has numbers of its own; 1 if they are the same on each."""
    return 0 if numbers.sketch is None else numbers.sketch.shape[-2]


def judge_sketches(
    a: np.ndarray,
    b: np.ndarray,
    moved: np.ndarray,
    eps: float,
    rtol: float | None,
    start: np.ndarray | None = None,
) -> Judgment:
    """Compare the sketches of two versions of a value, shape (..., 515), as `judge` does."""
    sizes = tuple(
        (float(np.linalg.norm(x[..., NORM_AT])), float(np.max(x[..., LARGEST_AT]))) for x in (a, b)
    )
    if not np.array_equal(a[..., LENGTH - 1], b[..., LENGTH - 1]):
        return Judgment(math.inf, 0.0, not np.any(moved[..., LENGTH - 1]), sizes)
    start = np.zeros(a.shape) if start is None else start
    judgments = []
    for at in (0, NUMBERS):
        one, two, floor, before = (part_of(x, at) for x in (a, b, moved, start))
        judgments.append(judge(one, two, floor, eps, rtol, before))
    worst = max(judgments, key=lambda j: (j.differs, not j.is_judged, j.difference))
    return worst._replace(sizes=sizes)


def judge(
    a: np.ndarray,
    b: np.ndarray,
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
      a: the numbers in the first version.
      b: those in the second.
      floor: how far rounding moves each number; see `floor_of`.
      eps: one rounding of the dtype.
      rtol: the tolerance that replaces all this, or None.
      start: the numbers that the first version is an update of, or 0.
    """
    # With room for differences and sums of the largest numbers.
    a, b, floor, start = (np.ravel(x) * 2.0**-4 for x in (a, b, floor, start))
    finite = np.isfinite(a)
    is_stable = _relative(_norm(floor[finite]), _norm((a - start)[finite])) <= UNJUDGED
    odd = ~np.isfinite(a) | ~np.isfinite(b)
    if not np.array_equal(a[odd], b[odd], equal_nan=True):
        return Judgment(math.inf, rtol or EQUAL_ROUNDINGS * eps, rtol is not None or is_stable)
    unequal = ~odd & (a != b)
    distance = _norm(a[unequal] - b[unequal])
    size = _norm(b[unequal]) or _norm(a[unequal])
    difference = _relative(distance, size)
    if rtol is not None:
        return Judgment(difference, rtol)
    moved = _norm(floor[unequal])
    if not math.isfinite(moved):
        return Judgment(difference, math.inf, difference == 0)
    least = min(_relative(FLOORS_IN_FLOAT32 * moved, size), MOST_IN_FLOAT32)
    tolerance = max(EQUAL_ROUNDINGS * eps, _relative(moved, size), least)
    is_judged = is_stable or difference <= EQUAL_ROUNDINGS * eps or distance > CLEAR * moved
    return Judgment(difference, tolerance, is_judged)


def _relative(distance: float, size: float) -> float:
    """A distance relative to a size: nothing is no difference, also beside nothing."""
    return 0.0 if distance == 0 else math.inf if size == 0 else float(distance / size)


def _norm(x: np.ndarray) -> float:
    """The L2 norm, without overflow and underflow of squares."""
    largest = float(np.max(np.abs(x), initial=0))
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(np.linalg.norm(x / largest))
