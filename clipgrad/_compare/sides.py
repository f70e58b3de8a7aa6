"""The sides of a comparison: a loss that runs now, or the run of one that was saved in a file."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from clipgrad._compare.program_record import point_at, program_data, program_from_data
from clipgrad._compare.run_facts import RunFacts, facts_file, run_facts, saved_facts
from clipgrad._compare.run_file import RunFile, checked
from clipgrad._compare.sketches import LENGTH
from clipgrad._compare.versions import (
    Version,
    VersionLeaf,
    VersionProgram,
    VersionRun,
    VersionValue,
)

GRADIENT = "gradient"  # the kind of such a file


class Side(NamedTuple):
    """A version, and what gives its results.

    Attributes:
      version: the version.
      run: gives the results of a run.
      floor: gives their movement by the rounding of its program.
      facts: its arguments and circumstances beside a run from a file, where gradients are known by
        their sketches; or None.
    """

    version: Version
    run: Callable[[], VersionRun]
    floor: Callable[[], VersionRun]
    facts: RunFacts | None


def live_side(version: Version, signed: bool) -> Side:
    """A version that runs when it is compared; signed beside a run from a file."""
    program = functools.cache(lambda: VersionProgram(version, signed=signed))
    found = functools.cache(lambda: program()())
    facts = facts_of(version) if signed else None
    return Side(version, found, lambda: program().floor(found()), facts)


def facts_of(version: Version) -> RunFacts:
    given = version.subject
    assert given is not None  # it does not come from a file
    params = {leaf.path: given.inputs[leaf.position] for leaf in version.leaves}
    left = set(range(len(given.inputs))) - set(given.chosen)
    return run_facts(params, {given.names[i]: given.inputs[i] for i in sorted(left)})


def gradient_file(side: Side) -> RunFile:
    version = side.version
    assert side.facts is not None  # it is signed
    facts, arrays = facts_file(side.facts)
    header = {
        "kind": GRADIENT,
        "program": program_data(version.program),
        "values": [_value_data(value) for value in version.values],
        "leaves": [[x.path, x.position, str(x.dtype), x.shape] for x in version.leaves],
        "loss dtype": str(version.loss_dtype),
        "types": sorted(version.types),
        **facts,
    }
    for name, run in (("", side.run()), ("floor ", side.floor())):
        arrays[f"{name}loss"] = np.asarray(run.loss)
        arrays |= {f"{name}gradient {i}": x for i, x in enumerate(run.grads)}
        for i, value in enumerate(version.values):
            dtype = np.float64 if jnp.finfo(value.dtype).bits == 64 else np.float32
            for kind, own in (("value", run.values), ("cotangent", run.cotangents)):
                if value.position in own:
                    arrays[f"{name}{kind} {i}"] = np.asarray(own[value.position], dtype)
    return RunFile(header, arrays)


def _value_data(value: VersionValue) -> dict[str, Any]:
    location = next((x.location for x in value.place if x.location.file), value.maker.location)
    known = ("position", "name", "kind", "shape", "tapped")
    own = {name: getattr(value, name) for name in known} | {"dtype": str(value.dtype)}
    steps = [size for size, is_scan in value.axes if is_scan]
    return own | {"steps": steps, "file": location.file, "line": location.line}


def saved_gradient(file: RunFile) -> Side:
    header = file.header
    program = program_from_data(header["program"])
    values = [
        VersionValue(
            tuple(row["position"]),
            row["name"],
            row["kind"],
            jnp.dtype(row["dtype"]),
            tuple(row["shape"]),
            row["tapped"],
            *point_at(program, row["position"]),
        )
        for row in header["values"]
    ]
    leaves = [
        VersionLeaf(path, position, jnp.dtype(dtype), tuple(shape))
        for path, position, dtype, shape in header["leaves"]
    ]
    types = jnp.dtype(header["loss dtype"]), frozenset(header["types"])
    version = Version(program, values, leaves, *types)
    run, floor = (_saved_numbers(version, file.arrays, name) for name in ("", "floor "))
    return Side(version, lambda: run, lambda: floor, saved_facts(file))


def _saved_numbers(version: Version, arrays: Mapping[str, np.ndarray], name: str) -> VersionRun:
    values, cotangents = {}, {}
    for i, value in enumerate(version.values):
        values[value.position] = checked(arrays[f"{name}value {i}"], value.sketches)
        if value.tapped:
            cotangents[value.position] = checked(arrays[f"{name}cotangent {i}"], value.sketches)
    grads = [checked(arrays[f"{name}gradient {i}"], (LENGTH,)) for i in range(len(version.leaves))]
    return VersionRun(checked(arrays[f"{name}loss"], ()), grads, values, cotangents)
