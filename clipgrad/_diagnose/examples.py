"""The examples of a batch whose own loss or gradient is not finite, or far above the others."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from clipgrad._diagnose.raised import is_of_callback
from clipgrad._diagnose.records import GradientExample
from clipgrad._diagnose.subject import DiagnosisSubject, named_arguments
from clipgrad._errors import first_line
from clipgrad._frameworks import has_modules
from clipgrad._jaxpr import quick_jit
from clipgrad._numerics import global_norm
from clipgrad._trees import argument_name

Trace = Callable[[tuple, Mapping[str, Any]], DiagnosisSubject]


class Batch(NamedTuple):
    """The arguments that are cut into examples."""

    size: int  # the number of examples
    places: tuple[str, ...]  # the arguments, as the names of a subject begin
    notes: tuple[str, ...] = ()  # on those that were not named, and those that were left whole

    def has(self, name: str, x: Any) -> bool:
        """Whether an array of the subject is cut."""
        return has_rows(x, self.size) and _place_of(name) in self.places

    def changed(
        self, args: tuple, kwargs: Mapping[str, Any], change: Callable[[Any], Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """The arguments of the loss, with a change of all arrays that are cut."""

        def own(place: str, tree: Any) -> Any:
            if place not in self.places:
                return tree
            return jax.tree.map(lambda x: change(x) if has_rows(x, self.size) else x, tree)

        changed = tuple(own(argument_name(i), x) for i, x in enumerate(args))
        return changed, {key: own(argument_name(key), x) for key, x in kwargs.items()}


def has_rows(x: Any, size: int) -> bool:
    """Whether the leading axis of an array has this length."""
    return np.ndim(x) > 0 and np.shape(x)[0] == size


def batch_of(
    given: DiagnosisSubject,
    trace: Trace,
    args: tuple,
    kwargs: Mapping[str, Any],
    examples: str | int | Sequence[str | int],
) -> Batch:
    """The arguments with the axis of the batch: the named ones, and those that must go with them.

    An argument must go with them if the loss does not take twice as many examples without it: one
    example would broadcast against all of its rows.

    Raises:
      ValueError: a name is no argument, the named have no one leading axis, or it is not clear
        which arguments go with the only one that is named.
    """
    several = not isinstance(examples, str | int)
    keys = named_arguments("examples", examples, given.fun, args, kwargs)
    places = [argument_name(key) for key in keys]
    named = Batch(_rows_of(given, places), tuple(dict.fromkeys(places)))

    def error_of_twice(batch: Batch) -> Exception | None:
        try:
            if named.size > 1:
                trace(*batch.changed(args, kwargs, _twice))
        except Exception as error:  # whatever a loss does with another number of examples
            return error
        return None

    error, others = error_of_twice(named), _as_many_rows(given, args, kwargs, named)
    if error is None:
        return named._replace(notes=_notes((), others, named.size))
    fixed = [place for place, is_moved in others.items() if not is_moved]
    for some in (fixed, [*others]):
        if some and error_of_twice(_and(named, some)) is None:
            needed = [p for p in some if error_of_twice(_and(named, {*some} - {p}))]
            return _and(named, needed)._replace(notes=_notes(needed, others, named.size))
    if several:
        return named
    raise ValueError(
        f"examples: got {examples!r}, but the loss does not take {2 * named.size} examples there "
        f"({first_line(error)}), so that diagnose cannot see which arguments belong to it; "
        'expected the names of all that have the batch axis, such as ("x", "y"), or '
        f"({examples!r},) if no other has it; pass an array of {named.size} rows that the loss "
        "closes over as an argument"
    )


def _rows_of(given: DiagnosisSubject, places: list[str]) -> int:
    """The length of the one leading axis of all arrays in some arguments."""
    arrays: dict[str, list[Any]] = {place: [] for place in places}
    for x, name in zip(given.inputs, given.names, strict=True):
        arrays.get(_place_of(name), []).append(np.shape(x))
    sizes = {shape[:1] for own in arrays.values() for shape in own}
    if len(sizes) != 1 or () in sizes or not all(arrays.values()):
        parts = (f"{', '.join(map(str, own)) or 'no arrays'} in {p}" for p, own in arrays.items())
        there = " and ".join(parts) or "no argument"
        raise ValueError(f"examples: got {there}, expected one leading axis for all")
    ((size,),) = sizes
    return size


def _place_of(name: str) -> str:
    """The argument that an array is in."""
    return name[: name.index("]") + 1]


def _as_many_rows(
    given: DiagnosisSubject, args: tuple, kwargs: Mapping[str, Any], named: Batch
) -> dict[str, bool]:
    """The other arguments with as many rows, and whether the loss is differentiated by them."""
    trees = {argument_name(i): x for i, x in enumerate(args)}
    trees |= {argument_name(key): x for key, x in kwargs.items()}
    moved = {_place_of(given.names[i]) for i in given.chosen}
    return {
        place: place in moved
        for place, tree in trees.items()
        if place not in named.places
        and not has_modules(tree)
        and any(has_rows(x, named.size) for x in jax.tree.leaves(tree))
    }


def _and(batch: Batch, places: Iterable[str]) -> Batch:
    return batch._replace(places=(*batch.places, *places))


def _notes(found: Collection[str], others: Mapping[str, bool], size: int) -> tuple[str, ...]:
    left = [p for p, is_moved in others.items() if p not in found and not is_moved]
    notes = [f"examples: {place} has the axis of the batch too" for place in found]
    return tuple(notes) + tuple(
        f"examples: {place} has {size} rows too, but was left whole, since the loss takes another "
        "number of rows there; name it in examples if its rows belong to the examples"
        for place in left
    )


def _twice(x: Any) -> Any:
    """Twice as many rows, which broadcast against nothing; their numbers do not matter."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jnp.concatenate([x, x])
    return np.broadcast_to(np.zeros((), x.dtype), (2 * x.shape[0], *x.shape[1:]))


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
    program, copies = given.program, batch.size
    with contextlib.suppress(Exception):  # whatever a loss does with a batch of one
        one = trace(*batch.changed(args, kwargs, lambda x: _gathered(x)[:1]))
        if one.names == given.names:
            program, copies = one.program, 1
    losses, norms = _one_by_one(program, given.chosen, inside, whole, copies)
    finite = norms[np.isfinite(norms)]
    limit = _FAR * np.median(finite) if finite.size else np.inf
    bad = ~np.isfinite(losses) | ~(norms <= limit)
    first = next(x for x, chosen in zip(given.inputs, inside, strict=True) if chosen)
    found = tuple(
        GradientExample(int(i), float(losses[i]), float(norms[i]), _coordinates(first, int(i)))
        for i in np.flatnonzero(bad)
    )
    return found, batch.notes


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
        mine = list(everything)
        for i in np.flatnonzero(inside):
            row = jax.lax.dynamic_slice_in_dim(mine[i], index, 1)
            mine[i] = jnp.broadcast_to(row, (copies, *row.shape[1:]))
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
