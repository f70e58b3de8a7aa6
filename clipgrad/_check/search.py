"""Where a gradient is wrong: suspects named by plain AD, ranges bisected, all judged by slopes."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from clipgrad._check.differences import Differences, Moves, Slopes, progress_bar
from clipgrad._check.points import BALANCED, DENSE, SINGLE, Point
from clipgrad._check.subject import Range
from clipgrad._check.tolerances import SETTLED, SLIGHT, Allowed, Sizes, Tolerance, length_along
from clipgrad._check.verdicts import (
    KINK,
    LOST,
    NO_VERDICTS,
    OK,
    ROUNDING,
    UNSEEN,
    UNSURE,
    WRONG,
    Verdict,
    is_certain,
    judge_ladder,
    judge_two,
)

GROUPS = 3  # of leaves that an independent look at plain AD moves together
BLOCKS = 64  # parts that a leaf is split into where there is no reference
# Of the suspects in a leaf, the worst and some spread over the others are looked at; if they are
# all wrong so are the others, else more are looked at.
WORST, SPREAD, INSPECTED = 8, 8, 64
# A range that is wrong is split in so many parts; where more than FEW are, only the WORST_AREAS.
PARTS, FEW, WORST_AREAS = 16, 8, 2
# Off by less than this part of the typical gradient: constants may have been rounded.
SUBTLE = 0.01


class Finding(NamedTuple):
    """What was found in one leaf.

    `indices` are elements of the input vector and `verdict` the verdict on them, of which the
    first `inspected` were looked at by differences; `suspects` counts all elements that disagree,
    listed or not, and `exact` is whether that count is complete. `passes`: the rule is wrong in
    float64, but its gradient as computed is within its own tolerance.
    """

    leaf: int
    indices: np.ndarray
    verdict: Verdict
    suspects: int
    exact: bool
    inspected: int
    passes: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether some element is wrong."""
        return bool(np.any(self.verdict.kind == WRONG))

    def with_kind(self, kind: Any, where: Any = True) -> "Finding":
        """The finding with another verdict on its wrong elements, or on some of them."""
        kinds = np.where((self.verdict.kind == WRONG) & where, kind, self.verdict.kind)
        return self._replace(verdict=self.verdict._replace(kind=kinds))


class Search(NamedTuple):
    """All findings at one point, and the ranges that are at kinks or could not be decided."""

    findings: list[Finding]
    kinks: list[Range]
    unsure: list[Range]

    def wrong_leaves(self) -> set[int]:
        """The leaves in which some element is wrong."""
        return {finding.leaf for finding in self.findings if finding.is_wrong}


