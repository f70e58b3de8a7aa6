"""The first difference: a value, a cotangent, or the gradient of a leaf."""

import dataclasses
import math
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from clipgrad._compare.differences import Judgment
from clipgrad._compare.matching import Instance
from clipgrad._compare.places import ComparedPlace
from clipgrad._compare.program_record import OperationRecord
from clipgrad._compare.records import ComparisonFinding
from clipgrad._compare.sketches import ENTERS
from clipgrad._compare.slices import (
    Ends,
    Slice,
    made_by,
    module_of,
    outside,
    used_by,
    users_of,
    value_scopes,
)
from clipgrad._compare.versions import Version
from clipgrad._compare.wiring import shared_modules
from clipgrad._names import ScopePath

SharedModules = Set[ScopePath]
Around = Sequence[OperationRecord]  # an operation and those around, innermost first
TELLING = 0.01  # sizes that are nearer say nothing of how two versions differ
ONE_ARGUMENT = "the argument"  # the path of an argument that is one array


class ComparedLeaf(NamedTuple):
    """A leaf of the gradient of both versions: its path, its argument's position, its judgment."""

    path: str
    position: int
    judgment: Judgment


def find(
    own: Version,
    other: Version,
    places: Sequence[ComparedPlace],
    loss: Judgment,
    leaves: Sequence[ComparedLeaf],
) -> list[ComparisonFinding]:
    """The findings, if the outputs or the gradients differ.

    At most one of "value", "vjp" and "grads" is there: what differs later may follow from it.
    """
    values = [place for place in places if place.value.differs]
    bad = [leaf for leaf in leaves if leaf.judgment.differs]
    if not loss.differs and not bad:
        return []
    shared = shared_modules(own.program, other.program)
    if values:
        return [_value_finding(values[0], places, shared)]
    if loss.differs:
        return [_loss_finding(own, places, loss, shared)]
    cotangents = [p for p in places if p.cotangent is not None and p.cotangent.differs]
    if cotangents:
        return [_vjp_finding(cotangents[-1], places, shared)]
    return [_leaf_finding(own, leaf, places, shared) for leaf in bad]


def _value_finding(
    first: ComparedPlace, places: Sequence[ComparedPlace], shared: SharedModules
) -> ComparisonFinding:
    before = places[: places.index(first)]
    value = first.pair.own.value
    now = [place for place in before if _is_of_one_step(place, first)]
    found = Slice()
    for side, ends in _sides(first, now):
        own = side.value
        found += made_by(own.program, own.variable, value_scopes(own), ends)
    found = outside(found, shared)
    text = f"the value {_named_value(first)} {_difference(first.value)}"
    # The inner view of the same value agrees: what changed it is in this module alone.
    module = first.name if _other_view(first, before) else module_of(found)
    factor = _factor(first.value, [place.value for place in before])
    return located("value", module, first.step, text, value.place, factor)


def _loss_finding(
    own: Version, places: Sequence[ComparedPlace], loss: Judgment, shared: SharedModules
) -> ComparisonFinding:
    (result,) = own.program.outputs
    ends = _agreeing(places)
    made = made_by(own.program, result, (), ends) if isinstance(result, int) else []
    found = outside(made, shared)
    text = f"the loss {_difference(loss)}; "
    text += f"all {len(places)} named values agree" if places else "no named value was matched"
    factor = _factor(loss, [place.value for place in places])
    return located("value", module_of(found), None, text, _around_first(found, ()), factor)


def _vjp_finding(
    last: ComparedPlace,
    places: Sequence[ComparedPlace],
    shared: SharedModules,
) -> ComparisonFinding:
    later = [
        place
        for place in places[places.index(last) + 1 :]
        if place.cotangent is not None and place.cotangent.is_judged
    ]
    value = last.pair.own.value
    outer = _other_view(last, later)
    users = [users_of(side, ends) for side, ends in _sides(last, later)]
    found = outside([each for part, _ in users for each in part], shared)
    module, step = (outer.name, last.step) if outer else (module_of(found), users[0][1])
    assert last.cotangent is not None
    by = module or "what follows"
    to = f"what enters {last.name}" if value.kind == ENTERS else last.name
    text = f"the cotangent that {by} passes back to {to} {_difference(last.cotangent)}"
    text += "; all values agree"
    factor = _factor(last.cotangent, [place.cotangent for place in later])
    place = _around_first(found, value.place[1:]) or value.place
    return located("vjp", module, step, text, place, factor)


