"""The search for wrong elements: plain AD names suspects, groups are halved, slopes judge all."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from clipgrad._check import tolerances, verdicts
from clipgrad._check.differences import Differences, Moves, Slopes, step_sizes
from clipgrad._check.points import DENSE, SINGLE, Point
from clipgrad._check.rounding import IN_FLOAT64
from clipgrad._check.subject import Range
from clipgrad._check.tolerances import PRECISE, Allowed, Excuse, Sizes, Tolerance
from clipgrad._check.verdicts import (
    BENT,
    LOST,
    OK,
    UNSEEN,
    UNSURE,
    VANISHED,
    WRONG,
    Verdict,
)

GROUPS = 3  # of leaves that an independent look at plain AD moves together
BLOCKS, PARTS = 64, 16  # that a group is split into, first and then
# Of elements that are off, the worst are looked at, two of each of the largest kinds, and some
# spread over the others.
WORST, KINDS_LOOKED_AT, INSPECTED = 8, 16, 24
# Of the groups that are wrong, if there are more than FEW, only the worst; of those at kinks, FEW.
FEW, WORST_GROUPS = 8, 2
AT_ONCE = 2**13  # elements judged between two looks at the clock


class Finding(NamedTuple):
    """The verdicts on some elements of one leaf.

    `indices` are elements of the input vector, `verdict` the verdict on each and `seen` whether it
    was moved alone; `exact` is whether no wrong one may be missing.
    """

    leaf: int
    indices: np.ndarray
    verdict: Verdict
    seen: np.ndarray
    exact: bool = True

    @property
    def is_wrong(self) -> bool:
        """Whether some element is wrong."""
        return bool(np.any(self.verdict.kind == WRONG))

    def part(self, where: np.ndarray) -> "Finding":
        """The finding on some of its elements."""
        verdict = self.verdict.part(where)
        return self._replace(indices=self.indices[where], verdict=verdict, seen=self.seen[where])

    def with_kind(self, kind: Any, where: Any = True) -> "Finding":
        """The finding with another verdict on its wrong elements, or on some of them."""
        kinds = np.where((self.verdict.kind == WRONG) & where, kind, self.verdict.kind)
        return self._replace(verdict=self.verdict._replace(kind=kinds))


def wrong_leaves(findings: Sequence[Finding]) -> set[int]:
    """The leaves in which some element is wrong."""
    return {finding.leaf for finding in findings if finding.is_wrong}


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
      excuse: what may be off by more, and how far; None if nothing may.
      unconverged: how far each element may be off since loops stop; None if there are none.
      is_late: whether no more is to be looked at.
      unsettled: how far the value is from where its loops would settle, for each cotangent.
      knows_around: whether the gradient around the point counts, which costs a backward pass.
      is_plain: whether plain AD is judged, which is more precise than a rule.
    """

    differences: Differences
    point: Point
    gradient: Any
    reference: Any
    tolerance: Tolerance
    delta: float | None = None
    excuse: Excuse | None = None
    unconverged: np.ndarray | None = None
    is_late: Callable[[], bool] = lambda: False
    unsettled: Callable[[], Any] = lambda: 0.0
    knows_around: bool = False
    is_plain: bool = False

    @property
    def ranges(self) -> Sequence[Range]:
        """The range of each leaf in the vector of inputs."""
        return self.tolerance.ranges

    @functools.cached_property
    def sizes(self) -> Sizes:
        """The size of the gradient, leaf by leaf; the exact one, if there is one."""
        target = self.gradient if self.reference is None else self.reference
        around = self.point.around() if self.knows_around else None
        return self.tolerance.sizes(target, self.point.scale, self.reference is not None, around)

    @functools.cached_property
    def with_around(self) -> "Judge":
        """The judge that knows how large the gradient is around a point where it vanishes."""
        return dataclasses.replace(self, knows_around=True)

    # Needed by cosine similarity at constants of check_vanishing.
    @functools.cached_property
    def noise(self) -> Callable[[np.ndarray], np.ndarray]:
        """Gives sizes of gradients in float64 that are nothing but rounding, to slopes at least."""
        moved = np.broadcast_to(self.point.rounded(*IN_FLOAT64), self.point.scale.size)
        explained = self.tolerance.explained(moved)
        return lambda indices: explained(indices) + tolerances.LEAST_SEEN * moved[indices]

    # Needed by attention without values near zero of check_vanishing.
    def is_nothing(self, indices: np.ndarray) -> np.ndarray:
        """Whether gradient and reference are zero or noise; a true gradient hardly changes."""
        own = np.all(np.abs(self.gradient[:, indices]) <= self.noise(indices), axis=0)
        return own & self.is_zero(indices)

    def is_zero(self, indices: np.ndarray) -> np.ndarray:
        """Whether the reference is zero or noise."""
        return np.all(np.abs(self.reference[:, indices]) <= self.noise(indices), axis=0)

    def allowed_at(self, indices: Any, beside: bool = True) -> Allowed:
        """The allowed error of some elements, or of a slice of one leaf."""
        one = isinstance(indices, slice)
        leaf = self.tolerance.leaves_of(indices.start) if one else self.tolerance.leaves_of(indices)
        allowed = self.tolerance.elements(self.sizes, leaf, self.point.scale[indices], beside)
        extra = 0.0 if self.unconverged is None else self.unconverged[indices]
        return allowed._replace(floor=allowed.floor + extra)

    def elements(self, indices: np.ndarray, judged: bool = True) -> Verdict:
        """The verdict on single elements, in units of the gradient."""
        areas = np.stack([indices, indices + 1], axis=1)
        verdict = self.areas(areas, SINGLE, judged=judged)
        unit = self.point.scale[indices]
        names = ("numeric", "analytic", "error", "ahead", "behind")
        return verdict._replace(**{name: getattr(verdict, name) / unit for name in names})

    def areas(
        self, areas, direction: int, judged: bool = True, order: np.ndarray | None = None
    ) -> Verdict:
        """Judge the slopes along ranges of elements against the gradient.

        Args:
          areas: pairs (start, stop), one for each row.
          direction: which of the point's directions to move along.
          judged: False to look closer at what is imprecise, instead of at what disagrees.
          order: the elements that `areas` are ranges of; None for all, one after the other.

        Returns:
          One verdict for each range. What two steps show to be right is not looked at again.
        """
        areas = np.asarray(areas, int).reshape(-1, 2)
        if not len(areas):
            return verdicts.NO_VERDICTS
        along = self.differences.placed(self.point.direction(direction))
        allowed = self._allowed(areas, direction == SINGLE, np.asarray(along), order)
        measure = functools.partial(self._measure, along, order)
        evaluation = self.differences.evaluation
        own = self.delta is not None
        quick = np.asarray([1.0, 0.5]) if own else step_sizes(evaluation.quick)
        verdict = verdicts.judge_two(measure(areas, quick), quick[0] / quick[1], allowed, own)
        unsettled = ~(verdict.error <= PRECISE * np.abs(verdict.numeric))
        doubtful = np.flatnonzero(verdict.kind != OK if judged else unsettled)
        if doubtful.size and not own:
            steps = step_sizes(evaluation.ladder)
            slopes, ratio = self._ladder(measure(areas[doubtful], steps), steps)
            flat = direction == SINGLE and self._are_flat(areas[doubtful, 0])
            part = allowed.part(doubtful)
            verdict.put(doubtful, verdicts.judge_ladder(slopes, ratio, part, flat))
        return verdict

    def _ladder(self, slopes: Slopes, steps: np.ndarray) -> tuple[Slopes, np.ndarray]:
        """The slopes of a ladder, with all of their noise, and the ratios of its steps."""
        if self.differences.evaluation.eps > np.finfo(np.float64).eps:
            slopes = verdicts.with_grains(slopes, steps)
        noise = slopes.noise + self.unsettled() / steps[:, None]
        return slopes._replace(noise=noise), steps[:-1] / steps[1:]

    def _are_flat(self, indices: np.ndarray) -> np.ndarray:
        """Whether each element has no gradient here nor around, as on a staircase."""
        flat = np.asarray(~self.gradient[:, indices].any(axis=0))
        around = self.point.around() if flat.any() else None
        if around is None:
            return np.zeros_like(flat)
        leaves = self.tolerance.leaves_of(indices)
        starts = np.array([start for start, _ in self.ranges])[leaves]
        return flat & ~around.is_there(leaves, indices - starts)

    def _measure(self, along, order, areas, steps) -> Slopes:
        count, each = len(areas), len(steps)
        starts, stops = (np.repeat(column, each) for column in areas.T)
        moves = Moves(starts, stops, np.tile(steps, count))
        flat = self.differences.measure(self.point.xs, along, self.gradient, moves, order)
        return Slopes(*(column.reshape((count, each, -1)) for column in flat))

    def _allowed(self, areas, single: bool, along, order) -> Allowed:
        starts = areas[:, 0] if order is None else order[areas[:, 0]]
        if single:
            unit = self.point.scale[starts][:, None]
            allowed = self.allowed_at(starts)
            floor, typical = allowed.floor.T * unit, allowed.typical.T * unit
            return Allowed(allowed.relative[:, None], floor, typical, unit, allowed.paddle)
        where = [slice(a, b) if order is None else order[a:b] for a, b in areas]
        norms = [tolerances.length_along(self.gradient[:, part], along[part]) for part in where]
        sizes = np.stack(norms), self.sizes.overall
        allowed = self.tolerance.ranges_along(*sizes, starts, self.is_plain)
        if self.unconverged is None:
            return allowed
        extra = [np.sum(np.abs(self.unconverged[part] * along[part])) for part in where]
        return allowed._replace(floor=allowed.floor + np.asarray(extra)[:, None])


