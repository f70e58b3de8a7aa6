"""One run of a check: the order of its parts, and the log they write."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from clipgrad._check import behavior
from clipgrad._check.behavior import Case, first_line
from clipgrad._check.compare import Comparison
from clipgrad._check.evaluation import Chosen
from clipgrad._check.log import Log
from clipgrad._check.options import Options
from clipgrad._check.problem import Problem
from clipgrad._check.pullback import Differentiate, PullBack
from clipgrad._check.reference import Reference
from clipgrad._check.report import Failure
from clipgrad._check.search import search
from clipgrad._check.second import check_second
from clipgrad._check.session import Session
from clipgrad._check.ties import check_ties
from clipgrad._check.values import told, undecided

BEHAVIORS: dict[str, Callable[[Case], behavior.Outcome]] = {
    "determinism": behavior.determinism,
    "linearity": behavior.linearity,
    "jit": behavior.jit,
    "vmap": behavior.vmap,
    "forward": behavior.forward,
    "outputs": behavior.outputs,
}
OF_RULES = ("vmap", "forward", "outputs")


class Elsewhere(NamedTuple):
    """Another point and the gradient there, one row for each cotangent."""

    xs: list[jax.Array]
    gradient: np.ndarray


@dataclasses.dataclass(frozen=True)
class Run:
    """A problem whose gradient exists and has the right types, ready to be checked."""

    problem: Problem
    options: Options
    log: Log
    covectors: np.ndarray
    differentiate: Differentiate
    pull: PullBack
    gradient: np.ndarray
    chosen: Chosen
    reference: Reference | None
    session: Session
    elsewhere: Callable[[int], Elsewhere | None]

    def rounding(self, xs) -> np.ndarray | None:
        """How far plain AD is off at a point, if it can be told."""
        if self.chosen.shadow is None:
            return None
        plain = self.reference or Reference(self.chosen.shadow, self.problem.outputs)
        try:
            return plain.rounding(xs, self.covectors)
        except Exception:
            return None


def check_values(run: Run, xs, gradient: np.ndarray, first: bool) -> None:
    """Search for wrong elements at one point."""
    log, options = run.log, run.options
    point = run.session.point(xs, gradient, _reference_gradient(run, xs))
    mode = options.mode if first or options.mode == "auto" else "fast"
    if not first and point.reference is None:
        mode = "fast"
    found = search(run.session, point, mode, lambda: run.rounding(xs), rows=2 if first else 1)
    where = "" if first else "at a second point "
    failures, notes = told(run.problem, point, found, where=where)
    if first:
        failures += check_ties(run.session, run.pull, point, found)
    log.fail(failures, options)
    log.notes += [note for note in notes if note.replace(where, "", 1) not in log.notes]
    if first and not gradient.any():
        log.notes.append("the gradient is zero everywhere: does the output depend on the inputs?")
    if first:
        log.verified = int(point.finite.sum()) - undecided(point, found)


def _reference_gradient(run: Run, xs) -> np.ndarray | None:
    if run.reference is None:
        return None
    run.log.evaluations += 1
    try:
        return run.reference.gradient(xs, run.covectors)
    except Exception as error:
        note = f"no AD reference ({first_line(error)}): differences only"
        run.log.notes += [] if note in run.log.notes else [note]
        return None


def check_points(run: Run) -> None:
    """The values once more at other points, and then the first pull-back again."""
    wrong = any(failure.check == "value" for failure in run.log.failures)
    if wrong:
        run.log.not_run["points"] = "the values at the first point are wrong"
        return
    for k in range(1, run.options.points):
        other = run.elsewhere(run.options.seed + k)
        if other is None:
            run.log.not_run["points"] = "the function is not finite at points nearby"
            return
        check_values(run, other.xs, other.gradient, first=False)
    compare = comparison(run)
    text = "the first pull-back, after another point was differentiated"
    again = run.pull(run.covectors[0])
    run.log.fail(compare("points", again, run.gradient[0], text), run.options)


def comparison(run: Run, xs=None) -> Comparison:
    """Compares gradients found in different ways at a point; None means the first."""
    xs = run.problem.inputs if xs is None else xs
    return Comparison(run.problem, run.session.tolerance, lambda: run.rounding(xs))


def check_behavior(run: Run) -> None:
    """All checks of behaviour that are not switched off."""
    here = Elsewhere(run.problem.inputs, run.gradient)
    second = run.elsewhere(run.options.seed + 1) or here
    case = Case(
        run.problem,
        run.differentiate,
        run.pull,
        run.covectors,
        run.gradient,
        comparison(run),
        comparison(run, second.xs),
        second,
        run.options.seed,
    )
    for name, check in BEHAVIORS.items():
        if name in run.options.skip:
            continue
        if run.differentiate.compiled and name in OF_RULES:
            run.log.not_run[name] = "JAX's own operations alone, no custom rule"
            continue
        outcome = _outcome(name, check, case)
        run.log.failures += outcome.failures
        run.log.evaluations += 2
        if outcome.not_run:
            run.log.not_run[name] = outcome.not_run


def _outcome(name: str, check: Callable[[Case], behavior.Outcome], case: Case):
    try:
        return check(case)
    except Exception as error:
        failure = Failure(name, case.problem.names[0], f"raises {first_line(error)}")
        return behavior.Outcome([failure])


def check_order(run: Run) -> None:
    """The second order, if it is asked for and the first is right."""
    if run.options.order < 2:
        return
    if run.log.failures:
        run.log.not_run["second order"] = "the first order fails"
        return
    try:
        second = check_second(run.problem, run.chosen.shadow, run.covectors, run.options.seed)
    except Exception as error:
        detail = f"the VJP cannot be differentiated: it raises {first_line(error)}"
        run.log.failures.append(Failure("second order", run.problem.names[0], detail))
        return
    run.log.failures += second.failures
    run.log.notes += second.notes
    run.log.evaluations += second.evaluations