@dataclasses.dataclass(frozen=True)
class Judge:
    """Judges a gradient at a point, in whole or in part, by the slopes of the function.

    Attributes:
      differences: measures slopes.
      point: the inputs, and the directions to move them in.
      gradient: what is judged, shape (cotangents, inputs).
      reference: what each element is compared with first, plain AD's gradient or the rule's in
        float64; None if neither can be had.
      tolerance: how far numbers may be apart.
      delta: an absolute step, to be used as it is; None to extrapolate.
      rounding: gives what rounding excuses in each element, or None.
    """

    differences: Differences
    point: Point
    gradient: np.ndarray
    reference: np.ndarray | None
    tolerance: Tolerance
    delta: float | None = None
    rounding: Callable[[], np.ndarray | None] = lambda: None

    @property
    def ranges(self) -> Sequence[Range]:
        """The range of each leaf in the vector of inputs."""
        return self.tolerance.ranges

    @functools.cached_property
    def sizes(self) -> Sizes:
        """How large the gradient is, leaf by leaf; the exact one, if there is one."""
        target = self.gradient if self.reference is None else self.reference
        return self.tolerance.sizes(target, self.point.scale)

    def allowed(self, leaf: int) -> Allowed:
        """How far each element of a leaf may be off."""
        scale = self.point.scale[slice(*self.ranges[leaf])]
        return self.tolerance.elements(self.sizes, leaf, scale, self.reference is not None)

    def allowed_at(self, indices: np.ndarray) -> Allowed:
        """How far some elements may be off."""
        leaves, scale = self.tolerance.leaves_of(indices), self.point.scale[indices]
        return self.tolerance.elements(self.sizes, leaves, scale, self.reference is not None)

    def elements(self, indices: np.ndarray, judged: bool = True) -> Verdict:
        """The verdict on single elements, in units of the gradient."""
        areas = np.stack([indices, indices + 1], axis=1)
        verdict = self.areas(areas, SINGLE, judged=judged)
        unit = self.point.scale[indices]
        names = ("numeric", "analytic", "error", "ahead", "behind")
        return verdict._replace(**{name: getattr(verdict, name) / unit for name in names})

    def areas(
        self, areas, direction: int, target: np.ndarray | None = None, judged: bool = True
    ) -> Verdict:
        """Judge the slopes along ranges of the input vector against a gradient.

        Args:
          areas: pairs (start, stop), one for each row.
          direction: which of the point's directions to move along.
          target: another gradient to be judged instead.
          judged: False to look closer at what is imprecise, instead of at what disagrees.

        Returns:
          One verdict for each range. What two steps show to be right or certainly wrong is not
          looked at again.
        """
        areas = np.asarray(areas, int).reshape(-1, 2)
        if not len(areas):
            return NO_VERDICTS
        target = self.gradient if target is None else target
        allowed = self._allowed(areas, direction, target)
        verdict = self._by_two_steps(areas, direction, target, allowed)
        if judged and direction != SINGLE:
            self._by_finer_steps(verdict, areas, direction, target, allowed)
        doubtful = verdict.kind != OK if judged else _unsettled(verdict)
        doubtful = np.flatnonzero(doubtful & ~(is_certain(verdict) & judged))
        if doubtful.size and self.delta is None:
            ladder, ratio = self._ladder(areas[doubtful], direction, target)
            verdict.put(doubtful, judge_ladder(ladder, ratio, allowed.part(doubtful)))
        return verdict

    def _by_finer_steps(self, verdict, areas, direction, target, allowed) -> None:
        """Try smaller steps where one disagrees, since elements may have passed their kinks."""
        finer, doubtful = self.differences.evaluation.finer, np.flatnonzero(verdict.kind != OK)
        if finer is None or self.delta is not None or not doubtful.size:
            return
        part = allowed.part(doubtful)
        closer = self._by_two_steps(areas[doubtful], direction, target, part, finer)
        right = closer.kind == OK
        verdict.put(doubtful[right], closer.part(right))

    def _by_two_steps(self, areas, direction, target, allowed, exponents=None) -> Verdict:
        exponents = exponents or self.differences.evaluation.quick
        exponents = exponents if self.delta is None else (0, 1)
        steps = self._measure(areas, direction, target, exponents)
        ratio = 2.0 ** (exponents[1] - exponents[0])
        return judge_two(steps, ratio, allowed, as_they_are=self.delta is not None)

    def _ladder(self, areas, direction, target) -> tuple[Slopes, float]:
        exponents = self.differences.evaluation.ladder
        ladder = self._measure(areas, direction, target, exponents)
        return ladder, 2.0 ** (exponents[1] - exponents[0])

    def _measure(self, areas, direction, target, exponents) -> Slopes:
        steps = 2.0 ** -np.asarray(exponents, np.float64)
        count, each = len(areas), len(steps)
        starts, stops = (np.repeat(column, each) for column in areas.T)
        moves = Moves(starts, stops, np.tile(steps, count))
        along = self.point.direction(direction)
        with progress_bar(len(moves.start)) as progress:
            flat = self.differences.measure(self.point.xs, along, target, moves, progress)
        return Slopes(*(column.reshape((count, each, -1)) for column in flat))

    def _allowed(self, areas, direction, target) -> Allowed:
        starts = areas[:, 0]
        if direction == SINGLE:
            unit = self.point.scale[starts][:, None]
            allowed = self.allowed_at(starts)
            floor, typical = allowed.floor.T * unit, allowed.typical.T * unit
            return Allowed(allowed.relative[:, None], floor, typical, unit, allowed.paddle)
        along = self.point.direction(direction)
        norms = [length_along(target[:, a:b], along[a:b]) for a, b in areas]
        exact = target is self.reference
        return self.tolerance.ranges_along(np.stack(norms), self.sizes.overall, starts, exact)


