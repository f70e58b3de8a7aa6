"""The wiring of modules: the modules whose operations, with their operands, both versions have."""

import os
from collections.abc import Hashable, Sequence

from clipgrad._compare.program_record import Operand, ProgramRecord
from clipgrad._names import ScopePath


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
        left = maker[: len(os.path.commonprefix([maker, scope])) + 1]
        numbers = self._leaving.setdefault(left, {})
        return left, numbers.setdefault(operand, len(numbers))
