"""Programs that repeat the same operations, as a loop of Python over layers does.

Such a program is cut into pieces, and equal pieces are one compiled function: 300 layers compile in
the time of a few. Cuts depend on the operations around them alone, so that layers are cut alike.
"""

import functools
import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._programs.elements import is_reference
from clipgrad._programs.evaluate import FreedValues, Hook, ProgramValues, bind
from clipgrad._programs.kinds import called_program, held_programs, is_jit, kind_of
from clipgrad._programs.programs import opened
from clipgrad._programs.rounded import is_measure
from clipgrad._programs.widen import Widen

LEAST, MOST = 16, 64  # the operations of a piece, but for the last one
AHEAD = 4  # the operations behind a cut that decide where it is
REPEATED = 2  # to compile a piece, and to call it for each layer, has costs of its own


# Compiled pieces, as long as a program has them: two versions of one program share most of them.
_COMPILED: weakref.WeakValueDictionary[tuple, Any] = weakref.WeakValueDictionary()


class Inlined(Hook):
    """Evaluates what is inside of `jit`, `remat` and custom rules without them."""

    in_place = Widen.in_place

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        return bind(equation, inputs) if is_measure(equation) else None

    def values(self, jaxpr: Any) -> ProgramValues:
        return FreedValues(self, jaxpr)


def is_repetitive(program: Any) -> bool:
    """Whether the different pieces of a program are at most half of it."""
    flat = list(_inlined_equations(program))
    if any(not is_measure(e) and held_programs(e) for e in flat):
        return False
    if any(is_reference(v) for e in flat for v in (*e.invars, *e.outvars)):  # no result of a `jit`
        return False
    operations = list(map(_operation_of, flat))
    different = {tuple(operations[start:end]) for start, end in _cut(operations)}
    return bool(flat) and REPEATED * sum(map(len, different)) <= len(flat)


def _inlined_equations(program: Any) -> Iterator[JaxprEqn]:
    for equation in opened(program)[0].eqns:
        if kind_of(equation) in Inlined.in_place and not is_measure(equation):
            yield from _inlined_equations(called_program(equation))
        else:
            yield equation


class Piece(NamedTuple):
    """Some operations of a program, one behind the other.

    Attributes:
      run: computes them, compiled; equal pieces share it.
      inputs, outputs: what they read of what is before, and what is read behind.
      freed: what nothing behind them reads.
    """

    run: Callable[..., list]
    inputs: list[Var]
    outputs: list[Var]
    freed: list[Var]


class ByPieces:
    """A function that runs piece by piece; it is traced at the first call.

    Args:
      function: of trees of arrays; it returns a list of arrays.
      jit: compiles a piece.
    """

    def __init__(self, function: Callable[..., list], jit: Callable[[Callable], Callable]) -> None:
        self._function, self._jit = function, jit
        self._program: Any = None
        self._pieces: list[Piece] = []

    def __call__(self, *inputs: Any) -> list:
        if self._program is None:
            self._program = jax.make_jaxpr(self._function)(*inputs)
            self._pieces = pieces_of(self._program, self._jit)
        jaxpr, constants = opened(self._program)
        values = dict(zip(jaxpr.invars, jax.tree.leaves(inputs), strict=True))
        values |= dict(zip(jaxpr.constvars, constants, strict=True))
        for piece in self._pieces:
            outputs = piece.run(*(values[v] for v in piece.inputs))
            values.update(zip(piece.outputs, outputs, strict=True))
            for v in piece.freed:
                del values[v]
            # A CPU would allocate the results of many pieces before it has computed the first.
            jax.block_until_ready(outputs)
        return [
            jax.numpy.asarray(v.val if type(v) is Literal else values[v]) for v in jaxpr.outvars
        ]


def pieces_of(program: Any, jit: Callable[[Callable], Callable]) -> list[Piece]:
    """The pieces of a program whose equations hold no programs but calls that stay whole."""
    jaxpr = opened(program)[0]
    equations = _late(jaxpr)
    operations = list(map(_operation_of, equations))
    uses = {v: i for i, e in enumerate(equations) for v in e.invars if type(v) is not Literal}
    uses |= {v: len(equations) for v in jaxpr.outvars if type(v) is not Literal}
    pieces = []
    for start, end in _cut(operations):
        part = equations[start:end]
        inputs, wires = _wired(part)
        made = {v: i for i, v in enumerate(v for e in part for v in e.outvars)}
        outputs = {v: i for v, i in made.items() if uses.get(v, -1) >= end}
        key = (jit, *operations[start:end], *wires, *outputs.values())
        if (run := _COMPILED.get(key)) is None:
            run = _COMPILED[key] = jit(_runner(part, inputs, list(outputs)))
        freed = [v for v in inputs if uses[v] < end]
        pieces.append(Piece(run, inputs, list(outputs), freed))
    return pieces


