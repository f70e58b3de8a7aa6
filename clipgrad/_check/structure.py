"""Points with structure: elements that are tied, as equal maxima are, and symmetric matrices.

An element at a kink may have any gradient between its one-sided slopes; several that are tied may
not have it together. Where all kinks of one output bend the same way, the gradient lies between the
one-sided slopes along every direction of the elements at kinks.
"""

import dataclasses

import numpy as np

import clipgrad._trees as _trees
from clipgrad._check import points
from clipgrad._check.differences import Differences, Moves, step_sizes
from clipgrad._check.further import symmetric_leaves
from clipgrad._check.gradients import VJP
from clipgrad._check.points import DENSE, SINGLE, Point
from clipgrad._check.report import Failure
from clipgrad._check.search import Finding, Judge, wrong_leaves
from clipgrad._check.subject import CheckSubject
from clipgrad._check.tolerances import KINK_GAP, LOOSER, NOISE
from clipgrad._check.verdicts import KINK, OK, SYMMETRIC, WRONG

AT_KINKS = 64  # elements of each finding that are moved
OUTPUTS = 8  # with kinks that are looked at
TIED = 256  # wrong elements among equal ones that are looked at where ties are broken
APART = 2.0**-16  # how far equal elements are moved apart, relative to their scale
BENDS = 8  # relative to the step: how far a smooth function's one-sided slopes are off
MOVED = 4  # ways to move tied elements: all up, and up and down at random


def check_ties(
    subject: CheckSubject, judge: Judge, vjp: VJP, found: list[Finding], seed: int
) -> list[Failure]:
    """The one-sided slopes of single outputs along elements that are at kinks of them."""
    wrong, differences, point = wrong_leaves(found), judge.differences, judge.point
    every = [f.indices[f.verdict.kind == KINK] for f in found if f.leaf not in wrong]
    kinks = np.unique(np.concatenate([np.zeros(0, int), *(part[:AT_KINKS] for part in every)]))
    if len(kinks) < 2:
        return []
    step = float(step_sizes(differences.evaluation.quick)[1])
    differences.set_base(point.xs, point.direction(SINGLE))
    noise = NOISE * differences.evaluation.eps * float(np.max(np.abs(differences.base)))
    outputs, bent = _bent_one_way(differences, point, kinks, step, noise)
    others = np.unique(np.concatenate(every))
    for output, of_output in zip(outputs, bent.T, strict=True):
        tied = kinks[of_output]
        if len(others) > len(kinks):  # those that were not moved are tied by their value
            tied = others[np.isin(point.vector[others], point.vector[tied])]
        detail = _shared_wrongly(judge, vjp, tied, int(output), seed, step, noise)
        if detail:
            detail = f"the gradient of {subject.output_element(int(output))} wrongly: {detail}"
            detail = f"{len(tied)} tied elements share {detail}"
            start = max(start for start, _ in subject.ranges if start <= tied[0])
            return [Failure("value", subject.element(int(tied[0])), detail, indices=tied - start)]
    return []


def _shared_wrongly(
    judge: Judge, vjp: VJP, tied, output: int, seed: int, step: float, noise: float
) -> str:
    """The slopes of an output where tied elements move together, if its gradient is outside."""
    differences, point = judge.differences, judge.point
    gradient = vjp(np.eye(1, len(differences.base), output)[0])[tied].astype(np.float64)
    leaf = judge.tolerance.leaves_of(tied)[0]
    relative = max(LOOSER * judge.tolerance.relative[leaf], BENDS * step)
    signs = points.generator(seed, "ties").choice([-1.0, 1.0], (MOVED, len(tied)))
    signs[0] = 1.0  # all up, and up and down at random
    found, shift = [], np.zeros(point.scale.size, point.scale.dtype)
    for move in step * signs * point.scale[tied].max():
        shift[tied] = move
        ahead, behind = (change[output] for change in differences.change(point.xs, shift))
        analytic, slack = move @ gradient, relative * np.abs(move) @ np.abs(gradient) + noise
        off = np.fmax(min(ahead, behind) - analytic, analytic - max(ahead, behind)) - slack
        found.append((off, *(np.array([behind, ahead, analytic]) / np.linalg.norm(move))))
    off, *slopes = max(found)
    if not off > 0:
        return ""
    behind, ahead, analytic = (f"{slope:.7g}" for slope in slopes)
    return f"along them its slopes are {behind} and {ahead}, analytic {analytic}"


