"""The values of which others are computed."""

from collections.abc import Iterable, Sequence, Set

from clipgrad._compare.matching import Instance
from clipgrad._compare.program_record import OperationRecord, ProgramRecord
from clipgrad._compare.versions import VersionValue


class Ancestors:
    """The values of which some values are computed, at the same step or at earlier ones.

    Args:
      values: the values that are computed.
      ends: the variables of which nothing is looked for.
    """

    def __init__(self, values: Sequence[Instance], ends: Set[int] = frozenset()) -> None:
        self._values, self._ends = values, ends
        self._known: dict[tuple[int, tuple[int, ...], bool], set[int]] = {}

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
            starts = _operand_variables(own_holders[level - 1]) if level else []
        return False

    def _before(
        self,
        program: ProgramRecord,
        starts: Iterable[int],
        holders: tuple[OperationRecord, ...],
        feeds: bool,
    ) -> set[int]:
        """The variables of a program that some are computed of; in a loop in earlier steps, too."""
        key = id(program), tuple(sorted(starts)), feeds
        if key in self._known:
            return self._known[key]
        loop = holders[-1].loop if holders and feeds else None
        found, todo = set[int](), list(key[1])
        while todo:
            variable = todo.pop()
            if variable in found:
                continue
            found.add(variable)
            if variable in self._ends and variable not in key[1]:
                continue
            if variable in program.makers:
                todo += _operand_variables(program.makers[variable])
            elif loop and variable in program.inputs:
                i = program.inputs.index(variable) - loop.constants
                if 0 <= i < loop.carried:
                    todo += [v for v in (program.outputs[i],) if isinstance(v, int)]
        self._known[key] = found
        return found


def _leaves_with(outer: VersionValue, inner: VersionValue) -> bool:
    """Whether what leaves a module within another one leaves that one, too."""
    return outer.kind == inner.kind == "module" and inner.name.startswith(f"{outer.name}/")


def _operand_variables(operation: OperationRecord) -> list[int]:
    return [v for v in operation.operands if isinstance(v, int)]
