"""The examples of a batch whose own loss or gradient is not finite, or far above the others.

One example after the other runs through one compiled gradient. `per_example_norms` would take all
at once, but it compiles twice as long (a transformer of 4 layers, in CPU seconds of November 2026:
3.5, and 0.7 for the losses, against 2.1) and is no faster on 256 small examples; and a callback
that raises for one of them, or a loss that needs whole batches, would leave nothing of it.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from clipgrad._arrays import argument_name, global_norm, nearest
from clipgrad._diagnose.records import GradientExample
from clipgrad._diagnose.tape import is_of_callback
from clipgrad._losses import TracedLoss

Trace = Callable[[tuple, Mapping[str, Any]], TracedLoss]
# As much as a hundred ordinary examples: in a batch of that many, half of the gradient is its own.
_FAR = 100


def bad_examples(
    traced: TracedLoss,
    trace: Trace,
    args: tuple,
    kwargs: Mapping[str, Any],
    examples: str | int | Sequence[str | int],
) -> tuple[GradientExample, ...]:
    """The bad examples of the batch; `trace` traces the loss for other arguments.

    Raises:
      ValueError: `examples` does not name all arguments that have the axis of the batch.
    """
    keys = arguments_of_examples(examples, traced.fun, args, kwargs)
    size = rows_of_examples(traced, args, kwargs, examples)
    inside = [leaf.argument in keys for leaf in traced.leaves]
    whole = [_gathered(x) if chosen else x for x, chosen in zip(traced.inputs, inside, strict=True)]
    program, copies = traced.program, size
    with contextlib.suppress(Exception):  # whatever a loss does with a batch of one
        head = lambda x: _gathered(x)[:1] if np.ndim(x) else x  # noqa: E731
        named = {**dict(enumerate(args)), **kwargs}
        named |= {key: jax.tree.map(head, named[key]) for key in keys}
        one = trace(tuple(named.pop(i) for i in range(len(args))), named)
        if one.leaves == traced.leaves:
            program, copies = one.program, 1
    losses, norms = _one_by_one(program, traced.chosen, inside, whole, copies)
    # Examples without a gradient, as those that a hinge loss leaves alone, are no measure.
    usual = norms[np.isfinite(norms) & (norms > 0)]
    limit = _FAR * np.median(usual) if usual.size else np.inf
    bad = ~np.isfinite(losses) | ~(norms <= limit)
    first = traced.inputs[inside.index(True)]
    return tuple(
        GradientExample(int(i), float(losses[i]), float(norms[i]), _coordinates(first, int(i)))
        for i in np.flatnonzero(bad)
    )


def arguments_of_examples(
    examples: Any, fun: Callable, args: tuple, kwargs: Mapping[str, Any]
) -> list[int | str]:
    """The positions of arguments that are chosen by name or position, or the names of keywords.

    Raises:
      ValueError: there is no such argument.
    """
    try:
        names = list(inspect.signature(fun).parameters)[: len(args)]
    except (TypeError, ValueError):  # some functions have no signature
        names = []
    places: list[int | str] = []
    for name in _each(examples):
        if isinstance(name, int) and -len(args) <= name < len(args):
            places.append(name % len(args))
        elif name in kwargs:
            places.append(name)
        elif name in names:
            places.append(names.index(name))
        else:
            there = nearest(str(name), [*names, *kwargs], 3)
            raise ValueError(
                f"examples: got {name!r}, expected the name or the position of an argument; {there}"
            )
    return places


def _each(examples: Any) -> list[Any]:
    """The names and positions; `TypeError` for what is neither."""
    every = [examples] if isinstance(examples, str | int) else examples
    if not isinstance(every, Sequence) or not all(isinstance(x, str | int) for x in every):
        raise TypeError(
            f"examples: got {examples!r}, expected the name or the position of an argument, or a "
            "tuple of them"
        )
    return list(every)


def rows_of_examples(
    traced: TracedLoss, args: tuple, kwargs: Mapping[str, Any], examples: Any
) -> int:
    """The length of the leading axis of all arrays in the arguments of examples.

    Raises:
      ValueError: they do not have one, or another argument has it too.
    """
    keys = arguments_of_examples(examples, traced.fun, args, kwargs)
    places = list(dict.fromkeys(map(argument_name, keys)))
    arrays: dict[str, list[Any]] = {}
    for x, leaf in zip(traced.inputs, traced.leaves, strict=True):
        arrays.setdefault(argument_name(leaf.argument), []).append(np.shape(x))
    batches = {place: arrays.get(place, []) for place in places}
    sizes = {shape[:1] for shapes in batches.values() for shape in shapes}
    if len(sizes) != 1 or () in sizes or not all(batches.values()):
        parts = (f"{', '.join(map(str, s)) or 'no arrays'} in {p}" for p, s in batches.items())
        there = " and ".join(parts) or "no argument"
        raise ValueError(f"examples: got {there}, expected one leading axis for all")
    ((size,),) = sizes
    moved = {argument_name(traced.leaves[i].argument) for i in traced.chosen}
    rows = [place for place, shapes in arrays.items() if size in (s[0] for s in shapes if s)]
    others = [place for place in rows if place not in {*places, *moved}]
    if others and isinstance(examples, str | int):
        raise ValueError(
            f"examples: got {examples!r}, but {', '.join(others)} has {size} rows too; "
            'expected the names of all arguments that have the axis of the batch, such as ("x", '
            f'"y"), or ({examples!r},) if no other has it'
        )
    return size


def _one_by_one(
    program: Any, chosen: list[int], inside: list[bool], inputs: list[Any], copies: int
) -> np.ndarray:
    """The loss and the norm of the gradient of each example; NaN where a callback raises."""
    run = jaxpr_as_fun(program)
    size = len(inputs[inside.index(True)])

    def loss(parameters: list[Any], everything: list[Any]) -> Any:
        left = iter(parameters)
        return run(*(next(left) if i in chosen else x for i, x in enumerate(everything)))[0]

    @jax.jit
    def one(index: Any, everything: list[Any]) -> Any:
        mine = list(everything)
        for i in np.flatnonzero(inside):
            row = jax.lax.dynamic_slice_in_dim(mine[i], index, 1)
            mine[i] = jnp.broadcast_to(row, (copies, *row.shape[1:]))
        value, grads = jax.value_and_grad(loss)([mine[i] for i in chosen], mine)
        return value, global_norm(grads)

    numbers = np.full((2, size), np.nan)
    for i in range(size):
        try:
            numbers[:, i] = jax.device_get(one(i, inputs))
        except Exception as error:
            if not is_of_callback(error):
                raise
    return numbers


def _gathered(x: Any) -> Any:
    """An array that is spread over devices, whole on each of them."""
    if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
        return jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))
    return x


def _coordinates(array: Any, index: int) -> str:
    """The place of an example on the axes of the mesh that hold the batch, such as "data=5"."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not sharding.spec or sharding.spec[0] is None:
        return ""
    axes = sharding.spec[0] if isinstance(sharding.spec[0], tuple) else (sharding.spec[0],)
    sizes = [sharding.mesh.shape[axis] for axis in axes]
    part = index // (len(array) // math.prod(sizes))
    place = np.unravel_index(part, sizes)
    return ", ".join(f"{axis}={i}" for axis, i in zip(axes, place, strict=True))
