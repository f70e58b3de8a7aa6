"""The verdict: which of three witnesses agree, and the tolerances by which they do.

The budgets of the search are in `search`.

At each element there are the rule r, plain AD p and slopes s, all in float64. Where r and s agree,
the element is right; where p and s do and r does not, it is wrong; where r and p agree and s does
not, it is disputed. Two numbers agree where they are apart by no more than a stated part, or than
three times what one measured rounding moves them by.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

PRECISIONS = ("bfloat16", "float16", "float32", "float64")
HALVES = ("bfloat16", "float16")

# The stated part: by the narrowest type that computes. The rule in float64 has float64's, the error
# of two extrapolated steps. A right rule loses about the square root of its operations in
# roundings: 5e-4 is 4,000 of float32, 5e-2 is six of bfloat16.
RELATIVE = {"float64": 1e-6, "float32": 5e-4, "float16": 1e-2, "bfloat16": 5e-2}
# Of a type of 8 bits and fewer a result may be off by two of its roundings.
FEW_ROUNDINGS = 2.0
# Roundings of the leaf's typical gradient that any element may be off by: sums of products of both
# signs cancel.
ROUNDINGS = {"float64": 50.0, "float32": 50.0, "float16": 8.0, "bfloat16": 4.0}
# The measured part: so many times what moving each number by one rounding moves a result by, since
# the root mean square of some runs is neither the largest nor known to better than a quarter.
TIMES = 3.0
# A gradient below so many of its own roundings in float64 is zero: outputs are rounded too, and
# their rounding is divided by a step.
BELOW_ROUNDING = 200.0
# What rounding explains is verified if it is this part of the element and its leaf, or less.
TRUSTED = 0.25
# Slopes of what can only be evaluated in its own narrow type, and of tied elements moved together,
# may be so many times further apart.
LOOSER = 10.0
# Along several directions errors are three standard deviations of one; of their root mean square
# it is this part.
SPREAD_OF_ERRORS = 0.6
HALF = 0.5
# Two ways to compile one gradient add in other orders: so many times the roundings of its leaf.
ORDERS = 20.0
# One-sided slopes that are further apart than this part of them are a kink's.
KINK_GAP = 0.02
# An error above this part of the slope, and of the leaf's typical one, tells nothing.
NOISY = 0.1
# Slopes that grow so much at each of the last steps have no limit: a jump's.
GROWTH = 1.5
# A function's values in float64 are its own up to this part, or ten measured roundings.
SAME_VALUES = 0.1
# An output that nothing moves, and that is so many times as large as what moves, is a mask.
MASK = 2.0**10
# Of the elements that are not at kinks, if `min_verified` is not given.
LEAST_VERIFIED = 0.5

# In order of severity: of several cotangents, looks and questions, the most severe one counts.
OK, ROUNDING, KINK, NOISE, DISPUTED, UNSEEN, WRONG = range(7)
VERIFIED = (OK, ROUNDING)
NOTES = {
    ROUNDING: "off by rounding: plain autodiff or the rule's operations lose as much in this "
    "precision",
    KINK: "at a kink: the gradient lies between the one-sided slopes",
    NOISE: "not verified: the slopes are too noisy, or rounding explains the difference",
    DISPUTED: "not verified: JAX's own derivative does not have the function's slopes either",
    UNSEEN: "not verified: not looked at one by one",
}


def narrowest(names: Iterable[str]) -> str:
    """The narrowest of some floating types: the one of the fewest digits."""
    return min(names, key=lambda name: (-float(jnp.finfo(name).eps), PRECISIONS[0] != name))


def relative_of(name: str) -> float:
    """The stated part of a type."""
    return RELATIVE.get(name, FEW_ROUNDINGS * float(jnp.finfo(name).eps))


DIGITS = range(7, 18)  # of two numbers, until they are told apart


class Slack(NamedTuple):
    """The most that an element may be off by, in parts of itself and of its leaf's gradient.

    And by the least number that the type's arithmetic keeps.
    """

    relative: float
    floor: float
    least: float = 0.0

    def __call__(self, larger: Any, typical: Any = 0.0) -> Any:
        """The slack of an element, of the larger of two numbers for it."""
        return self.relative * larger + self.floor * typical + self.least


def slack_of(name: str, tolerance: float | None = None, times: float = 1.0) -> Slack:
    """The slack of a type, or the one that the user states."""
    limits = jnp.finfo(name)  # XLA's float32 and bfloat16 have no subnormal numbers, float16 has
    has_subnormals = name not in RELATIVE or name == "float16"
    least = float(limits.smallest_subnormal if has_subnormals else limits.tiny)
    floor = ROUNDINGS.get(name, FEW_ROUNDINGS) * float(limits.eps)
    if tolerance is None:
        return Slack(times * relative_of(name), times * floor, least)
    return Slack(tolerance, tolerance + floor, least)


class Ladder(NamedTuple):
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
    """The verdict on some directions: arrays of one entry for each, of the worst cotangent.

    Or the verdict on one direction, numbers.
    """

    kind: Any
    numeric: Any
    error: Any
    analytic: Any
    ahead: Any
    behind: Any
    is_kink: Any
    is_smooth: Any = True
    is_stair: Any = False

    def of_one(self, k: int, scale: Any) -> "Slopes":
        """The verdict on one direction, for a unit of an input of this scale."""
        kind, *numbers = (column[k] for column in self[:6])
        flags = (column[k] for column in self[6:])
        return Slopes._make([kind, *(float(x / scale) for x in numbers), *flags])


def agree_at_once(ladder: Ladder, gradient: np.ndarray, slack: Slack) -> np.ndarray:
    """Whether two steps alone have the slopes of a gradient already."""
    numeric, _ = _extrapolated(ladder)
    numeric, (analytic, norm) = numeric[:, -1], _gradient_along(ladder, gradient)
    allowed = slack(np.fmax(np.abs(numeric), norm))
    return (np.abs(numeric - analytic) <= allowed).all(axis=1)


def off_at_once(ladder: Ladder, gradient: np.ndarray) -> list[float]:
    """The part of itself that a gradient is off by along each direction, by two steps alone."""
    numeric = _extrapolated(ladder)[0][:, -1]
    analytic, norm = _gradient_along(ladder, gradient)
    size = np.fmax(np.abs(numeric), norm)
    off = np.abs(numeric - analytic) / np.where(size > 0, size, 1.0)
    return [float(part) for part in off.max(axis=1)]


def judge_slopes(ladder: Ladder, gradient: np.ndarray, slack: Slack, typical: Any = 0.0) -> Slopes:
    """Judge a gradient by slopes: right, wrong, at a kink, or too noisy to tell.

    The slopes of a smooth function settle on one value, those at a kink on two, noise does not
    settle, and at a singular point they grow.

    Args:
      ladder: the slopes.
      gradient: shape (cotangents, elements).
      slack: how far they may be apart.
      typical: of directions of one element, the typical effect of an element of its leaf.
    """
    numeric, error = settled(ladder)
    analytic, norm = _gradient_along(ladder, gradient)
    allowed = slack(np.fmax(np.abs(numeric), norm), typical)
    off = np.abs(numeric - analytic)
    size = np.fmax(np.fmax(np.abs(numeric), norm), typical)
    is_noisy = ~(error <= NOISY * size + 100 * slack(0.0, typical))
    kind = np.where(off <= allowed + error, np.where(is_noisy, NOISE, OK), WRONG)
    is_kink, middle, width, at = _kink(ladder)
    inside = np.abs(analytic - middle) <= width + allowed
    kind = np.where(is_kink, np.where(inside, KINK, WRONG), kind)
    kind = np.where(_grows(ladder) | ~np.isfinite(numeric), NOISE, kind)
    worst = np.argmax(kind * 10.0 + off / (1 + off), axis=1)
    sides = (_taken(side, at) for side in (ladder.ahead, ladder.behind))
    largest = np.fmax(np.abs(numeric), np.abs(analytic))
    is_stair = _is_on_a_stair(ladder, numeric, largest)
    is_smooth = ~is_kink & ~_is_bent(ladder, largest)
    columns = (kind, numeric, error, analytic, *sides, is_kink, is_smooth, is_stair)
    return Slopes(*(np.take_along_axis(c, worst[:, None], 1)[:, 0] for c in columns))


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


def judge_along(ladders: Sequence[Ladder], gradient: np.ndarray, slack: Slack) -> Along:
    """Judge the gradient of a leaf by the root mean square of what it is off by along directions.

    Along one direction alone a gradient and its double may have slopes that are as good as equal.
    Not verified where it may be off by more than `TRUSTED`.
    """
    columns = []
    for ladder in ladders:
        numeric, error = settled(ladder)
        analytic, norm = _gradient_along(ladder, gradient)
        is_kink, middle, width, _ = _kink(ladder)
        between = np.clip(analytic, middle - width, middle + width)
        columns.append([c[0] for c in (numeric, error, analytic, norm, is_kink, between)])
    numeric, error, analytic, norm, is_kink, between = np.asarray(columns).transpose(1, 0, 2)
    size = lambda x: float(np.sqrt(np.mean(np.square(x))))  # noqa: E731
    if is_kink.mean() > HALF:
        numeric = np.where(is_kink, between, numeric)
    off, larger = size(numeric - analytic), max(size(norm), size(numeric))
    bound = slack.relative * larger + slack.least + SPREAD_OF_ERRORS * size(error)
    kind = WRONG if off > bound else OK if bound <= TRUSTED * larger else NOISE
    kind = kind if np.isfinite(off + bound) else NOISE
    j = np.unravel_index(np.argmax(np.abs(numeric - analytic)), numeric.shape)
    part, off = (x / larger if larger else 0.0 for x in (bound, off))
    return Along(kind, part, float(numeric[j]), float(error[j]), float(analytic[j]), off)


def _gradient_along(ladder: Ladder, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gradient along each direction, and the length of its terms."""
    terms = (gradient[:, group] * ladder.along[group] for group in ladder.groups)
    total, norm = zip(*((t.sum(axis=1), np.linalg.norm(t, axis=1)) for t in terms), strict=True)
    return np.stack(total), np.stack(norm)


