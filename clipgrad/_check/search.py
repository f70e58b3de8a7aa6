"""Where a gradient is wrong: the three modes, and the bisection that names elements."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from clipgrad._check.judge import KINK, OK, UNSURE, WRONG, Verdict
from clipgrad._check.session import BALANCED, DENSE, SINGLE, Point, Session
from clipgrad._check.suspects import elements, suspected

GROUPS = 3
BLOCKS = 64
KEPT = 8
INSPECTED = 64
ROUNDING = 4
FREEDOM = (10.0, 30.0)

Range = tuple[int, int]


class Finding(NamedTuple):
    """What was found in one leaf.

    `indices` are the inspected elements of the input vector and `verdict` the verdict on them;
    `suspects` counts all elements that disagree, inspected or not; `exact` tells whether that
    count is complete.
    """

    leaf: int
    indices: np.ndarray
    verdict: Verdict
    suspects: int
    exact: bool


class Search(NamedTuple):
    """All findings at one point, and the ranges that could not be decided."""

    findings: list[Finding]
    kinks: list[Range]
    unsure: list[Range]


def search(session: Session, point: Point, mode: str, rounding: Callable | None, rows: int = 2):
    """Look for wrong elements at one point.

    Args:
      session: the function.
      point: the point and its gradients.
      mode: "auto", "fast", "full", or "reference": "auto" with no look at the reference itself.
      rounding: gives the rounding error of plain AD at the point; None if not to be had.
      rows: how many random directions per group of leaves.

    Returns:
      A `Search`.
    """
    found = Search([], [], [])
    if mode == "full":
        _full(session, point, found)
    elif mode in ("auto", "reference") and point.reference is not None:
        _by_reference(session, point, point.reference, found)
        if mode == "auto":
            _along_groups(session, point, point.reference, found, rows)
        _by_blocks(session, point, found, point.blind)
    elif mode in ("auto", "reference"):
        _by_blocks(session, point, found, range(len(session.tolerance.ranges)))
    else:
        _along_leaves(session, point, found, rows)
    findings = [_of_finite(finding, point) for finding in found.findings]
    findings = [_without_rounding(f, session, point, rounding) for f in findings]
    return found._replace(findings=findings)


def every_slope(session: Session, point: Point) -> np.ndarray:
    """The slope along every single element, for the first cotangent."""
    indices = np.arange(point.scale.size)
    return elements(session, point, indices, judged=False).numeric


def _full(session: Session, point: Point, found: Search) -> None:
    for leaf, (start, stop) in enumerate(session.tolerance.ranges):
        indices = np.flatnonzero(point.finite[start:stop]) + start
        verdict = elements(session, point, indices)
        found.findings.append(Finding(leaf, indices, verdict, _count(verdict), True))


def _by_reference(session: Session, point: Point, reference: np.ndarray, found: Search) -> None:
    tolerance = session.tolerance
    slack = _slack(tolerance, reference, point.gradient, session.floor(point))
    off = np.abs(reference - point.gradient)
    excess = np.where(point.finite, (off / slack).max(axis=0), 0.0)
    for leaf, (start, stop) in enumerate(tolerance.ranges):
        part = excess[start:stop]
        suspects = np.flatnonzero(part > 1)
        if suspects.size:
            worst = suspects[np.argsort(-part[suspects], kind="stable")][:INSPECTED] + start
            verdict = suspected(session, point, reference, worst)
            alike = len(worst) == suspects.size or (verdict.kind == WRONG).all()
            count = suspects.size if alike else len(worst)
            found.findings.append(Finding(leaf, worst, verdict, count, alike))


def _slack(tolerance, numeric, analytic, floor) -> np.ndarray:
    if tolerance.paddle is not None:
        size = np.abs(numeric)
        return tolerance.paddle * np.where(size < 1e-3, 1.0, size)
    return tolerance.relative * np.fmax(np.abs(numeric), np.abs(analytic)) + floor


def _along_groups(
    session: Session, point: Point, reference: np.ndarray, found: Search, rows: int
) -> None:
    """An independent look at the reference itself, a few leaves at a time."""
    known = {finding.leaf for finding in found.findings}
    groups = np.array_split(np.arange(len(session.tolerance.ranges)), GROUPS)
    ranges = [_span(session, group) for group in groups if group.size]
    doubtful = set()
    for direction in BALANCED[:rows]:
        verdict = session.verdict(point, ranges, direction, reference)
        members = [group for group in groups if group.size]
        for group, kind in zip(members, verdict.kind, strict=True):
            doubtful |= set(group.tolist()) if kind != OK else set()
    leaves = sorted(doubtful - known)
    if leaves:
        _along_leaves(session, point, found, rows, leaves)


def _span(session: Session, group: np.ndarray) -> Range:
    ranges = session.tolerance.ranges
    return ranges[int(group[0])][0], ranges[int(group[-1])][1]


def _along_leaves(
    session: Session, point: Point, found: Search, rows: int, leaves: Sequence[int] | None = None
) -> None:
    leaves = range(len(session.tolerance.ranges)) if leaves is None else leaves
    ranges = [session.tolerance.ranges[leaf] for leaf in leaves]
    kinds = [
        session.verdict(point, ranges, direction, point.gradient).kind
        for direction in (*BALANCED, DENSE)[:rows]
    ]
    for leaf, area, kind in zip(leaves, ranges, np.max(kinds, axis=0), strict=True):
        _record(session, point, found, leaf, [area], np.asarray([kind]))


def _by_blocks(session: Session, point: Point, found: Search, leaves: Sequence[int]) -> None:
    for leaf in leaves:
        blocks = _split(session.tolerance.ranges[leaf], BLOCKS)
        _record(session, point, found, leaf, blocks, _kinds(session, point, blocks))


def _record(session, point, found: Search, leaf: int, areas, kinds) -> None:
    found.kinks.extend(area for area, kind in zip(areas, kinds, strict=True) if kind == KINK)
    found.unsure.extend(area for area, kind in zip(areas, kinds, strict=True) if kind == UNSURE)
    wrong = [area for area, kind in zip(areas, kinds, strict=True) if kind == WRONG]
    if wrong:
        finding = _bisect(session, point, leaf, wrong)
        found.findings.append(finding)
        if not len(finding.indices):
            found.unsure.extend((a, b) for a, b in wrong if b - a > BLOCKS)


def _bisect(session: Session, point: Point, leaf: int, areas: list[Range]) -> Finding:
    """Split disagreeing ranges until single elements are left.

    Where a range disagrees though all its parts agree, only elements at kinks are left: together
    they may be wrong. None at all are left where the disagreement was noise; if every element was
    looked at, it is right.
    """
    exact, kinks = True, []
    while areas and max(stop - start for start, stop in areas) > 1:
        exact = exact and len(areas) <= KEPT
        kept = areas[:KEPT]
        parts = [part for area in kept for part in _split(area, BLOCKS)]
        kinds = _kinds(session, point, parts)
        areas = [part for part, kind in zip(parts, kinds, strict=True) if kind == WRONG]
        kinks = [part for part, kind in zip(parts, kinds, strict=True) if kind == KINK]
    singles = areas or [(start, stop) for start, stop in kinks if stop - start == 1]
    indices = np.asarray([start for start, _ in singles], int)[:INSPECTED]
    verdict = elements(session, point, indices)
    return Finding(leaf, indices, verdict, len(singles), exact)


def _kinds(session: Session, point: Point, areas: list[Range]) -> np.ndarray:
    single = max(stop - start for start, stop in areas) == 1
    return session.verdict(point, areas, SINGLE if single else DENSE, point.gradient).kind


def _split(area: Range, parts: int) -> list[Range]:
    start, stop = area
    cuts = np.linspace(start, stop, min(parts, stop - start) + 1).astype(int)
    return [(int(a), int(b)) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]


def _count(verdict: Verdict) -> int:
    return int(np.sum(verdict.kind == WRONG))


def _of_finite(finding: Finding, point: Point) -> Finding:
    """Leaves out elements whose gradient is not finite, which is a failure of its own."""
    finite = point.finite[finding.indices]
    verdict = Verdict(*(field[finite] for field in finding.verdict))
    suspects = finding.suspects - int(np.sum(~finite))
    return finding._replace(indices=finding.indices[finite], verdict=verdict, suspects=suspects)


def _without_rounding(finding: Finding, session: Session, point: Point, rounding) -> Finding:
    """Excuse elements where plain AD in the same precision is off about as much."""
    wrong = finding.verdict.kind == WRONG
    if rounding is None or not wrong.any():
        return finding
    error = rounding()
    if error is None:
        return finding
    start, stop = session.tolerance.ranges[finding.leaf]
    own, others = FREEDOM
    allowed = own * error.max(axis=0) + others * np.median(error.max(axis=0)[start:stop])
    off = np.abs(finding.verdict.numeric - finding.verdict.analytic)
    excused = wrong & (off <= allowed[finding.indices]) & ~finding.verdict.kink
    kind = np.where(excused, ROUNDING, finding.verdict.kind)
    return finding._replace(verdict=finding.verdict._replace(kind=kind))
