"""Recording a whole step, or any function: its outputs by path, and its named values."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from clipgrad._compare.hook import Sketches
from clipgrad._compare.numbers import plain_row, with_numbers
from clipgrad._compare.recording import Recording, Table
from clipgrad._errors import first_line
from clipgrad._frameworks import with_models
from clipgrad._jaxpr import Traced, evaluate, opened, trace
from clipgrad._trees import check_concrete, donated_leaf, is_array, path_string

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
    found: list[Any] = []

    def run(function: Callable[..., Any], args: tuple, kwargs: dict) -> None:
        found.append(_recording(function, args, kwargs, with_arguments))

    try:
        with_models(run, fun, args, dict(kwargs))
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        note = f"a function can't be traced as one program ({first_line(error)}), so its outputs "
        note += "are in the order of their paths, and their rounding is not measured; give rtol="
        outputs = _outputs_of(fun, args, kwargs)
        found.append(_recording(lambda outputs: outputs, (outputs,), {}, with_arguments=False))
        found[0].record.notes.append(note)
    return found[0]


def _recording(
    function: Callable[..., Any], args: tuple, kwargs: dict, with_arguments: bool
) -> Recording:
    fixed: dict[str, Any] = {}
    paths: list[str] = []

    def arrays(*args: Any, **kwargs: Any) -> list:
        leaves = output_paths(function(*args, **kwargs))
        fixed.update({p: x for p, x in leaves.items() if not isinstance(x, jax.Array)})
        paths[:] = [p for p in leaves if p not in fixed]
        return [leaves[p] for p in paths]

    program = trace(arrays, args, kwargs).program
    check_concrete("fun", opened(program)[1])
    inputs = [x for x in jax.tree.leaves((args, kwargs)) if is_array(x)]
    given = [(p, x) for p, x in _given(args, kwargs) if is_array(x)]
    table = Table(program, given, with_arguments)
    avals = [v.aval for v in opened(program)[0].outvars]
    returned = [
        table.add_output(plain_row("output", p, aval), i)
        for i, (p, aval) in enumerate(zip(paths, avals, strict=True))
    ]
    for p, x in fixed.items():
        table.add(with_numbers(plain_row("output", p, x), x))
    for p, x in _given(args, kwargs) if with_arguments else ():
        if not is_array(x):
            table.add(with_numbers(plain_row("argument", p, x), x))

    def run(inputs: list) -> tuple:
        hook = Sketches()
        return evaluate(program, inputs, hook), hook.noted(), {}

    traced: Traced = trace(run, (inputs,), {})
    return table.recording(table.record(program, inputs), traced, inputs, returned)


def output_paths(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, but for None; those whose paths look alike by their keys."""
    entries = [(path, leaf) for path, leaf in tree_flatten_with_path(tree)[0] if leaf is not None]
    counts = collections.Counter(path_string(path) for path, _ in entries)
    found = {}
    for path, leaf in entries:
        text = path_string(path)
        found[(text if counts[text] == 1 else keystr(path)) or WHOLE_OUTPUT] = leaf
    return found


def _given(args: tuple, kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The arrays and numbers among the arguments, in the order of the leaves."""
    leaves = output_paths({"args": args, "kwargs": dict(kwargs)})
    kinds = jax.Array, np.ndarray, np.generic, int, float, complex
    return [(path, x) for path, x in leaves.items() if isinstance(x, kinds)]


def _outputs_of(fun: Callable[..., Any], args: tuple, kwargs: Mapping) -> dict[str, Any]:
    found: list[Any] = []
    own = jax.tree.map(lambda x: x.copy() if is_array(x) else x, (args, dict(kwargs)))
    with_models(lambda f, args, kwargs: found.append(f(*args, **kwargs)), fun, *own)
    check_concrete("fun", found[0])
    return output_paths(found[0])
