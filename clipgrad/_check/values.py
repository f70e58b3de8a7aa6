"""The check of values at one point: is the formula right, and then is its arithmetic?"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from clipgrad._check import vectors
from clipgrad._check.log import Log
from clipgrad._check.points import OF_RULE, OWN, Point
from clipgrad._check.report import Failure
from clipgrad._check.search import Search
from clipgrad._check.verdict import (
    BELOW_ROUNDING,
    DISPUTED,
    LOOSER,
    NOISE,
    NOTES,
    OK,
    ROUNDING,
    ROUNDINGS,
    TRUSTED,
    UNSEEN,
    WRONG,
    Slopes,
    narrowest,
    slack_of,
)

# Ratios that spread this much, relative to what sets them apart from 1 and from 0, are one number:
# results rounded to bfloat16 spread by 0.4 %, so a missing factor of 2 is still seen there.
SAME_RATIO = 0.01
THOUSANDTH = 1e-3
LOOPS = '; a loop stops by its numbers: to allow for that write tolerance=..., or skip="linearity"'
NUMBERED = 64  # wrong elements of the arithmetic of which the numbers are kept
DISPUTES = (
    "; plain AD has the gradient of the rule there, and the function has other slopes: where it is "
    "not meant to be differentiated, choose another point"
)


@dataclasses.dataclass
class CheckedPoint:
    """The verdict at a point, and what to show of it."""

    point: Point
    kinds: np.ndarray
    numbers: dict[int, Slopes]
    disputed: np.ndarray

    def notes(self, where: str = "") -> list[str]:
        """One note for each leaf and kind that has one."""
        names, notes = self.point.of.subject.names, []
        for name, (start, stop) in zip(names, self.point.ranges, strict=True):
            for kind, text in NOTES.items():
                if count := int((self.kinds[start:stop] == kind).sum()):
                    notes.append(f"{name}: {where}{count} of {stop - start} elements {text}")
        return notes

    def failures(self, where: str = "", check: str = "value") -> list[Failure]:
        """One failure for each leaf with wrong elements."""
        found = []
        for start, stop in self.point.ranges:
            wrong = np.flatnonzero(self.kinds[start:stop] == WRONG) + start
            if len(wrong):
                found.append(self._failure(start, stop, wrong, where, check))
        return found

    def _failure(self, start: int, stop: int, wrong: np.ndarray, where: str, check: str) -> Failure:
        numeric, analytic = self._both(wrong)
        off = np.abs(numeric - analytic)
        is_known = np.isin(wrong, [*self.numbers])
        off = np.where(is_known | ~is_known.any(), np.where(np.isfinite(off), off, 0.0), -1.0)
        k = int(np.argmax(off))
        error, text = np.nan, f"numeric {numeric[k]:.7g}"
        if known := self.numbers.get(int(wrong[k])):
            error, text = known.error, f"{text} +- {known.error:.0e}"
            sides = f"kink: slopes {known.behind:.7g} and {known.ahead:.7g}"
            text = sides if known.is_kink else text
        is_exact = not (self.kinds[start:stop] == UNSEEN)[self.point.finite[start:stop]].any()
        disputes = DISPUTES if self.disputed[wrong].all() else ""
        hint = ratio_hint(numeric, analytic) or self._layout_hint(start, stop)
        return Failure(
            check=check,
            where=self.point.of.subject.element(int(wrong[k])),
            detail=(
                f"{where}{'' if is_exact else 'at least '}{len(wrong)} of {stop - start} elements "
                f"wrong; worst: {text}, analytic {analytic[k]:.7g}{hint}{disputes}"
                f"{LOOPS if self.point.of.loops else ''}"
            ),
            numeric=float(numeric[k]),
            error=float(error),
            analytic=float(analytic[k]),
            indices=wrong - start,
            ratio=analytic / np.where(numeric == 0, np.nan, numeric),
        )

    def _both(self, wrong: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers that elements should be, by slopes or else plain AD, and those they are."""
        point = self.point
        judged = point.gradient if point.rule is None else point.rule
        other = judged if point.plain is None else point.plain
        row = np.argmax(np.abs(judged[:, wrong] - other[:, wrong]), axis=0)
        numeric, analytic = other[row, wrong].copy(), judged[row, wrong].copy()
        for k, j in enumerate(wrong):
            if known := self.numbers.get(int(j)):
                numeric[k], analytic[k] = known.numeric, known.analytic
        return numeric, analytic

    def _layout_hint(self, start: int, stop: int) -> str:
        """A remark if a square leaf's gradient is the transpose of plain AD's."""
        point = self.point
        leaf = point.xs[point.ranges.index((start, stop))]
        is_square = leaf.ndim == 2 and leaf.shape[0] == leaf.shape[1] > 1
        if point.plain is None or not is_square or leaf.size != stop - start:
            return ""
        own, other = (g[0, start:stop].reshape(leaf.shape) for g in (point.gradient, point.plain))
        is_same = is_near(own, other) or not is_near(own.T, other)
        return "" if is_same else "; analytic is the transpose of numeric"


