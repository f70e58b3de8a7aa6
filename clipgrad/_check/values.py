"""The check of values at one point: is the formula right, and then is its arithmetic?

Each question has its verdict on every element; the more severe one counts.
"""

import copy

import jax.numpy as jnp
import numpy as np

from clipgrad._check import contract, vectors
from clipgrad._check.checked_point import CheckedPoint, Verdicts, relative_error
from clipgrad._check.log import Log
from clipgrad._check.points import OF_RULE, OWN, Point
from clipgrad._check.search import Search
from clipgrad._check.verdict import (
    BELOW_ROUNDING,
    LOOSER,
    NOISE,
    OK,
    ROUNDING,
    ROUNDINGS,
    TRUSTED,
    WRONG,
    Slack,
    Slopes,
    slack_of,
)

NUMBERED = 64  # wrong elements of the arithmetic of which the numbers are kept


def check_point(point: Point, log: Log) -> CheckedPoint:
    """The verdict at a point.

    The rule in float64 must agree with plain AD and slopes; the gradient as it was computed must
    then be that rule. Where the rule cannot run in float64, slopes judge the gradient as computed.
    """
    options = log.options
    if options.max_relative_error is not None:
        return _by_paddles_rule(point, log, options.max_relative_error)
    slack = _slack_of_formula(point, options.tolerance)
    judged = point.gradient if point.rule is None else point.rule
    search = Search(point, judged, slack, log, point.plain).run(options.mode == "full")
    log.judged_to = max(log.judged_to, search.share)
    formula = Verdicts(_without_rounding(point, search), search.numbers)
    arithmetic = _arithmetic(point, log)
    return CheckedPoint(point, formula, arithmetic, search.disputed, search.together, search.off)


def _slack_of_formula(point: Point, tolerance: float | None) -> Slack:
    if point.rule is not None:
        return slack_of("float64", tolerance)
    evaluation = point.of.evaluation
    # Slopes in half precision have an error that is measured along several directions.
    is_loose = not evaluation.is_wide and not evaluation.is_half
    return slack_of(point.of.narrow, tolerance, times=LOOSER if is_loose else 1.0)


def _without_rounding(point: Point, search: Search) -> np.ndarray:
    """The kinds of the formula; a gradient as computed may have the roundings of plain AD."""
    kinds = search.kinds
    is_off = (kinds == WRONG) & ~search.disputed
    if point.rule is not None or point.plain is None or not is_off.any():
        return kinds
    room = point.rounding(OWN, plain_alone=True)
    is_near_plain = (np.abs(point.gradient - point.plain) <= room).all(axis=0)
    return np.where(is_off & is_near_plain, np.int8(ROUNDING), kinds)


def _by_paddles_rule(point: Point, log: Log, most: float) -> CheckedPoint:
    """The verdict by |numeric - analytic| / |numeric|, absolute where |numeric| < 1e-3."""
    search = Search(point, point.gradient, slack_of("float64"), log).run(full=True)
    kinds = search.kinds.copy()
    for j, own in search.numbers.items():
        if kinds[j] in (OK, WRONG) and not own.is_kink:
            kinds[j] = WRONG if relative_error(own) > most else OK
    none, verdicts = np.zeros(len(kinds), bool), Verdicts(kinds, search.numbers)
    return CheckedPoint(point, verdicts, _nothing(point), none, is_paddles=True)


def on_another_device(found: CheckedPoint, gradient: np.ndarray, kind: str, log: Log) -> list:
    """Failures of the gradient of another device, held against the numbers that judged the first.

    The rule in float64 where it was found right, or else slopes once more.
    """
    point = copy.copy(found.point)
    point.computed = gradient
    point.finite = np.asarray(np.isfinite(gradient).all(axis=0))
    point.gradient = np.where(point.finite, gradient, 0.0)
    exact = None if log.options.max_relative_error is not None else found.exact
    if exact is None:
        point.rule = None
        verdicts = check_point(point, log).formula
    else:
        point.rule = exact
        verdicts = _arithmetic(point, log)
    failures = contract.finite_gradient(point.of.function, point.finite)
    for start, stop in point.ranges:
        wrong = np.flatnonzero(verdicts.kinds[start:stop] == WRONG) + start
        if len(wrong):
            shown = CheckedPoint(point, verdicts, verdicts, np.zeros(len(verdicts.kinds), bool))
            failures.append(shown.of_device(start, stop, wrong))
    text = "the gradient on {}: {}"
    return [f._replace(check="devices", detail=text.format(kind, f.detail)) for f in failures]


def _nothing(point: Point) -> Verdicts:
    return Verdicts(np.full(point.gradient.shape[1], np.int8(OK)), {})


def _arithmetic(point: Point, log: Log) -> Verdicts:
    """The gradient as it was computed is the rule's in float64, to its type or to rounding."""
    r, g, found = point.rule, point.gradient, _nothing(point)
    if r is None:
        return found
    slack = slack_of(point.of.narrow, log.options.tolerance)
    typical = point.typical(r)
    bad = (point.excess(g, r, slack, typical) > 1) & point.finite
    if bad.any():
        bad &= ~point.is_zero((g, r), BELOW_ROUNDING)
    some = np.flatnonzero(bad)
    if not len(some):
        return found
    off = np.abs(g[:, some] - r[:, some])
    is_explained = (off <= _explained_room(point, r)[some]).all(axis=0)
    size = np.abs(r[:, some]) + typical[:, point.leaf[some]]
    is_sure = (off <= TRUSTED * size).all(axis=0) | point.is_zero((r,), 1.0)[some]
    found.kinds[some] = np.where(is_explained, np.where(is_sure, ROUNDING, NOISE), WRONG)
    worst = np.argsort(-off.max(axis=0), kind="stable")[:NUMBERED]
    rows = zip(np.argmax(off[:, worst], axis=0), some[worst], strict=True)
    numbers = {
        int(j): Slopes(found.kinds[j], r[c, j], 0.0, g[c, j], r[c, j], r[c, j], False)
        for c, j in rows
    }
    return Verdicts(found.kinds, numbers)


def _explained_room(point: Point, rule: np.ndarray) -> np.ndarray:
    """The distance that rounding explains: that of plain AD, or of a rule whose terms cancel.

    A rule may lose some roundings of the largest effect of any element, and where all are as small,
    of the value itself.
    """
    unit = ROUNDINGS["float32"] * float(jnp.finfo(point.of.narrow).eps)
    largest = np.abs(rule * point.scale).max()
    value = np.abs(vectors.to_numpy(point.of.function.outputs))
    value = (np.abs(point.covectors) @ np.nan_to_num(value, posinf=0.0)).max()
    largest = value if largest <= unit * value else largest
    own = np.fmin(point.rounding(OF_RULE), unit * largest / point.scale)
    return np.fmax(point.rounding(OWN, plain_alone=True), own)
