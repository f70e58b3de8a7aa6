"""The run of a loss and of its gradient as a file keeps it."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from clipgrad._compare.program_record import point_at, program_data, program_from_data
from clipgrad._compare.run_facts import RunFacts
from clipgrad._compare.run_file import RunFile
from clipgrad._compare.sides import Side, saved_side
from clipgrad._compare.signatures import Signature
from clipgrad._compare.sketches import LENGTH
from clipgrad._compare.versions import Version, VersionLeaf, VersionRun, VersionValue

GRADIENT = "gradient"  # the kind of such a file


def gradient_file(side: Side) -> RunFile:
    """Run a version, and describe the run by plain data and arrays."""
    version = side.version
    run, floor = side.run(), side.floor()
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
    for name, numbers in (("", run), ("floor ", floor)):
        arrays |= _numbers_of_run(version, numbers, name)
    return RunFile(header, arrays)


def _value_data(value: VersionValue) -> dict[str, Any]:
    location = next((x.location for x in value.place if x.location.file), value.maker.location)
    known = ("position", "name", "kind", "shape", "tapped")
    own = {name: getattr(value, name) for name in known} | {"dtype": str(value.dtype)}
    steps = [size for size, is_scan in value.axes if is_scan]
    return own | {"steps": steps, "file": location.file, "line": location.line}


def _numbers_of_run(version: Version, run: VersionRun, name: str) -> dict[str, np.ndarray]:
    found = {f"{name}loss": np.asarray(run.loss)}
    for i, value in enumerate(version.values):
        for kind, own in (("value", run.values), ("cotangent", run.cotangents)):
            if value.position in own:
                dtype = np.float64 if jnp.finfo(value.dtype).bits == 64 else np.float32
                found[f"{name}{kind} {i}"] = np.asarray(own[value.position], dtype)
    return found | {f"{name}gradient {i}": x for i, x in enumerate(run.grads)}


def saved_gradient(file: RunFile) -> Side:
    """The run that a file describes."""
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
    return saved_side(version, run, floor, saved_facts(file))


def _saved_numbers(version: Version, arrays: Mapping[str, np.ndarray], name: str) -> VersionRun:
    values, cotangents = {}, {}
    for i, value in enumerate(version.values):
        values[value.position] = _sketches(value, arrays[f"{name}value {i}"])
        if value.tapped:
            cotangents[value.position] = _sketches(value, arrays[f"{name}cotangent {i}"])
    grads = [checked(arrays[f"{name}gradient {i}"], (LENGTH,)) for i in range(len(version.leaves))]
    return VersionRun(checked(arrays[f"{name}loss"], ()), grads, values, cotangents)


def _sketches(value: VersionValue, array: np.ndarray) -> np.ndarray:
    return checked(array, (*(size for size, _ in value.axes), LENGTH))


def checked(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """An array of numbers of the shape that it should have; or else `ValueError`."""
    if array.shape != tuple(shape) or array.dtype.kind not in "fc":
        raise ValueError(f"an array of {array.dtype} and shape {array.shape}, not {tuple(shape)}")
    return array


def facts_file(facts: RunFacts) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The part of a header and of the arrays that has the facts of a run."""
    header: dict[str, Any] = {"circumstances": facts.circumstances}
    arrays = {}
    for kind, signatures in (("params", facts.params), ("data", facts.data)):
        header[kind] = [
            [name, own.shape, str(own.dtype), own.digest] for name, own in signatures.items()
        ]
        arrays |= {f"{kind} {i}": own.sketch for i, own in enumerate(signatures.values())}
    return header, arrays


def saved_facts(file: RunFile) -> RunFacts:
    """The facts of the run in a file."""
    found: list[dict[str, Signature]] = []
    for kind in ("params", "data"):
        own = {}
        for i, (name, shape, dtype, digest, *_) in enumerate(file.header[kind]):
            sketch = checked(file.arrays[f"{kind} {i}"], (0,) if digest else (LENGTH,))
            own[name] = Signature(tuple(shape), dtype, sketch, digest)
        found.append(own)
    return RunFacts(found[0], found[1], dict(file.header["circumstances"]))
