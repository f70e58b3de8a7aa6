"""Slices of programs: the operations that made or use a value, and the modules they are in."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set

from clipgrad._compare.matching import Instance
from clipgrad._compare.program_record import Loop, Operand, OperationRecord, ProgramRecord
from clipgrad._compare.versions import VersionValue
from clipgrad._names import ScopePath, common_start

Ends = Callable[[int], bool]  # whether a named value that agrees ends a slice
Slice = list[tuple[ScopePath, OperationRecord]]  # operations, each with the scopes around it


def module_of(found: Slice) -> str:
    return "/".join(common_start(scopes for scopes, _ in found))


def outside(found: Slice, modules: Set[ScopePath]) -> Slice:
    """The operations that no such module holds directly; all, if each is in one of them."""
    return [each for each in found if each[0] not in modules] or found


def made_by(program: ProgramRecord, variable: int, scopes: ScopePath, ends: Ends) -> Slice:
    """The operations of a program that compute a variable from named values.

    Those that compute something of inputs alone, such as a cast of a weight, are left out, if there
    are others.
    """
    behind = _behind(program, ends)
    reached = variables_before(program, [variable], ends)
    open_ones = (v for v in reached if v in program.makers and (v == variable or not ends(v)))
    made = dict.fromkeys(program.makers[v] for v in open_ones)
    every = [((*scopes, *operation.scopes), operation) for operation in made]
    return [each for each in every if each[1] in behind] or every


def variables_before(
    program: ProgramRecord, starts: Sequence[int], ends: Ends, loop: Loop | None = None
) -> dict[int, None]:
    """The variables that some are computed of, up to those that end; in earlier steps, too."""
    found, todo = dict[int, None](), list(starts)
    while todo:
        variable = todo.pop()
        if variable in found:
            continue
        found[variable] = None
        if ends(variable) and variable not in starts:
            continue
        if variable in program.makers:
            todo += program.makers[variable].variables
        elif loop and variable in program.inputs:
            i = program.inputs.index(variable) - loop.constants
            if 0 <= i < loop.carried:
                todo += [v for v in (program.outputs[i],) if isinstance(v, int)]
    return found


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


def entered_modules(value: VersionValue) -> list[str]:
    """The modules, outermost first, that use a value from outside."""
    own = (*value_scopes(value), *value.maker.scopes)
    found: dict[str, None] = {}
    for scopes in _uses(value):
        shared = len(common_start([own, scopes]))
        found |= {"/".join(scopes[:i]): None for i in range(shared + 1, len(scopes) + 1)}
    return list(found)


def _uses(value: VersionValue) -> Iterator[ScopePath]:
    """The scopes of the operations that use a value, up to the scan around."""
    variables = {value.variable}
    for level in range(len(value.holders), -1, -1):
        program = value.programs[level]
        around = [scope for holder in value.holders[:level] for scope in holder.scopes]
        for variable in variables:
            for operation in program.users.get(variable, []):
                yield (*around, *operation.scopes)
        if not level or value.holders[level - 1].loop:
            return
        pairs = zip(value.holders[level - 1].results, program.outputs, strict=False)
        variables = {outer for outer, inner in pairs if inner in variables}


class Ancestors:
    """The values, and inputs, of which values are computed, at the same step or at earlier ones.

    Behind the variables that are ends nothing is looked for.
    """

    def __init__(self, values: Sequence[Instance], ends: Set[int] = frozenset()) -> None:
        self._values, self._ends = values, ends
        self._known: dict[tuple[int, tuple[int, ...], bool], Set[int]] = {}

    def has(self, ancestor: Instance) -> bool:
        """Whether one of the values is computed of another value, which is not itself."""
        later = [own for own in self._values if own.time > ancestor.time]
        return any(self._is_of(own, ancestor) for own in later)

    def is_used(self, value: VersionValue) -> bool:
        """Whether what a program returns is computed of a value."""
        variables = {value.variable}
        for level in range(len(value.holders), -1, -1):
            program, holders = value.programs[level], value.holders[:level]
            outputs = [v for v in program.outputs if isinstance(v, int)]
            if variables.isdisjoint(self._before(program, outputs, holders, True)):
                return False
            variables = {v for holder in holders[-1:] for v in holder.results}
        return True

    def inputs(self, of: VersionValue | ProgramRecord) -> set[int]:
        """The inputs, by number, that a value, or the loss of a program, is computed of."""
        holders, programs = (
            ((), (of,)) if isinstance(of, ProgramRecord) else (of.holders, of.programs)
        )
        starts = of.outputs[:1] if isinstance(of, ProgramRecord) else (of.variable,)
        starts = [v for v in starts if isinstance(v, int)]
        for level in range(len(holders), 0, -1):
            own, holder = programs[level], holders[level - 1]
            reached = self._before(own, starts, holders[:level], True)
            inner = zip(own.inputs[::-1], holder.operands[::-1], strict=False)
            starts = [outer for v, outer in inner if v in reached and isinstance(outer, int)]
        reached = self._before(programs[0], starts, (), False)
        return {i for i, v in enumerate(programs[0].inputs) if v in reached}

    def _is_of(self, own: Instance, ancestor: Instance) -> bool:
        """Whether a value is computed of one before."""
        variables = {ancestor.value.variable}
        variables.update(v for holder in ancestor.value.holders for v in holder.results)
        if own.value.variable == ancestor.value.variable:
            return own.steps != ancestor.steps or _leaves_with(own.value, ancestor.value)
        own_holders, around = own.value.holders, ancestor.value.holders
        shared = [a is b for a, b in zip(own_holders, around, strict=False)]
        depth = shared.index(False) if False in shared else len(shared)
        inside = {v for holder in around[:depth] for v in holder.results}
        starts: list[int] = [own.value.variable]
        for level in range(len(own_holders), -1, -1):
            feeds = own.steps != ancestor.steps and level <= depth
            reached = self._before(own.value.programs[level], starts, own_holders[:level], feeds)
            if reached & (variables - inside):
                return True
            starts = own_holders[level - 1].variables if level else []
        return False

    def _before(
        self,
        program: ProgramRecord,
        starts: Sequence[int],
        holders: tuple[OperationRecord, ...],
        feeds: bool,
    ) -> Set[int]:
        """The variables of a program that some are computed of; in a loop in earlier steps, too."""
        key = id(program), tuple(sorted(starts)), feeds
        if key not in self._known:
            loop = holders[-1].loop if holders and feeds else None
            found = variables_before(program, key[1], self._ends.__contains__, loop)
            self._known[key] = found.keys()
        return self._known[key]


def _leaves_with(outer: VersionValue, inner: VersionValue) -> bool:
    """Whether what leaves a module within another one leaves that one, too."""
    return outer.kind == inner.kind == "module" and inner.name.startswith(f"{outer.name}/")


def shared_modules(*programs: ProgramRecord) -> set[ScopePath]:
    """The scopes that directly hold the same operations, of the same operands, in each program.

    Such a module computes the same values from values that agree, and the same cotangents from
    cotangents that agree: no difference begins there. An operand of another module has the number
    of its first use among the values that leave that module.
    """
    first, *others = (_Wiring(program).found for program in programs)
    return {scope for scope, own in first.items() if all(own == x.get(scope) for x in others)}


class _Wiring:
    """The operations of each scope in order, by their digests, each with its operands."""

    def __init__(self, program: ProgramRecord) -> None:
        self.found: dict[ScopePath, list[Hashable]] = {}
        self._makers: dict[int, tuple[ScopePath, Hashable]] = {}
        self._leaving: dict[ScopePath, dict[int, int]] = {}
        self._define([*program.constants, *program.inputs], (), "input")
        self._walk(program, ())

    def _walk(self, program: ProgramRecord, around: ScopePath) -> list[Hashable]:
        """Add the operations of a program, and return them: those inside are a holder's, too."""
        every = []
        for own in program.operations:
            scope = (*around, *own.scopes)
            operations = self.found.setdefault(scope, [])
            number = len(operations)
            key = own.digest or object()  # which equals no other
            operation = [key, *(self._operand(x, scope) for x in own.operands)]
            for i, inner in enumerate(own.seen):
                self._define([*inner.constants, *inner.inputs], scope, (number, i))
                operation.append((scope, *self._walk(inner, scope)))
                operation.append(tuple(self._operand(x, scope) for x in inner.outputs))
            self._define(own.results, scope, number)
            operations.append(tuple(operation))
            every.append((scope, operations[-1]))
        return every

    def _define(self, variables: Sequence[int], scope: ScopePath, by: Hashable) -> None:
        for i, variable in enumerate(variables):
            self._makers[variable] = scope, (by, i)

    def _operand(self, operand: Operand, scope: ScopePath) -> Hashable:
        """The operand: its maker if that is in the scope, or else the module that it leaves."""
        if isinstance(operand, str):
            return operand
        maker, own = self._makers[operand]
        if maker == scope:
            return own
        left = maker[: len(common_start([maker, scope])) + 1]
        numbers = self._leaving.setdefault(left, {})
        return left, numbers.setdefault(operand, len(numbers))
