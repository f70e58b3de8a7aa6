"""Two versions of a loss: their named values, their cotangents, and their gradients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clipgrad._compare.comparison import GradientComparison
from clipgrad._compare.differences import Judgment, judge, rounding
from clipgrad._compare.findings import ONE_ARGUMENT, ComparedLeaf, find
from clipgrad._compare.leaf_paths import same_leaves
from clipgrad._compare.matching import match
from clipgrad._compare.places import ComparedPlace, compared_places, undecided
from clipgrad._compare.records import ComparisonFinding, unjudged
from clipgrad._compare.run_facts import with_facts
from clipgrad._compare.sides import SavedSide, Side, without_floor
from clipgrad._compare.sketches import judge_sketches
from clipgrad._compare.versions import SketchedNames, Version, VersionRun
from clipgrad._errors import first_few


def compare_gradients(
    first: Side, second: Side, names: Mapping[str, str] | None, rtol: float | None
) -> GradientComparison:
    """Compare two versions of a loss and of its gradient; those that run do so one by one."""
    matching = match(first.version, second.version, names)
    own = first.run(_wanted(pair.own.value for pair in matching.pairs))
    floor = first.floor() if rtol is None else without_floor(own)
    theirs = second.run(_wanted(pair.other.value for pair in matching.pairs))
    places, partial = compared_places(matching.pairs, own, theirs, floor, rtol)
    versions = first.version, second.version
    dtypes = [version.loss_dtype for version in versions]
    loss = judge(own.loss, theirs.loss, floor.loss, rounding(*dtypes), rtol)
    by_sketch = any(isinstance(side, SavedSide) for side in (first, second))
    judging = judge_sketches if by_sketch else judge
    leaves, alone = _leaves(versions, own, theirs, floor, judging, rtol)
    unmatched = [*matching.unmatched, *partial, *alone]
    found = comparison_of(*versions, places, loss, leaves, unmatched)
    return with_facts(found, first.facts, second.facts)


def _wanted(values: Any) -> SketchedNames:
    return frozenset((value.name, value.kind) for value in values)


def _leaves(
    versions: tuple[Version, Version],
    own: VersionRun,
    theirs: VersionRun,
    floor: VersionRun,
    judging: Callable[..., Judgment],
    rtol: float | None,
) -> tuple[list[ComparedLeaf], list[str]]:
    """The leaves of both gradients, and those that only one of them has."""
    paths = [[leaf.path for leaf in version.leaves] for version in versions]
    same = same_leaves(*paths)
    found, alone = [], []
    for i, leaf in enumerate(versions[0].leaves):
        name = leaf.path or ONE_ARGUMENT
        if i not in same:
            alone.append(f"gradient {name}, only in fun")
            continue
        j, its = same[i], versions[1].leaves[same[i]]
        if leaf.shape != its.shape:
            shapes = f"{list(leaf.shape)} in fun, {list(its.shape)} in other"
            alone.append(f"gradient {name}, of another shape: {shapes}")
            continue
        eps = rounding(leaf.dtype, its.dtype)
        judgment = judging(own.grads[i], theirs.grads[j], floor.grads[i], eps, rtol)
        found.append(ComparedLeaf(leaf.path, leaf.position, judgment))
    only = [path for j, path in enumerate(paths[1]) if j not in same.values()]
    return found, [*alone, *(f"gradient {path or ONE_ARGUMENT}, only in other" for path in only)]


def comparison_of(
    first: Version,
    second: Version,
    places: list[ComparedPlace],
    loss: Judgment,
    leaves: list[ComparedLeaf],
    unmatched: list[str],
) -> GradientComparison:
    """The findings and notes of two versions whose places and leaves are judged."""
    findings = find(first, second, places, loss, leaves)
    notes = undecided(places)
    notes += [] if loss.is_judged else ["the loss: rounding decides here, so it is not judged"]
    notes += [
        f"{leaf.path or ONE_ARGUMENT}: rounding decides here, so its gradient is not judged"
        for leaf in leaves
        if not leaf.judgment.is_judged
    ]
    if not places:
        notes.append("no named value was matched; name values by names=, or tag them")
    if not findings:
        notes += _inner_differences(places)
        findings += _no_gradient_judged(first, leaves)
    rows = tuple(place.row for place in places)
    return GradientComparison(not findings, tuple(findings), rows, tuple(unmatched), tuple(notes))


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
    text += f"{farthest.judgment.difference:.2g} apart at {farthest.path or ONE_ARGUMENT}; "
    if wider := _wider(own):
        text += f"compare them in {wider}, with wider arguments and types; compare(fun, "
        text += f'"{wider}", args), of each version, says where precision is lost; '
    return [unjudged(text + "or give rtol=, a tolerance of your own")]


def _wider(own: Version) -> str | None:
    """The dtype, by its name, that is wider than the coarsest one of a program."""
    types = own.types - {"float64"}
    return ("float64" if types <= {"float32"} else "float32") if types else None


def _inner_differences(places: Sequence[ComparedPlace]) -> list[str]:
    """Notes of what differs inside of versions whose outputs and gradients agree."""
    found = []
    for what in ("value", "cotangent"):
        judged = [(place.name, getattr(place, what)) for place in places]
        bad = list(dict.fromkeys(name for name, found in judged if found and found.differs))
        if bad:
            names = first_few(bad, 5)
            found.append(f"outputs and gradients agree, but the {what}s of {names} differ")
    return found
