"""Programs that repeat the same operations, as a loop of Python over layers does.

Such a program is cut into pieces, and equal pieces are one compiled function: 300 layers compile in
the time of a few. Cuts depend on the operations around them alone, so that layers are cut alike.
"""

import dataclasses
import functools
import itertools
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._programs.elements import byte_count, dtype_of, is_reference
from clipgrad._programs.evaluate import FreedValues, Hook, ProgramValues, bind
from clipgrad._programs.free_memory import return_free_memory
from clipgrad._programs.kinds import (
    WITH_FUNCTIONS,
    called_program,
    detaches,
    is_jit,
    is_scan,
    is_tag,
    kind_of,
    scan_counts,
    scan_length,
)
from clipgrad._programs.opened_scans import OpenedScan, Take
from clipgrad._programs.programs import opened
from clipgrad._programs.rounded import is_measure
from clipgrad._programs.widen import Widen

LEAST, MOST = 16, 64  # the operations of a piece, but for the last one
AHEAD = 4  # the operations behind a cut that decide where it is
LONG = 4 * MOST  # the operations of a program whose kernels take more than a moment to compile
REPEATED = 2  # to compile a piece, and to call it for each layer, has costs of its own
# The bytes of freed arrays that are worth a look at the whole heap, and how much of all arrays at
# the peak there may be besides: to get pages again for each array takes as long as to compute it.
WORTHWHILE, SPARE = 2**24, 1 / 8


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
    operations = _operations_to_cut(program)
    different = {tuple(operations[start:end]) for start, end in _cut(operations)}
    return bool(operations) and REPEATED * sum(map(len, different)) <= len(operations)


def has_repeated_operations(program: Any) -> bool:
    """Whether the different operations of a long program are at most half of them.

    A hook that computes much at each operation, such as `rounded`, makes pieces of few of them.
    """
    operations = _operations_to_cut(program)
    return len(operations) >= LONG and REPEATED * len(set(operations)) <= len(operations)


def _operations_to_cut(program: Any) -> list[tuple]:
    """The operations of a program; none of one that cannot be cut, or has programs in it.

    The small function in a scatter or a reduction does not count as such a program.
    """
    if not can_be_cut(program):
        return []
    flat = list(_inlined_equations(program))
    if any(not is_measure(e) and kind_of(e) not in (None, WITH_FUNCTIONS) for e in flat):
        return []
    return list(map(_operation_of, flat))


def can_be_cut(program: Any) -> bool:
    """Whether no operations of a program share references, which are no results of a `jit`."""
    flat = _inlined_equations(program)
    return not any(is_reference(v) for e in flat for v in (*e.invars, *e.outvars))


