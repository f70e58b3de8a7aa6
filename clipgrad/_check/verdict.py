"""Verdicts: the kinds there are, and what slopes say of a gradient.

The slopes of a smooth function settle on one value, those at a kink on two; noise does not settle.
All tolerances are in `tolerances`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from clipgrad._check.tolerances import (
    ABOVE_NOISE,
    EXTRAPOLATED,
    GROWTH,
    HALF,
    KINK_GAP,
    NOISY,
    NOISY_FLOORS,
    SPREAD_OF_ERRORS,
    TIMES,
    TRUSTED,
    Tolerance,
)

# In order of severity: of several cotangents, looks and questions, the most severe one counts.
OK, ROUNDING, KINK, NOISE, UNDECIDED, UNSEEN, DISPUTED, WRONG = range(8)
VERIFIED, FAILED = (OK, ROUNDING), (DISPUTED, WRONG)
# What a note says of a kind. A kind is a failure, or verified, or not verified and then has a note.
NOTES = {
    ROUNDING: "off by rounding: plain autodiff or the rule's operations lose as much in this "
    "precision",
    KINK: "at a kink: the gradient lies between the one-sided slopes",
    NOISE: "not verified: finite differences are too noisy, or rounding explains the error",
    UNDECIDED: "not verified: JAX's own derivative and the finite differences are apart too",
    UNSEEN: "not verified: not looked at one by one",
}
DIGITS = range(7, 18)  # of two numbers, until they are told apart


def majority(
    rule: np.ndarray, plain: np.ndarray, is_smooth: np.ndarray, is_between: np.ndarray
) -> np.ndarray:
    """The verdict of three witnesses, of which two must agree: the rule, plain AD and slopes.

    ==================  =====================  ================================================
    slopes are of rule  slopes are of plain    verdict
    ==================  =====================  ================================================
    yes                 whatever it says       right
    no                  yes, or there is none  wrong
    no                  no                     disputed; undecided where f is not smooth
    fit both            fit both               wrong: rule and plain are apart, and none is for rule
    ==================  =====================  ================================================

    At kinks, in noise, and where nothing was looked at, that is what is said.

    Args:
      rule: of each element whether slopes are those of the rule: OK, KINK, NOISE, UNSEEN or WRONG.
      plain: whether they are those of plain AD; UNSEEN where there is none.
      is_smooth: whether they are those of a smooth function.
      is_between: whether they fit both, though these are apart.
    """
    is_neither = (rule == WRONG) & (plain == WRONG)
    kinds = np.where(is_neither, np.where(is_smooth, DISPUTED, UNDECIDED), rule)
    return np.where(is_between, WRONG, kinds).astype(np.int8)


class FiniteDifferences(NamedTuple):
    """One-sided slopes, shape (directions, steps, cotangents), from the largest step down.

    `width` is half the difference of both, summed without sign over the outputs; `noise` is what
    the measured rounding of the function may do to a slope. A direction is `along` at the elements
    of its group, and zero at the others.
    """

    ahead: np.ndarray
    behind: np.ndarray
    width: np.ndarray
    noise: np.ndarray
    steps: np.ndarray
    along: np.ndarray
    groups: Sequence[np.ndarray]


class Slopes(NamedTuple):
    """What slopes say of a gradient along some directions: arrays of one entry for each.

    Or along one direction, numbers.

    Attributes:
      kind: OK, KINK, NOISE or WRONG.
      numeric: what the gradient should be; the slope, unless plain AD is known better.
      error: of the slope.
      analytic: what the gradient is.
      ahead, behind: the one-sided slopes.
      slope: the slope of both sides.
      row: the cotangent of these numbers, the worst.
      is_kink, is_smooth: whether the slopes are those of a kink, or of a smooth function.
      is_stair: whether the smallest steps have other slopes.
    """

    kind: Any
    numeric: Any
    error: Any
    analytic: Any
    ahead: Any
    behind: Any
    slope: Any
    row: Any
    is_kink: Any
    is_smooth: Any
    is_stair: Any

    def of_one(self, k: int, scale: Any) -> "Slopes":
        """The numbers along one direction, for a unit of an input of this scale."""
        kind, *numbers = (column[k] for column in self[:7])
        marks = (column[k] for column in self[7:])
        return Slopes._make([kind, *(float(x / scale) for x in numbers), *marks])


def agree_at_once(
    differences: FiniteDifferences, gradient: np.ndarray, tolerance: Tolerance
) -> np.ndarray:
    """Whether two steps alone have the slopes of a gradient already."""
    numeric, _ = _extrapolated(differences)
    numeric, (analytic, norm) = numeric[:, -1], _gradient_along(differences, gradient)
    allowed = tolerance(np.fmax(np.abs(numeric), norm))
    return (np.abs(numeric - analytic) <= allowed).all(axis=1)


def off_at_once(differences: FiniteDifferences, gradient: np.ndarray) -> list[float]:
    """The part of itself that a gradient is off by along each direction, by two steps alone."""
    numeric = _extrapolated(differences)[0][:, -1]
    analytic, norm = _gradient_along(differences, gradient)
    size = np.fmax(np.abs(numeric), norm)
    off = np.abs(numeric - analytic) / np.where(size > 0, size, 1.0)
    return [float(part) for part in off.max(axis=1)]


def judge_slopes(
    differences: FiniteDifferences, gradient: np.ndarray, tolerance: Tolerance, typical: Any = 0.0
) -> Slopes:
    """Judge a gradient by slopes: right, wrong, at a kink, or too noisy to tell.

    The slopes of a smooth function settle on one value, those at a kink on two, noise does not
    settle, and at a singular point they grow.

    Args:
      differences: the slopes.
      gradient: shape (cotangents, elements).
      tolerance: how far they may be apart.
      typical: of directions of one element, the typical effect of an element of its leaf.
    """
    numeric, error = richardson(differences)
    analytic, norm = _gradient_along(differences, gradient)
    allowed = tolerance(np.fmax(np.abs(numeric), norm), typical)
    off = np.abs(numeric - analytic)
    size = np.fmax(np.fmax(np.abs(numeric), norm), typical)
    is_noisy = ~(error <= NOISY * size + NOISY_FLOORS * tolerance(0.0, typical))
    kind = np.where(off <= allowed + error, np.where(is_noisy, NOISE, OK), WRONG)
    is_kink, middle, width, at = _kink(differences)
    inside = np.abs(analytic - middle) <= width + allowed
    kind = np.where(is_kink, np.where(inside, KINK, WRONG), kind)
    kind = np.where(_grows(differences) | ~np.isfinite(numeric), NOISE, kind)
    worst = np.argmax(kind * 10.0 + off / (1 + off), axis=1)
    sides = (_taken(side, at) for side in (differences.ahead, differences.behind))
    largest = np.fmax(np.abs(numeric), np.abs(analytic))
    is_stair = _is_on_a_stair(differences, numeric, largest)
    is_smooth = ~is_kink & ~_is_bent(differences, largest)
    columns = (kind, numeric, error, analytic, *sides, numeric, is_kink, is_smooth, is_stair)
    *numbers, kink, smooth, stair = (_taken(column, worst) for column in columns)
    return Slopes._make([*numbers, worst, kink, smooth, stair])


def told_apart(a: Any, b: Any) -> tuple[str, str]:
    """Two numbers, each with the digits that tell them apart."""
    texts = [(f"{a:.{digits}g}", f"{b:.{digits}g}") for digits in DIGITS]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[0])


class Along(NamedTuple):
    """The verdict on a leaf along several directions, and the worst of them."""

    kind: int
    bound: float  # the part of itself that the gradient may be off by
    numeric: float
    error: float
    analytic: float
    off: float  # the part of itself that it is off by


def judge_along(
    several: Sequence[FiniteDifferences], gradient: np.ndarray, tolerance: Tolerance
) -> Along:
    """Judge the gradient of a leaf by the root mean square of what it is off by along directions.

    Along one direction alone a gradient and its double may have slopes that are as good as equal.
    Not verified where it may be off by more than `TRUSTED`.
    """
    columns = []
    for differences in several:
        numeric, error = richardson(differences)
        analytic, norm = _gradient_along(differences, gradient)
        is_kink, middle, width, _ = _kink(differences)
        between = np.clip(analytic, middle - width, middle + width)
        columns.append([c[0] for c in (numeric, error, analytic, norm, is_kink, between)])
    numeric, error, analytic, norm, is_kink, between = np.asarray(columns).transpose(1, 0, 2)
    size = lambda x: float(np.sqrt(np.mean(np.square(x))))  # noqa: E731
    if is_kink.mean() > HALF:
        numeric = np.where(is_kink, between, numeric)
    off, larger = size(numeric - analytic), max(size(norm), size(numeric))
    bound = tolerance.relative * larger + tolerance.least + SPREAD_OF_ERRORS * size(error)
    kind = WRONG if off > bound else OK if bound <= TRUSTED * larger else NOISE
    kind = kind if np.isfinite(off + bound) else NOISE
    j = np.unravel_index(np.argmax(np.abs(numeric - analytic)), numeric.shape)
    part, off = (x / larger if larger else 0.0 for x in (bound, off))
    return Along(kind, part, float(numeric[j]), float(error[j]), float(analytic[j]), off)


def _gradient_along(
    differences: FiniteDifferences, gradient: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient along each direction, and the length of its terms."""
    terms = (gradient[:, group] * differences.along[group] for group in differences.groups)
    total, norm = zip(*((t.sum(axis=1), np.linalg.norm(t, axis=1)) for t in terms), strict=True)
    return np.stack(total), np.stack(norm)


