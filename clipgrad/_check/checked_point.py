"""The verdict at one point, and what a report says of it: notes, failures, errors."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from clipgrad._check import vectors
from clipgrad._check.points import Point
from clipgrad._check.report import Failure
from clipgrad._check.rules import lines_of_wrong_rules
from clipgrad._check.verdict import (
    DISPUTED,
    HALVES,
    NOISE,
    NOTES,
    ROUNDING,
    UNSEEN,
    WRONG,
    Slopes,
    told_apart,
)

# Ratios that spread this much, relative to what sets them apart from 1 and from 0, are one number:
# results rounded to bfloat16 spread by 0.4 %, so a missing factor of 2 is still seen there.
SAME_RATIO = 0.01
THOUSANDTH = 1e-3
LOOPS = '; a loop stops by its numbers: to allow for that write tolerance=..., or skip="linearity"'
CONSTANT = 8.0  # roundings that constants which are rounded apart may make of a formula
DISPUTES = (
    "; disputed: plain autodiff has the gradient of the rule there, and the function, which is "
    "smooth, has other slopes: where it is not meant to be differentiated, choose another point"
)
OF_JAX = (
    "; disputed: JAX's derivative of its own operations is wrong there, the function is smooth and "
    "has other slopes: choose another point, or write a rule"
)
STAIRCASE = (
    "; the function is flat there (piecewise constant?), so slopes cannot judge a straight-through "
    "rule: check the rule on its surrogate, the function whose gradient it has"
)


class Verdicts(NamedTuple):
    """The answers to one question: the kind of each element, and the numbers of some."""

    kinds: np.ndarray
    numbers: Mapping[int, Slopes]


@dataclasses.dataclass(frozen=True)
class CheckedPoint:
    """The verdict at a point: on the formula, and on its arithmetic.

    Attributes:
      disputed: the elements where neither the gradient nor plain AD has the function's slope.
      together: of a leaf that is judged along directions, by its start: the slope along one of
        them, its error, and the gradient along it.
    """

    point: Point
    formula: Verdicts
    arithmetic: Verdicts
    disputed: np.ndarray
    together: Mapping[int, tuple[float, float, float]] = dataclasses.field(default_factory=dict)
    off: Mapping[int, float] = dataclasses.field(default_factory=dict)
    is_paddles: bool = False

    @property
    def exact(self) -> np.ndarray | None:
        """The gradient in float64 as it should be; None where it is not known at each element."""
        point = self.point
        if point.rule is None:
            return point.plain
        is_wrong = self.formula.kinds == WRONG
        return point.rule if point.plain is None else np.where(is_wrong, point.plain, point.rule)

    def errors(self) -> list[tuple[float, str]]:
        """Of each leaf the largest relative error of an element, of itself or its leaf, and where.

        Where the gradient is known along directions alone it is that of the leaf.
        """
        areas = zip(self.point.of.function.names, self.point.ranges, strict=True)
        return [self._error(name, start, stop) for name, (start, stop) in areas]

    def _error(self, name: str, start: int, stop: int) -> tuple[float, str]:
        exact, element = self.exact, self.point.of.function.element
        looked = {j: n for j, n in self.formula.numbers.items() if start <= j < stop}
        if exact is not None and not self.is_paddles:
            errors = self._errors_of(exact[:, start:stop], start, stop)
            for j, known in looked.items():
                if known.kind == WRONG:
                    errors[j - start] = relative_error(known)
            k = int(np.argmax(errors))
            return float(errors[k]), element(start + k)
        parts = [part for j, part in self.off.items() if start <= j < stop]
        if looked and (not parts or any(n.kind == WRONG for n in looked.values())):
            k = max(looked, key=lambda j: relative_error(looked[j]))
            return relative_error(looked[k]), element(k)
        return max(parts, default=np.nan), name

    def _errors_of(self, exact: np.ndarray, start: int, stop: int) -> np.ndarray:
        """The largest error of each element of a leaf, in parts of it or of the leaf's typical."""
        off = np.abs(self.point.computed[:, start:stop] - exact)
        typical = np.sqrt(np.mean(exact**2, axis=1, keepdims=True))
        size = np.fmax(np.abs(exact), typical)
        errors = (off / np.where(size > 0, size, 1.0)).max(axis=0)
        return np.where(np.isfinite(errors), errors, np.inf)

    @property
    def kinds(self) -> np.ndarray:
        """The more severe of both verdicts."""
        return np.maximum(self.formula.kinds, self.arithmetic.kinds)

    def without_disputes(self) -> "CheckedPoint":
        """The verdict at a point that the user did not choose: what is disputed there is a note."""
        kinds = np.where(self.disputed, np.int8(DISPUTED), self.formula.kinds)
        return dataclasses.replace(self, formula=self.formula._replace(kinds=kinds))

    def notes(self, where: str = "") -> list[str]:
        """One note for each leaf and kind that has one."""
        names, notes = self.point.of.function.names, []
        for name, (start, stop) in zip(names, self.point.ranges, strict=True):
            for kind, text in NOTES.items():
                some = np.flatnonzero(self.kinds[start:stop] == kind) + start
                if len(some):
                    count = f"{name}: {where}{len(some)} of {stop - start} elements"
                    notes.append(f"{count} {text}{self._numbers_of(some, kind)}")
        return notes

    def _numbers_of(self, some: np.ndarray, kind: int) -> str:
        """The worst of some elements, in numbers, where they are known."""
        if kind not in (ROUNDING, NOISE):
            return ""
        is_off = self.arithmetic.kinds[some] == kind
        if is_off.any():
            known = [
                self.arithmetic.numbers[int(j)]
                for j in some[is_off]
                if j in self.arithmetic.numbers
            ]
            if not known:
                return ""
            worst = max(known, key=lambda n: abs(n.numeric - n.analytic))
            numbers = told_apart(worst.numeric, worst.analytic)
            texts = f"{numbers[0]} in float64, {numbers[1]} as computed"
            return f" (worst: {texts}, off by {_part(worst)})"
        known = [n for j in some if (n := self.formula.numbers.get(int(j)))]
        if not known:
            start = max((s for s in self.together if s <= some[0]), default=None)
            if start is None:
                return ""
            numeric, error, analytic = self.together[start]
            return (
                f" (along a direction: slope {numeric:.4g} +- {error:.1g}, gradient {analytic:.4g})"
            )
        worst = max(known, key=lambda n: abs(n.numeric - n.analytic))
        numbers = f"slope {worst.numeric:.4g} +- {worst.error:.1g}, gradient {worst.analytic:.4g}"
        return f" (worst: {numbers})"

    def failures(self, where: str = "", check: str = "value") -> list[Failure]:
        """One failure for each leaf with wrong elements: of the formula, or else its arithmetic."""
        found = []
        for start, stop in self.point.ranges:
            for verdicts, describe in (
                (self.formula, self._of_formula),
                (self.arithmetic, self._of_arithmetic),
            ):
                wrong = np.flatnonzero(verdicts.kinds[start:stop] == WRONG) + start
                if len(wrong):
                    failure = describe(start, stop, wrong)
                    loops = LOOPS if self.point.of.loops else ""
                    detail = f"{where}{failure.detail}{loops}"
                    found.append(failure._replace(check=check, detail=detail))
                    break
        return found

    def _of_formula(self, start: int, stop: int, wrong: np.ndarray) -> Failure:
        if start in self.together and not any(int(j) in self.formula.numbers for j in wrong):
            return self._together(start, stop, wrong)
        numeric, analytic = self._both(wrong)
        k = self._worst(wrong, numeric, analytic, self.formula)
        error, (slope, gradient) = np.nan, told_apart(numeric[k], analytic[k])
        text = f"numeric {slope}"
        if known := self.formula.numbers.get(int(wrong[k])):
            error, text = known.error, f"{text} +- {known.error:.0e}"
            sides = f"kink: slopes {known.behind:.7g} and {known.ahead:.7g}"
            text = sides if known.is_kink else text
        is_exact = not (self.formula.kinds[start:stop] == UNSEEN)[
            self.point.finite[start:stop]
        ].any()
        least = "" if is_exact else "at least "
        hint = ratio_hint(numeric, analytic) or self._layout_hint(start, stop)
        reason = self._reason(wrong, known, numeric, analytic)
        return self._failure(
            start, wrong, k, numeric, analytic, float(error), "formula",
            f"{least}{len(wrong)} of {stop - start} elements wrong; worst: {text}, "
            f"analytic {gradient}{hint}{reason}",
        )  # fmt: skip

    def _reason(self, wrong, known: Slopes | None, numeric, analytic) -> str:
        """The cause of a wrong formula, or what to do, and the lines of the rules."""
        point, text = self.point, ""
        is_flat = known and known.ahead == known.behind == 0 and not numeric.any()
        if self.disputed[wrong].all():
            text = DISPUTES if point.of.is_ruled else OF_JAX
        elif is_flat and point.of.is_ruled:
            text = STAIRCASE
        elif self._is_by_a_constant(numeric, analytic):
            text = (
                f"; if a constant of the rule is rounded otherwise than that of the function, "
                f"write tolerance={2 * np.max(np.abs(analytic / numeric - 1)):.1g}"
            )
        if self.disputed[wrong].all() and not point.of.is_ruled:
            return text
        exact = None if point.rule is None or point.plain is None else (point.rule, point.plain)
        lines = lines_of_wrong_rules(point.of.function, point.xs, point.covectors, wrong, exact)
        one = "rule: " if len(lines) == 1 else "rules: "
        return f"{text}; {one}{', '.join(lines)}" if lines else text

    def _is_by_a_constant(self, numeric: np.ndarray, analytic: np.ndarray) -> bool:
        """Whether a rule in half precision is off by some roundings of a constant alone."""
        narrow = self.point.of.narrow
        if narrow not in HALVES or not numeric.all():
            return False
        off = np.abs(analytic / numeric - 1)
        return bool((off <= CONSTANT * float(jnp.finfo(narrow).eps)).all())

    def _of_arithmetic(self, start: int, stop: int, wrong: np.ndarray) -> Failure:
        point, narrow = self.point, self.point.of.narrow
        rule, computed = point.gradient if point.rule is None else point.rule, point.gradient
        row = np.argmax(np.abs(rule[:, wrong] - computed[:, wrong]), axis=0)
        numeric, analytic = rule[row, wrong].copy(), computed[row, wrong].copy()
        k = self._worst(wrong, numeric, analytic, self.arithmetic)
        part = _part(Slopes(WRONG, numeric[k], 0.0, analytic[k], 0.0, 0.0, False))
        exact, off = told_apart(numeric[k], analytic[k])
        hint = ratio_hint(numeric, analytic)
        return self._failure(
            start, wrong, k, numeric, analytic, 0.0, "arithmetic",
            f"{len(wrong)} of {stop - start} elements wrong; the formula is right, its arithmetic "
            f"is not: as computed in {narrow} it is off by {part}; worst: numeric {exact} in "
            f"float64, analytic {off}{hint}; to allow for that write tolerance=...",
        )  # fmt: skip

    def of_device(self, start: int, stop: int, wrong: np.ndarray) -> Failure:
        """The failure of a leaf whose gradient another device computed."""
        rule, computed = self.exact, self.point.gradient
        rule = computed if rule is None else rule
        row = np.argmax(np.abs(rule[:, wrong] - computed[:, wrong]), axis=0)
        numeric, analytic = rule[row, wrong].copy(), computed[row, wrong].copy()
        for k, j in enumerate(wrong):
            if known := self.formula.numbers.get(int(j)):
                numeric[k], analytic[k] = known.numeric, known.analytic
        k = self._worst(wrong, numeric, analytic, self.formula)
        texts = told_apart(numeric[k], analytic[k])
        return self._failure(
            start, wrong, k, numeric, analytic, 0.0, "",
            f"{len(wrong)} of {stop - start} elements wrong; worst: numeric {texts[0]}, analytic "
            f"{texts[1]}{ratio_hint(numeric, analytic)}",
        )  # fmt: skip

    def _together(self, start: int, stop: int, wrong: np.ndarray) -> Failure:
        """The failure of a leaf as a whole, where slopes of single elements tell nothing."""
        numeric, error, analytic = self.together[start]
        ratio = f"; analytic/numeric is about {analytic / numeric:.2g}" if numeric else ""
        reason = self._reason(wrong, None, np.full(1, numeric), np.full(1, analytic))
        texts = told_apart(numeric, analytic)
        return Failure(
            "value",
            self.point.of.function.names[self.point.ranges.index((start, stop))],
            f"{len(wrong)} of {stop - start} elements wrong, moved together: numeric {texts[0]} +- "
            f"{error:.0e} along a direction, analytic {texts[1]}{ratio}{reason}",
            numeric, error, analytic, wrong - start, fault="formula",
        )  # fmt: skip

    def _worst(self, wrong, numeric, analytic, verdicts: Verdicts) -> int:
        off = np.abs(numeric - analytic)
        is_known = np.isin(wrong, [*verdicts.numbers])
        off = np.where(is_known | ~is_known.any(), np.where(np.isfinite(off), off, 0.0), -1.0)
        return int(np.argmax(off))

    def _failure(self, start, wrong, k, numeric, analytic, error, fault, detail) -> Failure:
        point, j = self.point, int(wrong[k])
        known = self.formula.numbers.get(j)
        row = int(np.argmax(np.abs(point.gradient[:, j])))
        at = lambda gradient: np.nan if gradient is None else float(gradient[row, j])  # noqa: E731
        return Failure(
            check="value",
            where=point.of.function.element(j),
            detail=detail,
            numeric=float(numeric[k]),
            error=error,
            analytic=float(analytic[k]),
            indices=wrong - start,
            ratio=analytic / np.where(numeric == 0, np.nan, numeric),
            fault=fault,
            rule=at(point.rule),
            plain=at(point.plain),
            slope=np.nan if known is None else float(known.numeric),
            computed=at(point.computed),
        )

    def _both(self, wrong: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers that elements should be, by slopes or else plain AD, and those they are."""
        point = self.point
        judged = point.gradient if point.rule is None else point.rule
        other = judged if point.plain is None else point.plain
        row = np.argmax(np.abs(judged[:, wrong] - other[:, wrong]), axis=0)
        numeric, analytic = other[row, wrong].copy(), judged[row, wrong].copy()
        for k, j in enumerate(wrong):
            if known := self.formula.numbers.get(int(j)):
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


def relative_error(numbers: Slopes) -> float:
    """Paddle's relative error: absolute where the slope is less than a thousandth."""
    size = 1.0 if abs(numbers.numeric) < THOUSANDTH else abs(numbers.numeric)
    return float(abs(numbers.numeric - numbers.analytic) / size)


def _part(numbers: Slopes) -> str:
    """The error of a computed number, as a part of the number that it should be."""
    off = abs(numbers.numeric - numbers.analytic)
    return f"{off / abs(numbers.numeric):.2%}" if numbers.numeric else f"{off:.2g}"


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
