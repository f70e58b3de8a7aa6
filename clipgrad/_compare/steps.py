"""Recording a whole step, or any function: its outputs by path, and its named values."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from clipgrad._arrays import check_concrete, donated_leaf, is_array, leaves_with_keys, path_string
from clipgrad._compare.recording import Recording, recording_of
from clipgrad._compare.row_numbers import numbers_of, plain_row
from clipgrad._errors import first_line
from clipgrad._frameworks import with_models
from clipgrad._programs import opened, trace

WHOLE_OUTPUT = "the output"  # the path of an output that is one array


def recorded_step(
    fun: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any], with_arguments: bool = True
) -> Recording:
    """Trace a function with sketches of its values; of NNX models what changes in them, too.

    One that cannot be traced, such as a loop of Python that reads numbers, is called.
    """
    check_concrete("args", (args, kwargs))
    if (at := donated_leaf((args, kwargs))) is not None:
        raise ValueError(
            f"args: got an array that a function has overwritten, at {at}, expected arrays that "
            "were not donated; pass a copy to the step that donates them"
        )
    recordings: list[Any] = []

    def run(function: Callable[..., Any], args: tuple, kwargs: dict) -> None:
        recordings.append(_recording(function, args, kwargs, with_arguments))

    try:
        with_models(run, fun, args, dict(kwargs))
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        note = f"a function can't be traced as one program ({first_line(error)}), so its outputs "
        note += "are in the order of their paths, and their rounding is not measured; give rtol="
        outputs = _outputs_of(fun, args, kwargs)
        recordings.append(_recording(lambda outputs: outputs, (outputs,), {}, with_arguments=False))
        recordings[0].record.notes.append(note)
    return recordings[0]


def _recording(
    function: Callable[..., Any], args: tuple, kwargs: dict, with_arguments: bool
) -> Recording:
    traced = trace(function, args, kwargs)
    jaxpr, constants = opened(traced.program)
    check_concrete("fun", constants)
    arguments = output_paths({"args": args, "kwargs": kwargs})
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars]
    leaves = output_paths(traced.result(avals))
    outputs = {p: x for p, x in leaves.items() if isinstance(x, jax.ShapeDtypeStruct)}
    rows = [plain_row("output", p, x) for p, x in outputs.items()]
    inputs = [(p, ("", ""), x) for p, x in arguments.items() if is_array(x)]
    fixed = [("output", p, x) for p, x in leaves.items() if p not in outputs]
    if with_arguments:
        numbers = np.ndarray, np.generic, int, float, complex
        fixed += [("argument", p, x) for p, x in arguments.items()
                  if isinstance(x, numbers) and not is_array(x)]  # fmt: skip
    known = [plain_row(*each, numbers=numbers_of(each[2])) for each in fixed]
    return recording_of(traced.program, inputs, rows, {}, with_arguments, known)


def output_paths(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, but for None; those whose paths look alike by their keys."""
    entries = leaves_with_keys(tree)
    counts = collections.Counter(path_string(path) for path, _ in entries)
    outputs = {}
    for path, leaf in entries:
        text = path_string(path)
        outputs[(text if counts[text] == 1 else keystr(path)) or WHOLE_OUTPUT] = leaf
    return outputs


def _outputs_of(fun: Callable[..., Any], args: tuple, kwargs: Mapping) -> dict[str, Any]:
    outputs: list[Any] = []
    copies = jax.tree.map(lambda x: x.copy() if is_array(x) else x, (args, dict(kwargs)))
    with_models(lambda f, args, kwargs: outputs.append(f(*args, **kwargs)), fun, *copies)
    check_concrete("fun", outputs[0])
    return output_paths(outputs[0])
