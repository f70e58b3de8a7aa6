"""The verdict at one point, and what a report says of it: notes, failures, errors."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from clipgrad._check import vectors
from clipgrad._check.evidence import Evidence
from clipgrad._check.points import Point
from clipgrad._check.report import Failure
from clipgrad._check.tolerances import CONSTANT, SAME_RATIO, THOUSANDTH, precision
from clipgrad._check.verdict import (
    DISPUTED,
    FAILED,
    KINK,
    NOISE,
    NOTES,
    ROUNDING,
    UNDECIDED,
    UNSEEN,
    Along,
    Slopes,
    told_apart,
)
from clipgrad._check.wrong_rules import (
    lines_of_rules,
    lines_to_blame,
    named_rules,
    of_arithmetic,
    of_formula,
)

LOOPS = '; a loop stops by its numbers: to allow for that write tolerance=..., or skip="linearity"'
DISPUTES = (
    "; disputed: plain autodiff has the gradient of the rule there, but the function is smooth and "
    "its finite differences are others: if it is not meant to be differentiated there, choose "
    "another point"
)
NEITHER = (
    "; disputed: the function is smooth there, and its finite differences agree neither with the "
    "rule nor with plain autodiff"
)
OF_JAX = (
    "; disputed: JAX's derivative of its own operations is wrong there, the function is smooth and "
    "its finite differences are others: choose another point, or write a rule"
)
STAIRCASE = (
    "; the function is flat there (piecewise constant?), so its finite differences are 0 "
    "and cannot tell whether a straight-through rule is right: check the rule on its surrogate, "
    "the function whose gradient it has"
)


@dataclasses.dataclass(frozen=True, eq=False)
class CheckedPoint:
    """The verdict at a point, on the formula and on its arithmetic, and what a report says of it.

    Attributes:
      point: the point.
      evidence: what slopes say there.
      formula: of each element the kind of the rule as it is written.
      arithmetic: the kind of the gradient as it was computed, against that rule.
      is_paddles: whether the formula is judged by Paddle's criterion.
    """

    point: Point
    evidence: Evidence
    formula: np.ndarray
    arithmetic: np.ndarray
    is_paddles: bool = False

    @property
    def kinds(self) -> np.ndarray:
        """The more severe of both verdicts."""
        return np.maximum(self.formula, self.arithmetic)

    @property
    def exact(self) -> np.ndarray | None:
        """The gradient in float64 as it should be; None where it is not known at each element."""
        point = self.point
        if point.rule is None or point.plain is None:
            return point.plain if point.rule is None else point.rule
        return np.where(np.isin(self.formula, FAILED), point.plain, point.rule)

    def errors(self) -> list[tuple[float, str]]:
        """Of each leaf the largest relative error of an element, of itself or its leaf, and where.

        Where the gradient is known along directions alone it is that of the leaf.
        """
        areas = zip(self.point.witnesses.function.names, self.point.ranges, strict=True)
        return [self._error(name, start, stop) for name, (start, stop) in areas]

    def _error(self, name: str, start: int, stop: int) -> tuple[float, str]:
        exact, element = self.exact, self.point.witnesses.function.element
        moved = {j: n for j, n in self.evidence.numbers.items() if start <= j < stop}
        failed = [j for j, n in moved.items() if self.formula[j] in FAILED and n.kind != KINK]
        if exact is not None and not self.is_paddles:
            errors = self._errors_of(exact[:, start:stop], start, stop)
            errors[[j - start for j in failed]] = [relative_error(moved[j]) for j in failed]
            k = int(np.argmax(errors))
            return float(errors[k]), element(start + k)
        parts = [part for j, part in self.evidence.off.items() if start <= j < stop]
        if moved and (failed or not parts):
            k = max(moved, key=lambda j: relative_error(moved[j]))
            return relative_error(moved[k]), element(k)
        return max(parts, default=np.nan), name

    def _errors_of(self, exact: np.ndarray, start: int, stop: int) -> np.ndarray:
        """The largest error of each element of a leaf, in parts of it or of the leaf's typical."""
        off = np.abs(self.point.computed[:, start:stop] - exact)
        typical = np.sqrt(np.mean(exact**2, axis=1, keepdims=True))
        size = np.fmax(np.abs(exact), typical)
        errors = (off / np.where(size > 0, size, 1.0)).max(axis=0)
        return np.where(np.isfinite(errors), errors, np.inf)

    def without_disputes(self) -> "CheckedPoint":
        """The verdict at a point that the user did not choose: what is disputed there is a note."""
        formula = np.where(self.formula == DISPUTED, np.int8(UNDECIDED), self.formula)
        return dataclasses.replace(self, formula=formula)

    def notes(self, where: str = "") -> list[str]:
        """One note for each leaf and kind that has one."""
        names, notes = self.point.witnesses.function.names, []
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
        lost = some[self.arithmetic[some] == kind]
        if len(lost):
            apart = self._apart(self.point.judged, self.point.gradient, lost)
            numbers = apart.worst[:2]
            texts = "{} in float64, {} as computed".format(*told_apart(*numbers))
            return f" (worst: {texts}, off by {_part(*numbers)})"
        moved = [n for j in some if (n := self.evidence.numbers.get(int(j)))]
        if moved:
            worst = max(moved, key=lambda n: abs(n.numeric - n.analytic))
            return f" (worst: {_difference_and_gradient(worst)})"
        start = max((s for s in self.evidence.leaves if s <= some[0]), default=None)
        if start is None:
            return ""
        return f" (along a direction: {_difference_and_gradient(self.evidence.leaves[start])})"

    def failures(self, where: str = "", check: str = "value") -> list[Failure]:
        """One failure for each leaf with wrong elements: of the formula, or else its arithmetic."""
        failures = []
        for start, stop in self.point.ranges:
            if len(wrong := self._failed(self.formula, start, stop)):
                failures.append(self._of_formula(start, stop, wrong))
            elif len(wrong := self._failed(self.arithmetic, start, stop)):
                failures.append(self._of_arithmetic(start, stop, wrong))
        loops = LOOPS if self.point.witnesses.loops else ""
        return [f._replace(check=check, detail=f"{where}{f.detail}{loops}") for f in failures]

    def failures_of_device(self) -> list[Failure]:
        """One failure for each leaf whose gradient another device computed wrong."""
        failures = []
        for start, stop in self.point.ranges:
            wrong = self._failed(self.kinds, start, stop)
            if len(wrong):
                numbers = self._by_slopes(
                    self._apart(self.point.judged, self.point.gradient, wrong)
                )
                texts = "worst: numeric {}, analytic {}".format(*told_apart(*numbers.worst[:2]))
                detail = f"{_count(wrong, start, stop)}; {texts}{numbers.hint}"
                failures.append(self._failure(start, numbers, detail))
        return failures

    def _failed(self, kinds: np.ndarray, start: int, stop: int) -> np.ndarray:
        return np.flatnonzero(np.isin(kinds[start:stop], FAILED)) + start

    def _of_formula(self, start: int, stop: int, wrong: np.ndarray) -> Failure:
        leaf = self.evidence.leaves.get(start)
        if leaf is not None and not any(int(j) in self.evidence.numbers for j in wrong):
            return self._of_leaf(start, stop, wrong)
        point = self.point
        plain = point.judged if point.plain is None else point.plain
        numbers = self._by_slopes(self._apart(plain, point.judged, wrong))
        error, (numeric, analytic) = np.nan, told_apart(*numbers.worst[:2])
        text = f"numeric {numeric}"
        if slopes := self.evidence.numbers.get(numbers.element):
            error, text = slopes.error, f"{text} +- {slopes.error:.0e}"
            sides = f"kink: slopes {slopes.behind:.7g} and {slopes.ahead:.7g}"
            text = sides if slopes.is_kink else text
        is_seen = (self.formula[start:stop] != UNSEEN)[point.finite[start:stop]].all()
        hint = numbers.hint or self._layout_hint(start, stop)
        detail = (
            f"{'' if is_seen else 'at least '}{_count(wrong, start, stop)}; worst: {text}, "
            f"analytic {analytic}{hint}{self._reason(numbers)}"
        )
        return self._failure(start, numbers, detail, "formula", float(error))

    def _of_leaf(self, start: int, stop: int, wrong: np.ndarray) -> Failure:
        """The failure of a leaf as a whole, where slopes of single elements tell nothing."""
        leaf = self.evidence.leaves[start]
        numeric, analytic = leaf.numeric, leaf.analytic
        ratio = f"; analytic/numeric is about {analytic / numeric:.2g}" if numeric else ""
        numbers = Numbers(wrong[:1], np.full(1, numeric), np.full(1, analytic), np.zeros(1, int))
        texts = told_apart(numeric, analytic)
        return Failure(
            "value",
            self.point.witnesses.function.names[self.point.ranges.index((start, stop))],
            f"{_count(wrong, start, stop)}, moved together: numeric {texts[0]} +- {leaf.error:.0e} "
            f"along a direction, analytic {texts[1]}{ratio}{self._reason(numbers)}",
            numeric, leaf.error, analytic, wrong - start, fault="formula",
        )  # fmt: skip

    def _of_arithmetic(self, start: int, stop: int, wrong: np.ndarray) -> Failure:
        numbers = self._apart(self.point.judged, self.point.gradient, wrong)
        numeric, analytic, _ = numbers.worst
        exact, off = told_apart(numeric, analytic)
        detail = (
            f"{_count(wrong, start, stop)}; the formula is right, its arithmetic is not: as "
            f"computed in {self.point.witnesses.narrow} it is off by {_part(numeric, analytic)}; "
            f"worst: numeric {exact} in float64, analytic {off}{numbers.hint}; to allow for that "
            "write tolerance=..."
        )
        detail += self._rules_to_blame(wrong, self.point.computed, of_arithmetic)
        return self._failure(start, numbers, detail, "arithmetic", 0.0)

    def _apart(self, expected: np.ndarray, gradient: np.ndarray, some: np.ndarray) -> "Numbers":
        """What some elements should be and what they are, for the cotangent that tells most."""
        row = np.argmax(np.abs(expected[:, some] - gradient[:, some]), axis=0)
        return Numbers(some, expected[row, some], gradient[row, some], row)

    def _by_slopes(self, numbers: "Numbers") -> "Numbers":
        """The numbers of the elements that were moved by themselves, where some were."""
        elements, *columns = (column.copy() for column in numbers[:4])
        is_moved = np.asarray([int(j) in self.evidence.numbers for j in elements])
        for k in np.flatnonzero(is_moved):
            slopes = self.evidence.numbers[int(elements[k])]
            for column, number in zip(
                columns, (slopes.numeric, slopes.analytic, slopes.row), strict=True
            ):
                column[k] = number
        return Numbers._make([elements, *columns, is_moved])

    def _reason(self, numbers: "Numbers") -> str:
        """The cause of a wrong formula, or what to do, and the lines of the rules."""
        point, text, wrong = self.point, "", numbers.elements
        is_disputed, is_ruled = (self.formula[wrong] == DISPUTED).all(), point.witnesses.is_ruled
        slopes = self.evidence.numbers.get(numbers.element)
        is_flat = slopes and slopes.ahead == slopes.behind == 0 and not numbers.numeric.any()
        if is_disputed and not is_ruled:
            return OF_JAX
        if is_disputed:
            text = DISPUTES if self._is_plain_ads(wrong) else NEITHER
        elif is_flat and is_ruled:
            text = STAIRCASE
        elif self._is_by_a_constant(numbers):
            most = 2 * np.max(np.abs(numbers.ratio - 1))
            text = (
                "; if a constant of the rule is rounded otherwise than that of the function, "
                f"write tolerance={most:.1g}"
            )
        return text + self._rules_to_blame(wrong, point.plain, of_formula)

    def _rules_to_blame(self, wrong: np.ndarray, other: np.ndarray | None, blames: Any) -> str:
        """The lines of the rules that make a gradient another one than the rule at elements."""
        point = self.point
        function, exact = point.witnesses.function, point.rule
        if exact is None or other is None:
            return named_rules(lines_of_rules(function))
        is_to_blame = blames(point.xs, point.covectors, wrong, exact, other)
        return named_rules(lines_to_blame(function, is_to_blame))

    def _is_plain_ads(self, wrong: np.ndarray) -> bool:
        """Whether plain AD has the gradient of the rule at some elements."""
        point = self.point
        if point.rule is None or point.plain is None:
            return True
        return is_near(point.rule[:, wrong], point.plain[:, wrong])

    def _is_by_a_constant(self, numbers: "Numbers") -> bool:
        """Whether a rule in half precision is off by some roundings of a constant alone."""
        narrow = self.point.witnesses.narrow
        if not precision(narrow).is_coarse or not numbers.numeric.all():
            return False
        off = np.abs(numbers.ratio - 1)
        return bool((off <= CONSTANT * float(jnp.finfo(narrow).eps)).all())

    def _failure(
        self, start: int, numbers: "Numbers", detail: str, fault: str = "", error: float = 0.0
    ) -> Failure:
        """A failure with the numbers of the worst element by each witness, of one cotangent."""
        point, j = self.point, numbers.element
        slopes = self.evidence.numbers.get(j)
        numeric, analytic, row = numbers.worst
        at = lambda gradient: np.nan if gradient is None else float(gradient[row, j])  # noqa: E731
        return Failure(
            check="value",
            where=point.witnesses.function.element(j),
            detail=detail,
            numeric=float(numeric),
            error=error,
            analytic=float(analytic),
            indices=numbers.elements - start,
            ratio=numbers.ratio,
            fault=fault,
            rule=at(point.rule),
            plain=at(point.plain),
            slope=np.nan if slopes is None or slopes.row != row else float(slopes.slope),
            computed=at(point.computed),
        )

    def _layout_hint(self, start: int, stop: int) -> str:
        """A remark if a square leaf's gradient is the transpose of plain AD's."""
        point = self.point
        leaf = point.xs[point.ranges.index((start, stop))]
        is_square = leaf.ndim == 2 and leaf.shape[0] == leaf.shape[1] > 1
        if point.plain is None or not is_square or leaf.size != stop - start:
            return ""
        gradients = (g[0, start:stop].reshape(leaf.shape) for g in (point.gradient, point.plain))
        computed, plain = gradients
        is_same = is_near(computed, plain) or not is_near(computed.T, plain)
        return "" if is_same else "; analytic is the transpose of numeric"


