"""Points with structure: elements that are tied, as equal maxima are, and symmetric matrices.

An element at a kink may have any gradient between its one-sided slopes; several that are tied may
not have it together. Two checks find out. Along a direction that keeps equal elements equal, what
is tied stays tied, so that most functions have one slope there, which the gradient must have. And
where all kinks of one output bend the same way, the gradient lies between the one-sided slopes
along every direction of the elements at kinks, equal or not.
"""

import dataclasses

import numpy as np

from clipgrad._check.differences import Differences, Moves, step_sizes
from clipgrad._check.gradients import VJP
from clipgrad._check.points import (
    BALANCED,
    DENSE,
    Point,
    dense_numbers,
    generator,
    symmetric_leaves,
    tied_direction,
)
from clipgrad._check.report import Failure
from clipgrad._check.search import Finding, Judge, wrong_leaves
from clipgrad._check.subject import CheckSubject
from clipgrad._check.tolerances import KINK_GAP, NOISE, TIED_RELATIVE
from clipgrad._check.vectors import from_rows, real_size, to_numpy
from clipgrad._check.verdicts import (
    KINK,
    LOST,
    OK,
    ROUNDING,
    SINGULAR,
    SYMMETRIC,
    UNSURE,
    WRONG,
)

EXCUSED = (ROUNDING, LOST, UNSURE, SYMMETRIC, SINGULAR)
AT_KINKS = 64  # elements of each finding that are moved
OUTPUTS = 8  # with kinks that are looked at
MANY = 100_000  # elements, of which some are equal: to sort them costs more than to try
TIED = 256  # wrong elements among equal ones that are looked at where ties are broken
APART = 2.0**-16  # how far equal elements are moved apart, relative to their scale
BENDS = 8  # relative to the step: how far a smooth function's one-sided slopes are off
MOVED = 4  # ways to move tied elements: all up, and up and down at random


def check_ties(
    subject: CheckSubject, judge: Judge, vjp: VJP, found: list[Finding], seed: int
) -> list[Failure]:
    """Check what is tied in leaves in which no element is wrong by itself."""
    wrong = wrong_leaves(found)
    findings = [finding for finding in found if finding.leaf not in wrong]
    kinks = [f.indices[f.verdict.kind == KINK][:AT_KINKS] for f in findings]
    kinks = np.unique(np.concatenate(kinks)) if kinks else np.zeros(0, int)
    failures = _at_kinks(subject, judge, vjp, kinks, seed) if len(kinks) > 1 else []
    if failures or wrong:
        return failures
    # What is excused in an element is no less off in a sum over several.
    excused = [f.leaf for f in findings if np.isin(f.verdict.kind, EXCUSED).any()]
    return _of_equal_elements(subject, judge, excused, seed)


def _of_equal_elements(subject: CheckSubject, judge: Judge, without, seed: int) -> list[Failure]:
    """The slope along directions that keep equal elements equal."""
    if judge.delta is not None:  # a step of the user's, of which nothing is known
        return []
    vector, direction = judge.point.vector.copy(), tied_direction(judge.point.xs, seed)
    for leaf in without:
        start, stop = judge.ranges[leaf]
        vector[start:stop] = direction[start:stop] = 0.0
    values = _tied_values(vector) if vector.size < MANY else vector
    if not len(values) or not _is_wrong_along(judge, direction):
        return []
    values = _tied_values(vector)
    if not len(values) or not _is_wrong_along(judge, _of_values(judge, vector, values)):
        return []
    while len(values) > 1:
        halves = np.array_split(values, 2)
        wrong = [half for half in halves if _is_wrong_along(judge, _of_values(judge, vector, half))]
        if not wrong:
            break
        values = wrong[0]
    tied = np.flatnonzero(np.isin(vector, values))
    moved = np.zeros((1, judge.point.scale.size))
    moved[0, tied] = _step(judge.differences) * judge.point.scale[tied].max()
    ahead, behind = judge.differences.changes(judge.point.xs, moved)
    changes = [ahead, behind] @ judge.differences.covectors[0]
    slopes = [float(change[0]) for change in (changes[1], changes[0], moved @ judge.gradient[0])]
    return [_tied_failure(subject, tied, "", slopes, float(np.linalg.norm(moved)))]


