"""The verdict on a slope: right, wrong, at a kink, or too noisy to tell.

One-sided slopes over a ladder of shrinking steps tell the cases apart. A smooth function's settle
on one value, a kink's on two, noise does not settle, and at a singular point they grow.
"""

from typing import Any, NamedTuple

import numpy as np

from clipgrad._check.differences import Slopes
from clipgrad._check.tolerances import GROWTH, JUMP, KINK_GAP, NEGLIGIBLE, NOISY, Allowed


class Kind(NamedTuple):
    """The meaning of a verdict: the note in the report, and whether the element is verified."""

    note: str
    verified: bool = True


# In order of severity: of several cotangents the most severe verdict counts.
OK, KINK, SINGULAR, VANISHED, UNSURE, WRONG, ROUNDING, LOST, SYMMETRIC, UNSEEN = range(10)
BENT = (KINK, SINGULAR)
ROUNDS = "off by rounding: plain AD or the rule's operations lose as much in this precision"
KINDS = {
    KINK: Kind("not differentiable; the gradient lies between the one-sided slopes", False),
    SINGULAR: Kind("not verified: at a jump, or where slopes grow without bound", False),
    UNSURE: Kind("could not be verified, because the differences are too noisy", False),
    VANISHED: Kind("are nothing but rounding at this point: further points alone verify", False),
    ROUNDING: Kind(ROUNDS),
    LOST: Kind(f"not verified: {ROUNDS}", False),
    SYMMETRIC: Kind(
        "right for symmetric matrices, such as this one, but not for others: the function does not "
        "read both triangles alike",
    ),
    UNSEEN: Kind("not verified: not checked one by one", False),
}


def are_verified(kinds: np.ndarray) -> np.ndarray:
    """Whether elements of these kinds are verified."""
    unverified = [k == WRONG or k in KINDS and not KINDS[k].verified for k in range(UNSEEN + 1)]
    return ~np.asarray(unverified)[kinds]


class Verdict(NamedTuple):
    """Arrays of one entry per row: the kind, and the numbers of the worst cotangent."""

    kind: np.ndarray
    numeric: np.ndarray
    analytic: np.ndarray
    error: np.ndarray
    ahead: np.ndarray
    behind: np.ndarray
    kink: np.ndarray

    def part(self, rows: np.ndarray) -> "Verdict":
        """The verdicts on some of the rows."""
        return Verdict(*(column[rows] for column in self))

    def put(self, rows: np.ndarray, other: "Verdict") -> None:
        """Replace the verdicts on some of the rows."""
        for column, better in zip(self, other, strict=True):
            column[rows] = better


STILL = 3  # of the smallest steps, which change nothing where values change by grains
OF_GRAINS = 1e-3  # how far a number of grains may be from a whole one
NO_VERDICTS = Verdict(*(np.zeros(0) for _ in range(6)), kink=np.zeros(0, bool))


def extrapolate(coarse: np.ndarray, fine: np.ndarray, ratio: Any) -> np.ndarray:
    """Richardson's extrapolation of two central differences, steps apart by `ratio`."""
    power = ratio**2
    return (power * fine - coarse) / (power - 1)


def judge_two(slopes: Slopes, ratio: float, allowed: Allowed, as_they_are: bool) -> Verdict:
    """Judge each row by two steps: right, or wrong; `as_they_are` does not extrapolate."""
    coarse, fine = np.moveaxis(slopes.central, 1, 0)
    if as_they_are:
        numeric, error = coarse, 4 / 3 * np.abs(coarse - fine) + slopes.noise[:, 0]
    else:
        numeric = extrapolate(coarse, fine, ratio)
        error = 0.1 * np.abs(numeric - fine) + slopes.noise[:, 1]
    analytic, norm = slopes.analytic[:, 0], slopes.norm[:, 0]
    off = np.abs(numeric - analytic)
    slack = allowed.slack(numeric, norm)
    large = 10 * allowed.relative * np.fmax(np.abs(numeric), allowed.typical) + allowed.floor
    sure = (error <= large) | as_they_are
    slack = slack + (error if allowed.paddle is None else 0.0)
    kind = np.where((off <= slack) & sure, OK, WRONG)
    worst = np.argmax(np.where(kind == WRONG, np.inf, 0) + off, axis=1)
    sides, no_kink = (slopes.ahead[:, 1], slopes.behind[:, 1]), np.zeros(kind.shape, bool)
    return Verdict(*(_pick(c, worst) for c in (kind, numeric, analytic, error, *sides, no_kink)))