def check_point(point: Point, log: Log, disputes_fail: bool) -> CheckedPoint:
    """The verdict at a point.

    The rule in float64 must agree with plain AD and slopes; the gradient as it was computed must
    then be that rule. Where the rule cannot run in float64, slopes judge the gradient as computed.
    """
    options, narrow = log.options, point.of.narrow
    if options.max_relative_error is not None:
        return _by_paddles_rule(point, log, options.max_relative_error)
    own = slack_of(narrow, options.tolerance)
    rule = point.rule
    if rule is None and not point.of.evaluation.is_wide:
        name = narrowest([narrow, point.of.evaluation.label])
        own = slack_of(name, options.tolerance, times=LOOSER)
    slack = own if rule is None else slack_of("float64", options.tolerance)
    judged = point.gradient if rule is None else rule
    search = Search(point, judged, slack, log, point.plain).run(options.mode == "full")
    disputed = search.kinds == DISPUTED
    if disputes_fail and point.of.is_ruled:
        search.kinds[disputed] = WRONG
    found = CheckedPoint(point, search.kinds, search.numbers, disputed)
    if rule is not None:
        _check_arithmetic(found, rule, log)
    elif point.plain is not None and (search.kinds == WRONG).any():
        room = point.rounding(OWN, plain_alone=True)
        is_near_plain = (np.abs(point.gradient - point.plain) <= room).all(axis=0)
        search.kinds[(search.kinds == WRONG) & is_near_plain] = ROUNDING
    return found


def _by_paddles_rule(point: Point, log: Log, most: float) -> CheckedPoint:
    """The verdict by |numeric - analytic| / |numeric|, absolute where |numeric| < 1e-3."""
    search = Search(point, point.gradient, slack_of("float64"), log).run(full=True)
    for j, own in search.numbers.items():
        if search.kinds[j] in (OK, WRONG) and not own.is_kink:
            size = 1.0 if abs(own.numeric) < 1e-3 else abs(own.numeric)
            search.kinds[j] = WRONG if abs(own.numeric - own.analytic) > most * size else OK
    return CheckedPoint(point, search.kinds, search.numbers, np.zeros(len(search.kinds), bool))


def _check_arithmetic(found: CheckedPoint, r: np.ndarray, log: Log) -> None:
    """The gradient as it was computed is the rule's in float64, to its type or to rounding."""
    point, kinds, g = found.point, found.kinds, found.point.gradient
    slack = slack_of(point.of.narrow, log.options.tolerance)
    typical = point.typical(r)
    bad = (point.excess(g, r, slack, typical) > 1) & point.finite & (kinds != WRONG)
    if bad.any():
        bad &= ~point.is_zero((g, r), BELOW_ROUNDING)
    some = np.flatnonzero(bad)
    if not len(some):
        return
    off = np.abs(g[:, some] - r[:, some])
    is_explained = (off <= _explained_room(point, r)[some]).all(axis=0)
    size = np.abs(r[:, some]) + typical[:, point.leaf[some]]
    is_sure = (off <= TRUSTED * size).all(axis=0) | point.is_zero((r,), 1.0)[some]
    kinds[some] = np.where(is_explained, np.where(is_sure, ROUNDING, NOISE), WRONG)
    for k in np.flatnonzero(~is_explained)[:NUMBERED]:
        c, j = int(np.argmax(off[:, k])), int(some[k])
        found.numbers[j] = Slopes(WRONG, r[c, j], 0.0, g[c, j], r[c, j], r[c, j], False)


def _explained_room(point: Point, rule: np.ndarray) -> np.ndarray:
    """The distance that rounding explains: that of plain AD, or of a rule whose terms cancel.

    A rule may lose some roundings of the largest effect of any element, and where all are as small,
    of the value itself.
    """
    unit = ROUNDINGS["float32"] * float(jnp.finfo(point.of.narrow).eps)
    largest = np.abs(rule * point.scale).max()
    value = np.abs(vectors.to_numpy(point.of.subject.outputs))
    value = (np.abs(point.covectors) @ np.nan_to_num(value, posinf=0.0)).max()
    largest = value if largest <= unit * value else largest
    own = np.fmin(point.rounding(OF_RULE), unit * largest / point.scale)
    return np.fmax(point.rounding(OWN, plain_alone=True), own)


def ratio_hint(numeric: np.ndarray, analytic: np.ndarray) -> str:
    """A remark if analytic/numeric is one number throughout."""
    known = np.isfinite(analytic) & np.isfinite(numeric) & (numeric != 0)
    if len(numeric) < 2 or not known.all():
        return ""
    ratio = analytic / numeric
    middle = float(np.median(ratio))
    if middle == 0 and not ratio.any():
        return "; analytic is 0 throughout"
    if np.ptp(ratio) > SAME_RATIO * min(abs(middle), abs(middle - 1)):
        return ""
    meaning = " (the sign)" if abs(middle + 1) < THOUSANDTH else ""
    digits = 4 if abs(middle - 1) > THOUSANDTH else 8
    return f"; analytic/numeric is {middle:.{digits}g} throughout{meaning}"


def is_near(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two matrices are the same but for a thousandth."""
    return bool(np.allclose(a, b, rtol=THOUSANDTH, atol=THOUSANDTH * vectors.root_mean_square(a)))
