"""The report of a check, for people and for programs."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from clipgrad._arrays import Findings, answers_lookups

# The header, and for failures and for notes these and a line that counts the rest: 25 lines.
SHOWN = 11
SAID = 0.1  # the share of elements not verified that the first line says


class Failure(NamedTuple):
    """One thing that is wrong: the check, the worst element, and what is wrong in words.

    Of values also the numbers of the worst element, and of the elements of its leaf that were found
    wrong the indices and analytic/numeric. `fault` is "formula" or "arithmetic": the rule as it is
    written is wrong, or what is computed is not the rule. The worst element is here in each
    way of computing it: `rule` and `plain` autodiff in float64, `slope` by finite differences, and
    as it was `computed` by the program; NaN where it is not known.
    """

    check: str
    where: str
    detail: str
    numeric: float = np.nan
    error: float = np.nan
    analytic: float = np.nan
    indices: np.ndarray = np.zeros(0, np.int64)
    ratio: np.ndarray = np.zeros(0)
    fault: str = ""
    rule: float = np.nan
    plain: float = np.nan
    slope: float = np.nan
    computed: float = np.nan

    def __str__(self) -> str:
        return f"[{self.check}] {self.where}: {self.detail}"


@answers_lookups("report")
@dataclasses.dataclass(frozen=True)
class GradCheckReport:
    """The outcome of `check_grads`; ``print`` it.

    Example:
      >>> import jax.numpy as jnp
      >>> import clipgrad as cg
      >>> report = cg.check_grads(jnp.sin, (jnp.ones(3),))
      >>> report.ok, report.failures
      (True, ())

    Attributes:
      failures: a record for each fault, with ``check``, ``where``, ``detail`` and, for values,
        ``numeric``, ``error``, ``analytic``, ``indices``, ``ratio``, ``fault``, ``rule``,
        ``plain``, ``slope``, ``computed``.
      notes: a tuple of remarks that are not failures: on kinks, noise and fallbacks.
      not_run: a mapping from each check that did not run to the reason.
      evaluations: the number of evaluations of the function, compiled or not.
      seconds: wall-clock time.
      precision: the precision of the differences, such as "float64".
      devices: the kinds of device that computed the gradient.
      verified: the number of verified input elements.
      at_kinks: the number of further elements at kinks, whose gradient lies between the one-sided
        slopes.
      elements: the number of input elements.
      judged_to: if the function cannot run in float64, the relative error to which the gradient was
        checked, such as 0.1; otherwise 0.
      errors: a mapping from the name of each leaf, ``"args[0]['w']"``, to the largest relative
        error of the computed gradient, compared with the finite difference (or with the rule in
        float64, if both agree). An error is relative to the element or to the root mean square of
        the leaf, whichever is larger; with ``max_relative_error=`` you get Paddle's definition. NaN
        where nothing was measured.
      largest_at: the element with the largest error.

    Guarantees:
      * ``ok`` is true only if something was verified, or lies at a kink, and nothing failed.
      * If more than a tenth of the elements was not verified, the first line says how many.
      * ``not_run`` lists every check that could not run, with the reason.
      * The printed text has at most 25 lines; the attributes have everything.
    """

    failures: tuple[Failure, ...]
    notes: tuple[str, ...]
    not_run: dict[str, str]
    evaluations: int
    seconds: float
    precision: str
    devices: tuple[str, ...]
    verified: int
    at_kinks: int = 0
    elements: int = 0
    judged_to: float = 0.0
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    largest_at: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "failures", Findings(self.failures))

    @property
    def max_relative_error(self) -> float:
        """The largest of ``errors``; NaN if nothing was measured."""
        known = [error for error in self.errors.values() if not np.isnan(error)]
        return max(known, default=float("nan"))

    @property
    def message(self) -> str:
        """The first failure, or a sentence that says what was verified."""
        if self.failures:
            return str(self.failures[0])
        if not self.ok:
            return "nothing was verified"
        kinks = f", {self.at_kinks} lie at kinks" if self.at_kinks else ""
        return f"the gradient is right: {self.verified} of {self.elements} elements verified{kinks}"

    @property
    def ok(self) -> bool:
        """Whether something was verified and nothing failed."""
        return not self.failures and self.verified + self.at_kinks > 0

    def __str__(self) -> str:
        asked = self.elements - self.at_kinks
        missing = 1 - self.verified / asked if asked else 0.0
        word = "FAILED" if not self.ok else "passed"
        word += f", checked to {percent(self.judged_to)}" if self.judged_to else ""
        word += f", {missing:.0%} not verified" if self.ok and missing > SAID else ""
        word += f", {self.at_kinks} at kinks" if self.ok and self.at_kinks else ""
        alone = "" if self.precision in ("float64", "no precision") else " alone"
        head = (
            f"gradient check {word} ({self.evaluations} evaluations, {self.seconds:.2f} s, "
            f"differences in {self.precision}{alone}, devices {', '.join(self.devices) or 'none'})"
        )
        largest = self.max_relative_error
        errors = [] if np.isnan(largest) else [f"largest error {largest:.1g}, at {self.largest_at}"]
        lines = [str(failure) for failure in self.failures]
        notes = [f"note: {note}" for note in self.notes]
        reasons = dict.fromkeys(self.not_run.values())
        notes += [
            f"not run: {', '.join(c for c, r in self.not_run.items() if r == reason)} ({reason})"
            for reason in reasons
        ]
        parts = _shortened(lines, "failures"), _shortened(notes, "notes", SHOWN - len(errors))
        return "\n  ".join([head, *errors, *parts[0], *parts[1]])


def percent(part: float) -> str:
    """A part in percent, in two digits."""
    return f"{100 * part:.0f}%" if part >= 0.1 else f"{100 * part:.2g}%"


class GradCheckError(AssertionError):
    """Raised by `check_grads` when the gradient is wrong; the text is the report.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import clipgrad as cg
      >>> double = jax.custom_vjp(lambda x: 2 * x)
      >>> double.defvjp(lambda x: (2 * x, None), lambda _, g: (g,))
      >>> try:
      ...     cg.check_grads(double, (jnp.ones(3),))
      ... except cg.GradCheckError as error:
      ...     print(error.report.failures[0].check)
      value

    Attributes:
      report: the `GradCheckReport`.
    """

    def __init__(self, report: GradCheckReport):
        super().__init__(str(report))
        self.report = report


def _shortened(lines: list[str], word: str, most: int = SHOWN) -> list[str]:
    shown = [" ".join(line.split("\n")) for line in lines[:most]]
    left = len(lines) - len(shown)
    return [*shown, f"... and {left} more {word} (see report.{word})"] if left else shown
