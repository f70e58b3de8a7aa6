"""Recording a loss and its gradient."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clipgrad._compare.numbers import plain_row
from clipgrad._compare.record import THE_LOSS
from clipgrad._compare.recording import Recording, recording_of
from clipgrad._diagnose import DiagnosisSubject, subject
from clipgrad._programs import opened


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
    paths = gradient_paths(own, argnums)
    names = [paths.get(i, name) for i, name in enumerate(own.names)]
    inputs = list(zip(names, own.inputs, strict=True))
    loss = plain_row("output", THE_LOSS, opened(own.program)[0].outvars[0].aval)
    found = recording_of(own.program, inputs, [loss], paths, with_arguments)
    return dataclasses.replace(found, given=own)


def gradient_paths(own: DiagnosisSubject, argnums: int | Sequence[int]) -> dict[int, str]:
    """The path in the tree of the gradient of each input that is differentiated, by its number."""
    is_one = not isinstance(argnums, Sequence)
    order = [] if is_one else [i % len(own.names) for i in argnums]
    found = {}
    for i in own.chosen:
        number, path = own.paths[i]
        first = [] if is_one else [str(order.index(int(number)))]
        found[i] = "/".join([*first, path]).rstrip("/")
    counts = collections.Counter(found.values())
    # A key with a slash may look like two keys.
    return {i: path if counts[path] == 1 else own.names[i] for i, path in found.items()}