def search(
    judge: Judge,
    mode: str,
    rows: int = 2,
    allowance: Callable | None = None,
    without: Collection = (),
) -> Search:
    """Look for wrong elements at one point.

    Args:
      judge: judges the gradient there.
      mode: "auto", "fast", "full", or "reference": "auto" without a check of the reference itself.
      rows: how many random directions per group of leaves.
      allowance: gives how far each element may be off in addition; called only where some are
        off a little.
      without: leaves to leave out.

    Returns:
      A `Search`.
    """
    found, leaves = Search([], [], []), range(len(judge.ranges))
    leaves = [leaf for leaf in leaves if leaf not in without]
    if mode == "full":
        _full(judge, found)
    elif mode in ("auto", "reference") and judge.reference is not None:
        _by_reference(judge, judge.reference, found, leaves, allowance)
        if mode == "auto":
            _along_groups(judge, judge.reference, found, rows)
        _by_blocks(judge, found, [leaf for leaf in judge.point.blind if leaf in leaves])
    elif mode in ("auto", "reference"):
        _by_blocks(judge, found, leaves)
    else:
        _along_leaves(judge, found, rows, leaves)
    findings = [_of_finite(finding, judge.point) for finding in found.findings]
    findings = [_without_constants(finding, judge, allowance) for finding in findings]
    return found._replace(findings=[_without_rounding(f, judge) for f in findings])


def every_slope(judge: Judge) -> np.ndarray:
    """The slope along every single element, for the first cotangent."""
    return judge.elements(np.arange(judge.point.scale.size), judged=False).numeric


def _full(judge: Judge, found: Search) -> None:
    for leaf, (start, stop) in enumerate(judge.ranges):
        indices = np.flatnonzero(judge.point.finite[start:stop]) + start
        verdict = judge.elements(indices)
        count = int(np.sum(verdict.kind == WRONG))
        found.findings.append(Finding(leaf, indices, verdict, count, True, len(indices)))


def _by_reference(judge: Judge, reference, found: Search, leaves, allowance) -> None:
    """Judge by differences where the gradient and the reference disagree."""
    for leaf in leaves:
        start, stop = judge.ranges[leaf]
        off = np.abs(reference[:, start:stop] - judge.gradient[:, start:stop])
        part = reference[:, start:stop], judge.gradient[:, start:stop]
        slack = judge.allowed(leaf).slack(*part)
        finite = judge.point.finite[start:stop]
        suspects = (off > slack).any(axis=0) & finite
        if not suspects.any():
            continue
        if allowance is not None and _is_subtle(
            off[:, suspects], part[0][:, suspects], judge, leaf
        ):
            slack = slack + allowance()[:, start:stop]
            suspects &= (off > slack).any(axis=0)
        excused = judge.rounding()
        rounding = np.zeros_like(suspects)
        if excused is not None:
            rounding = suspects & (off.max(axis=0) <= excused[start:stop])
        if rounding.any():
            indices = np.flatnonzero(rounding) + start
            kinds = _excuse(judge, leaf, off[:, rounding].max(axis=0), part[0][:, rounding])
            verdict = _as_reference(judge, reference, indices, ROUNDING)._replace(kind=kinds)
            found.findings.append(Finding(leaf, indices, verdict, 0, True, 0))
        indices = np.flatnonzero(suspects & ~rounding)
        if indices.size:
            excess = (off[:, indices] / slack[:, indices]).max(axis=0)
            excess[np.argmax(off[:, indices].max(axis=0))] = np.inf  # the one that is reported
            worst = indices[np.argsort(-excess, kind="stable")] + start
            found.findings.append(_inspected_finding(judge, reference, leaf, worst))


def _excuse(judge: Judge, leaf: int, off, gradient) -> np.ndarray:
    """The verdict on elements that rounding excuses: little of them is lost, or much."""
    size = np.abs(gradient).max(axis=0) + judge.sizes.typical[:, leaf].max()
    return np.where(off <= SLIGHT * size, ROUNDING, LOST)


def _is_subtle(off, reference, judge: Judge, leaf: int) -> bool:
    size = np.abs(reference) + judge.sizes.typical[:, [leaf]]
    return bool((off <= SUBTLE * size).all(axis=0).any())


