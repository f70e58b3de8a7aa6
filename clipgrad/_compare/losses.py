"""Recording a loss and its gradient."""

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from clipgrad._compare.hook import Sketches
from clipgrad._compare.numbers import plain_row
from clipgrad._compare.record import THE_LOSS
from clipgrad._compare.recording import Recording, Table
from clipgrad._diagnose import DiagnosisSubject, subject
from clipgrad._jaxpr import evaluate, opened, trace
from clipgrad._program import active_variables


def recorded_loss(
    fun: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    with_arguments: bool = True,
) -> Recording:
    """Trace a loss, and its gradient with sketches of values and cotangents."""
    own = subject(fun, args, kwargs, argnums, has_aux)
    active = active_variables(own.program, own.chosen)
    paths = gradient_paths(own, argnums)
    names = [paths.get(i, name) for i, name in enumerate(own.names)]
    inputs = list(zip(names, own.inputs, strict=True))
    is_tapped = lambda v: not v.in_while and v.variable in active  # noqa: E731
    table = Table(own.program, inputs, with_arguments, is_tapped)
    loss_row = plain_row("output", THE_LOSS, opened(own.program)[0].outvars[0].aval)
    returned = [table.add_output(loss_row, 0)]
    for i, path in paths.items():
        row = plain_row("gradient", path, own.inputs[i])
        returned.append(table.add(row, table.arguments[i]))
    taps = table.taps()

    def loss(moving: list, taps: dict, inputs: list) -> tuple:
        every, hook = list(inputs), Sketches(taps=taps)
        for i, x in zip(paths, moving, strict=True):
            every[i] = x
        (value,) = evaluate(own.program, every, hook)
        return value, hook.noted()

    def both(inputs: list, taps: dict) -> tuple:
        run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (value, notes), (grads, cotangents) = run([inputs[i] for i in paths], taps, inputs)
        return [value, *grads], notes, cotangents

    given = own.inputs, taps
    record = table.record(own.program, own.inputs)
    recording = table.recording(record, trace(both, given, {}), given, returned)
    return dataclasses.replace(recording, given=own)


def gradient_paths(own: DiagnosisSubject, argnums: int | Sequence[int]) -> dict[int, str]:
    """The path in the tree of the gradient of each input that is differentiated, by its number."""
    is_one = not isinstance(argnums, Sequence)
    order = [] if is_one else [i % len(own.names) for i in argnums]
    found = {}
    for i in own.chosen:
        number, path = own.paths[i]
        first = [] if is_one else [str(order.index(int(number)))]
        # NNX puts more around the attributes of a model that it takes apart.
        path = re.sub(r"^states/\d+/(.*)/value$|^(.*)/states/\d+/value$", r"\1\2", path)
        found[i] = "/".join([*first, path]).rstrip("/")
    counts = collections.Counter(found.values())
    # A key with a slash may look like two keys.
    return {i: path if counts[path] == 1 else own.names[i] for i, path in found.items()}
