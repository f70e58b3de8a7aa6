"""The first difference: a value, a cotangent, or the gradient of a leaf."""

import dataclasses
import math
import operator
from collections.abc import Sequence, Set
from typing import Any

from clipgrad._compare.comparison import ComparisonFinding
from clipgrad._compare.differences import Judgment
from clipgrad._compare.matching import Instance
from clipgrad._compare.places import ComparedLeaf, ComparedPlace, JudgedRuns
from clipgrad._compare.program_record import OperationRecord
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


def find(own: Version, other: Version | None, judged: JudgedRuns) -> list[ComparisonFinding]:
    """The findings, if the outputs or the gradients differ; of another framework beside None.

    At most one of "value", "vjp" and "grads" is there: what differs later may follow from it.
    """
    places, loss = judged.places, judged.loss
    values = [place for place in places if place.value.differs]
    bad = [leaf for leaf in judged.leaves if leaf.judgment.differs]
    if not loss.differs and not bad:
        return []
    shared = shared_modules(own.program, other.program) if other else set()
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
    own = first.pair.own
    # At other steps of the scans around both, others agree.
    now = [p for p in before if all(map(operator.eq, p.pair.own.steps, own.steps))]
    found = Slice()
    for side, ends in _sides(first, now):
        value = side.value
        found += made_by(value.program, value.variable, value_scopes(value), ends)
    # If the inner view of the same value agrees, what changed it is in this module alone.
    module = first.name if _other_view(first, before) else module_of(outside(found, shared))
    name = f"of {first.name or 'what the scan carries'}"
    name = f"that enters {first.name}" if own.value.kind == ENTERS else name
    text = f"the value {name} {_difference(first.value)}"
    factor = _factor(first.value, [place.value for place in before])
    return located("value", module, first.step, text, own.value.place, factor)


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
    last: ComparedPlace, places: Sequence[ComparedPlace], shared: SharedModules
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
    to = f"what enters {last.name}" if value.kind == ENTERS else last.name
    text = f"the cotangent that {module or 'what follows'} passes back to {to} "
    text += f"{_difference(last.cotangent)}; all values agree"
    factor = _factor(last.cotangent, [place.cotangent for place in later])
    place = _around_first(found, value.place[1:]) or value.place
    return located("vjp", module, step, text, place, factor)


def _leaf_finding(
    own: Version, leaf: ComparedLeaf, places: Sequence[ComparedPlace], shared: SharedModules
) -> ComparisonFinding:
    tapped = [place for place in places if place.cotangent is not None]
    start = own.program.inputs[leaf.position]
    found = outside(used_by(own.program, [start], (), _agreeing(tapped))[0], shared)
    text = f"the gradient of {leaf.name} {_difference(leaf.judgment)}"
    text += "; values and cotangents agree"
    finding = located("grads", module_of(found), None, text, _around_first(found, ()), None)
    return dataclasses.replace(finding, path=leaf.path)


def _other_view(place: ComparedPlace, others: Sequence[ComparedPlace]) -> ComparedPlace | None:
    """The place of the same value at the same steps, inside or outside of other modules."""
    key = place.pair.own.value.variable, place.pair.own.steps
    same = (p for p in others if (p.pair.own.value.variable, p.pair.own.steps) == key)
    return next(same, None)


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
    told = [  # a size of 0 is not known
        f"{name} {a:.3g} beside {b:.3g}"
        for name, (a, b) in pairs
        if min(a, b) > 0 and abs(a - b) > TELLING * max(a, b)
    ]
    return f"{text} ({', '.join(told)})" if told else text


def located(
    kind: str, module: str, step: int | None, text: str, place: Around, factor: Any
) -> ComparisonFinding:
    """A finding at the line of an operation, or else of the one around."""
    location = next((own for each in place if (own := each.location).file is not None), None)
    file, line = (location.file, location.line) if location else (None, None)
    text = f"{location}: {text}" if location else text
    return ComparisonFinding(kind, text, module, step, file, line, factor)
