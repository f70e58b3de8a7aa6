"""The examples of a batch whose own loss or gradient is not finite, or far above the others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from clipgrad._diagnose.batch import Batch, Trace, batch_of
from clipgrad._diagnose.raised import is_of_callback
from clipgrad._diagnose.records import GradientExample
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._jaxpr import quick_jit
from clipgrad._numerics import global_norm

# As much as a hundred ordinary examples: in a batch of that many, half of the gradient is its own.
_FAR = 100


def bad_examples(
    given: DiagnosisSubject,
    trace: Trace,
    args: tuple,
    kwargs: Mapping[str, Any],
    examples: str | int | Sequence[str | int],
) -> tuple[tuple[GradientExample, ...], tuple[str, ...]]:
    """The bad examples of the batch, and notes; `trace` makes a subject of other arguments.

    Raises:
      ValueError: `examples` does not name a batch.
    """
    batch = batch_of(given, trace, args, kwargs, examples)
    inside = [batch.has(*pair) for pair in zip(given.names, given.inputs, strict=True)]
    whole = [_gathered(x) if chosen else x for x, chosen in zip(given.inputs, inside, strict=True)]
    program = _program_of_one(given, trace, args, kwargs, batch)
    copies = 1 if program is not None else batch.size
    losses, norms = _one_by_one(program or given.program, given.chosen, inside, whole, copies)
    finite = norms[np.isfinite(norms)]
    limit = _FAR * np.median(finite) if finite.size else np.inf
    bad = ~np.isfinite(losses) | ~(norms <= limit)
    first = next(x for x, chosen in zip(given.inputs, inside, strict=True) if chosen)
    found = tuple(
        GradientExample(int(i), float(losses[i]), float(norms[i]), _coordinates(first, int(i)))
        for i in np.flatnonzero(bad)
    )
    return found, batch.notes


def _program_of_one(
    given: DiagnosisSubject, trace: Trace, args: tuple, kwargs: Mapping[str, Any], batch: Batch
) -> Any:
    """The program of a batch of one; None for a loss that needs whole batches."""
    try:
        found = trace(*batch.changed(args, kwargs, lambda x: _gathered(x)[:1]))
    except Exception:  # whatever a loss does with a batch of one
        return None
    return found.program if found.names == given.names else None


def _one_by_one(
    program: Any, chosen: list[int], inside: list[bool], inputs: list[Any], copies: int
) -> tuple[np.ndarray, np.ndarray]:
    """The loss and the norm of the gradient of each example, in one compiled program."""
    run = jaxpr_as_fun(program)
    size = next(len(x) for x, is_batch in zip(inputs, inside, strict=True) if is_batch)

    def loss(parameters: list[Any], everything: list[Any]) -> Any:
        left = iter(parameters)
        return run(*(next(left) if i in chosen else x for i, x in enumerate(everything)))[0]

    def one(index: Any, everything: list[Any]) -> Any:
        mine = [
            _copies(x, index, copies) if is_batch else x
            for x, is_batch in zip(everything, inside, strict=True)
        ]
        value, grads = jax.value_and_grad(loss)([mine[i] for i in chosen], mine)
        return value, global_norm(grads)

    def each(everything: list[Any]) -> Any:
        return jax.lax.map(lambda index: one(index, everything), jnp.arange(size))

    try:
        losses, norms = jax.device_get(quick_jit(each, jax.jit)(inputs))
    except Exception as error:
        if not is_of_callback(error):
            raise
        losses, norms = _one_call_each(quick_jit(one, jax.jit), size, inputs)
    return losses.astype(np.float64), norms.astype(np.float64)


def _one_call_each(one: Callable, size: int, inputs: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """As `_one_by_one`, in a call for each example: NaN where a callback raises."""
    found = np.full((2, size), np.nan)
    for i in range(size):
        try:
            found[:, i] = jax.device_get(one(i, inputs))
        except Exception as error:
            if not is_of_callback(error):
                raise
    return found[0], found[1]


def _copies(x: Any, index: Any, copies: int) -> Any:
    one = jax.lax.dynamic_slice_in_dim(x, index, 1)
    return jnp.broadcast_to(one, (copies, *one.shape[1:]))


def _gathered(x: Any) -> Any:
    """An array that is spread over devices, whole on each of them."""
    if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
        return jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))
    return x


def _coordinates(array: Any, index: int) -> str:
    """The place of an example on the axes of the mesh that hold the batch, such as "data=5"."""
    sharding = getattr(array, "sharding", None)
    spec = getattr(sharding, "spec", None) or (None,)
    if not isinstance(sharding, NamedSharding) or spec[0] is None:
        return ""
    mesh, axes = sharding.mesh, spec[0] if isinstance(spec[0], tuple) else (spec[0],)
    for device, part in sharding.devices_indices_map(array.shape).items():
        if index in range(len(array))[part[0]]:
            place = np.argwhere(mesh.devices == device)[0]
            named = dict(zip(mesh.axis_names, place, strict=True))
            return ", ".join(f"{axis}={named[axis]}" for axis in axes)
    return ""
