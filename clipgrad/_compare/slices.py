"""The module of a difference: the common scope of the operations that made or used a value."""

import os
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

from clipgrad._compare.matching import Instance
from clipgrad._compare.program_record import OperationRecord, ProgramRecord
from clipgrad._compare.versions import VersionValue
from clipgrad._names import ScopePath

Ends = Callable[[int], bool]  # whether a named value that agrees ends a slice


class Slice(NamedTuple):
    """Operations between named values.

    Attributes:
      scopes: those around each operation.
      operations: themselves, in the order in which they were found.
    """

    scopes: list[ScopePath]
    operations: list[OperationRecord]

    @property
    def module(self) -> str:
        """Their common scope, "" for none."""
        return "/".join(os.path.commonprefix(self.scopes))

    def outside(self, modules: Set[ScopePath]) -> "Slice":
        """The operations that no such module holds directly; all, if each is in one of them."""
        pairs = zip(self.scopes, self.operations, strict=True)
        kept = [pair for pair in pairs if pair[0] not in modules]
        return Slice(*map(list, zip(*kept, strict=True))) if kept else self


def made_by(program: ProgramRecord, variable: int, scopes: ScopePath, ends: Ends) -> Slice:
    """The operations of a program that compute a variable from named values.

    Those that compute something of inputs alone, such as a cast of a weight, are left out, if there
    are others.
    """
    behind = _behind(program, ends)
    found, every = Slice([], []), Slice([], [])
    todo, seen = [variable], set[OperationRecord]()
    while todo:
        operation = program.makers.get(todo.pop())
        if operation is None or operation in seen:
            continue
        seen.add(operation)
        for part in (every, found) if operation in behind else (every,):
            part.scopes.append((*scopes, *operation.scopes))
            part.operations.append(operation)
        todo += [v for v in operation.operands if isinstance(v, int) and not ends(v)]
    return found if found.operations else every


def _behind(program: ProgramRecord, ends: Ends) -> set[OperationRecord]:
    """The operations that compute something of a named value that agrees."""
    known, found = {v for v in program.inputs if ends(v)}, set()
    for operation in program.operations:
        if not known.isdisjoint(operation.operands):
            found.add(operation)
            known.update(operation.results)
        known.update(filter(ends, operation.results))
    return found


def used_by(
    program: ProgramRecord,
    variables: Iterable[int],
    scopes: ScopePath,
    inside: ScopePath,
    ends: Ends,
) -> tuple[Slice, set[int]]:
    """The operations that use variables, up to named values; and all variables on the way.

    Operations inside of the scopes ``inside`` of the program are left out.
    """
    found, reached = Slice([], []), set(variables)
    for operation in program.operations:
        hits = [i for i, v in enumerate(operation.operands) if v in reached]
        around = operation.scopes
        if not hits or (inside and around[: len(inside)] == inside):
            continue
        deeper, outputs = _inside(operation, hits, (*scopes, *around), ends)
        found.scopes.extend(deeper.scopes or [(*scopes, *around)])
        found.operations.extend(deeper.operations or [operation])
        reached |= {v for v in outputs if not ends(v)}
    return found, reached


def _inside(
    operation: OperationRecord, hits: Sequence[int], scopes: ScopePath, ends: Ends
) -> tuple[Slice, list[int]]:
    """The operations inside of one that use some inputs, and its results after them."""
    found, outputs = Slice([], []), list(operation.results)
    for program in operation.entered:
        first = len(operation.operands) - len(program.inputs)  # a cond's index is before the inputs
        starts = [program.inputs[i - first] for i in hits if i >= first]
        deeper, reached = used_by(program, starts, scopes, (), ends)
        found.scopes.extend(deeper.scopes)
        found.operations.extend(deeper.operations)
        if len(operation.entered) == 1 and len(program.outputs) == len(outputs):
            pairs = zip(operation.results, program.outputs, strict=True)
            outputs = [v for v, inner in pairs if inner in reached]
    return found, outputs


def users_of(instance: Instance, ends: Ends) -> tuple[Slice, int | None]:
    """The operations that use a value outside of its module, and their step, or None.

    A value that a scan carries is used in its next step, or else, like other results, by what uses
    the result of the operation around.
    """
    value, steps = instance.value, list(instance.steps)
    holders, programs, variables = list(value.holders), list(value.programs), {value.variable}
    scopes, inside = value_scopes(value), value.scopes
    while True:
        found, reached = used_by(programs[-1], variables, scopes, inside, ends)
        if found.scopes or not holders:
            return found, steps[-1] if steps else None
        holder, program = holders.pop(), programs.pop()
        if holder.loop:
            later = _next_step(holder, program, reached, steps.pop())
            if later is not None:
                found, _ = used_by(program, later[0], scopes, (), ends)
                if found.scopes:
                    return found, later[1]
        variables = _results(holder, program, reached)
        scopes, inside = scopes[: len(scopes) - len(holder.scopes)], ()


def _next_step(
    scan: OperationRecord, program: ProgramRecord, reached: set[int], step: int
) -> tuple[list[int], int] | None:
    """The variables that have what a step carried on, and the number of the next step."""
    assert scan.loop is not None
    constants, carried, length, reverse = scan.loop
    results = enumerate(program.outputs[:carried])
    starts = [program.inputs[constants + i] for i, v in results if v in reached]
    later = step + (-1 if reverse else 1)
    return (starts, later) if starts and 0 <= later < length else None


def _results(holder: OperationRecord, program: ProgramRecord, reached: set[int]) -> set[int]:
    """The results of an operation that are these variables of the program inside of it."""
    if len(holder.results) != len(program.outputs):
        return set(holder.results)
    pairs = zip(holder.results, program.outputs, strict=True)
    return {v for v, inner in pairs if inner in reached}


def value_scopes(value: VersionValue) -> ScopePath:
    """The scopes around the program that a value is computed in."""
    return tuple(scope for operation in value.holders for scope in operation.scopes)
