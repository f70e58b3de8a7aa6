"""One checked function: its measuring program, its tolerances, and verdicts on rows."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from clipgrad._check.differences import Differences, Rows, Slopes
from clipgrad._check.judge import OK, WRONG, Allowed, Ladder, Verdict, extrapolate, judge
from clipgrad._check.problem import Problem
from clipgrad._check.progress import progress_bar
from clipgrad._check.sampling import directions, scales
from clipgrad._check.tolerance import Tolerance

BALANCED = (0, 1)
DENSE, SINGLE = 2, 3
NOISE = 4.0
REFERENCE_ALONG = 1e-6
REFERENCE_EPS = 1e-14
ROUNDINGS = 50.0
SETTLED = 1e-6


@dataclasses.dataclass(frozen=True)
class Point:
    """A point, the gradients found there, and the directions in which it is perturbed.

    `gradient` and `reference` have shape (cotangents, inputs); `finite` tells which elements of
    the gradient are finite, the others stand as 0. `blind` lists the leaves where the reference
    is not finite; the gradient stands in for it there. `directions` holds two balanced dense
    directions, a dense one, and the scale of each element.
    """

    xs: Sequence[jax.Array]
    gradient: np.ndarray
    finite: np.ndarray
    reference: np.ndarray | None
    blind: list[int]
    directions: np.ndarray

    @property
    def scale(self) -> np.ndarray:
        """The scale of each element."""
        return self.directions[SINGLE]


@dataclasses.dataclass(frozen=True)
class Session:
    """What all points of a check share."""

    problem: Problem
    differences: Differences
    tolerance: Tolerance
    seed: int
    delta: float | None = None

    def point(self, xs, gradient: np.ndarray, reference: np.ndarray | None) -> Point:
        """Set up a point from its gradients."""
        finite = np.asarray(np.isfinite(gradient).all(axis=0))
        gradient, blind = np.where(finite, gradient, 0.0), []
        if reference is not None:
            reference, blind = self._mended(reference, gradient)
        best = gradient if reference is None else reference
        return Point(xs, gradient, finite, reference, blind, self._directions(xs, best))

    def _mended(self, reference, gradient) -> tuple[np.ndarray | None, list[int]]:
        reference, ranges = reference.copy(), self.tolerance.ranges
        bad = [not np.isfinite(reference[:, a:b]).all() for a, b in ranges]
        for blind, (start, stop) in zip(bad, ranges, strict=True):
            if blind:
                reference[:, start:stop] = gradient[:, start:stop]
        return (None if all(bad) else reference), [leaf for leaf, blind in enumerate(bad) if blind]

    def _directions(self, xs, gradient) -> np.ndarray:
        scale = scales(xs) if self.delta is None else np.full(gradient.shape[1], self.delta)
        dense = [directions(self.problem, self.seed, row) * scale for row in range(3)]
        balance = self._balance(gradient, scale)
        return np.stack([dense[0] * balance, dense[1] * balance, dense[2], scale])

    def _balance(self, gradient, scale) -> np.ndarray:
        """Powers of two that make the leaves' effects on the output alike, so none hides."""
        ranges = self.tolerance.ranges
        effect = [np.linalg.norm(gradient[:, a:b] * scale[a:b]) for a, b in ranges]
        least = min((e for e in effect if e > 0), default=1.0)
        factor = [np.clip(least / e, 2.0**-10, 1.0) if e > 0 else 1.0 for e in effect]
        factor = 2.0 ** np.round(np.log2(np.asarray(factor)))
        return np.repeat(factor, [b - a for a, b in ranges])

    def floor(self, point: Point) -> np.ndarray:
        """What rounding may do to each element of the analytic gradient."""
        if point.reference is None:
            return self.tolerance.floor(point.gradient, point.scale)
        return self.tolerance.floor(point.reference, point.scale, exact=True)

    def verdict(
        self, point: Point, ranges, direction: int, target: np.ndarray, judged: bool = True
    ) -> Verdict:
        """Judge the slopes along ranges of the input vector against a gradient.

        Args:
          point: where.
          ranges: pairs (start, stop), one for each row.
          direction: the row of `point.directions` to move along.
          target: the gradient to be judged, shape (cotangents, inputs).
          judged: False to look closer at what is imprecise, instead of at what disagrees.

        Returns:
          One verdict for each range; what passes at two steps is not looked at again.
        """
        ranges = np.asarray(ranges, int).reshape(-1, 2)
        if not len(ranges):
            return Verdict(*(np.zeros(0) for _ in Verdict._fields))
        allowed = self._allowed(point, ranges, direction, target)
        verdict = self._quick(point, ranges, direction, target, allowed)
        if judged and direction != SINGLE:
            self._again(verdict, point, ranges, direction, target, allowed)
        doubtful = np.flatnonzero(verdict.kind != OK if judged else _unsettled(verdict))
        if doubtful.size and self.delta is None:
            chosen = Allowed(*(_part(column, doubtful) for column in allowed))
            ladder, ratio = self._ladder(point, ranges[doubtful], direction, target)
            closer = judge(ladder, ratio, chosen)
            for column, better in zip(verdict, closer, strict=True):
                column[doubtful] = better
        return verdict

    def _again(self, verdict: Verdict, point, ranges, direction, target, allowed) -> None:
        """Try smaller steps where one disagrees, since elements may have passed their kinks."""
        finer, doubtful = self.differences.evaluation.finer, np.flatnonzero(verdict.kind != OK)
        if finer is None or self.delta is not None or not doubtful.size:
            return
        chosen = Allowed(*(_part(column, doubtful) for column in allowed))
        closer = self._quick(point, ranges[doubtful], direction, target, chosen, finer)
        right = closer.kind == OK
        for column, better in zip(verdict, closer, strict=True):
            column[doubtful[right]] = better[right]

    def _quick(self, point, ranges, direction, target, allowed, exponents=None) -> Verdict:
        exponents = exponents or self.differences.evaluation.quick
        exponents = exponents if self.delta is None else (0, 1)
        slopes, noise = self._measure(point, ranges, direction, target, exponents)
        coarse, fine = np.moveaxis(slopes.central, 1, 0)
        if self.delta is None:
            numeric = extrapolate(coarse, fine, 2.0 ** (exponents[1] - exponents[0]))
            error = 0.1 * np.abs(numeric - fine) + noise[:, 1]
        else:
            numeric, error = coarse, 4 / 3 * np.abs(coarse - fine) + noise[:, 0]
        analytic, norm = slopes.analytic[:, 0], slopes.norm[:, 0]
        off = np.abs(numeric - analytic)
        slack = allowed.slack(numeric, norm)
        large = 10 * allowed.relative * np.fmax(np.abs(numeric), allowed.typical) + allowed.floor
        sure = (error <= large) | (self.delta is not None)
        slack = slack + (error if allowed.paddle is None else 0.0)
        kind = np.where((off <= slack) & sure, OK, WRONG)
        worst = np.argmax(np.where(kind == WRONG, np.inf, 0) + off, axis=1)[:, None]
        columns = (kind, numeric, analytic, error, slopes.ahead[:, 1], slopes.behind[:, 1])
        picked = [np.take_along_axis(column, worst, 1)[:, 0] for column in columns]
        return Verdict(*picked, kink=np.zeros(len(ranges), bool))

    def _ladder(self, point, ranges, direction, target) -> tuple[Ladder, float]:
        exponents = self.differences.evaluation.ladder
        slopes, noise = self._measure(point, ranges, direction, target, exponents)
        return Ladder(slopes, noise), 2.0 ** (exponents[1] - exponents[0])

    def _measure(self, point, ranges, direction, target, exponents) -> tuple[Slopes, np.ndarray]:
        steps = 2.0 ** -np.asarray(exponents, np.float64)
        count, each = len(ranges), len(steps)
        rows = Rows(
            np.repeat(ranges[:, 0], each),
            np.repeat(ranges[:, 1], each),
            np.tile(steps, count),
            np.full(count * each, direction),
        )
        with progress_bar(len(rows.start)) as progress:
            flat = self.differences.measure(point.xs, point.directions, target, rows, progress)
        shape = (count, each, -1)
        slopes = Slopes(*(column.reshape(shape) for column in flat))
        return slopes, self._noise(slopes.size, steps)

    def _noise(self, size: np.ndarray, steps: np.ndarray) -> np.ndarray:
        outputs = max(self.differences.covectors.shape[1], 1)
        eps = self.differences.evaluation.eps
        return NOISE * eps * size / np.sqrt(outputs) / steps[None, :, None]

    def _allowed(self, point, ranges, direction, target) -> Allowed:
        start = ranges[:, 0]
        tolerance, scale = self.tolerance, point.scale
        if direction == SINGLE:
            unit = scale[start][:, None]
            floor = self.floor(point)[:, start].T * unit
            typical = tolerance.typical(target)[:, start].T * unit
            return Allowed(
                tolerance.relative[start][:, None], floor, typical, unit, tolerance.paddle
            )
        norms = [
            np.linalg.norm((target * point.directions[direction])[:, a:b], axis=1)
            for a, b in ranges
        ]
        overall = tolerance.overall(target, scale)
        if target is point.reference:
            relative, eps = np.full((len(start), 1), REFERENCE_ALONG), REFERENCE_EPS
        else:
            relative, eps = tolerance.along[start][:, None], tolerance.eps[start][:, None]
        floor = np.broadcast_to(ROUNDINGS * 0.01 * eps * overall, (len(start), len(overall)))
        return Allowed(relative, floor, np.stack(norms), np.ones((len(start), 1)), None)


def _unsettled(verdict: Verdict) -> np.ndarray:
    return ~(verdict.error <= SETTLED * np.abs(verdict.numeric))


def _part(column: Any, rows: np.ndarray) -> Any:
    return column[rows] if isinstance(column, np.ndarray) else column
