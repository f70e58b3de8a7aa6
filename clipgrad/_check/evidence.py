"""The evidence of slopes: at each element, whether the rule and plain AD are the function's slope.

Where the rule and plain AD are apart, single elements are moved. The rest is moved in dense groups,
which are split only where slopes disagree: so the cost of a right gradient does not grow with the
number of its elements. In half precision, where slopes of one element may be all rounding, the
gradient of a leaf is judged along several directions.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clipgrad._check.options import Options
from clipgrad._check.points import CONSTANTS, IN_FLOAT64, Point, dense_numbers
from clipgrad._check.tolerances import (
    BELOW_ROUNDING,
    DIRECTIONS,
    FEW_ELEMENTS,
    FEW_GROUPS,
    GROUPS,
    LEAST_ALONG,
    LEAST_TOGETHER,
    LOOSER,
    PRECISIONS,
    SINGLES,
    SPREAD,
    TIGHT,
    TIGHT_FLOAT32,
    TRUSTED,
    WORST,
    Tolerance,
)
from clipgrad._check.verdict import (
    KINK,
    NOISE,
    OK,
    UNSEEN,
    WRONG,
    Along,
    FiniteDifferences,
    Slopes,
    agree_at_once,
    judge_along,
    judge_slopes,
    majority,
    off_at_once,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """What slopes say at each element, one row for each; nobody changes it, parts are joined.

    A part that is joined only makes a verdict more severe; what acquits is a column. The columns
    stand in one order in the fields, in `on`, in `rows` and in the arguments of `majority`.

    Attributes:
      rule: whether the gradient that is judged is the slope: OK, KINK, NOISE, UNSEEN or WRONG.
      plain: the same of plain AD, where the first is WRONG; UNSEEN where there is none.
      is_smooth: whether the slope is one of a smooth function.
      is_between: whether slopes cannot tell the gradient from plain AD, though these are apart.
      numbers: of an element that was moved by itself, for a unit of it.
      leaves: of a leaf that was judged along directions, by its start.
      off: by the first element of a group that was moved as a whole, the part of itself that its
        gradient is off by.
      judged_to: the part of itself that a gradient is judged to, where slopes are not in float64.
    """

    rule: np.ndarray
    plain: np.ndarray
    is_smooth: np.ndarray
    is_between: np.ndarray
    numbers: Mapping[int, Slopes] = dataclasses.field(default_factory=dict)
    leaves: Mapping[int, Along] = dataclasses.field(default_factory=dict)
    off: Mapping[int, float] = dataclasses.field(default_factory=dict)
    judged_to: float = 0.0

    @classmethod
    def on(
        cls,
        finite: np.ndarray,
        elements: Any = (),
        rule: Any = OK,
        plain: Any = UNSEEN,
        is_smooth: Any = False,
        is_between: Any = False,
        **more: Any,
    ) -> "Evidence":
        """Evidence on some elements; of the others, those that are finite are as they should be."""
        columns = [
            np.where(finite, np.int8(OK), np.int8(UNSEEN)),
            np.full(len(finite), np.int8(UNSEEN)),
        ]
        columns += [np.zeros(len(finite), bool), np.zeros(len(finite), bool)]
        some = np.asarray(elements, int)
        for column, row in zip(columns, (rule, plain, is_smooth, is_between), strict=True):
            column[some] = row
        return cls(*columns, **more)

    @property
    def rows(self) -> tuple[np.ndarray, ...]:
        """The columns of one entry for each element."""
        return self.rule, self.plain, self.is_smooth, self.is_between

    def join(self, other: "Evidence") -> "Evidence":
        """At each element the row of the more severe one, this one's where both are as severe."""
        is_worse = other.rule > self.rule
        rows = [np.where(is_worse, b, a) for a, b in zip(self.rows, other.rows, strict=True)]
        return Evidence(
            *rows,
            numbers={**self.numbers, **other.numbers},
            leaves={**self.leaves, **other.leaves},
            off={**self.off, **other.off},
            judged_to=max(self.judged_to, other.judged_to),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Search:
    """Finds the evidence at a point; each method returns the evidence on some elements.

    Attributes:
      point: the point.
      judged: the gradient that is judged.
      tolerance: how far it may be from slopes.
      options: the options; nothing new is begun once the time is spent.
      reference: plain AD, or None.
    """

    point: Point
    judged: np.ndarray
    tolerance: Tolerance
    options: Options
    reference: np.ndarray | None = None

    @property
    def target(self) -> np.ndarray:
        """The gradient that groups are held against: plain AD, which suspects are apart from."""
        return self.judged if self.reference is None else self.reference

    @functools.cached_property
    def typical(self) -> np.ndarray:
        """The typical gradient of each leaf."""
        return self.point.typical(self.target)

    @functools.cached_property
    def overall(self) -> float:
        """The largest effect of any element."""
        return float(np.abs(self.target * self.point.scale).max(initial=0.0))

    @property
    def tolerance_along(self) -> Tolerance:
        """The tolerance along a dense direction."""
        relative = self.tolerance.relative
        if self.reference is not None:
            relative = TIGHT
        elif relative <= LOOSER * PRECISIONS["float32"].relative:
            relative = TIGHT_FLOAT32
        return Tolerance(relative, 0.0, LEAST_ALONG * self.overall)

    def run(self) -> Evidence:
        """Look at suspects one by one, and at the others together or, in "full", one by one too."""
        options, evaluation = self.options, self.point.nearby.evaluation
        if evaluation.is_coarse and options.max_relative_error is None:  # Paddle's is of elements
            return self._joined(self._leaf_along(*leaf) for leaf in self.point.ranges)
        suspects = self._suspects()
        is_left = self.point.finite.copy()
        is_left[suspects] = False
        is_full = options.mode == "full" or options.max_relative_error is not None
        others = (
            self._one_by_one(np.flatnonzero(is_left), self.target)
            if is_full
            else self._split([group for group in self._groups(is_left) if len(group)])
        )
        evidence = self._at_suspects(suspects).join(others)
        judged_to = 0.0 if evaluation.is_wide else self.tolerance.relative
        return dataclasses.replace(self._kinks_together(evidence), judged_to=judged_to)

    def _of(self, *row: Any, **more: Any) -> Evidence:
        """Evidence on some elements, as `Evidence.on` takes it."""
        return Evidence.on(self.point.finite, *row, **more)

    def _joined(self, parts) -> Evidence:
        return functools.reduce(Evidence.join, parts, self._of())

    def _suspects(self) -> np.ndarray:
        """Elements at which gradient and reference are apart by more than rounding, worst first."""
        judged, other, point = self.judged, self.reference, self.point
        if other is None or other is judged:
            return np.zeros(0, int)
        excess = point.excess(judged, other, self.tolerance, self.typical)
        some = np.flatnonzero((excess > 1) & point.finite)
        some = some[~point.is_zero(some, (judged, other), BELOW_ROUNDING)]
        if len(some):
            a, b, typical = judged[:, some], other[:, some], self.typical[:, point.leaf[some]]
            tolerance = self.tolerance(np.fmax(np.abs(a), np.abs(b)), typical)
            apart = np.abs(a - b) > tolerance + point.rounding(CONSTANTS)[some]
            some = some[np.any(apart, axis=0)]
        return some[np.argsort(-excess[some], kind="stable")]

    def _at_suspects(self, suspects: np.ndarray) -> Evidence:
        """Move some of the suspects, the worst among them; the others are as all of these are."""
        if not len(suspects):
            return self._of()
        spread = suspects[:: max(1, len(suspects) // SPREAD)]
        chosen = np.unique(np.concatenate([suspects[:WORST], spread]))[: WORST + SPREAD]
        moved = self._one_by_one(chosen, self.judged, suspects=True)
        kinds = majority(*moved.rows)[chosen]
        others = np.setdiff1d(suspects, chosen)
        if len(set(kinds)) > 1:
            return moved.join(self._of(others, UNSEEN))
        return moved.join(self._of(others, *(column[chosen[0]] for column in moved.rows)))

    def _one_by_one(
        self, elements: np.ndarray, gradient: np.ndarray, suspects: bool = False
    ) -> Evidence:
        """Move elements one by one, until the time is spent."""
        parts = []
        for start in range(0, len(elements), SINGLES):
            if self.options.is_late():
                parts.append(self._of(elements[start:], UNSEEN))
                break
            parts.append(self._moved(elements[start : start + SINGLES], gradient, suspects))
        return self._joined(parts)

    def _moved(self, some: np.ndarray, gradient: np.ndarray, suspects: bool) -> Evidence:
        """Move some elements, each by itself."""
        point = self.point
        typical = (self.typical[:, point.leaf[some]] * point.scale[some]).T
        differences = self._differences(point.scale, [np.array([j]) for j in some])
        slopes = judge_slopes(differences, gradient, self.tolerance, typical)
        rule, plain = slopes.kind, np.full(len(some), np.int8(UNSEEN))
        if self.reference is not None and (rule == WRONG).any():
            plain = judge_slopes(differences, self.reference, self.tolerance, typical).kind
            is_neither = (rule == WRONG) & (plain == WRONG)
            if is_neither.any():  # by less than their roundings in float64 they are not apart
                room = BELOW_ROUNDING * (point.rounding(IN_FLOAT64) * point.scale)[some]
                is_near = np.abs(slopes.numeric - slopes.analytic) <= room
                rule = np.where(is_neither & is_near, OK, rule)
        is_between = np.zeros(len(some), bool)
        if suspects:
            rule, is_between = self._told(some, slopes, rule)
            slopes = self._by_plain_ad(
                some, slopes, is_between | ((rule == WRONG) & (plain != WRONG))
            )
        numbers = {int(j): slopes.of_one(k, point.scale[j]) for k, j in enumerate(some)}
        marks = {"is_smooth": self._is_smooth(slopes), "is_between": is_between}
        return self._of(some, rule, plain, numbers=numbers, **marks)

    def _told(self, some, slopes: Slopes, rule: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The kinds of suspects, and where slopes fit both the gradient and plain AD.

        These are right where both are zero but for their roundings.
        """
        gradients: Any = (self.judged, self.reference)
        off = np.abs(gradients[0][:, some] - gradients[1][:, some]).max(axis=0)
        is_fit = np.abs(slopes.numeric - slopes.analytic) <= slopes.error
        is_blurred = (rule == OK) & (slopes.error > off * self.point.scale[some])
        is_between = ((rule == NOISE) & is_fit) | is_blurred
        is_zero = self.point.is_zero(some, gradients, 1.0)
        rule = np.where(is_between, np.where(is_zero, OK, NOISE), rule)
        return rule, is_between & ~is_zero

    def _by_plain_ad(self, some, slopes: Slopes, is_wrong: np.ndarray) -> Slopes:
        """Slopes that tell what a wrong gradient should be by plain AD, which is more exact."""
        judged, other = self.judged[:, some], self.target[:, some]
        row, column = np.argmax(np.abs(judged - other), axis=0), np.arange(len(some))
        is_known, scale = is_wrong & ~slopes.is_kink, self.point.scale[some]
        return slopes._replace(
            numeric=np.where(is_known, other[row, column] * scale, slopes.numeric),
            analytic=np.where(is_known, judged[row, column] * scale, slopes.analytic),
            row=np.where(is_known, row, slopes.row),
        )

    def _is_smooth(self, slopes: Slopes) -> np.ndarray:
        """Whether a slope is one of a smooth function, so that a gradient apart from it is wrong.

        What looks like a stair may be the rounding of a formula whose terms cancel: a user who
        wrote a rule did so for that reason, and the rule has the slope of the larger steps.
        """
        return slopes.is_smooth & (~slopes.is_stair | self.point.witnesses.is_ruled)

    def _differences(self, along, groups, steps=None) -> FiniteDifferences:
        return self.point.nearby.differences(along, groups, self.point.covectors, steps)

    def _along(self, groups: Sequence[np.ndarray], number: str = "") -> np.ndarray:
        """A dense random direction in each group."""
        along, seed = np.array(self.point.scale), self.options.seed
        for g in groups:
            along[g] *= dense_numbers(seed, f"along {number}{len(g)} {g[0]}", len(g))
        return along

    def _groups(self, is_left: np.ndarray) -> list[np.ndarray]:
        """The elements of each leaf; what is tied moves apart from what is not."""
        x, groups = self.point.nearby.x, []
        for start, stop in self.point.ranges:
            elements = np.flatnonzero(is_left[start:stop]) + start
            _, same, counts = np.unique(x[elements], return_inverse=True, return_counts=True)
            is_tied = counts[same] > 1
            groups += [elements[~is_tied], elements[is_tied]]
        return groups

    def _kinds_along(self, groups: list[np.ndarray]) -> tuple[np.ndarray, dict[int, float]]:
        """The kind of each group as a whole, and what it is off by.

        By two steps, and if they do not agree by all.
        """
        along, quick = self._along(groups), self.point.nearby.evaluation.quick
        two = self._differences(along, groups, quick)
        kinds = np.where(agree_at_once(two, self.target, self.tolerance_along), OK, WRONG)
        off = dict(zip([int(g[0]) for g in groups], off_at_once(two, self.target), strict=True))
        apart = np.flatnonzero(kinds)
        if len(apart):
            differences = self._differences(along, [groups[k] for k in apart])
            kinds[apart] = judge_slopes(differences, self.target, self.tolerance_along).kind
        return kinds, off

    def _split(self, groups: list[np.ndarray]) -> Evidence:
        """Move groups as a whole, and the parts of those whose slopes are not the target's."""
        parts = []
        if len(groups) > FEW_GROUPS:
            thirds = np.array_split(np.arange(len(groups)), 3)
            kinds, off = self._kinds_along([np.concatenate([groups[i] for i in t]) for t in thirds])
            groups = [groups[i] for t, k in zip(thirds, kinds, strict=True) if k != OK for i in t]
            parts.append(self._of(off=off))
        left = GROUPS
        while groups:
            if left < 0 or self.options.is_late():
                parts.append(self._of(np.concatenate(groups), UNSEEN))
                break
            kinds, off = self._kinds_along(groups)
            pieces = []
            for group, kind in zip(groups, kinds, strict=True):
                kind, split = self._pieces(group, kind)
                parts += [] if split else [self._of(group, kind)]
                pieces += split
            small = [g for g in pieces if len(g) <= FEW_ELEMENTS]
            together = np.concatenate([np.zeros(0, int), *small])
            parts += [self._of(off=off), self._one_by_one(together[:SINGLES], self.target)]
            parts.append(self._of(together[SINGLES:], UNSEEN))
            groups = [g for g in pieces if len(g) > FEW_ELEMENTS]
            left -= len(groups)
        return self._joined(parts)

    def _pieces(self, group: np.ndarray, kind: int) -> tuple[int, list[np.ndarray]]:
        """The kind of all of a group, or the pieces of it to look at."""
        if kind == NOISE and self.reference is not None:
            kind = OK if self.point.is_zero(group, (self.target,), 1.0).all() else NOISE
        # Without a reference, what is wrong may hide between the slopes of others at kinks; and of
        # few, those at kinks are told from the others.
        is_split = self.reference is None or len(group) <= FEW_ELEMENTS
        if kind != WRONG and not (kind == KINK and is_split and len(group) > 1):
            return kind, []
        if len(group) <= FEW_ELEMENTS:
            return kind, [group]
        return kind, [g for g in np.array_split(group, 16 if len(group) > 256 else 4) if len(g)]

    def _kinks_together(self, evidence: Evidence) -> Evidence:
        """Move elements at kinks together once: several may not have what one may.

        Those that bend up and those that bend down each by themselves.
        """
        bent, scale = np.flatnonzero(evidence.rule == KINK), self.point.scale
        along = np.zeros(len(scale))
        tolerance = Tolerance(LOOSER * self.tolerance.relative, 0.0, LEAST_TOGETHER * self.overall)
        known = (evidence.numbers.get(int(j)) for j in bent)
        bends = np.asarray([0.0 if n is None else np.sign(n.ahead - n.behind) for n in known])
        for sign in (1.0, -1.0):
            group = bent[bends != -sign]
            if len(group) < 2 or self.options.is_late():
                continue
            along[group] = scale[group].max()
            slopes = judge_slopes(self._differences(along, [group]), self.judged, tolerance)
            is_apart = self._is_apart(group)
            if slopes.kind[0] == WRONG and (self._is_smooth(slopes)[0] or is_apart):
                numbers = {int(group[0]): slopes.of_one(0, scale[group[0]])}
                plain = UNSEEN if is_apart else WRONG
                wrong = self._of(group, WRONG, plain, is_smooth=True, numbers=numbers)
                evidence = evidence.join(wrong)
        return evidence

    def _is_apart(self, group: np.ndarray) -> bool:
        """Whether the gradient is not its reference at some of these elements."""
        judged, other = self.judged, self.reference
        if other is None or other is judged:
            return other is None
        return bool(
            (self.point.excess(judged, other, self.tolerance, self.typical)[group] > 1).any()
        )

    def _leaf_along(self, start: int, stop: int) -> Evidence:
        """Judge a leaf in half precision as a whole, and some of its elements besides."""
        leaf = np.flatnonzero(self.point.finite[start:stop]) + start
        if not len(leaf) or self.options.is_late():
            return self._of(leaf, UNSEEN, judged_to=self.tolerance.relative)
        several = [
            self._differences(self._along([leaf], f"{k} "), [leaf]) for k in range(DIRECTIONS)
        ]
        along = judge_along(several, self.target, self.tolerance)
        some = np.arange(0, len(leaf), max(1, -(-len(leaf) // SINGLES)))
        typical = (self.typical[:, self.point.leaf[leaf[some]]] * self.point.scale[leaf[some]]).T
        differences = self._differences(self.point.scale, [np.array([j]) for j in leaf[some]])
        slopes = judge_slopes(differences, self.judged, self.tolerance, typical)
        kinds, is_wrong = _kinds_of_leaf(len(leaf), along.kind, some, slopes, typical)
        numbers = {
            int(j): slopes.of_one(k, self.point.scale[j])
            for k, j in enumerate(leaf[some])
            if is_wrong[k]
        }
        bound = along.bound if along.kind != WRONG else TRUSTED
        bound = self.tolerance.relative if along.kind == WRONG and is_wrong.any() else bound
        return self._of(
            leaf,
            kinds,
            numbers=numbers,
            leaves={start: along},
            off={start: along.off},
            judged_to=bound,
        )


def _kinds_of_leaf(
    size: int, kind: int, some: np.ndarray, slopes: Slopes, typical: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The kinds of the elements of a leaf in half precision, and which of `some` are wrong.

    An element that slopes tell surely is what they say. The others are what the leaf is as a whole;
    where that is wrong it may be so by those that are, or by kinks that all of them cross, and the
    others were not seen.
    """
    off, analytic = np.abs(slopes.numeric - slopes.analytic), np.abs(slopes.analytic)
    is_off = off > TRUSTED * (analytic + typical.max(axis=1)) + slopes.error
    is_wrong = (slopes.kind == WRONG) & (slopes.is_kink | is_off)
    is_right = off + slopes.error <= TRUSTED * np.fmax(analytic, np.abs(slopes.numeric))
    is_told = kind == WRONG and bool((is_wrong | is_right).any())
    kinds = np.full(size, np.int8(UNSEEN if is_told else kind))
    singles = np.where((slopes.kind == KINK) & (kind != WRONG), KINK, kinds[some])
    singles = np.where(is_right & is_told, OK, singles)
    kinds[some] = np.where(is_wrong, WRONG, singles)
    return kinds, is_wrong