def _tied_values(vector: np.ndarray) -> np.ndarray:
    values, counts = np.unique(vector, return_counts=True)
    return values[(counts > 1) & (values != 0)]


def _of_values(judge: Judge, vector: np.ndarray, values: np.ndarray) -> np.ndarray:
    """All elements of some values moved by their scale, those of one value alike."""
    scale = judge.point.scale
    return np.where(np.isin(vector, values), vector / np.abs(vector).max() * scale.max(), 0.0)


def _is_wrong_along(judge: Judge, direction: np.ndarray) -> bool:
    """Whether the gradient is off by more than its elements may be together.

    Not at a kink: what is tied has one slope along such a direction only where it has no other.
    """
    verdict = _moving(judge, direction).areas([(0, judge.point.scale.size)], DENSE)
    if verdict.kind[0] != WRONG or verdict.kink[0]:
        return False
    moved = np.flatnonzero(direction)
    part = judge.gradient[:, moved]
    slack = judge.allowed_at(moved).slack(part, part) @ np.abs(direction[moved])
    return bool(np.abs(verdict.numeric - verdict.analytic)[0] > slack.max())


def _moving(judge: Judge, direction: np.ndarray) -> Judge:
    """The same judge, which moves along `direction` where it would along a dense one."""
    point = dataclasses.replace(judge.point, direction=lambda row: direction)
    return dataclasses.replace(judge, point=point)


def _at_kinks(subject: CheckSubject, judge: Judge, vjp: VJP, kinks, seed: int) -> list[Failure]:
    """The one-sided slopes of single outputs along elements that are at kinks of them."""
    differences, point = judge.differences, judge.point
    bent = _bent_one_way(differences, point, kinks)
    for output in np.flatnonzero(bent.sum(axis=0) > 1)[:OUTPUTS]:
        tied = kinks[bent[:, output]]
        gradient = vjp(np.eye(1, bent.shape[1], output)[0])
        shifts = _shifts(judge, tied, seed)
        ahead, behind = (change[:, output] for change in differences.changes(point.xs, shifts))
        analytic = shifts @ gradient
        low, high = np.minimum(ahead, behind), np.maximum(ahead, behind)
        relative = TIED_RELATIVE * judge.tolerance.relative[judge.tolerance.leaves_of(tied)[0]]
        relative = max(relative, BENDS * _step(differences))
        slack = relative * np.abs(shifts) @ np.abs(gradient) + _noise(differences)
        off = np.fmax(low - analytic, analytic - high) - slack
        worst = int(np.argmax(off))
        if off[worst] > 0:
            name = f" of {subject.output_element(int(output))}"
            slopes = [float(x[worst]) for x in (behind, ahead, analytic)]
            return [
                _tied_failure(subject, tied, name, slopes, float(np.linalg.norm(shifts[worst])))
            ]
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


def _shifts(judge: Judge, tied, seed: int) -> np.ndarray:
    """All tied elements up, and moved up and down at random."""
    signs = generator(seed, "ties").choice([-1.0, 1.0], (MOVED, len(tied)))
    signs[0] = 1.0
    shifts = np.zeros((MOVED, judge.point.scale.size))
    shifts[:, tied] = _step(judge.differences) * signs * judge.point.scale[tied].max()
    return shifts


def _step(differences: Differences) -> float:
    return float(step_sizes(differences.evaluation.quick)[1])


def _noise(differences: Differences) -> float:
    return NOISE * differences.evaluation.eps * float(np.max(np.abs(differences.base)))


def _tied_failure(subject: CheckSubject, tied, output: str, slopes, size: float) -> Failure:
    behind, ahead, analytic = (slope / size for slope in slopes)
    starts = [start for start, _ in subject.ranges]
    start = starts[int(np.searchsorted(starts, tied[0], "right")) - 1]
    detail = (
        f"{len(tied)} tied elements share the gradient{output} wrongly: along them its slopes are "
        f"{behind:.7g} and {ahead:.7g}, analytic {analytic:.7g}"
    )
    return Failure("value", subject.element(int(tied[0])), detail, indices=tied - start)