def judge_ladder(slopes: Slopes, ratio: Any, allowed: Allowed, flat: Any = False) -> Verdict:
    """Judge each row by a ladder of shrinking steps; `ratio` is the ratio of successive steps.

    A row that is `flat` may be a staircase, whose larger steps have the slope of a ramp.
    """
    ratio = np.broadcast_to(ratio, slopes.central.shape[1] - 1)[:, None]
    numeric, error = settled(slopes, ratio)
    analytic, norm = slopes.analytic[:, -1], slopes.norm[:, -1]
    gap = np.abs(slopes.ahead - slopes.behind)
    best = np.argmin(np.where(np.isfinite(gap), gap + slopes.noise, np.inf), axis=1)
    kink = _is_kink(slopes, gap, best, ratio)
    grows, jumps = _grows(slopes), _jumps(slopes, ratio)
    centre, width = _pick(slopes.central, best), _pick(slopes.width, best)
    size = np.fmax(np.abs(numeric), norm)
    off = np.abs(numeric - analytic)
    slack = allowed.slack(numeric, norm)
    inside = np.abs(analytic - centre) <= width + slack + 3 * _pick(slopes.noise, best)
    noisy = error > np.fmax(NOISY * np.fmax(size, allowed.typical), NEGLIGIBLE * allowed.floor)
    kind = np.where(off <= slack + error, np.where(noisy, UNSURE, OK), WRONG)
    stairs = np.reshape(flat, (-1, 1)) & _is_rough(slopes, numeric, error, size)
    kind = np.where((kind == WRONG) & stairs, UNSURE, kind)
    kind = np.where(kink, np.where(inside, KINK, WRONG), kind)
    kind = np.where(grows, SINGULAR, kind)
    kind = np.where(np.isfinite(numeric), kind, UNSURE)
    sides = [_pick(side, best) for side in (slopes.ahead, slopes.behind)]
    # The slope beside a jump is from the values at two steps, and not the one at the point.
    last = ratio[-2]
    beside = [(last * c[:, -3] - c[:, -2]) / (last - 1) for c in (slopes.ahead, slopes.behind)]
    sides = [np.where(jumps, at, side) for at, side in zip(beside, sides, strict=True)]
    between = np.abs(analytic - np.mean(beside, axis=0)) - np.abs(beside[0] - beside[1]) / 2
    relative = 10 * allowed.relative * np.fmax(np.abs(analytic), allowed.typical)
    relative = relative + allowed.floor + 3 * slopes.noise[:, -2]
    kind = np.where(jumps, np.where(between > relative, WRONG, SINGULAR), kind)
    near, sure = _right_in_the_limit(slopes, numeric, error, analytic, slack)
    kind = np.where(near, np.where(sure, OK, UNSURE), kind)
    worst = np.argmax(kind + np.where(off > 0, off / (1 + off), 0) / 2, axis=1)
    columns = (kind, numeric, analytic, error, *sides, kink | jumps)
    return Verdict(*(_pick(column, worst) for column in columns))


def with_grains(slopes: Slopes, steps: np.ndarray) -> Slopes:
    """The slopes with the noise of values that change by grains, as those of large sums do.

    Where the smallest steps change nothing and a larger one does, the least change is a grain: each
    value may be off by as much, and so may those of other rows that change by grains or not at all
    (without it the case a_sum_beside_a_large_number is called wrong).
    """
    steps = steps[None, :, None]
    sizes = np.stack([np.abs(slopes.ahead), np.abs(slopes.behind)]) * steps
    still = (sizes[:, :, -STILL:] == 0).all(axis=(0, 2))
    least = np.where(sizes > 0, sizes, np.inf).min(axis=(0, 2))
    grain = np.where(still, least, np.inf).min(axis=0, initial=np.inf)
    counts = sizes / np.where(np.isfinite(grain), grain, 1.0)
    by_grains = (np.abs(counts - np.round(counts)) <= OF_GRAINS).all(axis=(0, 2))
    grains = np.where(still, np.where(np.isfinite(least), least, grain), grain)
    found = np.where(np.isfinite(grain) & (still | by_grains), grains, 0.0)
    return slopes._replace(noise=slopes.noise + 2 * found[:, None] / steps)