class Numbers(NamedTuple):
    """For each of some wrong elements what it should be, what it is, and for which cotangent.

    `is_moved` tells which of them were moved by themselves, so that slopes tell the first.
    """

    elements: np.ndarray
    numeric: np.ndarray
    analytic: np.ndarray
    row: np.ndarray
    is_moved: Any = False

    @property
    def k(self) -> int:
        """The worst, of those that were moved if some were."""
        off = np.nan_to_num(np.abs(self.numeric - self.analytic), nan=0.0, posinf=0.0)
        return int(np.argmax(np.where(self.is_moved | ~np.any(self.is_moved), off, -1.0)))

    @property
    def element(self) -> int:
        """The worst element."""
        return int(self.elements[self.k])

    @property
    def worst(self) -> tuple[Any, Any, int]:
        """What the worst element should be, what it is, and for which cotangent."""
        return self.numeric[self.k], self.analytic[self.k], int(self.row[self.k])

    @property
    def ratio(self) -> np.ndarray:
        """What they are, in parts of what they should be."""
        return self.analytic / np.where(self.numeric == 0, np.nan, self.numeric)

    @property
    def hint(self) -> str:
        """A remark if analytic/numeric is one number throughout."""
        return ratio_hint(self.numeric, self.analytic)


def _difference_and_gradient(looked: Slopes | Along) -> str:
    numeric, error, analytic = looked.numeric, looked.error, looked.analytic
    return f"finite difference {numeric:.4g} +- {error:.1g}, gradient {analytic:.4g}"


def _count(wrong: np.ndarray, start: int, stop: int) -> str:
    return f"{len(wrong)} of {stop - start} elements wrong"


def relative_error(numbers: Slopes) -> float:
    """Paddle's relative error: absolute where the slope is less than a thousandth."""
    size = 1.0 if abs(numbers.numeric) < THOUSANDTH else abs(numbers.numeric)
    return float(abs(numbers.numeric - numbers.analytic) / size)


def _part(numeric: float, analytic: float) -> str:
    """The error of a computed number, as a part of the number that it should be."""
    off = abs(numeric - analytic)
    return f"{off / abs(numeric):.2%}" if numeric else f"{off:.2g}"


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
