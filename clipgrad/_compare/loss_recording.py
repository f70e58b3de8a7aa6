"""Recording a loss and its gradient."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from clipgrad._arrays import argument_name, check_tree, is_array
from clipgrad._compare.record import THE_LOSS
from clipgrad._compare.recording import Recording, recording_of
from clipgrad._compare.row_numbers import plain_row
from clipgrad._errors import first_line
from clipgrad._frameworks import has_modules, is_model
from clipgrad._losses import TracedLoss, traced_loss
from clipgrad._programs import holds_floats, opened

ALL = "all"  # as ``argnums``
OF_STEPS = "; for a whole step, whose outputs are all compared, write argnums=None"
Argument = int | str  # by position, or a keyword argument by name


def recorded_loss(
    fun: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    with_arguments: bool = True,
) -> Recording:
    """Trace a loss, and its gradient with sketches of values and cotangents."""
    loss = traced_loss(fun, args, kwargs, argnums, has_aux, otherwise=OF_STEPS)
    return _with_gradients(loss, _paths_by_position(loss, argnums, len(args)), with_arguments)


def recorded_by_all(
    fun: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any],
    has_aux: bool,
    among: Collection[Argument] = (),
    with_arguments: bool = True,
) -> Recording:
    """Trace a loss, and its gradient by every argument that holds floats.

    By Python numbers beside the first of these only if the function takes arrays for them; and not
    by other arguments that JAX can't differentiate it by, as behind a `while_loop`. A note names
    what is left out. ``among`` has the arguments that a file has gradients of, if there is one.
    """
    check_tree("args", (args, dict(kwargs)))
    every: dict[Argument, Any] = {key: x for key, x in enumerate(args) if _floats(x)}
    every |= {k: x for k, x in kwargs.items() if not all(map(_is_python_number, _floats(x)))}
    chosen = [key for key in every if key in among or not among] or [0]
    loss, notes = _loss_by_all(fun, args, kwargs, has_aux, chosen, every)
    record = functools.partial(_by_all, loss, with_arguments)
    keys = list(dict.fromkeys(loss.leaves[i].argument for i in loss.chosen))
    try:
        recording = record(keys)
    except Exception:
        record(keys[:1])  # its own error is raised
        errors = {key: _error_of(record, [key]) for key in keys[1:]}
        if not any(errors.values()):
            raise
        recording = record([key for key in keys if not errors.get(key)])
        notes += [_left_out([key], why) for key, why in errors.items() if why]
    left = [key for key in every if key not in chosen]
    notes += [_left_out(left, "the file has none")] if left else []
    recording.record.notes[:0] = notes
    return recording


def _floats(argument: Any) -> list[Any]:
    """The models, the floating arrays and the Python numbers of an argument."""
    is_floating = lambda x: is_array(x) and holds_floats(x)  # noqa: E731
    kinds = is_model, _is_python_number, is_floating
    leaves = jax.tree.leaves(argument, is_leaf=is_model)
    return [x for x in leaves if any(is_kind(x) for is_kind in kinds)]


def _is_python_number(x: Any) -> bool:
    return isinstance(x, float | complex | np.inexact)


def _loss_by_all(
    fun: Callable, args: tuple, kwargs: Mapping, has_aux: bool, chosen: list, every: Mapping
) -> tuple[TracedLoss, list[str]]:
    """The loss with arrays for the Python numbers in arguments, or else without, and notes."""

    def traced(keys: Sequence[Argument]) -> TracedLoss:
        positions = tuple(key for key in keys if isinstance(key, int))
        by_name = [key for key in keys if isinstance(key, str)]
        return traced_loss(fun, args, kwargs, positions, has_aux, by_name, OF_STEPS)

    numbers = [
        key
        for key in chosen[1:]
        if any(map(_is_python_number, _floats(every[key]))) and not has_modules(every[key])
    ]
    try:
        return traced(chosen), []
    except (TypeError, ValueError, IndexError) as error:  # as JAX's of what needs a number
        if not numbers:
            raise
        loss = traced([key for key in chosen if key not in numbers])
        return loss, [_left_out(numbers, f"with arrays for its numbers {first_line(error)}")]


def _error_of(record: Callable, keys: list[Argument]) -> str:
    """The first line of the error that a gradient raises; "" if there is none."""
    try:
        record(keys)
    except Exception as error:
        return first_line(error)
    return ""


def _left_out(keys: Sequence[Argument], why: str) -> str:
    return f"the gradient of {', '.join(map(argument_name, keys))} was not compared: {why}"


def _with_gradients(
    loss: TracedLoss, gradients: Mapping[int, str], with_arguments: bool
) -> Recording:
    """The recording of a traced loss whose gradients have these paths, by the numbers of inputs."""
    names = [gradients.get(i, name) for i, name in enumerate(loss.names)]
    leaves = [(argument_name(leaf.argument), leaf.path) for leaf in loss.leaves]
    inputs = list(zip(names, leaves, loss.inputs, strict=True))
    output = plain_row("output", THE_LOSS, opened(loss.program)[0].outvars[0].aval)
    recording = recording_of(loss.program, inputs, [output], gradients, with_arguments)
    recording.record.argnums = tuple(dict.fromkeys(loss.leaves[i].argument for i in gradients))
    return dataclasses.replace(recording, loss=loss)


def _by_all(loss: TracedLoss, with_arguments: bool, keys: Sequence[Argument]) -> Recording:
    """The gradients by some arguments: paths of the first are those of its gradient alone."""
    chosen = [i for i in loss.chosen if loss.leaves[i].argument in keys]
    paths = {}
    for i in chosen:
        key, path, name = loss.leaves[i]
        is_first = key == keys[0]
        paths[i] = path if is_first else name
        if is_first and keys[1:] and not path:
            paths[i] = argument_name(key)
    return _with_gradients(loss._replace(chosen=chosen), _distinct(paths, loss), with_arguments)


def _paths_by_position(
    loss: TracedLoss, argnums: int | Sequence[int], count: int
) -> dict[int, str]:
    """The path in the tree of the gradient of each input that is differentiated, by its number."""
    is_one = not isinstance(argnums, Sequence)
    order = [] if is_one else [i % count for i in argnums]
    paths = {}
    for i in loss.chosen:
        number, path, _ = loss.leaves[i]
        first = [] if is_one else [str(order.index(int(number)))]
        paths[i] = "/".join([*first, path]).rstrip("/")
    return _distinct(paths, loss)


def _distinct(paths: Mapping[int, str], loss: TracedLoss) -> dict[int, str]:
    """The paths; where a key with a slash looks like two keys, the whole names."""
    counts = collections.Counter(paths.values())
    return {i: path if counts[path] == 1 else loss.names[i] for i, path in paths.items()}
