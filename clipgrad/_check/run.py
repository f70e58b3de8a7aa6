"""One run of a check: the order of its parts, and the log they write."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from clipgrad._check import behavior, structure
from clipgrad._check.behavior import Case, first_line
from clipgrad._check.compare import Comparison, on_cpu
from clipgrad._check.evaluation import Chosen, choose
from clipgrad._check.log import Log, Options
from clipgrad._check.problem import Problem, leaf_dtypes
from clipgrad._check.pullback import PullBack, pull_back
from clipgrad._check.real import cotangent_leaves, real_dtype, widen
from clipgrad._check.reference import Reference
from clipgrad._check.report import Failure
from clipgrad._check.sampling import cotangents, nearby
from clipgrad._check.search import search
from clipgrad._check.second import check_second
from clipgrad._check.session import Session
from clipgrad._check.tolerance import make_tolerance, narrowest
from clipgrad._check.values import told, undecided

BEHAVIORS: dict[str, Callable[[Case], behavior.Outcome]] = {
    "determinism": behavior.determinism,
    "linearity": behavior.linearity,
    "jit": behavior.jit,
    "vmap": behavior.vmap,
    "forward": behavior.forward,
    "outputs": behavior.outputs,
}
NATIVE_FACTOR = 10.0
REACHES = (1.0, 2.0**-3, 2.0**-6, 2.0**-10)


@dataclasses.dataclass(frozen=True)
class Run:
    """A problem whose gradient exists and has the right types, ready to be checked."""

    problem: Problem
    options: Options
    log: Log
    covectors: np.ndarray
    pull: PullBack
    gradient: np.ndarray
    chosen: Chosen
    reference: Reference | None
    session: Session

    def rounding(self, xs) -> np.ndarray | None:
        """How far plain AD is off at a point, if it can be told."""
        if self.chosen.shadow is None:
            return None
        plain = self.reference or Reference(self.chosen.shadow, self.problem.outputs)
        try:
            return plain.rounding(xs, self.covectors)
        except Exception:
            return None


def begin(problem: Problem, options: Options, log: Log) -> Run | None:
    """Check what must hold before numbers mean anything; None if it does not."""
    covectors = cotangents(problem, options.seed)
    pull = _differentiate(problem, covectors, options, log)
    if pull is None:
        return None
    gradient = pull.rows(covectors)
    log.fail(structure.finite_gradient(problem, gradient), options)
    chosen = choose(problem, covectors, fast_compile=options.mode != "full")
    log.notes += chosen.notes
    evaluation = chosen.differences.evaluation
    log.precision = evaluation.label
    tolerance = _tolerance(problem, chosen, options, log)
    session = Session(problem, chosen.differences, tolerance, options.seed, options.delta)
    reference = _reference(problem, chosen, options)
    run = Run(problem, options, log, covectors, pull, gradient, chosen, reference, session)
    return run


def _differentiate(problem, covectors, options, log: Log) -> PullBack | None:
    again = problem.fun(problem.inputs)
    log.evaluations += 3
    if not _same_bits(problem.outputs, again):
        detail = "the function called twice gives different values (randomness or side effects?)"
        log.failures.append(Failure("determinism", problem.output_names[0], detail))
        return None
    failures = structure.finite_values(problem)
    try:
        pull = pull_back(problem)
        first = pull.leaves(cotangent_leaves(covectors[0], problem.outputs))
        failures += structure.primal(problem, pull.outputs, "differentiated")
        failures += structure.same_types(problem, first)
        failures += structure.integers(problem, covectors[0])
    except Exception as error:
        detail = f"differentiation raises {first_line(error)}"
        log.failures.append(Failure("cotangent", problem.names[0], detail))
        return None
    log.fail(failures, options)
    stop = any("shape" in f.detail or f.check == "finite" for f in failures)
    different = any(a.dtype != b.dtype for a, b in zip(problem.outputs, pull.outputs, strict=True))
    return None if stop or different else pull


def _same_bits(first, second) -> bool:
    if not on_cpu(first):
        pairs = zip(first, second, strict=True)
        return all(np.allclose(widen(a), widen(b), rtol=1e-3, equal_nan=True) for a, b in pairs)
    return len(first) == len(second) and all(
        a.shape == b.shape and np.array_equal(widen(a), widen(b), equal_nan=True)
        for a, b in zip(first, second, strict=True)
    )


def _tolerance(problem: Problem, chosen: Chosen, options: Options, log: Log):
    own = leaf_dtypes(problem)
    inner = chosen.shadow.narrow if chosen.shadow else set()
    inner = set(inner) | {real_dtype(y).name for y in problem.outputs}
    narrow = narrowest(inner)
    if narrow != narrowest([*own, narrow]) or narrow not in own:
        log.notes.append(f"it computes in {narrow} inside: tolerances are those of {narrow}")
    tolerance = make_tolerance(problem.leaf_ranges(), own, inner, options.max_relative_error)
    if chosen.differences.evaluation.dtype == np.float64:
        return tolerance
    return tolerance._replace(
        relative=NATIVE_FACTOR * tolerance.relative, along=3 * NATIVE_FACTOR * tolerance.along
    )


def _reference(problem: Problem, chosen: Chosen, options: Options) -> Reference | None:
    if options.mode != "auto" or chosen.shadow is None or options.delta is not None:
        return None
    return Reference(chosen.shadow, problem.outputs)


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
    if wrong and run.options.points > 1:
        run.log.not_run["points"] = "the values at the first point are wrong"
    for k in range(1, 1 if wrong else run.options.points):
        xs = second_point(run, run.options.seed + k)
        if xs is None:
            run.log.not_run["points"] = "the function is not finite at points nearby"
            return
        run.log.evaluations += 1
        check_values(run, xs, pull_back(run.problem, xs).rows(run.covectors), first=False)
    compare = comparison(run)
    text = "the first pull-back, after another point was differentiated"
    again = run.pull(run.covectors[0])
    run.log.fail(compare("points", again, run.gradient[0], text), run.options)


def second_point(run: Run, seed: int) -> list[jax.Array] | None:
    """A point near the first at which the function is finite."""
    for reach in REACHES:
        xs = nearby(run.problem, seed, reach)
        run.log.evaluations += 1
        if all(np.isfinite(widen(y)).all() for y in run.problem.fun(xs)):
            return xs
    return None


def comparison(run: Run, xs=None) -> Comparison:
    """Compares gradients found in different ways at a point; None means the first."""
    xs = run.problem.inputs if xs is None else xs
    return Comparison(run.problem, run.session.tolerance, lambda: run.rounding(xs))


def check_behavior(run: Run) -> None:
    """All checks of behaviour that are not switched off."""
    second = second_point(run, run.options.seed) or run.problem.inputs
    case = Case(
        run.problem,
        run.pull,
        run.covectors,
        run.gradient,
        comparison(run),
        comparison(run, second),
        second,
        run.options.seed,
    )
    for name, check in BEHAVIORS.items():
        if name in run.options.skip:
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
