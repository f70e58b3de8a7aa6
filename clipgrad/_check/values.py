"""The check of values: a search at one point, told as failures and notes."""

import numpy as np

from clipgrad._check.hints import layout_hint, ratio_hint
from clipgrad._check.judge import KINK, UNSURE, WRONG
from clipgrad._check.problem import Problem
from clipgrad._check.report import Failure
from clipgrad._check.search import ROUNDING, Finding, Search
from clipgrad._check.session import Point

LAYOUT_LIMIT = 100_000


def told(
    problem: Problem, point: Point, found: Search, check: str = "value", where: str = ""
) -> tuple[list[Failure], list[str]]:
    """Return the failures and the notes of a search, one of each kind for each leaf."""
    failures = [
        failure
        for finding in found.findings
        for failure in _failure(problem, point, finding, check, where)
    ]
    notes = [note for finding in found.findings for note in _notes(problem, finding, where)]
    notes += _range_notes(problem, found.kinks, where, _KINK)
    notes += _range_notes(problem, found.unsure, where, _UNSURE)
    return failures, notes


_KINK = "not differentiable; the gradient lies between the one-sided slopes"
_UNSURE = "could not be verified by differences, which are too noisy"
_ROUNDING = "off by rounding, as plain AD in this precision is"


def undecided(point: Point, found: Search) -> int:
    """How many elements could not be verified, by differences or by the reference."""
    if point.reference is not None:
        return 0
    elements = sum(int(np.sum(finding.verdict.kind == UNSURE)) for finding in found.findings)
    return elements + sum(stop - start for start, stop in found.unsure)


def _failure(problem: Problem, point: Point, finding: Finding, check: str, where: str):
    size = _size(problem, finding.leaf)
    verdict, start = finding.verdict, problem.leaf_ranges()[finding.leaf][0]
    wrong = np.flatnonzero(verdict.kind == WRONG)
    if not wrong.size:
        return []
    off = np.abs(verdict.numeric - verdict.analytic)[wrong]
    worst = int(wrong[np.argmax(np.where(np.isfinite(off), off, 0))])
    spared = len(verdict.kind) - len(wrong)
    count = max(finding.suspects - spared, len(wrong))
    numeric, analytic = verdict.numeric[wrong], verdict.analytic[wrong]
    hint = _hint(problem, point, finding, numeric, analytic)
    detail = (
        f"{where}{'' if finding.exact else 'at least '}{count} of {size} elements wrong; worst: "
        f"{_worst(verdict, worst)}{hint}"
    )
    failure = Failure(
        check=check,
        where=problem.element(int(finding.indices[worst])),
        detail=detail,
        numeric=float(verdict.numeric[worst]),
        error=float(verdict.error[worst]),
        analytic=float(verdict.analytic[worst]),
        indices=finding.indices[wrong] - start,
        ratio=np.divide(analytic, numeric, out=np.full(len(wrong), np.nan), where=numeric != 0),
    )
    return [failure]


def _worst(verdict, k: int) -> str:
    if verdict.kink[k]:
        return (
            f"kink: slopes {verdict.behind[k]:.7g} and {verdict.ahead[k]:.7g}, "
            f"analytic {verdict.analytic[k]:.7g}"
        )
    return (
        f"numeric {verdict.numeric[k]:.7g} +- {verdict.error[k]:.0e}, "
        f"analytic {verdict.analytic[k]:.7g}"
    )


def _hint(problem: Problem, point: Point, finding: Finding, numeric, analytic) -> str:
    start, stop = problem.leaf_ranges()[finding.leaf]
    leaf = problem.inputs[finding.leaf]
    ratio = ratio_hint(numeric, analytic)
    if ratio or point.reference is None or not 3 <= stop - start <= LAYOUT_LIMIT:
        return ratio
    if stop - start != leaf.size:
        return ""
    shape = leaf.shape
    return layout_hint(
        point.reference[0, start:stop].reshape(shape), point.gradient[0, start:stop].reshape(shape)
    )


def _notes(problem: Problem, finding: Finding, where: str) -> list[str]:
    name, kinds = problem.names[finding.leaf], finding.verdict.kind
    texts = ((KINK, _KINK), (UNSURE, _UNSURE), (ROUNDING, _ROUNDING))
    size = _size(problem, finding.leaf)
    counted = [(int(np.sum(kinds == kind)), text) for kind, text in texts]
    return [f"{name}: {where}{n} of {size} elements {text}" for n, text in counted if n]


def _range_notes(problem: Problem, ranges, where: str, text: str) -> list[str]:
    notes = []
    for name, (start, stop) in zip(problem.names, problem.leaf_ranges(), strict=True):
        count = sum(b - a for a, b in ranges if start <= a < stop)
        if count:
            notes.append(f"{name}: {where}along random directions {text}")
    return notes


def _size(problem: Problem, leaf: int) -> int:
    start, stop = problem.leaf_ranges()[leaf]
    return stop - start
