"""The named values of a version in JAX beside those of a model in another framework."""

import collections
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from clipgrad._compare.ancestors import Ancestors
from clipgrad._compare.closeness import (
    NEAR,
    Candidates,
    Closest,
    Sketched,
    best_pairs,
    closest_of,
    rejudged,
)
from clipgrad._compare.differences import Judgment
from clipgrad._compare.entered import Entered
from clipgrad._compare.matching import Instance, instances_of
from clipgrad._compare.port_record import PortEntry
from clipgrad._compare.sketches import ENTERS, LENGTH
from clipgrad._compare.versions import Version, VersionRun
from clipgrad._errors import first_few

Likeness = Callable[[str, tuple[int, ...], PortEntry], float]
# Names of which two may be one module, of which they probably are, and of which they are.
ALIKE, LIKELY, SURE = 0.45, 0.6, 0.85
_UNLIKE = Judgment(float("inf"), 0.0)


class PortPair(NamedTuple):
    """A value of a version and the value of the other framework that it is, or should be."""

    own: Instance
    other: PortEntry
    value: Closest
    cotangent: Judgment | None


class PortMatching(NamedTuple):
    """The pairs in the order of the version, and the values that only one side has."""

    pairs: list[PortPair]
    unmatched: list[str]


def match_values(
    version: Version,
    run: VersionRun,
    floor: VersionRun,
    entries: Sequence[PortEntry],
    likeness: Likeness,
    rtol: float | None,
) -> PortMatching:
    """Match values: those that agree, in order; of the others those whose names are alike.

    A value that differs, and of which one that agrees is computed, is cut otherwise in the other
    framework: it is no difference. Nor is one of which nothing is computed.
    """
    own = sorted((i for v in version.values for i in instances_of(v)), key=lambda i: i.time)
    sketched = {i: s for i, x in enumerate(own) if (s := _sketch_at(x, run.values, floor.values))}
    candidates = Candidates([entry.value for entry in entries])
    table = {i: candidates.closest(x, rtol) for i, x in sketched.items()}
    finder = _Finder(own, entries, table, likeness)
    found = finder.found()
    pairs = []
    for i, (j, close) in sorted(found.items()):
        close = rejudged(close, sketched[i], entries[j].value, rtol)
        cotangent = _cotangent(own[i], entries[j], close, run, floor, rtol)
        pairs.append(PortPair(own[i], entries[j], close, cotangent))
    ours = {pair.own.value.name for pair in pairs}, [each.value.name for each in own]
    theirs = {pair.other.name for pair in pairs}, [entry.name for entry in entries]
    return PortMatching(pairs, [*_values_alone(*ours, "JAX"), *_values_alone(*theirs, "torch")])


def _values_alone(known: set[str], names: Sequence[str], where: str) -> Iterator[str]:
    if names := [name for name in dict.fromkeys(names) if name and name not in known]:
        yield f"values only in {where}: {first_few(names, 12)}"


def _sketch_at(instance: Instance, numbers: dict, floors: dict) -> Sketched | None:
    """The sketch of a value at a step; None of one that is not the same on each device."""
    value = instance.value
    if value.position not in numbers:
        return None
    own, moved = (
        np.asarray(x[value.position])[instance.at].reshape(-1, LENGTH) for x in (numbers, floors)
    )
    kept = np.flatnonzero(np.any(own, axis=1)) if len(own) > 1 else [0]
    if len(kept) != 1:
        return None
    first, floor = (np.asarray(x[kept[0]], np.float64) for x in (own, moved))
    return Sketched(first, floor, value.shape, value.dtype)