def excuse_tied(subject: CheckSubject, judge: Judge, found: list[Finding], seed: int) -> list:
    """Take what is wrong at tied elements alone for what it is: one of the gradients nearby.

    Of three equal elements the middle one of a sort moves by itself not at all, and yet one of
    them has its gradient. Where ties are broken at random, slopes are unique: a gradient between
    the least and the largest of these is right for an element; `check_ties` adds them up.
    """
    if judge.delta is not None or judge.differences.evaluation.dtype != np.float64:
        return found
    return [_untied(subject, judge, f, seed) if f.is_wrong else f for f in found]


def _untied(subject: CheckSubject, judge: Judge, finding: Finding, seed: int) -> Finding:
    vector, (start, stop) = judge.point.vector, judge.ranges[finding.leaf]
    values, counts = np.unique(vector[start:stop], return_counts=True)
    wrong = np.flatnonzero(finding.verdict.kind == WRONG)
    tied = np.isin(vector[finding.indices[wrong]], values[counts > 1])
    indices = finding.indices[wrong[tied]]
    if not len(indices) or len(indices) > TIED:
        return finding
    low, high = _slopes_nearby(subject, judge, (start, stop), indices, seed)
    gradient = judge.gradient[:, indices]
    slack = judge.allowed_at(indices).slack(gradient, gradient) + APART * np.abs(high - low)
    inside = (gradient >= low - slack) & (gradient <= high + slack) & (high - low > slack)
    kinds = finding.verdict.kind.copy()
    kinds[wrong[tied][inside.all(axis=0)]] = KINK
    return finding._replace(verdict=finding.verdict._replace(kind=kinds))


def _slopes_nearby(subject: CheckSubject, judge: Judge, area, indices, seed: int) -> tuple:
    """The least and the largest slope of each element, where no two elements are equal."""
    differences, point, count = judge.differences, judge.point, len(indices)
    moves = Moves(indices, indices + 1, np.full(count, APART / 4))
    rng, found = generator(seed, "untied"), []
    for _ in range(2 * MOVED):
        moved = point.vector.copy()
        part = rng.permutation(area[1] - area[0]) / (area[1] - area[0])
        moved[slice(*area)] += APART * part * point.scale[slice(*area)].max()
        xs = from_rows(moved, differences.evaluation.like)
        step = moves._replace(step=moves.step / (area[1] - area[0]))
        found.append(differences.measure(xs, point.scale, judge.gradient, step).central)
    slopes = np.stack(found) / point.scale[indices][None, :, None]
    return slopes.min(axis=0).T, slopes.max(axis=0).T


def excuse_symmetric(
    subject: CheckSubject, judge: Judge, found: list[Finding], seed: int
) -> list[Finding]:
    """Excuse what is right for symmetric matrices, where the function itself is meant for them.

    That is so where plain AD disagrees with the slopes as well, as for a Cholesky decomposition,
    which is differentiated as a function of symmetric matrices but reads one triangle. So a
    transposed gradient is not excused.
    """
    areas = dict(symmetric_leaves(subject, judge.point.xs))
    return [
        _excused_finding(subject, judge, f, areas[f.leaf], seed)
        if f.is_wrong and f.leaf in areas
        else f
        for f in found
    ]


def _excused_finding(
    subject: CheckSubject, judge: Judge, finding: Finding, area, seed: int
) -> Finding:
    if not _is_meant_for_symmetric(judge, finding):
        return finding
    leaf, rng = subject.inputs[finding.leaf], generator(seed, "symmetric")
    for _ in BALANCED:
        (random,) = from_rows(dense_numbers(rng, real_size(leaf)), [leaf])
        symmetric = (random + np.conj(np.swapaxes(random, -1, -2))) / 2
        direction = np.zeros_like(judge.point.scale)
        direction[slice(*area)] = to_numpy([symmetric]) * judge.point.scale[area[0]]
        if _moving(judge, direction).areas([area], DENSE).kind[0] != OK:
            return finding
    return finding.with_kind(SYMMETRIC)


def _is_meant_for_symmetric(judge: Judge, finding: Finding) -> bool:
    plain = judge.point.reference
    if plain is None:
        return False
    wrong = np.flatnonzero((finding.verdict.kind == WRONG) & finding.seen)
    numeric, indices = finding.verdict.numeric[wrong], finding.indices[wrong]
    slack = judge.allowed_at(indices).slack(plain[:, indices], judge.gradient[:, indices])
    return bool((np.abs(plain[:, indices] - numeric) > slack).all(axis=0).any())