def _bent_one_way(
    differences: Differences, point: Point, kinks, step: float, noise: float
) -> tuple:
    """Some outputs with several kinks, all of which bend the same way, and which kinks these are.

    An output is as large as a model may be, so that of each kink one bit is kept for it.
    """
    shift, rows = np.zeros(point.scale.size, point.scale.dtype), []
    ups, downs = np.zeros((2, len(differences.base)), np.int32)
    for k in kinks:
        shift[k] = step * point.scale[k]
        ahead, behind = differences.change(point.xs, shift)
        shift[k] = 0.0
        bend, size = ahead - behind, np.fmax(np.abs(ahead), np.abs(behind))
        bent = np.abs(bend) > KINK_GAP * size + noise
        ups, downs = ups + (bent & (bend > 0)), downs + (bent & (bend < 0))
        rows.append(np.packbits(bent))
    outputs = np.flatnonzero((ups + downs > 1) & ((ups == 0) | (downs == 0)))[:OUTPUTS]
    return outputs, np.stack([np.unpackbits(row)[outputs] for row in rows]).astype(bool)


def excuse_structure(subject: CheckSubject, judge: Judge, found: list[Finding], seed: int) -> list:
    """Take what is wrong in symmetric matrices, or at tied elements alone, for what it is."""
    if judge.delta is not None or judge.differences.evaluation.dtype != np.float64:
        return found
    leaves = symmetric_leaves(judge.point.xs)
    of_symmetric = [
        _symmetric(subject, judge, f, seed) if f.is_wrong and f.leaf in leaves else f for f in found
    ]
    return [_untied(judge, f, seed) if f.is_wrong else f for f in of_symmetric]


# Needed by the case sort_with_three_equal_elements.
def _untied(judge: Judge, finding: Finding, seed: int) -> Finding:
    """Accept one of the gradients nearby at tied elements.

    Of three equal elements the middle one of a sort moves by itself not at all, and yet one of
    them has its gradient. Where ties are broken at random, slopes are unique: a gradient between
    the least and the largest of these is right for an element.
    """
    vector, (start, stop) = judge.point.vector, judge.ranges[finding.leaf]
    values, counts = np.unique(vector[start:stop], return_counts=True)
    wrong = np.flatnonzero(finding.verdict.kind == WRONG)
    tied = np.isin(vector[finding.indices[wrong]], values[counts > 1])
    indices = finding.indices[wrong[tied]]
    if not len(indices) or len(indices) > TIED:
        return finding
    low, high = _slopes_nearby(judge, slice(start, stop), indices, seed)
    gradient = judge.gradient[:, indices]
    slack = judge.allowed_at(indices).slack(gradient, gradient) + APART * np.abs(high - low)
    inside = (gradient >= low - slack) & (gradient <= high + slack)
    inside &= high - low > slack + KINK_GAP * np.fmax(np.abs(low), np.abs(high))
    where = np.zeros(len(finding.indices), bool)
    where[wrong[tied]] = inside.all(axis=0)
    return finding.with_kind(KINK, where)


def _slopes_nearby(judge: Judge, area: slice, indices, seed: int) -> tuple:
    """The least and the largest slope of each element, where no two elements are equal."""
    differences, point, count = judge.differences, judge.point, area.stop - area.start
    moves = Moves(indices, indices + 1, np.full(len(indices), APART / 4 / count))
    rng, found = points.generator(seed, "untied"), []
    for _ in range(2 * MOVED):
        moved = point.vector.copy()
        moved[area] += APART * rng.permutation(count) / count * point.scale[area].max()
        xs = _trees.from_rows(moved, differences.evaluation.like)
        found.append(
            differences.measure(xs, point.direction(SINGLE), judge.gradient, moves).central
        )
    slopes = np.stack(found) / point.scale[indices][None, :, None]
    return slopes.min(axis=0).T, slopes.max(axis=0).T


# Needed by the case a_product_beside_a_cholesky_decomposition.
def _symmetric(subject: CheckSubject, judge: Judge, finding: Finding, seed: int) -> Finding:
    """Excuse what is right for symmetric matrices, where the function itself is meant for them.

    That is so where plain AD has the same gradient, which disagrees with the slopes as well, as for
    a Cholesky decomposition: it is differentiated as a function of symmetric matrices but reads one
    triangle. So a transposed gradient is not excused.
    """
    plain, indices = judge.point.reference, finding.indices
    if plain is None:
        return finding
    both = plain[:, indices], judge.gradient[:, indices]
    excused = (np.abs(both[0] - both[1]) <= judge.allowed_at(indices).slack(*both)).all(axis=0)
    leaf, area = subject.inputs[finding.leaf], judge.ranges[finding.leaf]
    rng = points.generator(seed, "symmetric")
    for _ in DENSE[:2] if excused.any() else ():
        (random,) = _trees.from_rows(points.dense_numbers(rng, _trees.real_size(leaf)), [leaf])
        symmetric = (random + np.conj(np.swapaxes(random, -1, -2))) / 2
        direction = np.zeros(judge.point.scale.size, judge.point.scale.dtype)
        direction[slice(*area)] = _trees.to_numpy([symmetric]) * judge.point.scale[area[0]]
        point = dataclasses.replace(judge.point, direction=lambda row: direction)  # noqa: B023
        itself = dataclasses.replace(judge, point=point, gradient=plain, is_plain=True)
        if itself.areas([area], DENSE[2]).kind[0] != OK:
            return finding
    return finding.with_kind(SYMMETRIC, excused)
