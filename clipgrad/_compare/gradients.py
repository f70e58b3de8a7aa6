"""Two versions of a loss: their named values, their cotangents, and their gradients."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from clipgrad._compare.comparison import GradientComparison
from clipgrad._compare.differences import Judgment, floor_of, judge, rounding
from clipgrad._compare.findings import ONE_ARGUMENT, ComparedLeaf, find
from clipgrad._compare.leaf_paths import same_leaves
from clipgrad._compare.matching import Pair, match
from clipgrad._compare.places import ComparedPlace, compared_places, undecided_places
from clipgrad._compare.records import ComparisonFinding, undecided, unjudged
from clipgrad._compare.run_facts import with_facts
from clipgrad._compare.sides import Side
from clipgrad._compare.sketches import judge_sketches
from clipgrad._compare.versions import Version, VersionRun
from clipgrad._errors import first_few


class JudgedRuns(NamedTuple):
    """Two runs of losses, each place, loss and gradient judged; and what only one of them has."""

    places: list[ComparedPlace]
    loss: Judgment
    leaves: list[ComparedLeaf]
    unmatched: list[str]


def compare_gradients(
    first: Side, second: Side, names: Mapping[str, str] | None, rtol: float | None
) -> GradientComparison:
    """Compare two versions of a loss and of its gradient; those that run do so one by one."""
    versions = first.version, second.version
    matching = match(*versions, names)
    own = first.run()
    floor = first.floor() if rtol is None else floor_of(own, ())
    judging = judge if first.facts is None else judge_sketches
    found = judged_runs(versions, matching.pairs, own, second.run(), floor, judging, rtol)
    unmatched = [*matching.unmatched, *found.unmatched]
    found = comparison_of(*versions, *found[:3], unmatched)
    return with_facts(found, first.facts, second.facts)


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
    dtypes = [version.loss_dtype for version in versions]
    loss = judge(own.loss, theirs.loss, floor.loss, rounding(*dtypes), rtol)
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
    notes = undecided_places(places)
    notes += [] if loss.is_judged else [undecided("the loss")]
    notes += undecided_leaves(leaves)
    if not places:
        notes.append("no named value was matched; name values by names=, or tag them")
    if not findings:
        notes += _inner_differences(places)
        findings += _no_gradient_judged(first, leaves)
    rows = tuple(place.row for place in places)
    return GradientComparison(not findings, tuple(findings), rows, tuple(unmatched), tuple(notes))


def undecided_leaves(leaves: Sequence[ComparedLeaf]) -> list[str]:
    """Notes of the leaves that rounding decides."""
    return [
        undecided(leaf.path or ONE_ARGUMENT, "its gradient")
        for leaf in leaves
        if not leaf.judgment.is_judged
    ]


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
