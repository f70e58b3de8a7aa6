"""Two versions of a loss: their values, cotangents and gradients, and where they first differ."""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from clipgrad._compare.comparison import (
    ComparisonFinding,
    GradientComparison,
    undecided,
    unjudged,
)
from clipgrad._compare.differences import Judgment, floor_of, judge, rounding
from clipgrad._compare.matching import Instance, Pair, match, same_leaves
from clipgrad._compare.places import (
    ONE_ARGUMENT,
    ComparedLeaf,
    ComparedPlace,
    JudgedRuns,
    compared_places,
    undecided_places,
)
from clipgrad._compare.program_record import OperationRecord
from clipgrad._compare.run_facts import with_facts
from clipgrad._compare.sides import Side
from clipgrad._compare.sketches import ENTERS, judge_sketches
from clipgrad._compare.slices import (
    Ends,
    Slice,
    made_by,
    module_of,
    outside,
    shared_modules,
    used_by,
    users_of,
    value_scopes,
)
from clipgrad._compare.versions import Version, VersionRun
from clipgrad._errors import first_few
from clipgrad._names import ScopePath

SharedModules = Set[ScopePath]
Around = Sequence[OperationRecord]  # an operation and those around, innermost first
TELLING = 0.01  # sizes that are nearer say nothing of how two versions differ


def compare_gradients(
    first: Side, second: Side, names: Mapping[str, str] | None, rtol: float | None
) -> GradientComparison:
    """Compare two versions of a loss and of its gradient; those that run do so one by one."""
    versions = first.version, second.version
    matching = match(*versions, names)
    own = first.run()
    floor = first.floor() if rtol is None else floor_of(own, ())
    judging = judge if first.facts is None else judge_sketches
    judged = judged_runs(versions, matching.pairs, own, second.run(), floor, judging, rtol)
    judged = judged._replace(unmatched=[*matching.unmatched, *judged.unmatched])
    return with_facts(comparison_of(*versions, judged), first.facts, second.facts)


def judged_runs(
    versions: tuple[Version, Version],
    pairs: Sequence[Pair],
    own: VersionRun,
    theirs: VersionRun,
    floor: VersionRun,
    judging: Callable[..., Judgment],
    rtol: float | None,
) -> JudgedRuns:
    """Judge the values, the loss and the gradients of two runs; gradients by `judging`."""
    places, unmatched = compared_places(pairs, own, theirs, floor, rtol)
    eps = rounding(*(version.loss_dtype for version in versions))
    loss = judge(own.loss, theirs.loss, floor.loss, eps, rtol)
    paths = [[leaf.path for leaf in version.leaves] for version in versions]
    same, found = same_leaves(*paths), []
    for i, leaf in enumerate(versions[0].leaves):
        name = leaf.path or ONE_ARGUMENT
        if i not in same:
            unmatched.append(f"gradient {name}, only in fun")
            continue
        j, its = same[i], versions[1].leaves[same[i]]
        if leaf.shape != its.shape:
            shapes = f"{list(leaf.shape)} in fun, {list(its.shape)} in other"
            unmatched.append(f"gradient {name}, of another shape: {shapes}")
            continue
        eps = rounding(leaf.dtype, its.dtype)
        judgment = judging(own.grads[i], theirs.grads[j], floor.grads[i], eps, rtol)
        found.append(ComparedLeaf(leaf.path, leaf.position, judgment))
    only = [path for j, path in enumerate(paths[1]) if j not in same.values()]
    unmatched += [f"gradient {path or ONE_ARGUMENT}, only in other" for path in only]
    return JudgedRuns(places, loss, found, unmatched)


def comparison_of(own: Version, other: Version | None, judged: JudgedRuns) -> GradientComparison:
    findings = find(own, other, judged)
    notes = undecided_places(judged.places)
    notes += [] if judged.loss.is_judged else [undecided("the loss")]
    notes += undecided_leaves(judged.leaves)
    if not judged.places:
        notes.append("no named value was matched; name values by names=, or tag them")
    if not findings:
        notes += _inner_differences(judged)
        findings += _no_gradient_judged(own, judged.leaves)
    rows = tuple(place.row for place in judged.places)
    parts = tuple(findings), rows, tuple(judged.unmatched), tuple(notes)
    return GradientComparison(not findings, *parts)


def undecided_leaves(leaves: Sequence[ComparedLeaf]) -> list[str]:
    return [undecided(x.name, "its gradient") for x in leaves if not x.judgment.is_judged]


def _no_gradient_judged(own: Version, leaves: Sequence[ComparedLeaf]) -> list[ComparisonFinding]:
    """The finding that no leaf of the gradient could be judged, with what to do."""
    if any(leaf.judgment.is_judged for leaf in leaves):
        return []
    if not leaves:
        return [
            unjudged(
                "no leaf of the gradients has the same path and shape in both, so no gradient was "
                "compared; give both versions trees of parameters with the same paths"
            )
        ]
    farthest = max(leaves, key=lambda leaf: leaf.judgment.difference)
    text = f"rounding decides each of {len(leaves)} gradients, so none is judged; the versions are "
    text += f"{farthest.judgment.difference:.2g} apart at {farthest.name}; "
    if types := own.types - {"float64"}:
        wider = "float64" if types <= {"float32"} else "float32"
        text += f"compare them in {wider}, with wider arguments and types; compare(fun, "
        text += f'"{wider}", args), of each version, says where precision is lost; '
    return [unjudged(text + "or give rtol=, a tolerance of your own")]


def _inner_differences(judged: JudgedRuns) -> list[str]:
    """Notes of what differs inside of versions whose outputs and gradients agree."""
    found = []
    for what in ("value", "cotangent"):
        each = [(place.name, getattr(place, what)) for place in judged.places]
        if bad := list(dict.fromkeys(name for name, own in each if own and own.differs)):
            names = first_few(bad, 5)
            found.append(f"outputs and gradients agree, but the {what}s of {names} differ")
    return found


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
        return "is NaN, inf, nothing or of another shape in one of the versions only"
    text = f"differs by {found.difference:.2g}, of which rounding explains {found.tolerance:.1g}"
    pairs = zip(("norm", "largest"), zip(*found.sizes, strict=True), strict=False)
    told = [  # nothing has no size
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