def search(judge: Judge, mode: str, without: Collection[int] = ()) -> list[Finding]:
    """Look for wrong elements at one point.

    Args:
      judge: judges the gradient there.
      mode: "auto", "fast", "full", or "reference": "auto" without a check of the reference itself.
      without: leaves to leave out.

    Returns:
      What was found in leaves of which not all elements are right.
    """
    leaves = [leaf for leaf in range(len(judge.ranges)) if leaf not in without]
    if mode == "full":
        found = [_every(judge.with_around, leaf) for leaf in leaves]
    elif mode in ("auto", "reference") and judge.reference is not None:
        found = [f for leaf in leaves for f in _by_reference(judge, leaf)]
        doubtful = doubtful_leaves(judge) if mode == "auto" else set()
        for leaf in sorted(doubtful.intersection(leaves)):
            known = [f.indices for f in found if f.leaf == leaf]
            found += _in_leaf(judge.with_around, leaf, 1, DENSE[:1], known)
    else:
        blocks = 1 if mode == "fast" else BLOCKS
        found = [f for leaf in leaves for f in _in_leaf(judge.with_around, leaf, blocks, DENSE[:2])]
    return [_excused(finding, judge.with_around) for finding in found]


def _finite_elements(judge: Judge, leaf: int) -> np.ndarray:
    """The elements of a leaf but for those that are not finite, which is a failure of its own."""
    start, stop = judge.ranges[leaf]
    return np.flatnonzero(judge.point.finite[start:stop]) + start


