"""Two versions of a loss: their named values, their cotangents, and their gradients."""

from collections.abc import Callable, Mapping, Sequence

from clipgrad._compare.comparison import (
    ComparisonFinding,
    GradientComparison,
    undecided,
    unjudged,
)
from clipgrad._compare.differences import Judgment, floor_of, judge, rounding
from clipgrad._compare.findings import find
from clipgrad._compare.matching import Pair, match, same_leaves
from clipgrad._compare.places import (
    ONE_ARGUMENT,
    ComparedLeaf,
    JudgedRuns,
    compared_places,
    undecided_places,
)
from clipgrad._compare.run_facts import with_facts
from clipgrad._compare.sides import Side
from clipgrad._compare.sketches import judge_sketches
from clipgrad._compare.versions import Version, VersionRun
from clipgrad._errors import first_few


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
    """The findings and notes of two versions whose places and leaves are judged."""
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
    """Notes of the leaves that rounding decides."""
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
