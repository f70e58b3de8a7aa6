"""The facts of a run beside its results: its arguments and its circumstances."""

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from clipgrad._compare.comparison import GradientComparison
from clipgrad._compare.leaf_paths import same_leaves
from clipgrad._compare.records import ComparisonFinding
from clipgrad._compare.signatures import Signature, judge_signatures, signature
from clipgrad._errors import first_few

_MOST_NAMES = 5


class RunFacts(NamedTuple):
    """The facts of a run.

    Attributes:
      params: the signature of each array that the loss is differentiated by, by its path.
      data: that of each other argument, by its name.
      circumstances: versions, device and layout.
    """

    params: dict[str, Signature]
    data: dict[str, Signature]
    circumstances: dict[str, Any]


def run_facts(params: Mapping[str, Any], data: Mapping[str, Any]) -> RunFacts:
    """The facts of a run of these arguments, now."""
    signed = [{name: signature(x) for name, x in own.items()} for own in (params, data)]
    layout = {
        name: str(x.sharding)
        for name, x in {**params, **data}.items()
        if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
    }
    device = jax.devices()[0]
    circumstances = {
        "clipgrad": importlib.metadata.version("clipgrad"),
        "jax": jax.__version__,
        "device": device.device_kind,
        "platform": device.platform,
        "processes": jax.process_count(),
        "layout": layout,
    }
    return RunFacts(signed[0], signed[1], circumstances)


def with_facts(
    found: GradientComparison, own: RunFacts | None, other: RunFacts | None
) -> GradientComparison:
    """A comparison with what differs in the facts of two runs; of two functions there are none.

    Arguments that differ are the first finding, or a note if there is no other.
    """
    if own is None or other is None:
        return found
    arguments, notes = _other_arguments(own, other), _other_circumstances(own, other)
    if found.findings:
        return dataclasses.replace(
            found, findings=(*arguments, *found.findings), notes=(*found.notes, *notes)
        )
    notes = [*(finding.message for finding in arguments), *notes]
    return dataclasses.replace(found, notes=(*found.notes, *notes))


def _other_arguments(own: RunFacts, other: RunFacts) -> list[ComparisonFinding]:
    """The finding of arguments whose numbers differ, at most one."""
    params = same_leaves(list(own.params), list(other.params))
    names, there = list(own.params), list(other.params)
    pairs = [(names[i], own.params[names[i]], other.params[there[j]]) for i, j in params.items()]
    pairs += [(name, x, other.data[name]) for name, x in own.data.items() if name in other.data]
    judged = [(name or "the argument", judge_signatures(a, b)) for name, a, b in pairs]
    differing = [(name, found.difference) for name, found in judged if found.differs]
    if not differing:
        return []
    shown = first_few([_shown_difference(*each) for each in differing], _MOST_NAMES)
    text = f"{len(differing)} of {len(pairs)} arguments differ: {shown}"
    return [ComparisonFinding("argument", text, path=differing[0][0])]


def _shown_difference(name: str, difference: float) -> str:
    return f"{name} ({difference:.2g})"


def _other_circumstances(own: RunFacts, other: RunFacts) -> list[str]:
    """A note of what differs in versions, devices and layout."""
    a, b = own.circumstances, other.circumstances
    found = [
        f"{name} {a.get(name)!s} in fun, {b.get(name)!s} in other"
        for name in dict.fromkeys([*a, *b])
        if name != "layout" and a.get(name) != b.get(name)
    ]
    return ["; ".join(found)] if found else []
