"""Calls: what is done for each leaf, traced and lowered once for many leaves of a kind."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer


def for_each(
    function: Callable[..., Any], static: Iterable[tuple[Any, ...]], *columns: Sequence[Any]
) -> list[Any]:
    """The function of each row of arguments; within a program that is traced, in few calls.

    Rows whose static arguments and types are equal, n of them, share about sqrt(n) calls of as
    many rows each: then JAX traces and lowers 2 sqrt(n) rows and calls instead of n. It keeps the
    calls by the function, which must be the same object each time. Outside of a program each
    operation runs on its own.
    """
    rows = list(zip(static, zip(*columns, strict=True), strict=True))
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves(columns)):
        return [function(*given, *row) for given, row in rows]
    kinds: dict[Any, list[int]] = {}
    for i, (given, row) in enumerate(rows):
        flat, structure = jax.tree.flatten(row)
        kinds.setdefault((given, structure, *map(jax.typeof, flat)), []).append(i)
    results: dict[int, Any] = {}
    for places in kinds.values():
        size = math.isqrt(len(places))
        for start in range(0, len(places), size):
            part = places[start : start + size]
            found = _rows(function, rows[part[0]][0], [rows[i][1] for i in part])
            results |= zip(part, found, strict=True)
    return [results[i] for i in range(len(rows))]


def _each_row(
    function: Callable[..., Any], static: tuple[Any, ...], rows: Sequence[tuple[Any, ...]]
) -> list[Any]:
    return [function(*static, *row) for row in rows]


# JAX lowers what a backward pass may compute again without a call. XLA writes the operations of a
# call out after its first passes, and may then round what is fused with them differently than in
# optax. As a `jax.jit` it is compiled where it is called eagerly.
_rows = jax.jit(
    jax.checkpoint(_each_row, static_argnums=(0, 1), prevent_cse=False),
    static_argnums=(0, 1),
    inline=True,
)
