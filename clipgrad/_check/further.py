"""The values once more: at further points, and then of the VJP, in second order."""

import numpy as np

from clipgrad._check import vectors
from clipgrad._check.behavior import Claim, broken
from clipgrad._check.check_point import check_point
from clipgrad._check.checked_function import CheckedFunction, traced
from clipgrad._check.checked_point import CheckedPoint, is_near
from clipgrad._check.log import Log
from clipgrad._check.points import Point, cotangents, further, point_at
from clipgrad._check.report import Failure
from clipgrad._check.slopes import Neighborhood
from clipgrad._check.user_code import UserError, call_user
from clipgrad._check.verdict import DISPUTED, UNDECIDED, WRONG
from clipgrad._check.vjp import first_vjp
from clipgrad._check.witnesses import find_witnesses

SECOND = "second order"
STRUCTURE = "what is equal, zero or symmetric is kept; what is wrong there alone was not seen"


def check_further_points(point: Point, log: Log) -> None:
    """Check further points, generic ones where the function is meant for them."""
    if any(failure.check == "value" for failure in log.failures):
        log.not_run["points"] = "the values at the first point are wrong"
        return
    for k in range(1, log.options.points):
        where = "at a second point " if k == 1 else "at a further point "
        if not log.has_time("points"):
            return
        if not any(_check_at(point, log, k, where, keeps) for keeps in (False, True)):
            log.not_run["points"] = "the function is not finite at points nearby"
            return
    again = point.vjp(point.covectors[0])
    text = "the first pull-back, called again after another point was differentiated"
    claims = [Claim(again, point.computed[0], text)]
    log.fail(broken(point, "points", claims, log.options))


def _check_at(point: Point, log: Log, k: int, where: str, keeps: bool) -> bool:
    """Check a further point; False where the function is not meant for it."""
    witnesses, seed = point.witnesses, log.options.seed + k
    nearby = Neighborhood(point.nearby.evaluation, further(witnesses.function, seed, keeps))
    try:
        vjp = point.vjp.again(nearby.xs)
        there = point_at(witnesses, vjp, nearby, point.covectors, log.options)
        log.measured(there)
        _ = nearby.base
    except UserError as error:  # a callback may refuse what has no structure
        if keeps:
            log.note(f"{where}the function raises {error}")
        return False
    if not all(np.isfinite(vectors.widened_leaf(y)).all() for y in vjp.outputs):
        return False
    checked = check_point(there, log.options)
    log.judged_to = max(log.judged_to, checked.evidence.judged_to)
    is_disputed = np.isin(checked.formula, (UNDECIDED, DISPUTED)).any()
    checked = checked.without_disputes()
    failures = checked.failures(where)
    if not keeps and (is_disputed or (failures and _reads_one_triangle(checked))):
        return False
    right = "right at the point that you passed; "
    log.fail([f._replace(detail=right + f.detail) for f in failures])
    for note in [*checked.notes(where), *([f"{where}{STRUCTURE}"] if keeps else [])]:
        log.notes += [] if note.replace(where, "", 1) in log.notes else [note]
    log.seen_elsewhere(checked)
    return True


def _reads_one_triangle(checked: CheckedPoint) -> bool:
    """Whether a wrong leaf was a symmetric matrix, both triangles of which plain AD takes as one.

    Then the function is meant for symmetric matrices.
    """
    function, plain = checked.point.witnesses.function, checked.point.plain
    for (start, stop), leaf in zip(function.ranges, function.inputs, strict=True):
        x = np.asarray(leaf)
        is_square = x.ndim > 1 and x.shape[-1] == x.shape[-2] > 1
        if not is_square or not (checked.formula[start:stop] == WRONG).any():
            continue
        parts = np.zeros((*x.shape, 1)) if plain is None else plain[0, start:stop]
        parts = parts.reshape(*x.shape, -1)
        is_symmetric = np.array_equal(x, np.conj(np.swapaxes(x, -1, -2)))
        if is_symmetric and is_near(parts, np.swapaxes(parts, -2, -3)):
            return True
    return False


def check_second_order(point: Point, log: Log) -> None:
    """The second order, if it is asked for and the first is right."""
    if log.options.order < 2 or not log.has_time(SECOND):
        return
    if log.failures:
        log.not_run[SECOND] = "the first order fails"
        return
    notes: list[str] = []
    try:
        function = _vjp(point)
        vjp = first_vjp(function)
        witnesses = find_witnesses(function, notes, point.witnesses)
        covectors = cotangents(function, log.options.seed)
        second = point_at(witnesses, vjp, witnesses.here, covectors, log.options)
    except UserError as error:
        detail = f"the VJP cannot be differentiated: it raises {error}"
        log.failures.append(Failure(SECOND, point.witnesses.function.names[0], detail))
        return
    log.measured(second)
    checked = check_point(second, log.options)
    log.judged_to = max(log.judged_to, checked.evidence.judged_to)
    log.failures += checked.failures(check=SECOND)
    log.notes += [f"{SECOND}: {note}" for note in [*notes, *checked.notes()]]
    log.evaluations += witnesses.here.evaluation.count


def _vjp(point: Point) -> CheckedFunction:
    """The VJP as a function to be checked, of inputs and cotangent."""
    function, count = point.witnesses.function, len(point.xs)

    def gradient(leaves):
        return function.pull_back(leaves[:count], leaves[count:])

    inputs = [*point.xs, *vectors.cotangent_leaves(point.covectors[0], function.outputs)]
    return function._replace(
        fun=gradient,
        program=traced(gradient, inputs),
        inputs=inputs,
        names=[*function.names, *(f"cotangent of {name}" for name in function.output_names)],
        outputs=call_user(gradient, inputs),
        output_names=[f"gradient of {name}" for name in function.names],
    )
