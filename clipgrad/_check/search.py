"""The search: the kind of each element of a gradient, by its reference and by slopes.

Where the gradient and its reference are apart, single elements are moved, and the majority of three
decides. The rest is moved in dense groups, which are split only where slopes disagree: so the cost
of a right gradient does not grow with the number of its elements.
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
    UNSEEN,
    WRONG,
    Slack,
    Slopes,
    agree_at_once,
    judge_slopes,
)

WORST, SPREAD, SINGLES = 8, 16, 64  # elements that are moved one by one
GROUPS = 40  # at most, before the rest is left unseen
FEW_GROUPS = 24  # with more, thirds of them are moved first
FEW_ELEMENTS = 16  # elements of a group that is looked at one by one
# Of plain AD along a dense direction: one wrong element among n weighs 1 / sqrt(n).
TIGHT = Slack(1e-6, 1e-16)


class Search:
    """The kinds of the elements at a point, and the numbers of those that were looked at.

    Attributes:
      kinds: of each element.
      numbers: of an element: slope, error, gradient, and if it is a kink's both slopes.
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
        self.numbers: dict[int, tuple] = {}
        self._typical = point.typical(self._target)
        self._evaluation = point.of.evaluation
        self._evaluation.set_point(point.xs)

    def run(self, full: bool = False) -> "Search":
        """Look at suspects one by one, and at the rest together or, in `full`, one by one too."""
        suspects = self._suspects()
        if len(suspects):
            self._look_at_suspects(suspects)
        is_left = np.array(self._point.finite)
        is_left[suspects] = False
        if full:
            self._look(np.flatnonzero(is_left), self._target)
        else:
            self._split([g for g in self._groups(is_left) if len(g)])
        bent = np.flatnonzero(self.kinds == KINK)
        if full or self._reference is None or np.isin(bent, suspects).any():
            self._move_together(bent)
        return self

    def _suspects(self) -> np.ndarray:
        """The elements at which the gradient and its reference are apart by more than rounding."""
        judged, other, point = self._judged, self._reference, self._point
        if other is None or other is judged:
            return np.zeros(0, int)
        found = []
        for leaf, (start, stop) in enumerate(point.ranges):
            a, b = judged[:, start:stop], other[:, start:stop]
            slack = self._slack(np.fmax(np.abs(a), np.abs(b)), self._typical[:, leaf, None])
            bad = (np.abs(a - b) > slack).any(axis=0) & point.finite[start:stop]
            found.append(np.flatnonzero(bad) + start)
        found = np.concatenate(found)
        if len(found):
            a, b = judged[:, found], other[:, found]
            slack = self._slack_at(found, np.fmax(np.abs(a), np.abs(b)))
            apart = np.abs(a - b) > slack + point.rounding(CONSTANTS)[found]
            is_zero = point.is_zero((judged, other), BELOW_ROUNDING)[found]
            found = found[np.any(apart, axis=0) & ~is_zero]
        return found

    def _slack_at(self, elements: np.ndarray, larger: Any) -> np.ndarray:
        return self._slack(larger, self._typical[:, self._point.leaf_of(elements)])

    def _look_at_suspects(self, suspects: np.ndarray) -> None:
        """The majority of three at some of the suspects, the worst among them."""
        a, b = self._judged[:, suspects], self._reference[:, suspects]  # pyright: ignore
        slack = self._slack_at(suspects, np.fmax(np.abs(a), np.abs(b)))
        excess = (np.abs(a - b) / np.fmax(slack, 1e-300)).max(axis=0)
        order = suspects[np.argsort(-excess, kind="stable")]
        spread = order[:: max(1, len(order) // SPREAD)]
        chosen = np.unique(np.concatenate([order[:WORST], spread]))[: WORST + SPREAD]
        self._look(chosen, self._judged, suspects=True)
        kinds = set(self.kinds[chosen])
        if len(kinds) == 1:
            self.kinds[suspects] = self.kinds[chosen[0]]
        else:
            self.kinds[np.setdiff1d(suspects, chosen)] = UNSEEN

    def _look(self, elements: np.ndarray, gradient: np.ndarray, suspects: bool = False) -> None:
        """Move elements one by one; what the reference is not right at either is disputed."""
        point = self._point
        for start in range(0, len(elements), SINGLES):
            some = elements[start : start + SINGLES]
            if self._log.is_late():
                self.kinds[elements[start:]] = UNSEEN
                return
            typical = (self._typical[:, point.leaf_of(some)] * point.scale[some]).T
            groups = [np.array([j]) for j in some]
            found, ladder = self._measure(point.scale, groups, gradient, typical)
            bad = found.kind == WRONG
            if bad.any() and self._reference is not None:
                other = judge_slopes(ladder, self._reference, self._slack, typical, alone=True)
                bad &= other.kind == WRONG
                found.kind[bad] = DISPUTED
                if bad.any():  # by less than their roundings in float64 they are not apart
                    room = BELOW_ROUNDING * (point.rounding(IN_FLOAT64) * point.scale)[some]
                    found.kind[bad & (np.abs(found.numeric - found.analytic) <= room)] = OK
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
            numbers = (found.numeric, found.error, found.analytic, found.behind, found.ahead)
            own = [float(column[k] / self._point.scale[j]) for column in numbers]
            self.numbers[int(j)] = (*own, bool(found.is_kink[k]))

    def _measure(self, along, groups, gradient, typical, alone=True, slack=None):
        """The verdict on a gradient along groups, of which two steps may be enough; the ladder."""
        slack = slack or self._slack
        covectors, evaluation = self._point.covectors, self._evaluation
        ladder = evaluation.ladder(along, groups, covectors)
        return judge_slopes(ladder, gradient, slack, typical, alone), ladder

    def _along(self, groups: Sequence[np.ndarray]) -> np.ndarray:
        along, seed = np.array(self._point.scale), self._log.options.seed
        for g in groups:
            along[g] *= dense_numbers(seed, f"along {len(g)} {g[0]}", len(g))
        return along

    def _groups(self, is_left: np.ndarray) -> list[np.ndarray]:
        """The elements of each leaf; what is tied moves apart from what is not."""
        x, found = self._evaluation.x, []
        for start, stop in self._point.ranges:
            own = np.flatnonzero(is_left[start:stop]) + start
            order = np.sort(x[own])
            repeated = np.unique(order[1:][order[1:] == order[:-1]])
            del order
            is_tied = np.isin(x[own], repeated) if len(repeated) else np.zeros(len(own), bool)
            found += [own[~is_tied], own[is_tied]]
        return found

    @property
    def _slack_along(self) -> Slack:
        """That of dense directions: plain AD's in float64, else a part of the own one's."""
        if self._reference is not None:
            return TIGHT
        own = self._slack.relative
        return TIGHT._replace(relative=3e-5 if own <= 5e-3 else own)

    def _kinds_along(self, groups: list[np.ndarray]) -> np.ndarray:
        """The verdict on each group as a whole: by two steps, and if they do not agree by all."""
        overall = np.abs(self._target * self._point.scale).max(initial=0.0)
        evaluation, along = self._evaluation, self._along(groups)
        quick = evaluation.ladder(along, groups, self._point.covectors, evaluation.quick)
        kinds = np.full(len(groups), OK)
        rest = np.flatnonzero(~agree_at_once(quick, self._target, self._slack_along, overall))
        if len(rest):
            own = [groups[k] for k in rest]
            kinds[rest] = self._measure(
                along, own, self._target, overall, alone=False, slack=self._slack_along
            )[0].kind
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
        if kind == WRONG and len(group) == 1 and self._reference is not None:
            kind = DISPUTED
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
        point, along = self._point, np.zeros(len(self.kinds))
        overall = np.abs(self._judged * point.scale).max(initial=0.0)
        slack = Slack(LOOSER * self._slack.relative, 1e-12)
        known = (self.numbers.get(int(j)) for j in bent)
        bends = np.asarray([0.0 if n is None else np.sign(n[4] - n[3]) for n in known])
        for sign in (1.0, -1.0):
            group = bent[bends != -sign]
            if len(group) < 2 or self._log.is_late():
                continue
            along[group] = point.scale[group].max()
            found, _ = self._measure(along, [group], self._judged, overall, False, slack)
            if found.kind[0] == WRONG:
                self.kinds[group] = WRONG
                self._note(group[:1], Slopes(*(np.asarray(c) for c in found)))
