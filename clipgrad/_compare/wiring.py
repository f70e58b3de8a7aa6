"""The wiring of modules: the modules whose operations, with their operands, both versions have."""

import os
from collections.abc import Hashable, Sequence
from typing import Any

from jax.extend.core import Literal, Var

from clipgrad._jaxpr import equation_key, opened, value_programs
from clipgrad._names import ScopePath, path


def shared_modules(*programs: Any) -> set[ScopePath]:
    """The scopes that directly hold the same operations, of the same operands, in each program.

    Such a module computes the same values from values that agree, and the same cotangents from
    cotangents that agree: no difference begins there. An operand of another module has the number
    of its first use among the values that leave that module.
    """
    first, *others = (_Wiring(program).found for program in programs)
    return {scope for scope, own in first.items() if all(own == x.get(scope) for x in others)}


class _Wiring:
    """The operations of each scope in order, each with its operands."""

    def __init__(self, program: Any) -> None:
        self.found: dict[ScopePath, list[Hashable]] = {}
        self._makers: dict[Var, tuple[ScopePath, Hashable]] = {}
        self._leaving: dict[ScopePath, dict[Var, int]] = {}
        jaxpr, _ = opened(program)
        self._define([*jaxpr.constvars, *jaxpr.invars], (), "input")
        self._walk(jaxpr, ())

    def _walk(self, jaxpr: Any, around: ScopePath) -> list[Hashable]:
        """Add the operations of a program, and return them: those inside are a holder's, too."""
        every = []
        for equation in jaxpr.eqns:
            scope = (*around, *path(equation))
            operations = self.found.setdefault(scope, [])
            number = len(operations)
            operation = [
                equation_key(equation),
                *(self._operand(x, scope) for x in equation.invars),
            ]
            for i, program in enumerate(value_programs(equation)):
                inner, _ = opened(program)
                self._define([*inner.constvars, *inner.invars], scope, (number, i))
                operation.append((scope, *self._walk(inner, scope)))
                operation.append(tuple(self._operand(atom, scope) for atom in inner.outvars))
            self._define(equation.outvars, scope, number)
            operations.append(tuple(operation))
            every.append((scope, operations[-1]))
        return every

    def _define(self, variables: Sequence[Var], scope: ScopePath, by: Hashable) -> None:
        for i, variable in enumerate(variables):
            self._makers[variable] = scope, (by, i)

    def _operand(self, atom: Any, scope: ScopePath) -> Hashable:
        """The operand: its maker if that is in the scope, or else the module that it leaves."""
        if isinstance(atom, Literal):
            return str(atom.val)
        maker, own = self._makers[atom]
        if maker == scope:
            return own
        left = maker[: len(os.path.commonprefix([maker, scope])) + 1]
        numbers = self._leaving.setdefault(left, {})
        return left, numbers.setdefault(atom, len(numbers))
