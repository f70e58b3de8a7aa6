"""The record of a program: what a comparison asks of its operations, also of those in a file."""

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal

from clipgrad._jaxpr import (
    device_count,
    entered_programs,
    equation_text,
    opened,
    scan_counts,
    value_programs,
)
from clipgrad._names import Location, Place, ScopePath, path

Operand = int | str  # a variable, by its number; or a constant, as text


class Loop(NamedTuple):
    """The steps of a scan: how many inputs are constants and how many are carried."""

    constants: int
    carried: int
    length: int
    reverse: bool


@dataclasses.dataclass(frozen=True, eq=False)
class OperationRecord:
    """An operation.

    Attributes:
      name: its primitive.
      scopes: those around it in its program.
      operands: its inputs.
      results: the numbers of its results.
      seen: the programs inside whose values can be seen.
      entered: the programs inside that derivatives go through.
      loop: the steps of a scan, or None.
      devices: the number of devices of a `shard_map`, or None.
      source: the operation itself; of one from a file its line, and its digest.
    """

    name: str
    scopes: ScopePath
    operands: tuple[Operand, ...]
    results: tuple[int, ...]
    seen: tuple["ProgramRecord", ...]
    entered: tuple["ProgramRecord", ...]
    loop: Loop | None
    devices: int | None
    source: JaxprEqn | tuple[Location, str | None]

    @property
    def variables(self) -> list[int]:
        return [v for v in self.operands if isinstance(v, int)]

    @property
    def location(self) -> Location:
        """The innermost line of the user's own files within its program."""
        return self.source[0] if isinstance(self.source, tuple) else Place(self.source).location

    @functools.cached_property
    def digest(self) -> str | None:
        """Equal to that of operations with the same parameters, in any process; None: of no other.

        Operands and the programs inside that are seen are left out.
        """
        if isinstance(self.source, tuple):
            return self.source[1]
        text = equation_text(self.source)
        return None if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramRecord:
    """A program: its inputs, its operations in order, and its outputs."""

    constants: tuple[int, ...]
    inputs: tuple[int, ...]
    operations: tuple[OperationRecord, ...]
    outputs: tuple[Operand, ...]

    @functools.cached_property
    def makers(self) -> dict[int, OperationRecord]:
        return {v: operation for operation in self.operations for v in operation.results}

    @functools.cached_property
    def users(self) -> dict[int, list[OperationRecord]]:
        found = collections.defaultdict(list)
        for operation in self.operations:
            for v in operation.variables:
                found[v].append(operation)
        return found


def program_record(program: Any) -> ProgramRecord:
    """The record of a jaxpr and of the programs inside; one of several uses has one record."""
    return _Recorder()(program)


class _Recorder:
    """Numbers the variables of a program and of those inside."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._known: dict[int, tuple[Any, ProgramRecord]] = {}  # by the address of what is kept

    def __call__(self, program: Any) -> ProgramRecord:
        jaxpr, _ = opened(program)
        if id(jaxpr) not in self._known:
            given = self._variables(jaxpr.constvars), self._variables(jaxpr.invars)
            operations = tuple(map(self._operation, jaxpr.eqns))
            found = ProgramRecord(*given, operations, self._operands(jaxpr.outvars))
            self._known[id(jaxpr)] = jaxpr, found
        return self._known[id(jaxpr)][1]

    def _operation(self, equation: JaxprEqn) -> OperationRecord:
        name, params, loop = equation.primitive.name, equation.params, None
        if name == "scan":
            loop = Loop(*scan_counts(equation), params["length"], params["reverse"])
        return OperationRecord(
            name,
            path(equation),
            self._operands(equation.invars),
            self._variables(equation.outvars),
            tuple(map(self, value_programs(equation))),
            tuple(map(self, entered_programs(equation)[0])),
            loop,
            device_count(equation) if name == "shard_map" else None,
            equation,
        )

    def _variables(self, variables: Sequence) -> tuple[int, ...]:
        return tuple(self._numbers.setdefault(v, len(self._numbers)) for v in variables)

    def _operands(self, atoms: Sequence) -> tuple[Operand, ...]:
        return tuple(
            str(x.val) if isinstance(x, Literal) else self._variables([x])[0] for x in atoms
        )


def program_data(program: ProgramRecord) -> list[dict[str, Any]]:
    """Plain data of a program and of those inside: each is behind the programs inside of it."""
    return list(_described(program, {}))


def _described(program: ProgramRecord, numbers: dict) -> Iterator[dict[str, Any]]:
    for operation in program.operations:
        for inner in (*operation.seen, *operation.entered):
            if inner not in numbers:
                yield from _described(inner, numbers)
    numbers[program] = len(numbers)
    rows = []
    for own in program.operations:
        inside = ([numbers[inner] for inner in found] for found in (own.seen, own.entered))
        row = [own.name, "/".join(own.scopes), own.operands, own.results, *inside]
        rows.append([*row, own.loop, own.devices, own.location, own.digest])
    given = {"constants": program.constants, "inputs": program.inputs}
    yield {**given, "outputs": program.outputs, "operations": rows}


def program_from_data(data: list[dict[str, Any]]) -> ProgramRecord:
    """The program of plain data, see `program_data`."""
    found: list[ProgramRecord] = []
    for each in data:
        operations = tuple(_operation_of(row, found) for row in each["operations"])
        given = tuple(each["constants"]), tuple(each["inputs"])
        found.append(ProgramRecord(*given, operations, tuple(each["outputs"])))
    return found[-1]


def _operation_of(row: list[Any], known: list[ProgramRecord]) -> OperationRecord:
    name, scopes, operands, results, seen, entered, loop, devices, location, digest = row
    return OperationRecord(
        name,
        tuple(filter(None, scopes.split("/"))),
        tuple(operands),
        tuple(results),
        tuple(known[i] for i in seen),
        tuple(known[i] for i in entered),
        Loop(*loop) if loop else None,
        devices,
        (Location(*location), digest),
    )


def point_at(
    program: ProgramRecord, position: Sequence[int]
) -> tuple[int, OperationRecord, tuple[OperationRecord, ...], tuple[ProgramRecord, ...]]:
    """The variable, maker, holders and programs of a `VersionValue`, by its position.

    Behind the last operation of a program is what it carries.
    """
    *around, number, output, _ = position
    holders, programs = [], [program]
    for at, inside in zip(around[::2], around[1::2], strict=True):
        holders.append(programs[-1].operations[at])
        programs.append(holders[-1].seen[inside])
    own = programs[-1]
    if number < len(own.operations):
        maker = own.operations[number]
        return maker.results[output], maker, tuple(holders), tuple(programs)
    variable = own.outputs[output]
    assert isinstance(variable, int)  # a carry that is computed
    return variable, own.makers[variable], tuple(holders), tuple(programs)