def _every(judge: Judge, leaf: int) -> Finding:
    indices = _finite_elements(judge, leaf)
    found = _unmoved(judge, leaf, indices)
    for begin in range(0, len(indices), AT_ONCE):
        part = np.arange(begin, min(begin + AT_ONCE, len(indices)))
        if not judge.is_late():
            found.verdict.put(part, judge.elements(indices[part]))
            found.seen[part] = True
    return found


def _by_reference(judge: Judge, leaf: int) -> list[Finding]:
    """Judge by differences where the gradient and the reference disagree."""
    suspects = _off_by_more(judge, leaf)
    if len(suspects):
        judge, suspects = judge.with_around, _off_by_more(judge.with_around, leaf)
    found = _lost_beside_others(judge, leaf, suspects)
    if not len(suspects):
        return found
    excusable = _excused(_unmoved(judge, leaf, suspects, WRONG), judge)
    lost = excusable.verdict.kind == LOST
    # Of what is zero but for rounding, differences may say so.
    lost &= judge.is_nothing(suspects) if lost.any() else False
    excused = (excusable.verdict.kind != WRONG) & ~lost
    found += [excusable.part(excused)] if excused.any() else []
    indices = suspects[~excused]
    if len(indices):
        parts = judge.reference[:, indices], judge.gradient[:, indices]
        off = np.abs(parts[0] - parts[1])
        excess = (off / judge.allowed_at(indices).slack(*parts)).max(axis=0)
        excess[np.argmax(off.max(axis=0))] = np.inf  # the one that is reported
        found.append(_examined(judge, leaf, indices[np.argsort(-excess, kind="stable")]))
    return found


