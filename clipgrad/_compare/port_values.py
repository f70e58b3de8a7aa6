"""The named values of a version in JAX beside those of a model in another framework."""

import collections
from collections.abc import Hashable, Sequence

import numpy as np

from clipgrad._compare.differences import Judgment
from clipgrad._compare.likeness import Likeness
from clipgrad._compare.matching import Instance, Pair, instances_of
from clipgrad._compare.places import ComparedPlace
from clipgrad._compare.port_record import PortEntry
from clipgrad._compare.signatures import (
    NEAR,
    Candidates,
    Closest,
    Signature,
    best_pairs,
    closest_of,
    is_among,
    rejudged,
)
from clipgrad._compare.sketches import ENTERS, LENGTH
from clipgrad._compare.slices import Ancestors, entered_modules
from clipgrad._compare.versions import Version, VersionRun
from clipgrad._errors import first_few

# Names of which two may be one module, of which they probably are, and of which they are.
ALIKE, LIKELY, SURE = 0.45, 0.6, 0.85


def match_values(
    version: Version,
    run: VersionRun,
    floor: VersionRun,
    entries: Sequence[PortEntry],
    likeness: Likeness,
    rtol: float | None,
) -> tuple[list[tuple[ComparedPlace, PortEntry]], list[str]]:
    """Match values: those that agree, in order; of the others those whose names are alike.

    Returns the places of both, each with the other's value, and the values of only one side.

    A value that differs, and of which one that agrees is computed, is cut otherwise in the other
    framework: it is no difference. Nor is one of which nothing is computed.
    """
    own = sorted((i for v in version.values for i in instances_of(v)), key=lambda i: i.time)
    signed = {i: s for i, x in enumerate(own) if (s := _sketch_at(x, run.values, floor.values))}
    candidates = Candidates([entry.value for entry in entries])
    table = {i: candidates.closest(x, rtol) for i, x in signed.items()}
    pairs = []
    for i, j in sorted(_Finder(own, entries, table, likeness).found().items()):
        entry, close = entries[j], table[i].get(j)
        close = close or Closest(Judgment(float("inf"), 0.0), False, (0,))  # of another size
        judgment = rejudged(close, signed[i], entry.value, rtol)
        cotangent, theirs = None, entry.cotangent
        # The cotangent of what enters depends on what else uses it, such as a cast.
        if theirs is not None and ENTERS not in (own[i].value.kind, entry.kind):
            its = _sketch_at(own[i], run.cotangents, floor.cotangents)
            if its is not None and its.size == theirs.size:
                cotangent = closest_of(its, theirs, close.at, rtol)
        # Of the other framework there is no program: the place is one of the version alone.
        pairs.append((ComparedPlace(Pair(own[i], own[i]), judgment, cotangent), entry))
    ours = "JAX", [x.value.name for x in own], {place.name for place, _ in pairs}
    others = "torch", [entry.name for entry in entries], {entry.name for _, entry in pairs}
    unmatched = []
    for where, names, known in (ours, others):
        if alone := [name for name in dict.fromkeys(names) if name and name not in known]:
            unmatched.append(f"values only in {where}: {first_few(alone, 12)}")
    return pairs, unmatched


def _sketch_at(instance: Instance, numbers: dict, floors: dict) -> Signature | None:
    """The sketch of a value at a step; None of one that is not the same on each device."""
    value = instance.value
    if value.position not in numbers:
        return None
    own, moved = (
        np.asarray(x[value.position])[instance.at].reshape(-1, LENGTH).astype(np.float64)
        for x in (numbers, floors)
    )
    kept = np.any(own, axis=1) if len(own) > 1 else np.array([True])
    if np.sum(kept) != 1:
        return None
    return Signature(value.shape, value.dtype, own[kept], (), floor=moved[kept][0])