def _inspected_finding(judge: Judge, reference, leaf: int, worst) -> Finding:
    """Some of the suspects judged by differences; more of them, if they do not agree.

    Two of a kind stand for all of it if none is wrong. Of a kind are the elements of one value
    that are off by one ratio, as are the zeros given to a relu.
    """
    spread = worst[WORST:][:: max(1, (len(worst) - WORST) // SPREAD)][:SPREAD]
    most = worst[:INSPECTED]
    kind, of_a_kind = _kinds(judge, reference, most)
    first = np.concatenate([worst[:WORST], spread])
    by_kind = len(worst) > WORST and len(of_a_kind) < len(first)
    first = most[of_a_kind] if by_kind else first
    verdict = _with_reference(judge.elements(first), judge, reference, first)
    if (verdict.kind == WRONG).all():
        return _leaf_finding(judge, reference, leaf, worst, first, verdict, WRONG)
    if by_kind and np.isin(verdict.kind, (OK, KINK)).all():
        verdict = verdict.part(kind)
    elif by_kind or len(first) < len(most):
        verdict = _with_reference(judge.elements(most), judge, reference, most)
    return _leaf_finding(judge, reference, leaf, worst, most, verdict, UNSEEN)


def _leaf_finding(
    judge, reference, leaf: int, suspects, inspected, verdict, others: int
) -> Finding:
    """The verdict on the elements inspected, and `others` on the other suspects."""
    rest = np.setdiff1d(suspects, inspected)
    both = [verdict, _as_reference(judge, reference, rest, others)]
    together = Verdict(*map(np.concatenate, zip(*both, strict=True)))
    wrong = others == WRONG
    count = len(suspects) if wrong else len(inspected)
    indices, exact = np.r_[inspected, rest], wrong or not len(rest)
    return Finding(leaf, indices, together, count, exact, len(inspected))


def _kinds(judge: Judge, reference, indices) -> tuple[np.ndarray, np.ndarray]:
    """The kind of each element, and where the first and the last of each kind are."""
    ratio = judge.gradient[0, indices] / reference[0, indices]
    alike = np.stack([judge.point.vector[indices], np.float32(ratio).astype(float)], axis=1)
    _, first, kind = np.unique(alike, axis=0, return_index=True, return_inverse=True)
    last = [np.flatnonzero(kind.ravel() == k)[-1] for k in range(len(first))]
    return kind.ravel(), np.concatenate([first, np.asarray(last, int)])


def _as_reference(judge: Judge, reference, indices, kind: int) -> Verdict:
    """The verdict on elements that only the reference has judged."""
    numeric, analytic = reference[0, indices], judge.gradient[0, indices]
    zero = np.zeros(len(indices))
    kinds = np.full(len(indices), kind)
    return Verdict(kinds, numeric, analytic, zero, numeric, numeric, zero.astype(bool))


def _with_reference(verdict: Verdict, judge: Judge, reference, indices) -> Verdict:
    """Where differences are too noisy to decide, without contradicting the reference, it decides.

    A gradient far below the noise of the outputs is among them, but not one that vanishes.
    """
    off = np.abs(reference - judge.gradient)[:, indices]
    row = np.argmax(off, axis=0)
    better, analytic = reference[row, indices], judge.gradient[row, indices]
    close = np.abs(verdict.numeric - verdict.analytic) <= verdict.error
    blurred = (np.abs(verdict.numeric - better) <= verdict.error) & (
        np.abs(better - analytic) <= verdict.error
    )
    unsure = (verdict.kind == UNSURE) | ((verdict.kind == OK) & blurred)
    wrong = unsure & np.isfinite(verdict.numeric) & close
    return verdict._replace(
        kind=np.where(wrong, WRONG, verdict.kind),
        numeric=np.where(wrong, better, verdict.numeric),
        analytic=np.where(wrong, analytic, verdict.analytic),
    )


def _along_groups(judge: Judge, reference: np.ndarray, found: Search, rows: int) -> None:
    """An independent look at the reference itself, a few leaves at a time."""
    known = {finding.leaf for finding in found.findings}
    groups = [g for g in np.array_split(np.arange(len(judge.ranges)), GROUPS) if g.size]
    areas = [(judge.ranges[g[0]][0], judge.ranges[g[-1]][1]) for g in groups]
    doubtful = set()
    for direction in BALANCED[:rows]:
        verdict = judge.areas(areas, direction, reference)
        for group, kind in zip(groups, verdict.kind, strict=True):
            doubtful |= set(group.tolist()) if kind != OK else set()
    leaves = sorted(doubtful - known)
    if leaves:
        _along_leaves(judge, found, rows, leaves)


def _along_leaves(judge: Judge, found: Search, rows: int, leaves: Sequence[int]) -> None:
    areas = [judge.ranges[leaf] for leaf in leaves]
    verdicts = [judge.areas(areas, direction) for direction in (*BALANCED, DENSE)[:rows]]
    kinds = np.max([verdict.kind for verdict in verdicts], axis=0)
    for leaf, area, kind in zip(leaves, areas, kinds, strict=True):
        _record(judge, found, leaf, [area], np.asarray([kind]))


def _by_blocks(judge: Judge, found: Search, leaves: Sequence[int]) -> None:
    for leaf in leaves:
        blocks = _split_range(judge.ranges[leaf], BLOCKS)
        _record(judge, found, leaf, blocks, _verdict(judge, blocks).kind)


def _record(judge: Judge, found: Search, leaf: int, areas, kinds) -> None:
    found.kinks.extend(area for area, kind in zip(areas, kinds, strict=True) if kind == KINK)
    found.unsure.extend(area for area, kind in zip(areas, kinds, strict=True) if kind == UNSURE)
    wrong = [area for area, kind in zip(areas, kinds, strict=True) if kind == WRONG]
    if wrong:
        finding = _bisect(judge, leaf, wrong)
        found.findings.append(finding)
        if not len(finding.indices):
            found.unsure.extend((a, b) for a, b in wrong if b - a > BLOCKS)


def _bisect(judge: Judge, leaf: int, areas: list[Range]) -> Finding:
    """Split disagreeing ranges until single elements are left.

    Where a range disagrees though all its parts agree, only elements at kinks are left: together
    they may be wrong. No element is left where the disagreement was noise.
    """
    exact, kinks = True, []
    while areas and max(stop - start for start, stop in areas) > 1:
        parts = [part for area in areas for part in _split_range(area, _part_count(area))]
        verdict = _verdict(judge, parts)
        kinks = [part for part, kind in zip(parts, verdict.kind, strict=True) if kind == KINK]
        wrong = np.flatnonzero(verdict.kind == WRONG)
        if len(wrong) > FEW and max(stop - start for start, stop in parts) > 1:
            off = np.abs(verdict.numeric - verdict.analytic)[wrong]
            wrong, exact = wrong[np.argsort(-off, kind="stable")][:WORST_AREAS], False
        areas = [parts[k] for k in wrong]
    singles = areas or [(start, stop) for start, stop in kinks if stop - start == 1]
    indices = np.asarray([start for start, _ in singles], int)[:INSPECTED]
    return Finding(leaf, indices, judge.elements(indices), len(singles), exact, len(indices))


def _verdict(judge: Judge, areas: list[Range]) -> Verdict:
    single = max(stop - start for start, stop in areas) == 1
    return judge.areas(areas, SINGLE if single else DENSE)


def _part_count(area: Range) -> int:
    return BLOCKS if area[1] - area[0] <= BLOCKS else PARTS


def _split_range(area: Range, parts: int) -> list[Range]:
    start, stop = area
    cuts = np.linspace(start, stop, min(parts, stop - start) + 1).astype(int)
    return [(int(a), int(b)) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]


def _unsettled(verdict: Verdict) -> np.ndarray:
    return ~(verdict.error <= SETTLED * np.abs(verdict.numeric))


def _of_finite(finding: Finding, point: Point) -> Finding:
    """Leaves out elements whose gradient is not finite, which is a failure of its own."""
    finite = point.finite[finding.indices]
    if finite.all():
        return finding
    return finding._replace(
        indices=finding.indices[finite],
        verdict=finding.verdict.part(finite),
        suspects=finding.suspects - int(np.sum(~finite)),
        inspected=int(finite[: finding.inspected].sum()),
    )


def _without_constants(finding: Finding, judge: Judge, allowance: Callable | None) -> Finding:
    """Accept what rounded constants explain, where there was no reference to compare with.

    (test_a_constant_may_be_rounded_in_every_mode)
    """
    if allowance is None or not finding.is_wrong:
        return finding
    verdict = finding.verdict
    off = np.abs(verdict.numeric - verdict.analytic)
    wrong = (verdict.kind == WRONG) & ~verdict.kink
    subtle = wrong & (off <= SUBTLE * np.fmax(np.abs(verdict.numeric), np.abs(verdict.analytic)))
    if not subtle.any():
        return finding
    return finding.with_kind(OK, subtle & (off <= allowance().max(axis=0)[finding.indices]))


def _without_rounding(finding: Finding, judge: Judge) -> Finding:
    """Excuse elements where plain AD in the same precision is off about as much."""
    verdict = finding.verdict
    wrong = (verdict.kind == WRONG) & ~verdict.kink
    excused = judge.rounding() if wrong.any() else None
    if excused is None:
        return finding
    off = np.abs(verdict.numeric - verdict.analytic)
    excuse = _excuse(judge, finding.leaf, off, verdict.numeric[None])
    return finding.with_kind(excuse, wrong & (off <= excused[finding.indices]))
