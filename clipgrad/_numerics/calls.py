"""Calls: what is done for each leaf, traced and lowered once for all leaves of a kind."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from clipgrad._compat import by_platform, explicit_sharding, on_one_device, varying_axes


def for_each(
    function: Callable[..., Any],
    static: Iterable[tuple[Any, ...]],
    *columns: Sequence[Any],
    written_out: bool = False,
) -> list[Any]:
    """The function of each row of arguments; within a program that is traced, in few calls.

    Rows whose static arguments and types are equal, n of them, share about sqrt(n) calls of as
    many rows each: then JAX traces and lowers 2 sqrt(n) rows and calls instead of n. It keeps the
    calls by the function, which must be the same object each time.

    XLA writes the operations of a call out after its first passes, so that it may round what is
    fused with them otherwise than in optax: with ``written_out`` they are written out before, and
    only JAX knows of calls. Outside of a program each operation runs on its own.
    """
    rows = list(zip(static, zip(*columns, strict=True), strict=True))
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves(columns)):
        return [function(*given, *row) for given, row in rows]
    call = _rows_written_out if written_out else _called_rows
    kinds: dict[Any, list[int]] = {}
    for i, (given, row) in enumerate(rows):
        flat, structure = jax.tree.flatten(row)
        kinds.setdefault((given, structure, *map(jax.typeof, flat)), []).append(i)
    results: dict[int, Any] = {}
    for places in kinds.values():
        size = math.isqrt(len(places))
        for start in range(0, len(places), size):
            part = places[start : start + size]
            found = call(function, rows[part[0]][0], [rows[i][1] for i in part])
            results |= zip(part, found, strict=True)
    return [results[i] for i in range(len(rows))]


def at_once(
    function: Callable[..., Any], *columns: Sequence[Any], static: tuple[Any, ...] = ()
) -> list[Any]:
    """An elementwise function of each row of small arrays, which have a shape, or no axes.

    Within a program of one device that is no CPU, those of a kind are one array while it is
    computed: a GPU would have a kernel for each. On a CPU each part of that array would be a kernel
    of its own to compile, and the same formula of equal leaves is one.
    """
    each, structure = jax.tree.flatten(columns)
    if not on_one_device(each) or not any(isinstance(x, Tracer) for x in each):
        return for_each(function, [static] * len(columns[0]), *columns, written_out=True)
    distinct = {id(x): x for x in each}

    def apart(distinct: dict[int, jax.Array]) -> list[Any]:
        given = structure.unflatten([distinct[id(x)] for x in each])
        return for_each(function, [static] * len(columns[0]), *given, written_out=True)

    def joined(distinct: dict[int, jax.Array]) -> list[Any]:
        return _joined_rows(function, static, *structure.unflatten([distinct[id(x)] for x in each]))

    return by_platform(distinct, cpu=apart, gpu=joined, default=joined)


def _joined_rows(
    function: Callable[..., Any], static: tuple[Any, ...], *columns: Sequence[Any]
) -> list[Any]:
    rows = list(zip(*columns, strict=True))
    flat = [tuple(jax.tree.leaves(row)) for row in rows]
    results: dict[int, Any] = {}
    for places in kinds_of(flat):
        shapes = [np.broadcast_shapes(*(x.shape for x in flat[i])) for i in places]
        arrays = [_column_in_one(x, shapes) for x in zip(*(flat[i] for i in places), strict=True)]
        found = function(*static, *jax.tree.unflatten(jax.tree.structure(rows[places[0]]), arrays))
        outs, structure = jax.tree.flatten(found)
        parts = zip(*(parted(x, shapes) for x in outs), strict=True)
        results |= zip(places, map(structure.unflatten, parts), strict=True)
    return [results[i] for i in range(len(rows))]


def kinds_of(rows: Sequence[tuple[Any, ...]]) -> list[list[int]]:
    """The places of rows of arrays of one kind; one whose types are sharded stays apart."""

    def kind(i: int, row: tuple[Any, ...]) -> Any:
        is_apart = any(map(explicit_sharding, row))
        return i if is_apart else tuple((x.dtype, not x.ndim, varying_axes(x)) for x in row)

    return _places_by(kind(i, row) for i, row in enumerate(rows))


# XLA joins kernels that read one array, and compiles a kernel of very many results slowly: for a
# GPU adaptive clips of 100 small leaves in 14 s instead of 2. It compiles equal kernels once, so
# that parts are of one size if there is one that divides all.
_SIZES = range(24, 11, -1)


def _places_by(keys: Iterable[Hashable]) -> list[list[int]]:
    """The places of keys that are equal, not very many at once."""
    kinds: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        kinds.setdefault(key, []).append(i)
    found = []
    for places in kinds.values():
        size = next((n for n in _SIZES if len(places) % n == 0), _SIZES[0])
        found += [places[i : i + size] for i in range(0, len(places), size)]
    return found


def in_one(arrays: Sequence[jax.Array]) -> jax.Array:
    """The elements of arrays in one."""
    if len(arrays) == 1:
        return arrays[0]
    return jax.lax.concatenate([jax.lax.reshape(x, (x.size,)) for x in arrays], 0)


def parted(array: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    if len(shapes) == 1:
        return [array]
    parts = jax.lax.split(array, list(map(math.prod, shapes)))
    return [jax.lax.reshape(x, shape) for x, shape in zip(parts, shapes, strict=True)]


def _column_in_one(column: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> jax.Array:
    """One array of all elements; an array without axes that is the same everywhere, itself."""
    if all(x is column[0] for x in column) and not column[0].ndim:
        return column[0]
    pairs = zip(column, shapes, strict=True)
    return in_one([x if x.shape == shape else jnp.broadcast_to(x, shape) for x, shape in pairs])


def _each_row(
    function: Callable[..., Any], static: tuple[Any, ...], rows: Sequence[tuple[Any, ...]]
) -> list[Any]:
    return [function(*static, *row) for row in rows]


_called_rows = jax.jit(_each_row, static_argnums=(0, 1))
# JAX lowers what a backward pass may compute again without a call. As a `jax.jit` it is compiled
# where it is called eagerly.
_rows_written_out = jax.jit(
    jax.checkpoint(_each_row, static_argnums=(0, 1), prevent_cse=False),
    static_argnums=(0, 1),
    inline=True,
)
