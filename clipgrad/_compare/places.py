"""The places and the leaves of the gradient that both versions have, each with its judgment."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from clipgrad._compare.comparison import ComparisonRow, undecided
from clipgrad._compare.differences import Judgment, rounding
from clipgrad._compare.matching import Instance, Pair
from clipgrad._compare.sketches import LENGTH, judge_values
from clipgrad._compare.versions import VersionRun

ONE_ARGUMENT = "the argument"  # the path of an argument that is one array


class ComparedPlace(NamedTuple):
    """A place of both versions: the judgments of the values there, and of their cotangents."""

    pair: Pair
    value: Judgment
    cotangent: Judgment | None

    @property
    def name(self) -> str:
        return self.pair.own.value.name

    @property
    def step(self) -> int | None:
        return self.pair.own.steps[-1] if self.pair.own.steps else None

    @property
    def row(self) -> ComparisonRow:
        cotangent = self.cotangent
        return ComparisonRow(
            self.name,
            self.step,
            self.value.difference,
            cotangent and cotangent.difference,
            self.value.tolerance,
            cotangent and cotangent.tolerance,
            self.pair.own.steps,
            self.pair.own.value.kind,
        )


class ComparedLeaf(NamedTuple):
    """A leaf of the gradient of both versions: its path, its argument's position, its judgment."""

    path: str
    position: int
    judgment: Judgment

    @property
    def name(self) -> str:
        return self.path or ONE_ARGUMENT


class JudgedRuns(NamedTuple):
    """Two runs of losses, each place, loss and gradient judged; and what only one of them has."""

    places: list[ComparedPlace]
    loss: Judgment
    leaves: list[ComparedLeaf]
    unmatched: list[str]


def compared_places(
    pairs: Sequence[Pair],
    own: VersionRun,
    other: VersionRun,
    floor: VersionRun,
    rtol: float | None,
) -> tuple[list[ComparedPlace], list[str]]:
    """Judge each pair, in the order of computation; and what is of one device alone."""
    found: list[ComparedPlace] = []
    partial: dict[str, None] = {}
    for pair in pairs:
        value = pair.own.value
        aligned = _aligned(pair, own.values, other.values, floor.values)
        if aligned is None:
            text = f"{value.kind} {value.name}: not the same on each device, in one version"
            partial[text] = None
            continue
        eps = rounding(*(side.value.dtype for side in pair))
        judged, cotangent = judge_values(*aligned, eps, rtol), None
        if value.position in own.cotangents and pair.other.value.position in other.cotangents:
            aligned = _aligned(pair, own.cotangents, other.cotangents, floor.cotangents, False)
            cotangent = aligned and judge_values(*aligned, eps, rtol)
        found.append(ComparedPlace(pair, judged, cotangent))
    return found, list(partial)


def _aligned(
    pair: Pair, own: dict, other: dict, floor: dict, alike: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """The sketches of both versions, and the floor, on the same devices.

    None if one version has several values and the other has one; or, if they are not `alike` on
    all devices, if it has several devices.
    """
    ours, moved = (_on_devices(x, pair.own) for x in (own, floor))
    theirs = _on_devices(other, pair.other)
    if len(ours) == len(theirs):
        return ours, theirs, moved
    kept = [x[np.any(x, axis=1)] for x in (ours, theirs)]  # the others are no copies
    if not alike or any(len(x) and np.any(x != x[:1]) for x in kept):
        return None
    first, second = (int(np.argmax(np.any(x, axis=1))) for x in (ours, theirs))
    return ours[first], theirs[second], moved[first]


def _on_devices(notes: dict, instance: Instance) -> np.ndarray:
    """The sketch on each device, shape (devices, 515)."""
    return np.asarray(notes[instance.value.position])[instance.at].reshape(-1, LENGTH)


def undecided_places(places: Iterable[ComparedPlace]) -> list[str]:
    """Notes of the places that rounding decides, each name once."""
    steps: dict[tuple[str, str], list[Any]] = {}
    for place in places:
        for what, found in (("value", place.value), ("cotangent", place.cotangent)):
            if found is not None and not found.is_judged:
                steps.setdefault((place.name, what), []).append(place.step)
    found = []
    for (name, what), at in steps.items():
        known = sorted({step for step in at if step is not None})
        listed = f", steps {', '.join(map(str, known))}" if known else ""
        found.append(undecided(f"{name}{listed}", f"its {what}"))
    return found