def _inlined_equations(program: Any) -> Iterator[JaxprEqn]:
    for equation in opened(program)[0].eqns:
        if kind_of(equation) in Inlined.in_place and not is_measure(equation):
            yield from _inlined_equations(called_program(equation))
        else:
            yield equation


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Some operations of a program, one behind the other.

    Attributes:
      run: computes them, compiled; equal pieces share it.
      inputs, outputs: what they read of what is before, and what is read behind or taken.
      freed: what nothing behind them reads.
      taken: what becomes of outputs, see `ByPieces`.
    """

    run: Any
    inputs: list[Var]
    outputs: list[Var]
    freed: list[Var]
    taken: Mapping[Var, Take]

    def __call__(self, values: dict[Var, Any]) -> dict[Var, np.ndarray]:
        """Compute the outputs, and free what nothing reads; return what is taken of them."""
        outputs, noted = self.computed(*(values[v] for v in self.inputs))
        values.update(zip(self.outputs, outputs, strict=True))
        # A CPU would allocate the results of many pieces before it has computed the first.
        jax.block_until_ready(outputs)
        noted |= {v: take(values[v]) for v, take in self.taken.items() if v not in noted}
        for v in self.freed:
            del values[v]
        return noted

    def computed(self, *operands: Any) -> tuple[list, dict[Var, np.ndarray]]:
        """The outputs, and what has been taken of others."""
        return self.run(*operands), {}

    @property
    def bytes_taken(self) -> int:
        """The bytes of what is taken at once."""
        return sum(map(byte_count, self.taken))


@dataclasses.dataclass(frozen=True, eq=False)
class OpenedPiece(Piece):
    """A scan that runs some steps at a time; what it stacks is taken while it runs."""

    run: OpenedScan

    def computed(self, *operands: Any) -> tuple[list, dict[Var, np.ndarray]]:
        """The outputs, and what has been taken of each step."""
        return self.run(*operands)

    @property
    def bytes_taken(self) -> int:
        """The bytes of what is taken at once."""
        return self.run.bytes_at_once


class ByPieces:
    """A function that runs piece by piece; it is traced at the first call.

    Args:
      function: of trees of arrays; it returns a list of arrays.
      jit: compiles a piece.
      taken: by the numbers of results functions of arrays with any leading axes. Of such a result
        the function's is returned, which is taken as soon as a piece or some steps of a scan have
        run: so these results are never all there.
    """

    def __init__(
        self,
        function: Callable[..., list],
        jit: Callable[..., Callable],
        taken: Mapping[int, Take] | None = None,
    ) -> None:
        self._function, self._jit, self._taken = function, jit, taken or {}
        self._program: Any = None
        self._pieces: list[Piece] = []
        self._outputs: list[Any] = []
        self._live: list[int] = []
        self._returns: list[bool] = []

    def __call__(self, *inputs: Any) -> list:
        self._trace(inputs)
        jaxpr, constants = opened(self._program)
        values = dict(zip(jaxpr.invars, map(jnp.asarray, jax.tree.leaves(inputs)), strict=True))
        values |= dict(zip(jaxpr.constvars, constants, strict=True))
        noted: dict[Var, np.ndarray] = {}
        for piece, is_returned in zip(self._pieces, self._returns, strict=True):
            if is_returned and jax.default_backend() == "cpu":  # else it is not the host's
                return_free_memory()
            noted |= piece(values)
        results = []
        for i, v in enumerate(self._outputs):
            if type(v) is not Literal and i in self._taken and v in noted:
                results.append(noted[v])
                continue
            x = jnp.asarray(v.val if type(v) is Literal else values[v])
            results.append(self._taken[i](x) if i in self._taken else x)
        return results

    def sizes(self, *inputs: Any) -> tuple[int, int]:
        """The most bytes that live behind a piece, and with what is taken there."""
        self._trace(inputs)
        pairs = zip(self._live, self._pieces, strict=True)
        with_taken = (size + piece.bytes_taken for size, piece in pairs)
        return max(self._live, default=0), max(with_taken, default=0)

    def _trace(self, inputs: tuple) -> None:
        if self._program is None:
            self._program = jax.make_jaxpr(self._function)(*inputs)
            cutting = _Cutting(self._program, self._taken)
            self._pieces, self._outputs = cutting.pieces(self._jit), cutting.results
            self._live = list(self._bytes_behind_pieces())
            self._returns = list(self._where_to_return())

    def _bytes_behind_pieces(self) -> Iterator[int]:
        """The bytes that live behind each piece, before anything is freed."""
        jaxpr = opened(self._program)[0]
        alive = {*jaxpr.invars, *jaxpr.constvars}
        size = sum(map(byte_count, alive))
        for piece in self._pieces:
            kept = {v for v in piece.outputs if not (v in piece.taken and v in piece.freed)}
            size += sum(map(byte_count, kept - alive))
            yield size
            alive |= kept
            ended = alive & {*piece.freed}
            size -= sum(map(byte_count, ended))
            alive -= ended

    def _where_to_return(self) -> Iterator[bool]:
        """Whether free memory is returned before each piece.

        Where arrays, and those that were freed since, would need more than arrays at the peak do.
        """
        most, free = (1 + SPARE) * max(self._live, default=0), 0
        for size, piece in zip(self._live, self._pieces, strict=True):
            is_returned = free >= WORTHWHILE and size + free > most
            yield is_returned
            freed = sum(map(byte_count, {*piece.freed, *piece.taken}))
            free = freed + (0 if is_returned else free)


class _Cutting:
    """How a program is cut into pieces.

    Attributes:
      equations: its operations, in the order in which they run.
      results: the variables of its results, or literals.
      taken: what becomes of results, by their variables.
      made: the operation of each variable that is made of nothing.
      constants: for each scan that is opened such operands, see `OpenedScan`; None of others.
      last: the last operation that reads a variable, or the end for a result.
    """

    def __init__(self, program: Any, taken: Mapping[int, Take]) -> None:
        jaxpr = opened(program)[0]
        equations, self.results = _without_copies(jaxpr)
        results = [(i, v) for i, v in enumerate(self.results) if type(v) is not Literal]
        self.taken = {v: taken[i] for i, v in results if i in taken}
        kept = [v for i, v in results if i not in taken]
        self.equations = _late(equations, {*jaxpr.invars, *jaxpr.constvars}, kept)
        self.made = {v: e for e in self.equations if not _read(e) for v in e.outvars}
        self.constants = [
            _elements(e) & self.made.keys() if _is_opened(e, self.taken) else None
            for e in self.equations
        ]
        self.last = {
            v: i
            for i, (e, constants) in enumerate(zip(self.equations, self.constants, strict=True))
            for v in _read(e) - (constants or set())
        }
        self.last |= dict.fromkeys(kept, len(equations))

    def pieces(self, jit: Callable[..., Callable]) -> list[Piece]:
        """The pieces."""
        operations = list(map(_operation_of, self.equations))
        parts = _parts(operations, [constants is not None for constants in self.constants])
        return [
            self._piece(jit, operations, start, end)
            if self.constants[start] is None
            else self._opened_scan(jit, start)
            for start, end in parts
        ]

    def _piece(
        self, jit: Callable[..., Callable], operations: list[tuple], start: int, end: int
    ) -> Piece:
        part = self.equations[start:end]
        inputs, wires = _wired(part)
        numbers = {v: i for i, v in enumerate(v for e in part for v in e.outvars)}
        taken = {v: self.taken[v] for v in numbers if v in self.taken}
        outputs = {v: i for v, i in numbers.items() if self._is_read(v, end) or v in taken}
        key = (jit, *operations[start:end], *wires, *outputs.values())
        if (run := _COMPILED.get(key)) is None:
            run = _COMPILED[key] = jit(_runner(part, inputs, list(outputs)))
        return Piece(run, inputs, list(outputs), self._freed([*inputs, *taken], end), taken)

    def _opened_scan(self, jit: Callable[..., Callable], number: int) -> Piece:
        """The piece of a scan that runs some steps at a time."""
        equation = self.equations[number]
        taken = {v: self.taken[v] for v in equation.outvars if v in self.taken}
        carry = equation.outvars[: scan_counts(equation)[1]]
        outputs = [
            v for v in equation.outvars if self._is_read(v, number + 1) or v in carry and v in taken
        ]
        of_steps = {v: take for v, take in taken.items() if v not in carry}
        constants = {v: self.made[v] for v in self.constants[number] or ()}
        run = OpenedScan(equation, jit, of_steps, outputs, constants)
        inputs = [v for v in run.operands if type(v) is not Literal and v not in constants]
        ended = self._freed([*inputs, *(v for v in outputs if v in taken)], number + 1)
        return OpenedPiece(run, inputs, outputs, ended, taken)

    def _is_read(self, v: Var, end: int) -> bool:
        """Whether an operation from a number on reads a variable, or whoever asks for results."""
        return self.last.get(v, -1) >= end

    def _freed(self, variables: Sequence[Var], end: int) -> list[Var]:
        """The variables that nothing from an operation on reads, each once."""
        return [v for v in dict.fromkeys(variables) if not self._is_read(v, end)]


def _is_opened(equation: JaxprEqn, taken: Collection[Var]) -> bool:
    """Whether a scan runs some steps at a time: what it stacks is taken."""
    if not (is_scan(equation) and scan_length(equation)):
        return False
    stacked = equation.outvars[scan_counts(equation)[1] :]
    has_keys = any(jnp.issubdtype(dtype_of(v), jax.dtypes.extended) for v in stacked)
    return not has_keys and any(v in taken for v in stacked)


def _elements(equation: JaxprEqn) -> set[Var]:
    """The operands of a scan of which each step reads a part."""
    elements = equation.invars[sum(scan_counts(equation)) :]
    return {v for v in elements if type(v) is not Literal}


def _without_copies(jaxpr: Any) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations of a program, and its results, without tags and `stop_gradient`."""
    same: dict[Var, Any] = {}
    of = lambda v: v if type(v) is Literal else same.get(v, v)  # noqa: E731
    equations = []
    for equation in jaxpr.eqns:
        read = list(map(of, equation.invars))
        if is_tag(equation) or detaches(equation):
            same[equation.outvars[0]] = read[0]
        else:
            equations.append(equation.replace(invars=read))
    return equations, list(map(of, jaxpr.outvars))


