"""The module of a difference: the common scope of the operations that made or used a value."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._jaxpr import ScopePath, entered_programs, opened, path, scan_counts
from clipgrad._values import NamedValue

Ends = Callable[[Var], bool]  # whether a named value that agrees ends a slice


class Slice(NamedTuple):
    """Operations between named values.

    Attributes:
      scopes: those around each operation.
      equations: the operations, in the order in which they were found.
    """

    scopes: list[ScopePath]
    equations: list[JaxprEqn]

    @property
    def module(self) -> str:
        """Their common scope, "" for none."""
        return "/".join(os.path.commonprefix(self.scopes))


def made_by(jaxpr: Any, variable: Var, scopes: ScopePath, ends: Ends) -> Slice:
    """The operations of a program that compute a variable from named values and inputs."""
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    found, todo, seen = Slice([], []), [variable], set()
    while todo:
        equation = makers.get(todo.pop())
        if equation is None or id(equation) in seen:
            continue
        seen.add(id(equation))
        found.scopes.append((*scopes, *path(equation)))
        found.equations.append(equation)
        todo += [v for v in equation.invars if type(v) is not Literal and not ends(v)]
    return found


def used_by(
    jaxpr: Any, variables: Iterable[Var], scopes: ScopePath, inside: ScopePath, ends: Ends
) -> tuple[Slice, set[Var]]:
    """The operations that use variables, up to named values; and all variables on the way.

    Operations inside of the scopes ``inside`` of the program are left out.
    """
    found, reached = Slice([], []), set(variables)
    for equation in jaxpr.eqns:
        hits = [i for i, v in enumerate(equation.invars) if type(v) is not Literal and v in reached]
        around = path(equation)
        if not hits or (inside and around[: len(inside)] == inside):
            continue
        deeper, outputs = _inside(equation, hits, (*scopes, *around), ends)
        found.scopes.extend(deeper.scopes or [(*scopes, *around)])
        found.equations.extend(deeper.equations or [equation])
        reached |= {v for v in outputs if not ends(v)}
    return found, reached


def _inside(
    equation: JaxprEqn, hits: Sequence[int], scopes: ScopePath, ends: Ends
) -> tuple[Slice, list[Var]]:
    """The operations inside of an equation that use some inputs, and its results after them."""
    found, outputs = Slice([], []), list(equation.outvars)
    programs = [opened(program)[0] for program in entered_programs(equation)[0]]
    for jaxpr in programs:
        first = len(equation.invars) - len(jaxpr.invars)  # a cond has its index before the inputs
        starts = [jaxpr.invars[i - first] for i in hits if i >= first]
        deeper, reached = used_by(jaxpr, starts, scopes, (), ends)
        found.scopes.extend(deeper.scopes)
        found.equations.extend(deeper.equations)
        if len(programs) == 1 and len(jaxpr.outvars) == len(outputs):
            pairs = zip(equation.outvars, jaxpr.outvars, strict=True)
            outputs = [v for v, inner in pairs if type(inner) is not Literal and inner in reached]
    return found, outputs


def users_of(value: NamedValue, step: int | None, ends: Ends) -> tuple[Slice, int | None]:
    """The operations that use a value outside of its module, and the step in which they do.

    A value that a scan carries is used in its next step.
    """
    around = value.place.chain[1] if value.place.parent else None
    scopes = value_scopes(value)
    found, reached = used_by(value.jaxpr, [value.variable], scopes, value.scopes, ends)
    is_scan = around is not None and around.primitive.name == "scan"
    if found.scopes or not is_scan or step is None:
        return found, step
    constants, carried = scan_counts(around)
    results = value.jaxpr.outvars[:carried]
    starts = [value.jaxpr.invars[constants + i] for i, v in enumerate(results) if v in reached]
    later = step + (-1 if around.params["reverse"] else 1)
    if not starts or not 0 <= later < around.params["length"]:
        return found, step
    return used_by(value.jaxpr, starts, scopes, (), ends)[0], later


def value_scopes(value: NamedValue) -> ScopePath:
    """The scopes around the program that a value is computed in."""
    holders = reversed(value.place.chain[1:])
    return tuple(scope for equation in holders for scope in path(equation))
