"""The start of a check: what must hold before numbers mean anything, and how to measure."""

import functools

import numpy as np

from clipgrad._check import structure
from clipgrad._check.behavior import first_line
from clipgrad._check.compare import on_cpu
from clipgrad._check.compiling import quick_jit
from clipgrad._check.evaluation import Chosen, choose
from clipgrad._check.log import Log
from clipgrad._check.options import Options
from clipgrad._check.problem import Problem, leaf_dtypes
from clipgrad._check.pullback import PullBack, differentiator
from clipgrad._check.real import cotangent_leaves, real_dtype, widen
from clipgrad._check.reference import Reference
from clipgrad._check.report import Failure
from clipgrad._check.run import Elsewhere, Run
from clipgrad._check.sampling import cotangents, nearby
from clipgrad._check.session import Session
from clipgrad._check.structure import primal
from clipgrad._check.tolerance import make_tolerance, narrowest

NATIVE_FACTOR = 10.0
UNSTEADY = (
    "traced again or under jax.vmap, it is made of other operations (does it look at tracers, or "
    "keep a state?)"
)
REACHES = (1.0, 2.0**-3, 2.0**-6, 2.0**-10)


def begin(problem: Problem, options: Options, log: Log) -> Run | None:
    """Check what must hold before numbers mean anything; None if it does not."""
    covectors = cotangents(problem, options.seed)
    differentiate = differentiator(problem)
    pull = _differentiate(problem, differentiate, covectors, options, log)
    if pull is None:
        return None
    gradient = pull.rows(covectors)
    log.fail(structure.finite_gradient(problem, gradient), options)
    chosen = _choose(problem, covectors, options, log)
    if chosen is None:
        return None
    log.notes += chosen.notes if differentiate.steady else [UNSTEADY, *chosen.notes]
    evaluation = chosen.differences.evaluation
    log.precision = evaluation.label
    tolerance = _tolerance(problem, chosen, options, log)
    session = Session(problem, chosen.differences, tolerance, options.seed, options.delta)
    reference = _reference(problem, chosen, options)
    elsewhere = functools.cache(lambda k: _elsewhere(problem, differentiate, covectors, k, log))
    found = (differentiate, pull, gradient, chosen, reference, session, elsewhere)
    return Run(problem, options, log, covectors, *found)


def _differentiate(problem, differentiate, covectors, options, log: Log) -> PullBack | None:
    again = problem.fun(problem.inputs)
    log.evaluations += 3
    if not _same_bits(problem.outputs, again):
        detail = "the function called twice gives different values (randomness or side effects?)"
        log.failures.append(Failure("determinism", problem.output_names[0], detail))
        return None
    failures = structure.finite_values(problem)
    try:
        pull = differentiate(problem.inputs)
        first = pull.leaves(cotangent_leaves(covectors[0], problem.outputs))
        failures += primal(problem, pull.outputs, "differentiated")
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


def _choose(problem: Problem, covectors, options: Options, log: Log) -> Chosen | None:
    """How to evaluate the function, or None where it was found to fail another way."""
    try:
        return choose(problem, covectors, fast_compile=options.mode != "full")
    except ValueError:
        compiled = primal(problem, quick_jit(problem.fun)(problem.inputs), "compiled")
        log.fail([failure._replace(check="jit") for failure in compiled], options)
        if not log.failures:
            raise
        return None


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


def _elsewhere(problem, differentiate, covectors, seed: int, log: Log) -> Elsewhere | None:
    """A point near the first at which the function is finite, and the gradient there."""
    for reach in REACHES:
        xs = nearby(problem, seed, reach)
        log.evaluations += 1
        pull = differentiate(xs)
        if all(np.isfinite(widen(y)).all() for y in pull.outputs):
            return Elsewhere(xs, pull.rows(covectors))
    return None