def _parts(operations: Sequence[tuple], is_opened: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """The starts and ends of pieces: scans that are opened, and cuts between these."""
    start = 0
    for is_alone, group in itertools.groupby(is_opened):
        end = start + len(list(group))
        if is_alone:
            yield from ((i, i + 1) for i in range(start, end))
        else:
            yield from ((start + i, start + j) for i, j in _cut(operations[start:end]))
        start = end


def _late(
    equations: Sequence[JaxprEqn], inputs: Collection[Var], results: Sequence[Var]
) -> list[JaxprEqn]:
    """The operations of a program, each behind those that do not need it, where that takes no room.

    JAX computes in the forward pass what only the backward pass reads, such as the factors of a
    derivative. XLA does so later, from fewer arrays, which are all that has to be kept.
    """
    end = len(equations)
    kept = {*inputs}
    first = dict.fromkeys(results, end)
    last = dict(first)
    for i, equation in enumerate(equations):
        last |= {v: max(i, last.get(v, -1)) for v in _read(equation)}
    keys = []
    for i in reversed(range(end)):
        equation = equations[i]
        at = min((first[v] for v in equation.outvars if v in first), default=i)
        longer = [v for v in _read(equation) - kept if last[v] < at]
        is_moved = not equation.effects and sum(map(byte_count, longer)) <= sum(
            map(byte_count, equation.outvars)
        )
        at = at if is_moved else i
        for v in _read(equation):
            first[v], last[v] = min(at, first.get(v, end)), max(at, last[v])
        keys.append((at, at == i, i))
    return [equations[i] for *_, i in sorted(keys)]


def _read(equation: JaxprEqn) -> set[Var]:
    return {v for v in equation.invars if type(v) is not Literal}


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