def _cotangent(
    own: Instance,
    other: PortEntry,
    value: Closest,
    run: VersionRun,
    floor: VersionRun,
    rtol: float | None,
) -> Judgment | None:
    """The closest of the cotangents in the orders in which the values agree.

    That of what enters a module depends on what else uses it, such as a copy in another type.
    """
    if own.value.kind == ENTERS or other.kind == ENTERS:
        return None
    its = _sketch_at(own, run.cotangents, floor.cotangents)
    if its is None or other.cotangent is None or its.size != other.cotangent.size:
        return None
    return closest_of(its, other.cotangent, value.at, rtol)


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
        entered = Entered()
        for i, x in enumerate(own):
            names = entered.names(x.value)
            for j, y in enumerate(entries):
                same = likeness(x.value.name, x.steps, y) - 0.3 * (x.value.kind != y.kind)
                views = names if y.kind == ENTERS else []
                into = max((likeness(name, x.steps, y) for name in views), default=0.0) - 0.1
                self._entering[i, j], self._like[i, j] = into, max(same, into)

    def found(self) -> dict[int, tuple[int, Closest]]:
        """The number of the other value, and how close it is."""
        agree = [(i, j) for i, row in self._agreeing.items() for j in row]
        found = best_pairs(agree, lambda i, j: self._like[i, j] - self._apart(i, j))
        anchors = sorted(found.items())
        later = Ancestors([self._own[i] for i, j in found.items() if self._is_witness(i, j)])
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
        differing = best_pairs(rest, lambda i, j: self._closeness(i, j, anchors))
        again = {i: j for i, j in agree if i not in found and i not in differing}
        pairs = found | differing | again
        return {i: (j, self._closest(i, j)) for i, j in pairs.items()}

    def _is_witness(self, i: int, j: int) -> bool:
        """Whether values agree so well that no difference before them is hidden by rounding."""
        judgment = self._table[i][j].judgment
        return judgment.difference <= judgment.tolerance / 2

    def _may_be(self, i: int, j: int, like: float, found: dict[int, int]) -> bool:
        """Whether a value that agrees with no other, or with one of another name, is this one."""
        agreeing = self._agreeing[i]
        if agreeing:  # it is another one that it should be
            is_better = i not in found or like > self._like[i, found[i]] + 0.2
            is_other = is_better and j in self._table[i]
            return is_other and like >= SURE and not any(self._is_one(j, k) for k in agreeing)
        is_kind = self._own[i].value.kind == self._entries[j].kind
        if i in self._table and j in self._table[i]:
            near = self._table[i][j].judgment.difference < NEAR
            enters = self._entering[i, j] >= LIKELY
            return near or like >= ALIKE and is_kind or enters
        same_rank = self._ranks[0][i] == self._ranks[1][j]
        is_result = is_kind and self._own[i].value.kind != ENTERS  # several enter
        return like >= SURE and i in self._table and is_result and same_rank

    def _closeness(self, i: int, j: int, anchors: Sequence[tuple[int, int]]) -> float:
        """The score of two values that differ: by names, difference and the pairs around."""
        near = min(1.0, self._closest(i, j).judgment.difference)
        crossed = sum((a < i) != (b < j) for a, b in anchors)
        same_shape = self._own[i].value.shape == self._entries[j].value.shape
        same_size = j in self._table.get(i, {})
        same_rank = self._ranks[0][i] == self._ranks[1][j]
        score = self._like[i, j] + 0.6 * (1 - near) + 0.1 * same_shape + 0.3 * same_size
        score += 0.3 * same_rank
        return score - 0.1 * crossed - self._apart(i, j)

    def _is_one(self, j: int, k: int) -> bool:
        """Whether two values are one, in other orders of axes, such as what is flattened."""
        first, others = self._entries[j].value.sketches[0], self._entries[k].value.sketches
        return j != k and bool(np.any(np.all(others == first, axis=1)))

    def _closest(self, i: int, j: int) -> Closest:
        return self._table.get(i, {}).get(j, Closest(_UNLIKE, False, (0,)))

    def _apart(self, i: int, j: int) -> float:
        return abs(i / len(self._own) - j / len(self._entries))


def _ranks(keys: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The number of each among those of its key, such as the calls of a module; and their count."""
    counts, found = collections.Counter(keys), []
    seen = collections.Counter[Hashable]()
    for key in keys:
        found.append((seen[key], counts[key]))
        seen[key] += 1
    return found
