"""The findings of a check while it runs."""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from clipgrad._check.checked_point import CheckedPoint
from clipgrad._check.options import Options
from clipgrad._check.points import Point
from clipgrad._check.report import Failure, GradCheckReport
from clipgrad._check.tolerances import LEAST_VERIFIED
from clipgrad._check.verdict import KINK, NOISE, UNDECIDED, VERIFIED
from clipgrad._errors import LONG_CALL, note_of_time

REASON = 200  # characters of a note, which is whole below


@dataclasses.dataclass
class Log:
    """The findings so far; `kinds` are the verdicts on the elements at the given point."""

    options: Options
    cotangent: Any = None  # the user's
    failures: list[Failure] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    not_run: dict[str, str] = dataclasses.field(default_factory=dict)
    evaluations: int = 0
    kinds: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int8))
    are_zero: list[bool] = dataclasses.field(default_factory=list)  # gradients at each point
    precision: str = "no precision"
    judged_to: float = 0.0
    errors: dict[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
    devices: list[str] = dataclasses.field(default_factory=list)

    def fail(self, failures: Sequence[Failure]) -> None:
        """Record failures, but not of checks that are switched off."""
        self.failures += [f for f in failures if f.check not in self.options.skip]

    def note(self, text: str) -> None:
        """Record a note once."""
        self.notes += [] if text in self.notes else [text]

    def has_time(self, name: str) -> bool:
        """Whether there is time left for a check; notes that it was not run if there is none."""
        if is_late := self.options.is_late():
            self.not_run[name] = f"the time budget of {self.options.time_budget:g} s is spent"
        return not is_late

    def measured(self, point: Point) -> None:
        """Record the gradients that were computed at a point."""
        self.are_zero.append(not point.computed.any())
        self.evaluations += 1 + sum(
            g is not None for g in {point.witnesses.plain, point.witnesses.rule}
        )
        for note in point.notes:
            self.note(note)

    def first(self, checked: CheckedPoint) -> None:
        """Record the verdict at the point that the user passed."""
        self.kinds, self.judged_to = checked.kinds, checked.evidence.judged_to
        names = checked.point.witnesses.function.names
        self.errors = dict(zip(names, checked.errors(), strict=True))
        self.fail(checked.failures())
        self.notes += checked.notes()

    def seen_elsewhere(self, checked: CheckedPoint) -> None:
        """What was noise at the first point counts as verified where it is so at another one."""
        is_seen = (self.kinds == NOISE) & np.isin(checked.kinds, VERIFIED)
        self.kinds = np.where(is_seen, checked.kinds, self.kinds)

    def _note_of_time(self) -> list[str]:
        """What to write where a check without a limit took long."""
        if self.options.time_budget is not None:
            return []
        limit = f"with time_budget={LONG_CALL}, it stops after {LONG_CALL} s"
        advice = f"{limit}, and what is left then counts as not verified"
        return note_of_time("check", self.options.seconds, advice)

    def report(self) -> GradCheckReport:
        """The report; too few verified elements are a failure."""
        verified = int(np.isin(self.kinds, VERIFIED).sum())
        at_kinks, elements = int((self.kinds == KINK).sum()), self.kinds.size
        # What is undecided is JAX's own affair.
        asked = elements - at_kinks - int((self.kinds == UNDECIDED).sum())
        share = verified / asked if asked else 1.0
        options = self.options
        lines = dict.fromkeys([*self.notes, *self.not_run.values()])
        reasons = "; ".join(textwrap.shorten(line, REASON, placeholder=" ...") for line in lines)
        least = LEAST_VERIFIED if options.min_verified is None else options.min_verified
        if not self.failures and not verified + at_kinks:
            detail = f"nothing was verified ({reasons})"
            self.failures.append(Failure("value", "all inputs", detail))
        elif not self.failures and share < least:
            detail = f"{share:.0%} of the elements were verified, of {least:.0%} at least"
            self.failures.append(Failure("value", "all inputs", f"{detail} ({reasons})"))
        return GradCheckReport(
            # Those first that explain others: what is random is wrong in many ways.
            failures=tuple(sorted(self.failures, key=lambda f: f.check != "determinism")),
            notes=(*self.notes, *self._note_of_time()),
            not_run=self.not_run,
            evaluations=self.evaluations,
            seconds=self.options.seconds,
            precision=self.precision,
            devices=tuple(self.devices),
            verified=verified,
            at_kinks=at_kinks,
            elements=elements,
            judged_to=self.judged_to,
            errors={name: error for name, (error, _) in self.errors.items()},
            largest_at=max(self.errors.values(), key=_size, default=(np.nan, ""))[1],
        )


def _size(error: tuple[float, str]) -> float:
    return -1.0 if np.isnan(error[0]) else error[0]