def _leaf_finding(
    own: Version, leaf: ComparedLeaf, places: Sequence[ComparedPlace], shared: SharedModules
) -> ComparisonFinding:
    tapped = [place for place in places if place.cotangent is not None]
    start = own.program.inputs[leaf.position]
    found, _ = used_by(own.program, [start], (), _agreeing(tapped))
    text = f"the gradient of {leaf.path or ONE_ARGUMENT} {_difference(leaf.judgment)}"
    text += "; values and cotangents agree"
    found = outside(found, shared)
    finding = located("grads", module_of(found), None, text, _around_first(found, ()), None)
    return dataclasses.replace(finding, path=leaf.path)


def _named_value(place: ComparedPlace) -> str:
    """The name of a value, within a sentence."""
    if place.pair.own.value.kind == ENTERS:
        return f"that enters {place.name}"
    return f"of {place.name or 'what the scan carries'}"


def _other_view(place: ComparedPlace, others: Sequence[ComparedPlace]) -> ComparedPlace | None:
    """The place of the same value at the same steps, inside or outside of other modules."""
    own = place.pair.own
    pairs = [(other, other.pair.own) for other in others]
    same = [
        other
        for other, its in pairs
        if its.value.variable == own.value.variable and its.steps == own.steps
    ]
    return same[0] if same else None


def _is_of_one_step(place: ComparedPlace, other: ComparedPlace) -> bool:
    """Whether two places are at one step of the scans around both: others agree at others only."""
    steps = zip(place.pair.own.steps, other.pair.own.steps, strict=False)
    return all(a == b for a, b in steps)


def _agreeing(places: Sequence[ComparedPlace], side: int = 0) -> Ends:
    """Whether a variable of a version is one of the values that end a slice."""
    agree = [place.pair[side] for place in places if place.value.is_judged]
    return {variable for instance in agree for variable in _variables(instance)}.__contains__


def _variables(instance: Instance) -> list[int]:
    """The variable of a value; of what a scan's last step carries, the result of the scan too."""
    value = instance.value
    if value.kind == "tag" or value.position[-1] or not value.holders:
        return [value.variable]
    scan = value.holders[-1]
    assert scan.loop is not None  # which carries the value
    last = 0 if scan.loop.reverse else scan.loop.length - 1
    results = [scan.results[value.position[-2]]] if instance.steps[-1] == last else []
    return [value.variable, *results]


def _sides(place: ComparedPlace, agreeing: Sequence[ComparedPlace]) -> list[tuple[Instance, Ends]]:
    """A place in each version, if it has one name: what is only in ``other`` may be the fault."""
    pair = place.pair
    count = 2 if pair.own.value.name == pair.other.value.name else 1
    return [(pair[side], _agreeing(agreeing, side)) for side in range(count)]


def _around_first(found: Slice, around: Around) -> Around:
    """The first operation of a slice, and those around."""
    return (found[0][1], *around) if found else ()


def _factor(found: Judgment, before: Sequence[Judgment | None]) -> float | None:
    """The ratio of a difference to the largest one before; None if there are none."""
    largest = max((j.difference for j in before if j is not None and j.is_judged), default=0.0)
    known = largest and math.isfinite(largest) and math.isfinite(found.difference)
    return found.difference / largest if known else None


def _difference(found: Judgment) -> str:
    if math.isinf(found.difference):
        return "is NaN, inf or nothing in one of the versions only"
    text = f"differs by {found.difference:.2g}, of which rounding explains {found.tolerance:.1g}"
    pairs = zip(("norm", "largest"), zip(*found.sizes, strict=True), strict=False)
    told = [f"{name} {a:.3g} beside {b:.3g}" for name, (a, b) in pairs if _tell_apart(a, b)]
    return f"{text} ({', '.join(told)})" if told else text


def _tell_apart(a: float, b: float) -> bool:
    """Whether two sizes that are known, which 0 is not, say something of a difference."""
    return min(a, b) > 0 and abs(a - b) > TELLING * max(a, b)


def located(
    kind: str, module: str, step: int | None, text: str, place: Around, factor: Any
) -> ComparisonFinding:
    """A finding at the line of an operation, or else of the one around."""
    location = next((own for each in place if (own := each.location).file is not None), None)
    file, line = (location.file, location.line) if location else (None, None)
    if location is not None:
        text = f"{location}: {text}"
    return ComparisonFinding(kind, text, module, step, file, line, factor)
