"""The verdict at one point: is the formula right, and then is its arithmetic?

Each question has its verdict on every element; the more severe one counts.
"""

import dataclasses

import numpy as np

from clipgrad._check import contract
from clipgrad._check.checked_point import CheckedPoint, relative_error
from clipgrad._check.evidence import Evidence, Search
from clipgrad._check.options import Options
from clipgrad._check.points import AS_COMPUTED, OF_RULE, Point
from clipgrad._check.report import Failure
from clipgrad._check.tolerances import (
    BELOW_ROUNDING,
    LOOSER,
    TRUSTED,
    Tolerance,
    tolerance_of,
)
from clipgrad._check.verdict import NOISE, OK, ROUNDING, WRONG, majority


def check_point(point: Point, options: Options) -> CheckedPoint:
    """The verdict at a point.

    The rule in float64 must agree with plain AD and slopes; the gradient as it was computed must
    then be that rule. Where the rule cannot run in float64, slopes judge the gradient as computed.
    """
    if options.max_relative_error is not None:
        return _by_paddles_rule(point, options, options.max_relative_error)
    tolerance = _tolerance_of_formula(point, options.tolerance)
    evidence = Search(point, point.judged, tolerance, options, point.plain).run()
    formula = majority(*evidence.rows)
    if point.rule is None and point.plain is not None:
        formula = _with_rounding(point, formula, point.plain)
    return CheckedPoint(point, evidence, formula, _arithmetic(point, options.tolerance))


def _tolerance_of_formula(point: Point, stated: float | None) -> Tolerance:
    if point.rule is not None:
        return tolerance_of("float64", stated)
    evaluation = point.nearby.evaluation
    # Slopes in half precision have an error that is measured along several directions.
    is_loose = not evaluation.is_wide and not evaluation.is_coarse
    return tolerance_of(point.witnesses.narrow, stated, times=LOOSER if is_loose else 1.0)


def _with_rounding(point: Point, formula: np.ndarray, plain: np.ndarray) -> np.ndarray:
    """The verdict on a gradient as computed, which may have the roundings of plain AD."""
    if not (formula == WRONG).any():
        return formula
    room = point.rounding(AS_COMPUTED, plain_alone=True)
    is_near_plain = (np.abs(point.gradient - plain) <= room).all(axis=0)
    return np.where((formula == WRONG) & is_near_plain, np.int8(ROUNDING), formula)


def _by_paddles_rule(point: Point, options: Options, most: float) -> CheckedPoint:
    """The verdict by |numeric - analytic| / |numeric|, absolute where |numeric| < 1e-3."""
    evidence = Search(point, point.gradient, tolerance_of("float64"), options).run()
    kinds = evidence.rule.copy()
    for j, slopes in evidence.numbers.items():
        if kinds[j] in (OK, WRONG) and not slopes.is_kink:
            kinds[j] = WRONG if relative_error(slopes) > most else OK
    return CheckedPoint(point, evidence, kinds, np.zeros_like(kinds), is_paddles=True)


def _arithmetic(point: Point, stated: float | None) -> np.ndarray:
    """Whether the gradient as computed is the rule's in float64, to its type or to rounding."""
    rule, gradient = point.rule, point.gradient
    kinds = np.full(gradient.shape[1], np.int8(OK))
    if rule is None:
        return kinds
    typical = point.typical(rule)
    tolerance = tolerance_of(point.witnesses.narrow, stated)
    is_off = (point.excess(gradient, rule, tolerance, typical) > 1) & point.finite
    some = np.flatnonzero(is_off)
    some = some[~point.is_zero_by_inputs(some, (gradient, rule), BELOW_ROUNDING)]
    is_noise = _is_noise(point, rule, some)
    kinds[some[is_noise]] = ROUNDING
    some = some[~is_noise]
    some = some[~point.is_zero(some, (gradient, rule), BELOW_ROUNDING)]
    if not len(some):
        return kinds
    off = np.abs(gradient[:, some] - rule[:, some])
    is_explained = (off <= _explained_room(point, rule)[some]).all(axis=0)
    size = np.abs(rule[:, some]) + typical[:, point.leaf[some]]
    is_sure = (off <= TRUSTED * size).all(axis=0) | point.is_zero(some, (rule,), 1.0)
    kinds[some] = np.where(is_explained, np.where(is_sure, ROUNDING, NOISE), WRONG)
    return kinds


def _is_noise(point: Point, rule: np.ndarray, some: np.ndarray) -> np.ndarray:
    """Where a gradient is 0, as of the bias of an attention's keys, and all is rounding.

    A rounding of the inputs shows that without the program that rounds all numbers.
    """
    is_noise = point.is_zero_by_inputs(some, (rule,), 1.0)
    zeros = some[is_noise]
    if len(zeros):
        off = np.abs(point.gradient[:, zeros] - rule[:, zeros])
        is_noise[is_noise] = (off <= point.rounding_of_inputs[zeros]).all(axis=0)
    return is_noise


def _explained_room(point: Point, rule: np.ndarray) -> np.ndarray:
    """The distance that rounding explains: that of plain AD, or of a rule whose terms cancel.

    A rule may lose some roundings of the largest effect of any element, and where all are as small,
    of the value itself.
    """
    plain = point.rounding(AS_COMPUTED, plain_alone=True)
    if rule is point.plain:
        return plain
    lost = np.fmin(point.rounding(OF_RULE), point.some_roundings(point.witnesses.narrow))
    return np.fmax(plain, lost)


def failures_on_another_device(
    checked: CheckedPoint, gradient: np.ndarray, kind: str, options: Options
) -> list[Failure]:
    """The failures of another device's gradient, by the numbers that judged the first device's.

    That is the rule in float64 where it was right, or else slopes once more.
    """
    exact = None if options.max_relative_error is not None else checked.exact
    point = dataclasses.replace(checked.point, computed=gradient, rule=exact)
    if exact is None:
        again = check_point(point, options)
    else:
        kinds = _arithmetic(point, options.tolerance)
        again = CheckedPoint(point, Evidence.on(point.finite), kinds, kinds)
    failures = [
        *contract.finite_gradient(point.witnesses.function, point.finite),
        *again.failures_of_device(),
    ]
    text = "the gradient on {}: {}"
    return [f._replace(check="devices", detail=text.format(kind, f.detail)) for f in failures]