def _off_by_more(judge: Judge, leaf: int, beside: bool = True) -> np.ndarray:
    """The elements of a leaf that are off the reference."""
    pair, finite = (judge.reference, judge.gradient), judge.point.finite
    least = judge.tolerance.elements(judge.sizes, leaf, np.full(1, np.inf), beside)
    slack = lambda where: judge.allowed_at(where, beside).slack(*(g[:, where] for g in pair))  # noqa: E731
    floor = least.floor if least.paddle is None else -1.0
    found = tolerances.off_by_more(pair, judge.ranges[leaf], floor, slack)
    return found[finite[found]]


# Needed by test_zero_for_a_leaf_of_no_effect_beside_another_is_not_verified_or_wrong.
def _lost_beside_others(judge: Judge, leaf: int, suspects: np.ndarray) -> list[Finding]:
    """Elements that nothing but the rounding of larger leaves excuses: there, zero would pass."""
    size = judge.sizes.typical[:, leaf].max() * judge.point.scale[slice(*judge.ranges[leaf])].max()
    if size > 10 * judge.sizes.vanishing * judge.sizes.overall.max():
        return []
    indices = np.setdiff1d(_off_by_more(judge, leaf, beside=False), suspects)
    if not len(indices) or judge.tolerance.eps[leaf] > np.finfo(np.float64).eps:
        return []
    return [_unmoved(judge, leaf, indices, VANISHED)]


def _in_leaf(
    judge: Judge, leaf: int, blocks: int, directions: Sequence[int], known: Sequence = ()
) -> list[Finding]:
    """Move the elements of a leaf together, but for known ones, and look at what disagrees."""
    elements = _finite_elements(judge, leaf)
    elements = np.setdiff1d(elements, np.concatenate(known)) if known else elements
    if not len(elements):
        return []
    if judge.is_late():
        return [_examined(judge, leaf, elements)]
    directions = DENSE[2:] if blocks > 1 else directions
    groups = _split([np.arange(len(elements))], blocks)
    kinds = [_moved_together(judge, elements, groups, direction).kind for direction in directions]
    bad = [g for g, kind in zip(groups, np.max(kinds, axis=0), strict=True) if kind != OK]
    if not bad:
        return []
    return [_examined(judge, leaf, elements[np.concatenate(bad)])]


def _examined(judge: Judge, leaf: int, elements: np.ndarray) -> Finding:
    """Judge elements of a leaf: two of each kind stand for it, and the others move together.

    What is at a kink is held where the others are moved, so that it hides none of them.
    """
    found = _unmoved(judge, leaf, elements)
    if judge.is_late():
        return found._replace(exact=False)
    verdict, seen, known = found.verdict, found.seen, judge.reference is not None
    kind, shared = _kinds(judge, elements)
    sample = _places_to_look_at(kind, shared, known)
    seen[sample] = True
    looked_at = judge.elements(elements[sample])
    verdict.put(sample, _with_reference(looked_at, judge, elements[sample]) if known else looked_at)
    if known and len(sample) and (verdict.kind[sample] == WRONG).all():
        verdict.kind[:] = WRONG
    for label in np.unique(kind[sample]):
        of_kind = kind == label
        kinds = np.unique(verdict.kind[of_kind & seen])
        bent = shared[of_kind].all() and kinds[0] in BENT
        if len(kinds) == 1 and (bent or (known and kinds[0] == WRONG)):
            verdict.kind[of_kind] = kinds[0]
    # What disagreed as a whole is split at once, unless what was looked at explains it.
    parts = 1 if known or (looked_at.kind != OK).any() else BLOCKS
    return found._replace(exact=_halved(judge, elements, verdict, seen, parts))


