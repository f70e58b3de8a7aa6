"""Facts of the variables of a program: the names that they have, and what made them."""

from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._names.modules import exits, users_tag
from clipgrad._names.scopes import ScopePath
from clipgrad._programs import (
    CALLS,
    JIT,
    REMAT,
    called_program,
    entered_programs,
    kind_of,
    opened,
    operation_name,
    read_once,
)

# Equations whose program is evaluated as a part of the one around.
_CALLS = (CALLS, JIT, REMAT)


@read_once
def operations(program: Any) -> frozenset[tuple[Var, str]]:
    """The primitive that made each variable of a program and of those inside it.

    What makes a tagged value is the operation before the tag, and what makes the result of a call
    the operation inside; an input of the whole program has none.
    """
    return frozenset(_add_operations(program, {}).items())


def _add_operations(program: Any, made: dict[Var, str]) -> dict[Var, str]:
    """The operations so far, with those of a program whose inputs are among them."""
    for equation in opened(program)[0].eqns:
        operands = [None if isinstance(a, Literal) else made.get(a, "") for a in equation.invars]
        inner, _ = entered_programs(equation)
        for jaxpr in (opened(each)[0] for each in inner):
            is_call = kind_of(equation) in _CALLS
            operations = operands if is_call else [""] * len(jaxpr.invars)
            made |= zip(jaxpr.invars, (name or "" for name in operations), strict=True)
            _add_operations(jaxpr, made)
        made |= zip(equation.outvars, _operations_of_results(equation, operands, made), strict=True)
    return made


def _operations_of_results(
    equation: JaxprEqn, operands: list[str | None], made: dict[Var, str]
) -> list[str]:
    if users_tag(equation) is not None:
        return [operands[0] or ""]
    if kind_of(equation) in _CALLS:
        results = opened(called_program(equation))[0].outvars
        return ["" if isinstance(atom, Literal) else made.get(atom, "") for atom in results]
    return [operation_name(equation)] * len(equation.outvars)


NamesOfVariables = dict[Any, str]


def names_of_variables(program: Any, around: ScopePath = ()) -> NamesOfVariables:
    """The tag of each variable of a program, or the path of the innermost module that it leaves.

    ``around`` are the scopes around the program.
    """
    jaxpr, _ = opened(program)
    left = {variable: "/".join((*around, *e.left[0])) for variable, e in exits(jaxpr).items()}
    tags = [(tag, e.invars[0]) for e in jaxpr.eqns if (tag := users_tag(e)) is not None]
    return left | {v: tag for tag, v in tags if not isinstance(v, Literal)}


def names_inside(
    equation: JaxprEqn, around: ScopePath, names: NamesOfVariables
) -> NamesOfVariables:
    """The names of the variables inside of an equation, in a program whose variables have names.

    What a call returns has the name of its result, unless it has one inside.
    """
    known: NamesOfVariables = {}
    for program in entered_programs(equation)[0]:
        if kind_of(equation) in _CALLS:
            pairs = zip(opened(program)[0].outvars, equation.outvars, strict=True)
            results = [(v, names.get(result)) for v, result in pairs if not isinstance(v, Literal)]
            known |= {v: name for v, name in results if name}
        known |= names_of_variables(program, around)
    return known
