"""The places that both versions have, each with its judgment."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from clipgrad._compare.differences import Judgment, rounding
from clipgrad._compare.matching import Instance, Pair
from clipgrad._compare.records import ComparisonRow
from clipgrad._compare.sketches import LENGTH, judge_values
from clipgrad._compare.versions import VersionRun


class ComparedPlace(NamedTuple):
    """A place of both versions: the judgments of the values there, and of their cotangents."""

    pair: Pair
    value: Judgment
    cotangent: Judgment | None

    @property
    def name(self) -> str:
        """The name in the first version."""
        return self.pair.own.value.name

    @property
    def step(self) -> int | None:
        """The index in the innermost scan, or None."""
        return self.pair.own.steps[-1] if self.pair.own.steps else None

    @property
    def row(self) -> ComparisonRow:
        """The place as data."""
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
        keys = pair.own.value.position, pair.other.value.position
        if _is_partial(own.values, other.values, pair):
            value = pair.own.value
            partial[f"{value.kind} {value.name}: not the same on each device, in one version"] = (
                None
            )
            continue
        judged = _place_judgment(pair, own.values, other.values, floor.values, rtol)
        cotangent = None
        shared = keys[0] in own.cotangents and keys[1] in other.cotangents
        if shared and _same_devices(own.cotangents, other.cotangents, pair):
            cotangent = _place_judgment(
                pair, own.cotangents, other.cotangents, floor.cotangents, rtol
            )
        found.append(ComparedPlace(pair, judged, cotangent))
    return found, list(partial)


def _same_devices(own: dict, other: dict, pair: Pair) -> bool:
    return len(_on_devices(own, pair.own)) == len(_on_devices(other, pair.other))


def _is_partial(own: dict, other: dict, pair: Pair) -> bool:
    """Whether devices have other values in one version, and the other version has one value."""
    if _same_devices(own, other, pair):
        return False
    for found in (_on_devices(own, pair.own), _on_devices(other, pair.other)):
        kept = found[np.any(found, axis=1)]
        if len(kept) > 1 and not np.array_equal(kept, np.broadcast_to(kept[:1], kept.shape)):
            return True
    return False


def _place_judgment(
    pair: Pair, own: dict, other: dict, floor: dict, rtol: float | None
) -> Judgment:
    sketches = [_on_devices(x, pair.own) for x in (own, floor)]
    theirs = _on_devices(other, pair.other)
    if len(theirs) != len(sketches[0]):  # the same value on some devices
        kept = np.any(sketches[0] if len(sketches[0]) > 1 else theirs, axis=1)
        sketches = [x[kept] if len(x) > 1 else x for x in sketches]
        theirs = theirs[kept] if len(theirs) > 1 else theirs
        shape = np.broadcast_shapes(sketches[0].shape, theirs.shape)
        sketches = [np.broadcast_to(x, shape) for x in sketches]
        theirs = np.broadcast_to(theirs, shape)
    eps = rounding(*(side.value.dtype for side in pair))
    return judge_values(sketches[0], theirs, sketches[1], eps, rtol)


def _on_devices(notes: dict, instance: Instance) -> np.ndarray:
    """The sketch on each device, shape (devices, 515)."""
    return np.asarray(notes[instance.value.position])[instance.at].reshape(-1, LENGTH)


def undecided(places: Iterable[ComparedPlace]) -> list[str]:
    """Notes of the places that rounding decides, each name once."""
    steps: dict[tuple[str, str], list[Any]] = {}
    for place in places:
        for what, found in (("value", place.value), ("cotangent", place.cotangent)):
            if found is not None and not found.is_judged:
                steps.setdefault((place.name, what), []).append(place.step)
    return [
        f"{name}{_listed(at)}: rounding decides here, so its {what} is not judged"
        for (name, what), at in steps.items()
    ]


def _listed(steps: Sequence[int | None]) -> str:
    known = sorted({step for step in steps if step is not None})
    return f", steps {', '.join(map(str, known))}" if known else ""