def _kinds(judge: Judge, elements: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A kind for each element, and whether others in it have its value.

    Of a kind are elements of one value, such as zeros given to a relu; where there is a reference,
    those that are off it by one ratio.
    """
    _, place, counts = np.unique(
        judge.point.vector[elements], return_inverse=True, return_counts=True
    )
    shared = counts[place] > 1
    columns = [np.where(shared, place, -1.0)]
    if judge.reference is not None:
        ratio = judge.gradient[0, elements] / judge.reference[0, elements]
        columns.append(np.round(ratio, 5) + 0.0)  # -0 is 0
    _, kind = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return kind.ravel(), shared


def _places_to_look_at(kind: np.ndarray, shared: np.ndarray, by_ratio: bool) -> np.ndarray:
    """The places of elements to look at: two of each of the largest kinds, and some others."""
    labels, first, sizes = np.unique(kind, return_index=True, return_counts=True)
    usable = np.flatnonzero(by_ratio | shared[first])
    largest = usable[np.argsort(-sizes[usable], kind="stable")][:KINDS_LOOKED_AT]
    ends = [np.flatnonzero(kind == labels[k])[[0, -1]] for k in largest]
    others = by_ratio and len(largest) < len(labels)
    worst = np.arange(min(WORST, len(kind)) if others or len(kind) <= WORST and by_ratio else 0)
    chosen = np.unique(np.concatenate([worst, *ends]))
    if not others:
        return chosen
    left = np.setdiff1d(np.arange(len(kind)), chosen)
    room = max(INSPECTED - len(chosen), 1)
    return np.union1d(chosen, left[:: max(1, -(-len(left) // room))])


# Needed by the case one_element_zeroed_beside_a_kink_in_pallas.
def _halved(judge: Judge, elements, verdict: Verdict, seen: np.ndarray, parts: int) -> bool:
    """Move what is left together, and split what disagrees; return whether all was looked at."""
    rest = np.flatnonzero(verdict.kind == UNSEEN)
    groups, exact = [rest] if len(rest) else [], True
    while groups and not judge.is_late():
        groups, single = _split(groups, parts), max(map(len, groups)) <= parts
        parts = BLOCKS if parts == 1 else PARTS
        found = _moved_together(judge, elements, groups, SINGLE if single else DENSE[2])
        if single:
            alone = np.concatenate(groups)
            verdict.put(alone, found)
            seen[alone] = True
            return exact
        for group, kind in zip(groups, found.kind, strict=True):
            verdict.kind[group] = kind if kind in (OK, UNSURE) else UNSEEN
        off = np.abs(found.numeric - found.analytic)
        wrong = sorted(np.flatnonzero(found.kind == WRONG), key=lambda k: -off[k])
        bent = np.flatnonzero(np.isin(found.kind, BENT))
        kept = [*(wrong[:WORST_GROUPS] if len(wrong) > FEW else wrong), *bent[:FEW]]
        exact = exact and len(kept) == len(wrong) + len(bent)
        groups = [groups[k] for k in kept]
    return exact


def _moved_together(judge: Judge, elements: np.ndarray, groups: list, direction: int) -> Verdict:
    """Judge groups of elements, each moved as a whole."""
    if direction == SINGLE:
        return judge.elements(elements[np.concatenate(groups)])
    ends = np.cumsum([0, *map(len, groups)])
    areas, order = np.stack([ends[:-1], ends[1:]], axis=1), elements[np.concatenate(groups)]
    found = judge.areas(areas, direction, order=order)
    unsure = found.kind == UNSURE
    if judge.reference is not None and unsure.any():
        unsure &= np.logical_and.reduceat(judge.is_nothing(order), ends[:-1])
        found = found._replace(kind=np.where(unsure, OK, found.kind))
    return found


def _split(groups: list[np.ndarray], parts: int) -> list[np.ndarray]:
    split = [np.array_split(group, min(parts, len(group))) for group in groups if len(group)]
    return [piece for several in split for piece in several]


def _unmoved(judge: Judge, leaf: int, indices: np.ndarray, kind: int = UNSEEN) -> Finding:
    """Elements that were not moved: their numbers are the reference's, for the worst cotangent."""
    analytic = np.asarray(judge.gradient[:, indices], np.float64)
    numeric = analytic * np.nan if judge.reference is None else judge.reference[:, indices]
    worst = np.argmax(np.abs(numeric - analytic), axis=0), np.arange(len(indices))
    numeric, analytic, zero = numeric[worst], analytic[worst], np.zeros(len(indices))
    kinds, sides = np.full(len(indices), kind), (numeric.copy(), numeric.copy())
    verdict = Verdict(kinds, numeric, analytic, zero, *sides, zero > 0)
    return Finding(leaf, indices, verdict, zero > 0)


# Needed by the case zero_for_a_leaf_of_little_effect.
def _with_reference(verdict: Verdict, judge: Judge, indices) -> Verdict:
    """The reference decides where differences are too noisy to decide and do not contradict it.

    A gradient far below the noise of the outputs is among them. One that is zero or noise for both,
    and zero for differences within theirs, is right.
    """
    parts = judge.reference[:, indices], judge.gradient[:, indices]
    off, allowed = np.abs(parts[0] - parts[1]), judge.allowed_at(indices).slack(*parts)
    row = np.argmax(off, axis=0), np.arange(len(indices))
    better, analytic = parts[0][row], parts[1][row]
    apart = np.abs(verdict.numeric - verdict.analytic) - verdict.error
    agrees = np.abs(verdict.numeric - better) <= verdict.error
    unsure = verdict.kind == UNSURE
    blurred = (verdict.kind == OK) & agrees & (np.abs(better - analytic) <= verdict.error)
    wrong = (unsure | blurred) & (apart <= 0) & np.isfinite(verdict.numeric)
    wrong &= (off > allowed).any(axis=0)
    nothing = (unsure | wrong) & (apart <= 0)
    nothing &= judge.is_nothing(indices) if nothing.any() else False
    wrong &= ~nothing
    return verdict._replace(
        kind=np.where(wrong, WRONG, np.where(nothing, OK, verdict.kind)),
        numeric=np.where(wrong, better, verdict.numeric),
        analytic=np.where(wrong, analytic, verdict.analytic),
    )


# Needed by the case second_derivative_of_i0_at_zero.
def doubtful_leaves(judge: Judge, groups: Any = None) -> set[int]:
    """An independent look at the reference itself, a few leaves at a time, or such groups.

    At a further point, where there is one cotangent, it is at all of them together.
    """
    count = min(GROUPS if len(judge.gradient) > 1 else 1, len(judge.ranges))
    groups = groups or np.array_split(np.arange(len(judge.ranges)), count)
    areas = [(judge.ranges[g[0]][0], judge.ranges[g[-1]][1]) for g in groups]
    itself = dataclasses.replace(judge, gradient=judge.reference, is_plain=True)
    kinds = itself.areas(areas, DENSE[0]).kind
    return {leaf for group, kind in zip(groups, kinds, strict=True) if kind != OK for leaf in group}


def _excused(finding: Finding, judge: Judge) -> Finding:
    """Excuse elements that are off no more than the excuse allows them."""
    verdict, excuse = finding.verdict, judge.excuse
    wrong = (verdict.kind == WRONG) & ~verdict.kink
    if excuse is None or not wrong.any():
        return finding
    off = np.abs(verdict.numeric - verdict.analytic)
    explained = wrong & (off <= excuse.measure(finding.indices))
    size = np.abs(verdict.numeric) + judge.sizes.typical[:, finding.leaf].max()
    sure = off <= excuse.verified * size
    if excuse.of_zero and (explained & ~sure).any():  # which costs some runs
        sure |= judge.is_zero(finding.indices)
    return finding.with_kind(np.where(sure, excuse.kind, LOST), explained)
