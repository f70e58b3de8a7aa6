"""Two versions of a loss: their named values, their cotangents, and their gradients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from clipgrad._compare.comparison import GradientComparison
from clipgrad._compare.differences import Judgment, floor_of, judge, rounding
from clipgrad._compare.findings import ONE_ARGUMENT, ComparedLeaf, find
from clipgrad._compare.leaf_paths import same_leaves
from clipgrad._compare.matching import match
from clipgrad._compare.places import ComparedPlace, compared_places, undecided
from clipgrad._compare.records import ComparisonFinding, unjudged
from clipgrad._compare.versions import SketchedNames, Version, VersionProgram, VersionRun, version
from clipgrad._jaxpr import computed_types


def compare_gradients(
    fun: Callable[..., Any],
    other: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any],
    other_args: tuple,
    argnums: int | Sequence[int],
    has_aux: bool,
    names: Mapping[str, str] | None,
    rtol: float | None,
) -> GradientComparison:
    """Run two versions of a loss and of its gradient, one after the other, and compare them."""
    first = version(fun, args, kwargs, argnums, has_aux)
    second = version(other, other_args, kwargs, argnums, has_aux)
    matching = match(first, second, names)
    own_run = VersionProgram(first, _wanted(pair.own.value for pair in matching.pairs))
    own = own_run()
    floor = own_run.floor(own) if rtol is None else floor_of(own, ())
    theirs = VersionProgram(second, _wanted(pair.other.value for pair in matching.pairs))()
    places, partial = compared_places(matching.pairs, own, theirs, floor, rtol)
    loss = _judged_array(own.loss, theirs.loss, floor.loss, _loss_types(first, second), rtol)
    leaves, alone = _leaves(first, second, own, theirs, floor, rtol)
    return _comparison(first, second, places, loss, leaves, [*matching.unmatched, *partial, *alone])


def _wanted(values: Any) -> SketchedNames:
    return frozenset((value.name, value.kind) for value in values)


def _loss_types(*versions: Version) -> list[Any]:
    return [v.subject.program.jaxpr.outvars[0].aval.dtype for v in versions]


def _judged_array(
    own: Any, other: Any, floor: Any, dtypes: Sequence[Any], rtol: float | None
) -> Judgment:
    return judge(np.asarray(own), np.asarray(other), floor, rounding(*dtypes), rtol)


def _leaves(
    first: Version,
    second: Version,
    own: VersionRun,
    theirs: VersionRun,
    floor: VersionRun,
    rtol: float | None,
) -> tuple[list[ComparedLeaf], list[str]]:
    """The leaves of both gradients, and those that only one of them has."""
    same = same_leaves(first.paths, second.paths)
    found, alone = [], []
    for i, path in enumerate(first.paths):
        name = path or ONE_ARGUMENT
        if i not in same:
            alone.append(f"gradient {name}, only in fun")
            continue
        j, grad, its = same[i], own.grads[i], theirs.grads[same[i]]
        if grad.shape != its.shape:
            shapes = f"{list(grad.shape)} in fun, {list(its.shape)} in other"
            alone.append(f"gradient {name}, of another shape: {shapes}")
            continue
        inputs = [v.subject.inputs[v.subject.chosen[k]] for v, k in ((first, i), (second, j))]
        dtypes = [x.dtype for x in inputs]
        judgment = _judged_array(grad, its, floor.grads[i], dtypes, rtol)
        found.append(ComparedLeaf(path, first.subject.chosen[i], judgment))
    only = [path for j, path in enumerate(second.paths) if j not in same.values()]
    return found, [*alone, *(f"gradient {path or ONE_ARGUMENT}, only in other" for path in only)]


def _comparison(
    first: Version,
    second: Version,
    places: list[ComparedPlace],
    loss: Judgment,
    leaves: list[ComparedLeaf],
    unmatched: list[str],
) -> GradientComparison:
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
    types = computed_types(own.subject.program) - {"float64"}
    return ("float64" if types <= {"float32"} else "float32") if types else None


def _inner_differences(places: Sequence[ComparedPlace]) -> list[str]:
    """Notes of what differs inside of versions whose outputs and gradients agree."""
    found = []
    for what in ("value", "cotangent"):
        judged = [(place.name, getattr(place, what)) for place in places]
        bad = list(dict.fromkeys(name for name, found in judged if found and found.differs))
        if bad:
            more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
            found.append(
                f"outputs and gradients agree, but the {what}s of {', '.join(bad[:5])}{more} differ"
            )
    return found
