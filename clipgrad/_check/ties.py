"""Ties: kinks where several elements share one output's gradient, as equal maxima do.

Each element by itself may take anything between its one-sided slopes; together they may not. Where
all kinks of an output bend the same way, the gradient lies between the one-sided slopes along every
direction too; of a sum of kinks that bend both ways that does not follow.
"""

import numpy as np

from clipgrad._check.differences import Differences
from clipgrad._check.judge import KINK, KINK_GAP, WRONG
from clipgrad._check.problem import Problem
from clipgrad._check.pullback import PullBack
from clipgrad._check.report import Failure
from clipgrad._check.sampling import generator
from clipgrad._check.search import Finding, Search
from clipgrad._check.session import Point, Session

OUTPUTS = 8
DIRECTIONS = 4
NOISE = 64.0
LOOSE = 10.0


def check_ties(session: Session, pull: PullBack, point: Point, found: Search) -> list[Failure]:
    """Check every leaf in which several elements are at kinks and none is wrong."""
    failures = []
    for finding in found.findings:
        kinks = finding.indices[finding.verdict.kind == KINK]
        if len(kinks) > 1 and not np.any(finding.verdict.kind == WRONG):
            failures += _check_leaf(session, pull, point, finding, kinks)
    return failures


def _check_leaf(session, pull, point: Point, finding: Finding, kinks) -> list[Failure]:
    differences, problem = session.differences, session.problem
    bent = _bent_one_way(differences, point, kinks)
    for output in np.flatnonzero(bent.sum(axis=0) > 1)[:OUTPUTS]:
        tied = kinks[bent[:, output]]
        gradient = pull(np.eye(1, bent.shape[1], output)[0])
        shifts = _shifts(session, point, tied)
        ahead, behind = (change[:, output] for change in differences.changes(point.xs, shifts))
        analytic = shifts @ gradient
        low, high = np.minimum(ahead, behind), np.maximum(ahead, behind)
        slack = LOOSE * session.tolerance.relative[tied[0]] * np.abs(shifts) @ np.abs(gradient)
        off = np.fmax(low - analytic, analytic - high) - slack - _noise(differences)
        worst = int(np.argmax(off))
        if off[worst] > 0:
            size = np.linalg.norm(shifts[worst])
            slopes = [float(x[worst] / size) for x in (behind, ahead, analytic)]
            return [_failure(problem, finding.leaf, tied, int(output), slopes)]
    return []


def _bent_one_way(differences: Differences, point: Point, kinks) -> np.ndarray:
    """Which elements have a kink in which output, for outputs whose kinks all bend one way."""
    shifts = np.zeros((len(kinks), point.scale.size))
    shifts[np.arange(len(kinks)), kinks] = _step(differences) * point.scale[kinks]
    ahead, behind = differences.changes(point.xs, shifts)
    bend = ahead - behind
    least = KINK_GAP * np.fmax(np.abs(ahead), np.abs(behind)) + _noise(differences)
    bent = np.abs(bend) > least
    one_way = ~(np.any(bent & (bend > 0), axis=0) & np.any(bent & (bend < 0), axis=0))
    return bent & one_way


def _shifts(session: Session, point: Point, tied) -> np.ndarray:
    """All tied elements up, and moved up and down at random."""
    signs = generator(session.seed, "ties").choice([-1.0, 1.0], (DIRECTIONS, len(tied)))
    signs[0] = 1.0
    shifts = np.zeros((DIRECTIONS, point.scale.size))
    shifts[:, tied] = _step(session.differences) * signs * point.scale[tied].max()
    return shifts


def _step(differences: Differences) -> float:
    return 2.0 ** -differences.evaluation.quick[1]


def _noise(differences: Differences) -> float:
    return NOISE * differences.evaluation.eps * float(np.max(np.abs(differences.base)))


def _failure(problem: Problem, leaf: int, tied, output: int, slopes) -> Failure:
    behind, ahead, analytic = slopes
    start = problem.leaf_ranges()[leaf][0]
    detail = (
        f"{len(tied)} tied elements share the gradient of {problem.output_element(output)} "
        f"wrongly: along them its slopes are {behind:.7g} and {ahead:.7g}, "
        f"analytic {analytic:.7g}"
    )
    return Failure("value", problem.element(int(tied[0])), detail, indices=tied - start)
