"""The second order: the VJP is a function too, of the inputs and the cotangent; check its VJP."""

from typing import NamedTuple

import jax
import numpy as np

from clipgrad._check.differences import Differences
from clipgrad._check.evaluation import choose, wide_evaluation
from clipgrad._check.problem import Problem, leaf_dtypes, traced
from clipgrad._check.pullback import differentiator
from clipgrad._check.real import cotangent_leaves, wide_dtype
from clipgrad._check.reference import Reference
from clipgrad._check.report import Failure
from clipgrad._check.sampling import cotangents
from clipgrad._check.search import search
from clipgrad._check.session import Session
from clipgrad._check.shadow import Shadow, make_shadow
from clipgrad._check.tolerance import make_tolerance
from clipgrad._check.values import told

CHECK = "second order"


class Second(NamedTuple):
    """What the check of second order found."""

    failures: list[Failure]
    notes: list[str]
    evaluations: int


def check_second(problem: Problem, shadow: Shadow | None, covectors, seed: int) -> Second:
    """Check the derivative of the VJP of `problem` with respect to inputs and cotangent.

    The reference is the derivative of plain AD's VJP, custom rules stripped. Suspects are judged
    by differences of the VJP as written, `stop_gradient` not held: a held one would hide exactly
    the derivative that a rule forgets.
    """
    gradient_problem = _gradient_problem(problem, covectors[0])
    rows = cotangents(gradient_problem, seed)
    gradient = differentiator(gradient_problem)(gradient_problem.inputs).rows(rows)
    differences, own, notes = _differences(gradient_problem, rows)
    reference = _reference(gradient_problem, problem, shadow, own)
    point_reference = None if reference is None else _gradient(reference, gradient_problem, rows)
    inner = set() if shadow is None else shadow.narrow
    names = leaf_dtypes(gradient_problem)
    tolerance = make_tolerance(gradient_problem.leaf_ranges(), names, inner)
    session = Session(gradient_problem, differences, tolerance, seed)
    point = session.point(gradient_problem.inputs, gradient, point_reference)
    stops = shadow is not None and shadow.stops
    mode = "reference" if stops and point.reference is not None else "auto"

    def rounding():
        return None if reference is None else reference.rounding(point.xs, rows)

    found = search(session, point, mode, rounding, rows=1)
    failures, more = told(gradient_problem, point, found, CHECK)
    return Second(failures, notes + more, differences.evaluations + 3)


def _gradient_problem(problem: Problem, covector: np.ndarray) -> Problem:
    count = len(problem.inputs)

    def gradient(leaves):
        return jax.vjp(problem.fun, leaves[:count])[1](leaves[count:])[0]

    inputs = [*problem.inputs, *cotangent_leaves(covector, problem.outputs)]
    return problem._replace(
        fun=gradient,
        program=traced(gradient, inputs),
        inputs=inputs,
        names=[*problem.names, *(f"cotangent of {name}" for name in problem.output_names)],
        outputs=gradient(inputs),
        output_names=[f"gradient of {name}" for name in problem.names],
    )


def _differences(problem: Problem, rows) -> tuple[Differences, Shadow | None, list[str]]:
    try:
        shadow = make_shadow(problem.program)
    except Exception:
        chosen = choose(problem, rows, fast_compile=True)
        return chosen.differences, None, [f"second order: {note}" for note in chosen.notes]
    like = [jax.ShapeDtypeStruct(x.shape, wide_dtype(x.dtype)) for x in problem.inputs]
    return Differences(wide_evaluation(shadow.fun, like, "float64"), rows), shadow, []


def _reference(problem: Problem, first: Problem, shadow, own) -> Reference | None:
    if shadow is None or own is None:
        return None
    count = len(first.inputs)

    def of(fun):
        return lambda leaves: jax.vjp(fun, leaves[:count])[1](leaves[count:])[0]

    plain = shadow._replace(fun=of(shadow.fun), native=of(shadow.native))
    return Reference(plain, problem.outputs)


def _gradient(reference: Reference, problem: Problem, rows) -> np.ndarray | None:
    try:
        return reference.gradient(problem.inputs, rows)
    except Exception:
        return None
