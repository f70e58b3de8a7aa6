"""Two versions of a loss: their named values, their cotangents, and their gradients."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from clipgrad._compare.comparison import GradientComparison
from clipgrad._compare.differences import Judgment, floor_of, judge, rounding
from clipgrad._compare.findings import ONE_ARGUMENT, ComparedLeaf, find
from clipgrad._compare.matching import match
from clipgrad._compare.places import ComparedPlace, compared_places, undecided
from clipgrad._compare.versions import SketchedNames, Version, VersionProgram, VersionRun, version


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
    there = {path: i for i, path in enumerate(second.paths)}
    found, alone = [], []
    for i, path in enumerate(first.paths):
        j = there.pop(_same_path(path, there), None)
        if j is None or own.grads[i].shape != theirs.grads[j].shape:
            alone.append(f"gradient {path or ONE_ARGUMENT}, only in fun, or of another shape")
            continue
        inputs = [v.subject.inputs[v.subject.chosen[k]] for v, k in ((first, i), (second, j))]
        dtypes = [x.dtype for x in inputs]
        judgment = _judged_array(own.grads[i], theirs.grads[j], floor.grads[i], dtypes, rtol)
        found.append(ComparedLeaf(path, first.subject.chosen[i], judgment))
    return found, [*alone, *(f"gradient {path or ONE_ARGUMENT}, only in other" for path in there)]


def _same_path(path: str, there: Iterable[str]) -> str:
    """The path, or the only other one of which it is the end, or which is its end."""
    if path in there:
        return path
    ends = [p for p in there if f"/{p}".endswith(f"/{path}") or f"/{path}".endswith(f"/{p}")]
    return ends[0] if len(ends) == 1 else path


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
    notes += [
        f"{leaf.path or ONE_ARGUMENT}: rounding decides here, so its gradient is not judged"
        for leaf in leaves
        if not leaf.judgment.is_judged
    ]
    if not places:
        notes.append("no named value was matched; name values by names=, or tag them")
    if not findings:
        notes += _inner_differences(places)
    rows = tuple(place.row for place in places)
    return GradientComparison(not findings, tuple(findings), rows, tuple(unmatched), tuple(notes))


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