# Needed by the case rounding_to_small_steps.
def _right_in_the_limit(slopes: Slopes, numeric, error, analytic, slack) -> tuple:
    """Whether small steps, unlike larger ones, have the analytic slope; whether precisely so.

    They do beside a kink that is nearer than the larger steps but not than these: then both
    one-sided slopes are the analytic one at two steps, and at all below.
    """
    sides, noise = np.stack([slopes.ahead, slopes.behind]), slopes.noise
    numeric, error, analytic, slack = (a[:, None] for a in (numeric, error, analytic, slack))
    there = (np.abs(sides - analytic) <= slack + noise).all(axis=0)
    below = np.flip(np.logical_and.accumulate(np.flip(there, 1), axis=1), 1)
    apart = below & (np.abs(sides - numeric) > error + 2 * noise).all(axis=0)
    # Of a staircase, which does not change at all between two steps, nothing is lost in noise.
    flat = (sides == 0).all(axis=0) & (analytic == 0)
    sure = apart & (noise <= np.where(flat, NOISY * np.abs(numeric), slack))
    return tuple((steps[:, :-1] & steps[:, 1:]).any(axis=1) for steps in (apart, sure))


def settled(slopes: Slopes, ratio: Any) -> tuple[np.ndarray, np.ndarray]:
    """The most trustworthy extrapolated slope of each row, and its error."""
    central = slopes.central
    better = extrapolate(central[:, :-1], central[:, 1:], ratio)
    moved = np.abs(central[:, 1:] - central[:, :-1])
    moved[:, 1:] = 0.1 * (moved[:, 1:] + np.abs(better[:, 1:] - better[:, :-1]))
    error = moved + slopes.noise[:, 1:]
    error = np.where(np.isfinite(error), error, np.inf)
    best = np.argmin(error, axis=1)
    return _pick(better, best), _pick(error, best)


# Needed by the case relu_in_fast_mode.
def _is_kink(slopes: Slopes, gap, best, ratio) -> np.ndarray:
    """A gap between both sides that does not shrink with the step, as a smooth function's does."""
    shrinks = gap[:, 1:] < gap[:, :-1] / np.sqrt(ratio)
    shrinks = _pick(shrinks, np.maximum(best - 1, 0))
    gap, noise = _pick(gap, best), _pick(slopes.noise, best)
    size = np.fmax(np.abs(_pick(slopes.ahead, best)), np.abs(_pick(slopes.behind, best)))
    return (gap - 3 * noise > KINK_GAP * size) & ~shrinks


# Needed by the case rounding_to_24_bits in float64.
def _is_rough(slopes: Slopes, numeric, error, size) -> np.ndarray:
    """Whether the smallest steps have other slopes, and not one, as on a staircase."""
    part, noise = KINK_GAP * size, 10 * slopes.noise
    unlike = np.abs(slopes.central[:, -3:] - numeric[:, None]) - noise[:, -3:]
    sides = np.concatenate([slopes.ahead[:, -2:], slopes.behind[:, -2:]], axis=1)
    differ = np.ptp(sides, axis=1) > part + noise[:, -1]
    return differ & (unlike > 10 * error[:, None] + part[:, None]).any(axis=1)


# Needed by test_slopes_are_told_apart.
def _grows(slopes: Slopes) -> np.ndarray:
    """Slopes that still grow by half at each of the last steps have no limit."""
    size = np.fmax(np.abs(slopes.ahead), np.abs(slopes.behind))[:, -4:]
    growing = np.all(size[:, 1:] > GROWTH * size[:, :-1], axis=1)
    return growing & (size[:, -1] > 10 * slopes.noise[:, -1])


# Needed by the case a_derivative_of_sign_at_its_jump.
def _jumps(slopes: Slopes, ratio) -> np.ndarray:
    """The change itself, of which a slope is a part, stays as it is at each of the last steps."""
    found = np.zeros(slopes.central[:, 0].shape, bool)
    for side in (slopes.ahead, slopes.behind):
        size = np.abs(side)[:, -3:]
        same = (size[:, 1:] > JUMP * ratio[-2:] * size[:, :-1]).all(axis=1)
        found |= same & (size[:, -1] > 10 * slopes.noise[:, -1])
    return found


def _pick(array: np.ndarray, step: np.ndarray) -> np.ndarray:
    """The entry of each row at a step of its own."""
    return np.take_along_axis(array, step[:, None], axis=1)[:, 0]