def _late(jaxpr: Any) -> list[JaxprEqn]:
    """The operations of a program, each behind those that do not need it, where that takes no room.

    JAX computes in the forward pass what only the backward pass reads, such as the factors of a
    derivative. XLA does so later, from fewer arrays, which are all that has to be kept.
    """
    end = len(jaxpr.eqns)
    kept = {v for v in (*jaxpr.invars, *jaxpr.constvars) if type(v) is not Literal}
    first = {v: end for v in jaxpr.outvars if type(v) is not Literal}
    last = dict(first)
    for i, equation in enumerate(jaxpr.eqns):
        last |= {v: max(i, last.get(v, -1)) for v in _read(equation)}
    keys = []
    for i in reversed(range(end)):
        equation = jaxpr.eqns[i]
        at = min((first[v] for v in equation.outvars if v in first), default=i)
        longer = [v for v in _read(equation) - kept if last[v] < at]
        is_moved = not equation.effects and sum(map(_bytes, longer)) <= sum(
            map(_bytes, equation.outvars)
        )
        at = at if is_moved else i
        for v in _read(equation):
            first[v], last[v] = min(at, first.get(v, end)), max(at, last[v])
        keys.append((at, at == i, i))
    return [jaxpr.eqns[i] for *_, i in sorted(keys)]


def _read(equation: JaxprEqn) -> set[Var]:
    return {v for v in equation.invars if type(v) is not Literal}


def _bytes(v: Var) -> int:
    aval: Any = v.aval
    return math.prod(getattr(aval, "shape", ())) * getattr(
        getattr(aval, "dtype", None), "itemsize", 0
    )


def _wired(part: Sequence[JaxprEqn]) -> tuple[list[Var], list]:
    """What a piece reads of what is before, and of each operand what it is, within the piece."""
    places: dict[Any, int] = {}
    inputs: list[Var] = []
    wires: list[Any] = []
    for equation in part:
        for v in equation.invars:
            if type(v) is Literal:
                value = np.asarray(v.val)
                wires.append((value.dtype.name, value.tobytes(), str(v.aval)))
                continue
            if v not in places:
                places[v] = ~len(inputs)
                inputs.append(v)
            wires.append(places[v])
        for v in equation.outvars:
            places[v] = len(places)
    return inputs, wires


def _runner(
    part: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Var]
) -> Callable[..., list]:
    """The function that computes a piece."""

    def run(*operands: Any) -> list:
        values = dict(zip(inputs, operands, strict=True))
        for equation in part:
            read = [v.val if type(v) is Literal else values[v] for v in equation.invars]
            with equation.ctx.manager:
                values.update(zip(equation.outvars, bind(equation, read), strict=True))
        return [values[v] for v in outputs]

    return run


def _cut(operations: Sequence[tuple]) -> Iterator[tuple[int, int]]:
    """The starts and ends of pieces: cuts are where the operations behind have the least hash."""
    code = functools.cache(lambda operation: zlib.crc32(repr(operation[:3]).encode()))
    codes = list(map(code, operations))
    hashes = [hash(tuple(codes[i : i + AHEAD])) for i in range(len(codes))]
    start = 0
    while len(codes) - start >= 2 * LEAST:
        among = hashes[start + LEAST : min(start + MOST, len(codes) - LEAST) + 1]
        end = start + LEAST + among.index(min(among))
        yield start, end
        start = end
    yield start, len(codes)


def _operation_of(equation: JaxprEqn) -> tuple:
    """What is compiled alike: the operation, with the types of its operands and its options."""
    name, types = str(equation.primitive), tuple(v.aval for v in equation.invars)
    if is_measure(equation):
        return name, types
    if is_jit(equation):  # JAX traces a function once for all operands of some types
        return name, types, equation.params["name"], id(called_program(equation))
    text = str(equation.params), str(equation.ctx)
    return name, types, *text, equation.primitive, _options(equation)


def _options(equation: JaxprEqn) -> Any:
    """The options of an operation as what they are: the text of a long array leaves numbers out."""
    options = tuple(equation.params.items())
    try:
        hash(options)
    except TypeError:
        return id(equation)
    return options
