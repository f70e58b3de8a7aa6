"""The run of a step as a file keeps it."""

import jax.numpy as jnp
import numpy as np

from clipgrad._compare.differences import Exact
from clipgrad._compare.ratios import Counts
from clipgrad._compare.run_file import RunFile
from clipgrad._compare.run_record import checked, facts_file, saved_facts
from clipgrad._compare.sketches import LENGTH
from clipgrad._compare.steps import Output, StepRun, digest

STEP = "step"  # the kind of such a file


def step_file(run: StepRun) -> RunFile:
    """The plain data and the arrays of a run of a step."""
    assert run.facts is not None  # it is signed
    header, arrays = facts_file(run.facts)
    floor, rows = run.floor(), []
    for i, (path, output) in enumerate(run.outputs.items()):
        row = {"path": path, "shape": output.shape, "dtype": str(output.dtype)}
        if isinstance(output.value, np.ndarray):
            arrays[f"output {i}"] = output.value
            if path in floor:
                arrays[f"floor {i}"] = floor[path]
        elif isinstance(output.value, Exact):
            moves = path in floor and bool(np.any(floor[path].values))
            row |= {"digest": output.value.values.tobytes().hex(), "moves": moves}
        else:
            row["text"] = output.value
        rows.append(row)
    notes = {"notes": run.notes, "ages": run.ages, "counts": run.counts}
    return RunFile({"kind": STEP, "outputs": rows, **notes, **header}, arrays)


def saved_step(file: RunFile) -> StepRun:
    """The run that a file describes."""
    header, outputs, floor = file.header, {}, {}
    for i, row in enumerate(header["outputs"]):
        path, shape, value = row["path"], tuple(row["shape"]), None
        if "digest" in row:
            value, floor[path] = digest(row["digest"]), Exact(np.asarray(float(row["moves"])))
        elif "text" in row:
            value = row["text"]
        else:
            own = (LENGTH,) if shape else ()
            value = checked(file.arrays[f"output {i}"], own)
            if f"floor {i}" in file.arrays:
                floor[path] = checked(file.arrays[f"floor {i}"], own)
        dtype = row["dtype"] if row["dtype"].startswith("key<") else jnp.dtype(row["dtype"])
        outputs[path] = Output(value, shape, dtype, "digest" in row or bool(shape))
    counts = Counts(*map(tuple, header["counts"]))
    facts = saved_facts(file)
    ages = dict(header["ages"])
    return StepRun(outputs, lambda: floor, ages, counts, list(header["notes"]), facts=facts)