def _taken(values: np.ndarray, steps: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, steps[:, None], 1)[:, 0]


def _extrapolated(ladder: Ladder) -> tuple[np.ndarray, np.ndarray]:
    """Richardson's extrapolation of each two central slopes, and these."""
    central = (ladder.ahead + ladder.behind) / 2
    power = np.square(ladder.steps[:-1] / ladder.steps[1:])[None, :, None]
    return (power * central[:, 1:] - central[:, :-1]) / (power - 1), central


def settled(ladder: Ladder) -> tuple[np.ndarray, np.ndarray]:
    """The slope at the step where it is known best, and its error: what it moved by, and noise."""
    better, central = _extrapolated(ladder)
    moved = np.abs(np.diff(central, axis=1))
    moved[:, 1:] = 0.1 * (moved[:, 1:] + np.abs(np.diff(better, axis=1)))
    error = np.where(np.isfinite(moved), moved, np.inf) + ladder.noise[:, 1:]
    best = np.argmin(error, axis=1)
    return _taken(better, best), _taken(error, best)


def _kink(ladder: Ladder) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Whether both sides settle on two values, their middle, how far each is from it, the step."""
    gap = np.abs(ladder.ahead - ladder.behind)
    at = np.argmin(np.where(np.isfinite(gap), gap + ladder.noise, np.inf), axis=1)
    ahead, behind, noise = (_taken(x, at) for x in (ladder.ahead, ladder.behind, ladder.noise))
    ratio = (ladder.steps[:-1] / ladder.steps[1:])[None, :, None]
    shrinks = _taken(gap[:, 1:] < gap[:, :-1] / np.sqrt(ratio), np.maximum(at - 1, 0))
    apart = _taken(gap, at) - TIMES * noise > KINK_GAP * np.fmax(np.abs(ahead), np.abs(behind))
    width = _taken(ladder.width, at) + TIMES * noise
    return apart & ~shrinks, (ahead + behind) / 2, width, at


def _is_bent(ladder: Ladder, size: np.ndarray) -> np.ndarray:
    """Whether both sides of some output have other slopes at each step, though their sums agree."""
    least = (ladder.width - TIMES * ladder.noise).min(axis=1)
    return np.asarray(least > KINK_GAP * size)


def _is_on_a_stair(ladder: Ladder, numeric: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Whether the smallest steps have other slopes than the larger ones, beyond their noise.

    So the function has stairs that are narrower than these.
    """
    central, noise = (ladder.ahead + ladder.behind)[:, -3:] / 2, ladder.noise[:, -3:]
    off = np.abs(central - numeric[:, None]) - noise
    return np.asarray((off > KINK_GAP * size[:, None]).any(axis=1))


def _grows(ladder: Ladder) -> np.ndarray:
    side = np.fmax(np.abs(ladder.ahead), np.abs(ladder.behind))[:, -3:]
    grows = (side[:, 1:] > GROWTH * side[:, :-1]).all(axis=1)
    return grows & (side[:, -1] > 10 * ladder.noise[:, -1])
