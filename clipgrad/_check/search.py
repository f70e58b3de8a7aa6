"""The search: the kind of each element of a gradient, by its reference and by slopes.

Where the gradient and its reference are apart, single elements are moved, and the majority of three
decides. The rest is moved in dense groups, which are split only where slopes disagree: so the cost
of a right gradient does not grow with the number of its elements. In half precision, where slopes
of one element may be all rounding, the gradient of a leaf is judged along several directions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clipgrad._check.points import CONSTANTS, IN_FLOAT64, Point, dense_numbers
from clipgrad._check.verdict import (
    BELOW_ROUNDING,
    DISPUTED,
    KINK,
    LOOSER,
    NOISE,
    OK,
    RELATIVE,
    TRUSTED,
    UNSEEN,
    WRONG,
    Ladder,
    Slack,
    Slopes,
    agree_at_once,
    judge_along,
    judge_slopes,
    off_at_once,
)

WORST, SPREAD, SINGLES = 8, 16, 64  # elements that are moved one by one
GROUPS = 40  # at most, before the rest is left unseen
FEW_GROUPS = 24  # with more, thirds of them are moved first
FEW_ELEMENTS = 16  # elements of a group that is looked at one by one
# Along a dense direction one wrong element among n weighs 1 / sqrt(n): the slack of plain AD in
# float64, and of a gradient in float32 without a reference.
TIGHT, TIGHT_FLOAT32 = 1e-6, 3e-5
DIRECTIONS = 4  # of a leaf in half precision


class Search:
    """The kinds of the elements at a point, and the numbers of those that were looked at.

    Attributes:
      kinds: of each element.
      numbers: of an element, for a unit of it.
      disputed: the elements where neither the gradient nor its reference is the slope.
      together: of a leaf that was judged along directions, by its start: a slope, its error and the
        gradient along one of them.
      off: by the first element of a group that was moved as a whole, the part of itself that its
        gradient is off by along a direction.
      share: the part of itself that a gradient is judged to, where slopes are not in float64.
    """

    def __init__(
        self,
        point: Point,
        judged: np.ndarray,
        slack: Slack,
        log: Any,
        reference: np.ndarray | None = None,
    ):
        self._point, self._judged, self._slack, self._log = point, judged, slack, log
        self._reference = reference
        self._target = judged if reference is None else reference
        self.kinds = np.where(point.finite, np.int8(OK), np.int8(UNSEEN))
        self.numbers: dict[int, Slopes] = {}
        self.disputed = np.zeros(len(self.kinds), bool)
        self.together: dict[int, tuple[float, float, float]] = {}
        self.off: dict[int, float] = {}
        self.share = 0.0 if point.of.evaluation.is_wide else slack.relative
        self._typical = point.typical(self._target)
        self._overall = np.abs(self._target * point.scale).max(initial=0.0)
        own = TIGHT_FLOAT32 if slack.relative <= 10 * RELATIVE["float32"] else slack.relative
        relative = own if reference is None else TIGHT
        self._slack_along = Slack(relative, 0.0, 1e-16 * self._overall)
        self._evaluation = point.of.evaluation
        self._evaluation.set_point(point.xs)

    def run(self, full: bool = False) -> "Search":
        """Look at suspects one by one, and at the rest together or, in `full`, one by one too."""
        is_paddles = self._log.options.max_relative_error is not None  # of each element by itself
        if self._point.of.evaluation.is_half and not is_paddles:
            return self._in_half_precision()
        suspects = self._suspects()
        if len(suspects):
            self._look_at_suspects(suspects)
        is_left = np.array(self._point.finite)
        is_left[suspects] = False
        if full:
            self._look(np.flatnonzero(is_left), self._target)
        else:
            self._split([g for g in self._groups(is_left) if len(g)])
        self._move_together(np.flatnonzero(self.kinds == KINK))
        return self

    def _in_half_precision(self) -> "Search":
        """Judge each leaf as a whole, and some of its elements besides: they may be wrong."""
        bounds = []
        for start, stop in self._point.ranges:
            leaf = np.flatnonzero(self._point.finite[start:stop]) + start
            if not len(leaf) or self._log.is_late():
                self.kinds[leaf] = UNSEEN
                continue
            ladders = [
                self._ladder(self._along([leaf], f"{k} "), [leaf]) for k in range(DIRECTIONS)
            ]
            found = judge_along(ladders, self._target, self._slack)
            self.kinds[leaf], bound = found.kind, found.bound
            self.together[start] = found.numeric, found.error, found.analytic
            self.off[start] = found.off
            self._look_in_half_precision(leaf[:: max(1, -(-len(leaf) // SINGLES))])
            if found.kind != WRONG:
                bounds.append(bound)
            elif not (self.kinds[leaf] == WRONG).any():
                bounds.append(TRUSTED)
        self.share = max(bounds, default=self.share)
        return self

    def _look_in_half_precision(self, some: np.ndarray) -> None:
        typical = (self._typical[:, self._point.leaf[some]] * self._point.scale[some]).T
        ladder = self._ladder(self._point.scale, [np.array([j]) for j in some])
        found = judge_slopes(ladder, self._judged, self._slack, typical)
        off, size = np.abs(found.numeric - found.analytic), np.abs(found.analytic)
        is_off = off > TRUSTED * (size + typical.max(axis=1)) + found.error
        is_wrong = (found.kind == WRONG) & (found.is_kink | is_off)
        bent = (found.kind == KINK) & (self.kinds[some] != WRONG)
        self.kinds[some[bent]] = KINK
        is_known = off + found.error <= TRUSTED * np.fmax(size, np.abs(found.numeric))
        if is_wrong.any() or is_known.any():
            leaf = self._point.leaf == self._point.leaf[some[0]]
            # As a whole: by those that are wrong, perhaps, or by kinks that all of them cross.
            was_wrong = leaf & (self.kinds == WRONG)
            self.kinds[was_wrong] = UNSEEN
            self.kinds[some[is_known & was_wrong[some]]] = OK
            self.kinds[some[is_wrong]] = WRONG
            for k in map(int, np.flatnonzero(is_wrong)):
                self.numbers[int(some[k])] = found.of_one(k, self._point.scale[some[k]])

    def _suspects(self) -> np.ndarray:
        """Elements at which gradient and reference are apart by more than rounding, worst first."""
        judged, other, point = self._judged, self._reference, self._point
        if other is None or other is judged:
            return np.zeros(0, int)
        excess = point.excess(judged, other, self._slack, self._typical)
        found = np.flatnonzero((excess > 1) & point.finite)
        if len(found):
            a, b, typical = judged[:, found], other[:, found], self._typical[:, point.leaf[found]]
            slack = self._slack(np.fmax(np.abs(a), np.abs(b)), typical)
            apart = np.abs(a - b) > slack + point.rounding(CONSTANTS)[found]
            is_zero = point.is_zero((judged, other), BELOW_ROUNDING)[found]
            found = found[np.any(apart, axis=0) & ~is_zero]
        return found[np.argsort(-excess[found], kind="stable")]

    def _look_at_suspects(self, suspects: np.ndarray) -> None:
        """The majority of three at some of the suspects, the worst among them."""
        spread = suspects[:: max(1, len(suspects) // SPREAD)]
        chosen = np.unique(np.concatenate([suspects[:WORST], spread]))[: WORST + SPREAD]
        self._look(chosen, self._judged, suspects=True)
        kinds = set(self.kinds[chosen])
        self.kinds[np.setdiff1d(suspects, chosen)] = kinds.pop() if len(kinds) == 1 else UNSEEN

    def _look(self, elements: np.ndarray, gradient: np.ndarray, suspects: bool = False) -> None:
        """Move elements one by one; what the reference is not right at either is disputed."""
        point = self._point
        for start in range(0, len(elements), SINGLES):
            some = elements[start : start + SINGLES]
            if self._log.is_late():
                self.kinds[elements[start:]] = UNSEEN
                return
            typical = (self._typical[:, point.leaf[some]] * point.scale[some]).T
            ladder = self._ladder(point.scale, [np.array([j]) for j in some])
            found = judge_slopes(ladder, gradient, self._slack, typical)
            bad = found.kind == WRONG
            if bad.any() and self._reference is not None:
                other = judge_slopes(ladder, self._reference, self._slack, typical)
                bad &= other.kind == WRONG
                if bad.any():  # by less than their roundings in float64 they are not apart
                    room = BELOW_ROUNDING * (point.rounding(IN_FLOAT64) * point.scale)[some]
                    is_one = bad & (np.abs(found.numeric - found.analytic) <= room)
                    found.kind[is_one], bad = OK, bad & ~is_one
                found.kind[bad & ~self._is_smooth(found)] = DISPUTED
                self.disputed[some[bad]] = True
            self._note(some, self._decided(some, found) if suspects else found)

    def _decided(self, some: np.ndarray, found: Slopes) -> Slopes:
        """The verdict where slopes cannot tell a gradient from its reference: this decides."""
        judged, other = self._judged[:, some], self._reference[:, some]  # pyright: ignore
        is_zero = self._point.is_zero((self._judged, self._reference), 1.0)[some]  # pyright: ignore
        off = np.abs(judged - other)
        fits = (found.kind == NOISE) & (np.abs(found.numeric - found.analytic) <= found.error)
        blurred = (found.kind == OK) & (found.error > off.max(axis=0) * self._point.scale[some])
        kind = np.where(fits & is_zero, OK, found.kind)
        kind = np.where((fits | blurred) & ~is_zero, WRONG, kind)
        row, column = np.argmax(off, axis=0), np.arange(len(some))
        known = (kind == WRONG) & ~found.is_kink
        scale = self._point.scale[some]
        numeric = np.where(known, other[row, column] * scale, found.numeric)
        analytic = np.where(known, judged[row, column] * scale, found.analytic)
        return found._replace(kind=kind, numeric=numeric, analytic=analytic)

    def _note(self, some: np.ndarray, found: Slopes) -> None:
        self.kinds[some] = found.kind
        for k, j in enumerate(some):
            self.numbers[int(j)] = found.of_one(k, self._point.scale[j])

    def _ladder(self, along, groups, steps=None) -> Ladder:
        return self._evaluation.ladder(along, groups, self._point.covectors, steps)

    def _along(self, groups: Sequence[np.ndarray], number: str = "") -> np.ndarray:
        along, seed = np.array(self._point.scale), self._log.options.seed
        for g in groups:
            along[g] *= dense_numbers(seed, f"along {number}{len(g)} {g[0]}", len(g))
        return along

    def _groups(self, is_left: np.ndarray) -> list[np.ndarray]:
        """The elements of each leaf; what is tied moves apart from what is not."""
        x, found = self._evaluation.x, []
        for start, stop in self._point.ranges:
            own = np.flatnonzero(is_left[start:stop]) + start
            _, same, counts = np.unique(x[own], return_inverse=True, return_counts=True)
            is_tied = counts[same] > 1
            found += [own[~is_tied], own[is_tied]]
        return found

    def _kinds_along(self, groups: list[np.ndarray]) -> np.ndarray:
        """The verdict on each group as a whole: by two steps, and if they do not agree by all."""
        along = self._along(groups)
        quick = self._ladder(along, groups, self._evaluation.quick)
        kinds = np.where(agree_at_once(quick, self._target, self._slack_along), OK, WRONG)
        self.off |= zip([int(g[0]) for g in groups], off_at_once(quick, self._target), strict=True)
        rest = np.flatnonzero(kinds)
        if len(rest):
            ladder = self._ladder(along, [groups[k] for k in rest])
            kinds[rest] = judge_slopes(ladder, self._target, self._slack_along).kind
        return kinds

    def _split(self, groups: list[np.ndarray]) -> None:
        """Move groups as a whole, and the parts of those whose slopes are not the target's."""
        if len(groups) > FEW_GROUPS:
            thirds = np.array_split(np.arange(len(groups)), 3)
            kinds = self._kinds_along([np.concatenate([groups[i] for i in t]) for t in thirds])
            groups = [groups[i] for t, k in zip(thirds, kinds, strict=True) if k != OK for i in t]
        left = GROUPS
        while groups:
            if left < 0 or self._log.is_late():
                self.kinds[np.concatenate(groups)] = UNSEEN
                return
            parts = []
            for group, kind in zip(groups, self._kinds_along(groups), strict=True):
                parts += self._parts(group, kind)
            small = [g for g in parts if len(g) <= FEW_ELEMENTS]
            if small:
                together = np.concatenate(small)
                self._look(together[:SINGLES], self._target)
                self.kinds[together[SINGLES:]] = UNSEEN
            groups = [g for g in parts if len(g) > FEW_ELEMENTS]
            left -= len(groups)

    def _parts(self, group: np.ndarray, kind: int) -> list[np.ndarray]:
        """The parts to look at of a group of such a kind; of some kinds all of it is."""
        if kind == NOISE and self._reference is not None:
            is_zero = self._point.is_zero((self._target,), 1.0)[group]
            kind = OK if is_zero.all() else NOISE
        # Without a reference, what is wrong may hide between the slopes of others at kinks; and of
        # few, those at kinks are told from the others.
        is_told = self._reference is None or len(group) <= FEW_ELEMENTS
        if kind != WRONG and not (kind == KINK and is_told and len(group) > 1):
            self.kinds[group] = kind
            return []
        if len(group) <= FEW_ELEMENTS:
            return [group]
        return [g for g in np.array_split(group, 16 if len(group) > 256 else 4) if len(g)]

    def _move_together(self, bent: np.ndarray) -> None:
        """Move elements at kinks together once: several may not have what one may.

        Those that bend up and those that bend down each by themselves.
        """
        along, scale = np.zeros(len(self.kinds)), self._point.scale
        slack = Slack(LOOSER * self._slack.relative, 0.0, 1e-12 * self._overall)
        known = (self.numbers.get(int(j)) for j in bent)
        bends = np.asarray([0.0 if n is None else np.sign(n.ahead - n.behind) for n in known])
        for sign in (1.0, -1.0):
            group = bent[bends != -sign]
            if len(group) < 2 or self._log.is_late():
                continue
            along[group] = scale[group].max()
            found = judge_slopes(self._ladder(along, [group]), self._judged, slack)
            if found.kind[0] == WRONG and (self._is_smooth(found)[0] or self._is_apart(group)):
                self.kinds[group] = WRONG
                self.disputed[group] = not self._is_apart(group)
                self._note(group[:1], found)

    def _is_smooth(self, found: Slopes) -> np.ndarray:
        """Whether a slope is one of a smooth function, so that a gradient apart from it is wrong.

        What looks like a stair may be the rounding of a formula whose terms cancel: a user who
        wrote a rule did so for that reason, and the rule has the slope of the larger steps.
        """
        return found.is_smooth & (~found.is_stair | self._point.of.is_ruled)

    def _is_apart(self, group: np.ndarray) -> bool:
        """Whether the gradient is not its reference at some of these elements."""
        judged, other = self._judged, self._reference
        if other is None or other is judged:
            return other is None
        return bool(
            (self._point.excess(judged, other, self._slack, self._typical)[group] > 1).any()
        )
