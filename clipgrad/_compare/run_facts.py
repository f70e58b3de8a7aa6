"""The facts of a run beside its results: its arguments and its circumstances."""

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from clipgrad._compare.comparison import ComparisonFinding, GradientComparison
from clipgrad._compare.matching import same_leaves
from clipgrad._compare.places import ONE_ARGUMENT
from clipgrad._compare.run_file import RunFile, checked
from clipgrad._compare.signatures import Signature, judge_signatures, signature
from clipgrad._compare.sketches import LENGTH
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
    first = arguments if found.findings else []
    told = [] if found.findings else [finding.message for finding in arguments]
    return dataclasses.replace(
        found, findings=(*first, *found.findings), notes=(*found.notes, *told, *notes)
    )


def _other_arguments(own: RunFacts, other: RunFacts) -> list[ComparisonFinding]:
    """The finding of arguments whose numbers differ, at most one."""
    names, there = list(own.params), list(other.params)
    same = {names[i]: there[j] for i, j in same_leaves(names, there).items()}
    pairs = [(name, own.params[name], other.params[its]) for name, its in same.items()]
    pairs += [(name, x, other.data[name]) for name, x in own.data.items() if name in other.data]
    judged = [(name or ONE_ARGUMENT, judge_signatures(a, b)) for name, a, b in pairs]
    bad = [(name, found.difference) for name, found in judged if found.differs]
    if not bad:
        return []
    shown = first_few([f"{name} ({difference:.2g})" for name, difference in bad], _MOST_NAMES)
    text = f"{len(bad)} of {len(pairs)} arguments differ: {shown}"
    return [ComparisonFinding("argument", text, path=bad[0][0])]


def _other_circumstances(own: RunFacts, other: RunFacts) -> list[str]:
    """A note of what differs in versions, devices and layout."""
    a, b = own.circumstances, other.circumstances
    found = [
        f"{name} {a.get(name)!s} in fun, {b.get(name)!s} in other"
        for name in dict.fromkeys([*a, *b])
        if name != "layout" and a.get(name) != b.get(name)
    ]
    return ["; ".join(found)] if found else []


def facts_file(facts: RunFacts) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    header: dict[str, Any] = {"circumstances": facts.circumstances}
    arrays = {}
    for kind, signatures in (("params", facts.params), ("data", facts.data)):
        header[kind] = [
            [name, own.shape, str(own.dtype), "".join(own.digests)]
            for name, own in signatures.items()
        ]
        arrays |= {f"{kind} {i}": x.sketches.ravel() for i, x in enumerate(signatures.values())}
    return header, arrays


def saved_facts(file: RunFile) -> RunFacts:
    found: list[dict[str, Signature]] = []
    for kind in ("params", "data"):
        own = {}
        for i, (name, shape, dtype, digest, *_) in enumerate(file.header[kind]):
            sketch = checked(file.arrays[f"{kind} {i}"], (0,) if digest else (LENGTH,))
            digests = (digest,) if digest else ()
            own[name] = Signature(tuple(shape), dtype, sketch.reshape(-1, LENGTH), digests)
        found.append(own)
    return RunFacts(found[0], found[1], dict(file.header["circumstances"]))
