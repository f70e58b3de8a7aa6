"""Work for each leaf: traced once for many leaves, and its scalars in few arrays."""

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from clipgrad._compat import to_varying, varying_axes
from clipgrad._devices import by_platform
from clipgrad._sharding import explicit_sharding, is_local


def for_each(
    function: Callable[..., Any], static: Iterable[tuple[Any, ...]], *columns: Sequence[Any]
) -> list[Any]:
    """The function of each row of arguments; within a program that is traced, each in a call.

    JAX traces and lowers it once for all rows whose static arguments and types are equal, and XLA
    compiles equal kernels once. It is kept by the function, which must be the same object each
    time. Outside of a program each operation runs on its own.
    """
    rows = zip(static, zip(*columns, strict=True), strict=True)
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves(columns)):
        return [function(*fixed, *row) for fixed, row in rows]
    return [_called(function, fixed, *row) for fixed, row in rows]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _called(function: Callable[..., Any], static: tuple[Any, ...], *row: Any) -> Any:
    return function(*static, *row)


def in_one_kernel(function: Callable[..., Any], *numbers: jax.Array) -> Any:
    """The function of a few numbers, for which a CPU's program has one kernel.

    XLA compiles a kernel for each of many results, but one for a small loop. The function, which
    must be the same object each time, is run as the body of a loop that ends after it.
    """
    if not any(isinstance(x, Tracer) for x in numbers) or any(map(varying_axes, numbers)):
        return function(*numbers)
    traced_once = jax.jit(function)
    cpu = functools.partial(looped, traced_once)
    return by_platform(*numbers, cpu=cpu, gpu=traced_once, default=traced_once)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def looped(function: Callable[..., Any], *numbers: jax.Array) -> Any:
    """The function of a few numbers, the first of them not negative, as the body of a loop."""
    return run_in_loop(function, *numbers)


@looped.defjvp
def looped_jvp(function: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    return jax.jvp(function, primals, tangents)


def run_in_loop(function: Callable[..., Any], *numbers: jax.Array) -> Any:
    """`looped` for what is not differentiated; the first is a real scalar, from 0 on or NaN."""
    axes = frozenset[str]().union(*map(varying_axes, numbers))  # inside of `shard_map`
    varying = functools.partial(jax.tree.map, lambda x: to_varying(x, axes))
    types = jax.eval_shape(function, *numbers)
    starts = jax.tree.map(_start, types)
    # What ends the loop is no constant, or XLA would take it apart, and it needs no kernel.
    first = numbers[0]

    def turn(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        return varying((jax.lax.full_like(carry[0], -1), function(*numbers)))

    loop = jax.lax.while_loop(lambda carry: ~(carry[0] < 0), turn, varying((first, starts)))
    return loop[1]


def _start(result: jax.ShapeDtypeStruct) -> np.ndarray:
    """Any array of this type that is no broadcast number, for which XLA has a kernel."""
    return np.arange(math.prod(result.shape)).reshape(result.shape).astype(result.dtype)


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

        most = 24 if all(x.size == 1 for x in arrays) else 8
        part_of = functools.partial(_part_of, most)
        return cls.by([kind(i, x) for i, x in enumerate(arrays)], arrays, part_of)

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

    def numbers(self, numbers: Sequence[float]) -> list[list[Any]]:
        """Numbers for the arrays, if there are any, as arrays or a number for each of the few."""

        def one(places: list[int]) -> Any:
            if len({numbers[i] for i in places}) == 1:
                return numbers[places[0]]
            return np.concatenate([np.full(math.prod(self.shapes[i]), numbers[i]) for i in places])

        return [list(map(one, self.places))] if numbers else []

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
    by_kind: dict[Hashable, list[int]] = {}
    for i, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(i)
    sizes = [(places, part_of(len(places))) for places in by_kind.values()]
    return [places[i : i + n] for places, n in sizes for i in range(0, len(places), n)]


def _part_of(most: int, number: int) -> int:
    """The number of arrays that are one: XLA compiles a kernel of very many results slowly.

    On a GPU it takes longest for results that are arrays. It compiles equal kernels once, so that
    parts are of one size if there is one.
    """
    return next((n for n in range(most, most // 2 - 1, -1) if number % n == 0), most)
