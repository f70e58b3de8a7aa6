"""The modules that a value enters, also one that leaves another module."""

import collections
import os
from collections.abc import Iterator

from clipgrad._compare.program_record import OperationRecord, ProgramRecord
from clipgrad._compare.slices import value_scopes
from clipgrad._compare.versions import VersionValue
from clipgrad._names import ScopePath


class Entered:
    """Names of modules by the values that enter them."""

    def __init__(self) -> None:
        self._users: dict[ProgramRecord, dict[int, list[OperationRecord]]] = {}

    def names(self, value: VersionValue) -> list[str]:
        """The modules, outermost first, that use a value from outside."""
        own = (*value_scopes(value), *value.maker.scopes)
        found: dict[str, None] = {}
        for scopes in self._uses(value):
            shared = len(os.path.commonprefix([own, scopes]))
            found |= {"/".join(scopes[:i]): None for i in range(shared + 1, len(scopes) + 1)}
        return list(found)

    def _uses(self, value: VersionValue) -> Iterator[ScopePath]:
        """The scopes of the operations that use a value, up to the scan around."""
        variables = {value.variable}
        for level in range(len(value.holders), -1, -1):
            program = value.programs[level]
            around = [scope for holder in value.holders[:level] for scope in holder.scopes]
            for variable in variables:
                for operation in self._users_in(program).get(variable, []):
                    yield (*around, *operation.scopes)
            if not level or value.holders[level - 1].loop:
                return
            pairs = zip(value.holders[level - 1].results, program.outputs, strict=False)
            variables = {outer for outer, inner in pairs if inner in variables}

    def _users_in(self, program: ProgramRecord) -> dict[int, list[OperationRecord]]:
        if program not in self._users:
            found = self._users[program] = collections.defaultdict(list)
            for operation in program.operations:
                for operand in operation.operands:
                    if isinstance(operand, int):
                        found[operand].append(operation)
        return self._users[program]
