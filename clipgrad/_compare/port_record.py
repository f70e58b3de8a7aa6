"""The run of a model in another framework, as a file keeps it."""

from typing import Any, NamedTuple

import numpy as np

from clipgrad._compare.run_file import RunFile, checked
from clipgrad._compare.signatures import Signature, orders_of
from clipgrad._compare.sketches import LENGTH

PORT = "port"  # the kind of such a file


class PortEntry(NamedTuple):
    """An array with a name.

    Attributes:
      name: the path of the module, or of the parameter.
      kind: ``"module"`` for what leaves a module, ``"enters"`` for what enters one;
        ``"parameter"``, ``"buffer"`` or ``"argument"``.
      owner: the class of the module.
      steps: the step of a recurrent module, if it is of one.
      file: the user's file that calls the module, or None.
      line: its number.
      value: the signatures of the array.
      cotangent: those of its cotangent or gradient, or None.
    """

    name: str
    kind: str
    owner: str
    steps: tuple[int, ...]
    file: str | None
    line: int | None
    value: Signature
    cotangent: Signature | None


class PortRun(NamedTuple):
    """The run of a model in another framework.

    Attributes:
      values: what leaves and enters modules, in the order of computation.
      leaves: parameters, buffers and arguments.
      loss: its value, and the name of its type.
      circumstances: versions, device and mode.
    """

    values: list[PortEntry]
    leaves: list[PortEntry]
    loss: np.ndarray
    loss_dtype: str
    circumstances: dict[str, Any]


def port_file(run: PortRun) -> RunFile:
    """The plain data and the arrays of a run; arrays of the same numbers are kept once."""
    kept, rows, count = [np.zeros((0, LENGTH))], dict[bytes, int](), 0

    def data(own: Signature) -> list[Any]:
        nonlocal count
        key = own.sketches.tobytes()
        if key not in rows:
            rows[key] = count
            kept.append(own.sketches)
            count += len(own.sketches)
        return [own.shape, own.dtype, rows[key], own.digests, own.stacked]

    header: dict[str, Any] = {"kind": PORT, "loss dtype": run.loss_dtype}
    header["circumstances"] = run.circumstances
    for name, entries in (("values", run.values), ("leaves", run.leaves)):
        header[name] = [
            [*entry[:6], data(entry.value), entry.cotangent and data(entry.cotangent)]
            for entry in entries
        ]
    wide = any("64" in entry.value.dtype for entry in run.values)
    sketches = np.concatenate(kept).astype(np.float64 if wide else np.float32)
    return RunFile(header, {"loss": run.loss, "sketches": sketches})


def saved_port(file: RunFile) -> PortRun:
    header, sketches = file.header, file.arrays["sketches"].astype(np.float64)
    values, leaves = ([_entry(row, sketches) for row in header[x]] for x in ("values", "leaves"))
    loss, dtype = file.arrays["loss"].reshape(()).astype(np.float64), header["loss dtype"]
    return PortRun(values, leaves, loss, dtype, dict(header["circumstances"]))


def _entry(row: list[Any], sketches: np.ndarray) -> PortEntry:
    name, kind, owner, steps, file, line, value, cotangent = row
    own, its = (x and _saved_signature(x, sketches) for x in (value, cotangent))
    return PortEntry(name, kind, owner, tuple(steps), file, line, own, its)


def _saved_signature(row: list[Any], sketches: np.ndarray) -> Signature:
    shape, dtype, first, digests, *_, stacked = row
    count = 0 if digests else len(orders_of(tuple(shape), stacked))
    own = checked(sketches[first : first + count], (count, LENGTH))
    return Signature(tuple(shape), dtype, own, tuple(digests), stacked)