class _Finder:
    """Finds the value of the other framework of each value of a version."""

    def __init__(
        self,
        own: Sequence[Instance],
        entries: Sequence[PortEntry],
        table: dict[int, dict[int, Closest]],
        likeness: Likeness,
    ) -> None:
        self._own, self._entries, self._table = own, entries, table
        self._ranks = (
            _ranks([(x.value.name, x.value.kind, x.value.shape) for x in own]),
            _ranks([(y.name, y.kind, y.value.shape, bool(y.steps)) for y in entries]),
        )
        self._agreeing = {
            i: [j for j, c in table.get(i, {}).items() if c.agrees] for i in range(len(own))
        }
        self._entering: dict[tuple[int, int], float] = {}
        self._like: dict[tuple[int, int], float] = {}
        for i, x in enumerate(own):
            names = entered_modules(x.value)
            for j, y in enumerate(entries):
                same = likeness(x.value.name, x.steps, y) - 0.3 * (x.value.kind != y.kind)
                views = names if y.kind == ENTERS else []
                into = max((likeness(name, x.steps, y) for name in views), default=0.0) - 0.1
                self._entering[i, j], self._like[i, j] = into, max(same, into)

    def found(self) -> dict[int, int]:
        """The number of the other value of each."""
        agree = [(i, j) for i, row in self._agreeing.items() for j in row]
        found = best_pairs(agree, lambda i, j: self._like[i, j] - self._apart(i, j))
        anchors = sorted(found.items())
        # They agree so well that no difference before them is hidden by rounding.
        judged = {i: self._table[i][j].judgment for i, j in found.items()}
        witnesses = [i for i, x in judged.items() if x.difference <= x.tolerance / 2]
        later = Ancestors([self._own[i] for i in witnesses])
        taken = {j for i, j in found.items() if self._like[i, j] >= LIKELY}
        rest = [
            (i, j)
            for (i, j), like in self._like.items()
            if j not in taken and self._may_be(i, j, like, found)
        ]
        cut_otherwise = {
            i
            for i in {i for i, _ in rest}
            if later.has(self._own[i]) or not later.is_used(self._own[i].value)
        }
        rest = [(i, j) for i, j in rest if i not in cut_otherwise]
        differing = best_pairs(rest, lambda i, j: self._score(i, j, anchors))
        again = {i: j for i, j in agree if i not in found and i not in differing}
        return found | differing | again

    def _may_be(self, i: int, j: int, like: float, found: dict[int, int]) -> bool:
        """Whether a value that agrees with no other, or with one of another name, is this one."""
        if i not in self._table:
            return False
        close, agreeing = self._table[i].get(j), self._agreeing[i]
        if agreeing:  # it is another one that it should be
            is_better = i not in found or like > self._like[i, found[i]] + 0.2
            is_other = is_better and close is not None
            others = (self._entries[k].value for k in agreeing if k != j)
            return is_other and like >= SURE and not is_among(self._entries[j].value, others)
        is_kind = self._own[i].value.kind == self._entries[j].kind
        if close is not None:
            near = close.judgment.difference < NEAR
            return near or like >= ALIKE and is_kind or self._entering[i, j] >= LIKELY
        is_result = is_kind and self._own[i].value.kind != ENTERS  # several enter
        return like >= SURE and is_result and self._ranks[0][i] == self._ranks[1][j]

    def _score(self, i: int, j: int, anchors: Sequence[tuple[int, int]]) -> float:
        """The score of two values that differ: by names, difference and the pairs around."""
        close = self._table[i].get(j)
        near = 1 - min(1.0, close.judgment.difference if close else 1.0)
        crossed = sum((a < i) != (b < j) for a, b in anchors)
        same_shape = self._own[i].value.shape == self._entries[j].value.shape
        same_rank = self._ranks[0][i] == self._ranks[1][j]
        score = self._like[i, j] + 0.6 * near + 0.1 * same_shape + 0.3 * (close is not None)
        return score + 0.3 * same_rank - 0.1 * crossed - self._apart(i, j)

    def _apart(self, i: int, j: int) -> float:
        return abs(i / len(self._own) - j / len(self._entries))


def _ranks(keys: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The number of each among those of its key, such as the calls of a module; and their count."""
    counts, seen = collections.Counter(keys), collections.Counter[Hashable]()
    found = []
    for key in keys:
        found.append((seen[key], counts[key]))
        seen[key] += 1
    return found
