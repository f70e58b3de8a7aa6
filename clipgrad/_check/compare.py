"""Two gradients that should be the same, compared element by element."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from clipgrad._check.problem import Problem
from clipgrad._check.report import Failure
from clipgrad._check.tolerance import Tolerance

FLOOR = 1e3
EXCUSED = 30.0


class Comparison(NamedTuple):
    """Compares gradients of one problem; `rounding()` is asked only where they differ."""

    problem: Problem
    tolerance: Tolerance
    rounding: Callable[[], np.ndarray | None]

    def __call__(self, check: str, got: np.ndarray, expected: np.ndarray, what: str) -> list:
        """Return a failure naming the worst element, or nothing."""
        off = _distance(got, expected)
        bad = off > self._slack(got, expected)
        if bad.any():
            error = self.rounding()
            bad &= off > (0 if error is None else EXCUSED * self._largest(error.max(axis=0)))
        if not bad.any():
            return []
        worst = int(np.argmax(np.where(bad, off, -1)))
        detail = (
            f"{what}: {int(bad.sum())} of {bad.size} elements differ; worst: {got[worst]:.7g}, "
            f"expected {expected[worst]:.7g}"
        )
        return [Failure(check, self.problem.element(worst), detail)]

    def exactly(self, check: str, got: np.ndarray, expected: np.ndarray, what: str) -> list:
        """The same, for what must agree to the last bit; other devices add in any order."""
        bad = _distance(got, expected) > 0
        if not on_cpu(self.problem.inputs):
            bad &= False
        return self._replace(rounding=lambda: None)(check, got, expected, what) or (
            _bits(self.problem, check, bad, what) if bad.any() else []
        )

    def _largest(self, error: np.ndarray) -> np.ndarray:
        """The largest error in each leaf, at each element."""
        ranges = self.tolerance.ranges
        return np.concatenate([np.full(b - a, error[a:b].max()) for a, b in ranges])

    def _slack(self, got, expected) -> np.ndarray:
        known = np.where(np.isfinite(expected), expected, 0.0)
        tolerance = self.tolerance
        size = np.fmax(np.abs(known), np.abs(np.where(np.isfinite(got), got, 0.0)))
        floor = FLOOR * tolerance.eps * tolerance.typical(known[None])[0]
        return tolerance.relative * size + floor + FLOOR * tolerance.tiny


def on_cpu(leaves: Sequence[jax.Array]) -> bool:
    """Whether the arrays are on CPUs, whose programs give the same bits each time."""
    return all(device.platform == "cpu" for leaf in leaves for device in leaf.devices())


def _bits(problem: Problem, check: str, bad: np.ndarray, what: str) -> list[Failure]:
    worst = int(np.argmax(bad))
    detail = f"{what}: {int(bad.sum())} of {bad.size} elements differ in their last bits"
    return [Failure(check, problem.element(worst), detail)]


def _distance(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """|got - expected|; 0 where both are the same non-finite value, infinite where one is."""
    with np.errstate(invalid="ignore"):
        off = np.abs(got - expected)
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    return np.where(same, 0.0, np.where(np.isnan(off), np.inf, off))
