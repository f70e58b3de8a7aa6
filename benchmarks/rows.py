"""Rows: programs that do the same work, proven to give the same numbers, then timed."""

import gc
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import timing

OURS, PEER, FLOOR = "clipgrad", "peer", "floor"


class Side(NamedTuple):
    """One of the programs of a row."""

    name: str
    # OURS, PEER, or FLOOR: what does less, such as a copy of the same bytes.
    kind: str
    sample: timing.Sample
    # What all sides must agree in. None: it does less, and is compared with a FLOOR alone.
    numbers: Callable[[], Any] | None
    facts: dict[str, Any]
    rtol: float = 0.0  # of the largest element, if more than the row's


class Absent(NamedTuple):
    """A side that was not run."""

    name: str
    why: str


class Row(NamedTuple):
    """The same work by several programs; they are built when the row is run."""

    name: str
    sides: Callable[[], Sequence[Side | Absent]]
    rtol: float = 1e-6  # of the largest element
    budget: float = 4.0  # seconds for all rounds, about
    facts: dict[str, Any] = {}
    long: bool = False  # takes minutes, and is run on request only


class DifferentNumbersError(AssertionError):
    """Two sides of a row don't give the same numbers, so their times say nothing."""


class Scale:
    """Sizes of the work: all of it, or a part of each."""

    def __init__(self, part: float) -> None:
        self.part = part

    def __call__(self, size: int, least: int = 1) -> int:
        """A number of leaves, steps or elements."""
        return min(size, max(least, int(size * self.part)))


def jitted(
    name: str,
    kind: str,
    fun: Callable,
    *args: Any,
    numbers: Callable[[Any], Any] | None = lambda result: result,
) -> Side:
    """A function that JAX compiles; ``numbers`` takes from its result what all must agree in."""
    program, facts = timing.compiled(fun, args)
    facts["temporaries"] = program.memory_analysis().temp_size_in_bytes
    sample = timing.running(lambda: jax.block_until_ready(program(*args)))
    return Side(name, kind, sample, numbers and (lambda: numbers(program(*args))), facts)


def donated(
    name: str,
    kind: str,
    fun: Callable,
    state: Any,
    *args: Any,
    numbers: Callable[[Any], Any] = lambda result: result,
) -> Side:
    """A step ``state -> state`` that writes into the memory of the state it is given."""
    program, facts = timing.compiled(fun, (state, *args), donated=(0,))
    held = [_copy(state)]

    def step() -> None:
        held[0] = jax.block_until_ready(program(held[0], *args))

    def once() -> Any:
        return jax.tree.map(np.array, numbers(program(_copy(state), *args)))

    facts["temporaries"] = program.memory_analysis().temp_size_in_bytes
    return Side(name, kind, timing.running(step), once, facts)


def _copy(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.copy(), tree)


def traced(
    name: str, kind: str, fun: Callable, *args: Any, compared: Callable[[Any], Any] = lambda x: x
) -> Side:
    """Tracing and compiling a function, as often as it is sampled.

    ``compared`` is what of its results the other side has, too.
    """
    program, seconds = timing.compiled(fun, args)
    known = [seconds]

    def sample() -> dict[str, float]:
        return known.pop() if known else timing.compiled(fun, args)[1]

    return Side(name, kind, sample, lambda: compared(program(*args)), {})


def optional(name: str, module: str, make: Callable[[Any], Side | Absent]) -> Side | Absent:
    """The side that ``make`` builds from a library, or why it was not run."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return Absent(name, f"{module.partition('.')[0]} is not installed")
    try:
        library = importlib.import_module(module)
    except Exception as error:  # whatever an old library meets in a new JAX
        return Absent(name, f"{module} can't be imported: {type(error).__name__}")
    return make(library)


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference of two trees, in parts of the largest element.

    Not of the largest of the leaf, since a leaf whose gradient is 0 by definition, such as the bias
    of an attention's keys, has rounding errors alone.
    """
    pairs = [[np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (ours, theirs)]
    if [x.shape for x in pairs[0]] != [x.shape for x in pairs[1]]:
        return np.inf
    largest = max((float(np.max(np.abs(x), initial=0)) for x in pairs[0]), default=0) or 1.0
    apart = [float(np.max(np.abs(x - y), initial=0)) for x, y in zip(*pairs, strict=True)]
    return max((np.inf if np.isnan(a) else a / largest for a in apart), default=0.0)


def check(row: Row, sides: list[Side]) -> None:
    """Proves that all sides that do the same work give the same numbers."""
    first = sides[0]
    reference = jax.tree.map(np.asarray, first.numbers())
    for side in sides[1:]:
        if side.numbers is not None:
            apart = difference(reference, side.numbers())
            side.facts["difference"] = apart
            rtol = max(row.rtol, side.rtol)
            if not apart <= rtol:
                raise DifferentNumbersError(
                    f"{row.name}: {first.name} and {side.name} differ by {apart:.2g} of the "
                    f"largest element, expected at most {rtol:.2g}"
                )


def measure(row: Row) -> dict[str, Any]:
    """The row's times and ratios, once its sides are known to give the same numbers."""
    built = row.sides()
    sides = [side for side in built if isinstance(side, Side)]
    check(row, sides)
    times = timing.take_turns({side.name: side.sample for side in sides}, row.budget)
    absent = [side._asdict() for side in built if isinstance(side, Absent)]
    measured = [_record(side, times[side.name]) for side in sides]
    compared = [
        _compare(a, b, times)
        for a, b in itertools.product(sides, sides)
        if a.kind == OURS and b.kind in ((PEER, FLOOR) if a.numbers else (FLOOR,))
    ]
    del built, sides
    gc.collect()
    return {"name": row.name, **row.facts, "sides": measured, "ratios": compared, "absent": absent}


def left_out(row: Row) -> dict[str, Any]:
    """The result of a row that was not run."""
    absent = Absent(row.name, "takes minutes; --long runs it")._asdict()
    return {"name": row.name, **row.facts, "sides": [], "ratios": [], "absent": [absent]}


def _record(side: Side, times: timing.Times) -> dict[str, Any]:
    phases = {phase: timing.spread(taken) for phase, taken in times.items()}
    return {"name": side.name, "kind": side.kind, "seconds": phases, "facts": side.facts}


def _compare(ours: Side, theirs: Side, times: dict[str, timing.Times]) -> dict[str, Any]:
    a, b = times[ours.name], times[theirs.name]
    ratios = {phase: timing.ratios(a[phase], b[phase]) for phase in a}
    return {"ours": ours.name, "theirs": theirs.name, "kind": theirs.kind, "ratio": ratios}
