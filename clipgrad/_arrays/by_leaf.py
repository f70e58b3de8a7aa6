"""Work for each leaf: traced once for many leaves, and its scalars in few arrays."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from clipgrad._compat import varying_axes
from clipgrad._sharding import explicit_sharding, is_local


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
    flat = [jax.tree.flatten(row) for _, row in rows]
    kinds = [
        (given, structure, *map(jax.typeof, leaves))
        for (given, _), (leaves, structure) in zip(rows, flat, strict=True)
    ]
    results: dict[int, Any] = {}
    for places in _places_by(kinds, math.isqrt):
        found = _rows(function, rows[places[0]][0], [rows[i][1] for i in places])
        results |= zip(places, found, strict=True)
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


class Joined(NamedTuple):
    """Small arrays in few: XLA would compile, and a GPU launch, a kernel for each of many.

    Attributes:
      places: which arrays are one.
      shapes: the shapes of all.
    """

    places: list[list[int]]
    shapes: list[tuple[int, ...]]

    @classmethod
    def of(cls, arrays: Sequence[jax.Array], apart: bool = False) -> "Joined":
        """Those of a kind; arrays that are spread over devices stay apart, or all of them."""

        def kind(i: int, x: jax.Array) -> Any:
            is_apart = explicit_sharding(x) or not (x.size == 1 or is_local(x))
            return i if is_apart or apart else (x.dtype, varying_axes(x))

        return cls.by([kind(i, x) for i, x in enumerate(arrays)], arrays, _part_of)

    @classmethod
    def by(
        cls, kinds: Sequence[Hashable], arrays: Sequence[jax.Array], part_of: Callable[[int], int]
    ) -> "Joined":
        """Those of equal kinds, as many in one as ``part_of`` says of their number."""
        return cls(_places_by(kinds, part_of), [x.shape for x in arrays])

    def join(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The few arrays that hold these."""

        def one(places: list[int]) -> jax.Array:
            some = [arrays[i] for i in places]
            if len(some) == 1:
                return some[0]
            return jax.lax.concatenate([jax.lax.reshape(x, (x.size,)) for x in some], 0)

        return list(map(one, self.places))

    def part(self, few: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays again, of what was computed element by element."""
        results: dict[int, jax.Array] = {}
        for array, places in zip(few, self.places, strict=True):
            if len(places) == 1:
                results[places[0]] = array
                continue
            parts = jax.lax.split(array, [math.prod(self.shapes[i]) for i in places])
            for i, x in zip(places, parts, strict=True):
                results[i] = jax.lax.reshape(x, self.shapes[i])
        return [results[i] for i in range(len(self.shapes))]


def _places_by(kinds: Sequence[Hashable], part_of: Callable[[int], int]) -> list[list[int]]:
    """The places of each kind, in parts of a size that follows from their number."""
    found: dict[Hashable, list[int]] = {}
    for i, kind in enumerate(kinds):
        found.setdefault(kind, []).append(i)
    sizes = [(places, part_of(len(places))) for places in found.values()]
    return [places[i : i + n] for places, n in sizes for i in range(0, len(places), n)]


def _part_of(number: int) -> int:
    """The number of arrays that are one: XLA compiles a kernel of very many results slowly.

    It compiles equal kernels once, so that parts are of one size if there is one.
    """
    return next((n for n in range(24, 11, -1) if number % n == 0), 24)
