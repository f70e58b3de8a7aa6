"""The module of a difference: the common scope of the operations that made or used a value."""

import os
from collections.abc import Callable, Iterable, Sequence, Set

from clipgrad._compare.matching import Instance
from clipgrad._compare.program_record import OperationRecord, ProgramRecord
from clipgrad._compare.versions import VersionValue
from clipgrad._names import ScopePath

Ends = Callable[[int], bool]  # whether a named value that agrees ends a slice
Slice = list[tuple[ScopePath, OperationRecord]]  # operations, each with the scopes around it


def module_of(found: Slice) -> str:
    """The common scope of a slice, "" for none."""
    return "/".join(os.path.commonprefix([scopes for scopes, _ in found]))


def outside(found: Slice, modules: Set[ScopePath]) -> Slice:
    """The operations that no such module holds directly; all, if each is in one of them."""
    return [each for each in found if each[0] not in modules] or found


def made_by(program: ProgramRecord, variable: int, scopes: ScopePath, ends: Ends) -> Slice:
    """The operations of a program that compute a variable from named values.

    Those that compute something of inputs alone, such as a cast of a weight, are left out, if there
    are others.
    """
    behind = _behind(program, ends)
    every, todo, seen = Slice(), [variable], set[OperationRecord]()
    while todo:
        operation = program.makers.get(todo.pop())
        if operation is None or operation in seen:
            continue
        seen.add(operation)
        every.append(((*scopes, *operation.scopes), operation))
        todo += [v for v in operation.operands if isinstance(v, int) and not ends(v)]
    return [each for each in every if each[1] in behind] or every


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
    program: ProgramRecord, variables: Iterable[int], scopes: ScopePath, ends: Ends
) -> tuple[Slice, set[int]]:
    """The operations that use variables, up to named values; and all variables on the way."""
    found, reached = Slice(), set(variables)
    for operation in program.operations:
        hits = [i for i, v in enumerate(operation.operands) if v in reached]
        if hits:
            around = (*scopes, *operation.scopes)
            found += _inside(operation, hits, around, ends) or [(around, operation)]
            reached |= {v for v in operation.results if not ends(v)}
    return found, reached


def _inside(
    operation: OperationRecord, hits: Sequence[int], scopes: ScopePath, ends: Ends
) -> Slice:
    """The operations in the programs inside of one that use some of its inputs."""
    found = Slice()
    for program in operation.entered:
        first = len(operation.operands) - len(program.inputs)  # a cond's index is before the inputs
        starts = [program.inputs[i - first] for i in hits if i >= first]
        found += used_by(program, starts, scopes, ends)[0]
    return found


def users_of(instance: Instance, ends: Ends) -> tuple[Slice, int | None]:
    """The operations that use a value, and their step, or None.

    A value that a scan carries is used in its next step, or else, like other results, by what uses
    the results of the operation around.
    """
    value, steps = instance.value, list(instance.steps)
    holders, programs, variables = list(value.holders), list(value.programs), {value.variable}
    scopes = value_scopes(value)
    while True:
        found, reached = used_by(programs[-1], variables, scopes, ends)
        if found or not holders:
            return found, steps[-1] if steps else None
        holder, program = holders.pop(), programs.pop()
        if holder.loop:
            later = _next_step(holder, program, reached, steps.pop())
            if later is not None:
                found, _ = used_by(program, later[0], scopes, ends)
                if found:
                    return found, later[1]
        variables, scopes = set(holder.results), scopes[: len(scopes) - len(holder.scopes)]


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


def value_scopes(value: VersionValue) -> ScopePath:
    """The scopes around the program that a value is computed in."""
    return tuple(scope for operation in value.holders for scope in operation.scopes)