def _taken(values: np.ndarray, steps: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, steps[:, None], 1)[:, 0]


def _extrapolated(differences: FiniteDifferences) -> tuple[np.ndarray, np.ndarray]:
    """Richardson's extrapolation of each two central slopes, of order four, and these."""
    central = (differences.ahead + differences.behind) / 2
    power = np.square(differences.steps[:-1] / differences.steps[1:])[None, :, None]
    return (power * central[:, 1:] - central[:, :-1]) / (power - 1), central


def richardson(differences: FiniteDifferences) -> tuple[np.ndarray, np.ndarray]:
    """The slope at the step where it is known best, and its error: what it moved by, and noise."""
    better, central = _extrapolated(differences)
    moved = np.abs(np.diff(central, axis=1))
    moved[:, 1:] = EXTRAPOLATED * (moved[:, 1:] + np.abs(np.diff(better, axis=1)))
    error = np.where(np.isfinite(moved), moved, np.inf) + differences.noise[:, 1:]
    best = np.argmin(error, axis=1)
    return _taken(better, best), _taken(error, best)


def _kink(differences: FiniteDifferences) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Whether both sides settle on two values, their middle, how far each is from it, the step."""
    gap = np.abs(differences.ahead - differences.behind)
    at = np.argmin(np.where(np.isfinite(gap), gap + differences.noise, np.inf), axis=1)
    ahead, behind, noise = (
        _taken(x, at) for x in (differences.ahead, differences.behind, differences.noise)
    )
    ratio = (differences.steps[:-1] / differences.steps[1:])[None, :, None]
    shrinks = _taken(gap[:, 1:] < gap[:, :-1] / np.sqrt(ratio), np.maximum(at - 1, 0))
    apart = _taken(gap, at) - TIMES * noise > KINK_GAP * np.fmax(np.abs(ahead), np.abs(behind))
    width = _taken(differences.width, at) + TIMES * noise
    return apart & ~shrinks, (ahead + behind) / 2, width, at


def _is_bent(differences: FiniteDifferences, size: np.ndarray) -> np.ndarray:
    """Whether both sides of some output have other slopes at each step, though their sums agree."""
    least = (differences.width - TIMES * differences.noise).min(axis=1)
    return np.asarray(least > KINK_GAP * size)


def _is_on_a_stair(
    differences: FiniteDifferences, numeric: np.ndarray, size: np.ndarray
) -> np.ndarray:
    """Whether the smallest steps have other slopes than the larger ones, beyond their noise.

    So the function has stairs that are narrower than these.
    """
    central, noise = (differences.ahead + differences.behind)[:, -3:] / 2, differences.noise[:, -3:]
    off = np.abs(central - numeric[:, None]) - noise
    return np.asarray((off > KINK_GAP * size[:, None]).any(axis=1))


def _grows(differences: FiniteDifferences) -> np.ndarray:
    side = np.fmax(np.abs(differences.ahead), np.abs(differences.behind))[:, -3:]
    grows = (side[:, 1:] > GROWTH * side[:, :-1]).all(axis=1)
    return grows & (side[:, -1] > ABOVE_NOISE * differences.noise[:, -1])
