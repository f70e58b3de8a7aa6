"""The module of a difference: the common scope of the operations that made or used a value."""

import os
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._compare.matching import Instance
from clipgrad._jaxpr import entered_programs, opened, scan_counts
from clipgrad._names import ScopePath, path
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

    def outside(self, modules: Set[ScopePath]) -> "Slice":
        """The operations that no such module holds directly; all, if each is in one of them."""
        pairs = zip(self.scopes, self.equations, strict=True)
        kept = [pair for pair in pairs if pair[0] not in modules]
        return Slice(*map(list, zip(*kept, strict=True))) if kept else self


def made_by(jaxpr: Any, variable: Var, scopes: ScopePath, ends: Ends) -> Slice:
    """The operations of a program that compute a variable from named values.

    Those that compute something of inputs alone, such as a cast of a weight, are left out, if there
    are others.
    """
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    behind = _behind(jaxpr, ends)
    found, every = Slice([], []), Slice([], [])
    todo, seen = [variable], set()
    while todo:
        equation = makers.get(todo.pop())
        if equation is None or id(equation) in seen:
            continue
        seen.add(id(equation))
        for part in (every, found) if id(equation) in behind else (every,):
            part.scopes.append((*scopes, *path(equation)))
            part.equations.append(equation)
        todo += [v for v in equation.invars if type(v) is not Literal and not ends(v)]
    return found if found.equations else every


def _behind(jaxpr: Any, ends: Ends) -> set[int]:
    """The equations that compute something of a named value that agrees, by `id`."""
    known, found = {v for v in jaxpr.invars if ends(v)}, set()
    for equation in jaxpr.eqns:
        if any(type(v) is not Literal and v in known for v in equation.invars):
            found.add(id(equation))
            known.update(equation.outvars)
        known.update(filter(ends, equation.outvars))
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


def users_of(program: Any, instance: Instance, ends: Ends) -> tuple[Slice, int | None]:
    """The operations that use a value outside of its module, and their step, or None.

    A value that a scan carries is used in its next step, or else, like other results, by what uses
    the result of the equation around.
    """
    value, steps = instance.value, list(instance.steps)
    jaxpr, variables, place = value.jaxpr, {value.variable}, value.place
    scopes, inside = value_scopes(value), value.scopes
    while True:
        found, reached = used_by(jaxpr, variables, scopes, inside, ends)
        if found.scopes or place.parent is None:
            return found, steps[-1] if steps else None
        holder = place.parent.equation
        if holder.primitive.name == "scan":
            later = _next_step(holder, jaxpr, reached, steps.pop())
            if later is not None:
                found, _ = used_by(jaxpr, later[0], scopes, (), ends)
                if found.scopes:
                    return found, later[1]
        variables = _results(holder, jaxpr, reached)
        scopes, inside = scopes[: len(scopes) - len(path(holder))], ()
        place = place.parent
        jaxpr = place.program_in(program)


def _next_step(
    scan: JaxprEqn, jaxpr: Any, reached: set[Var], step: int
) -> tuple[list[Var], int] | None:
    """The variables that have what a step carried on, and the number of the next step."""
    constants, carried = scan_counts(scan)
    results = enumerate(jaxpr.outvars[:carried])
    starts = [jaxpr.invars[constants + i] for i, v in results if _is_in(v, reached)]
    later = step + (-1 if scan.params["reverse"] else 1)
    return (starts, later) if starts and 0 <= later < scan.params["length"] else None


def _results(holder: JaxprEqn, jaxpr: Any, reached: set[Var]) -> set[Var]:
    """The results of an equation that are these variables of the program inside of it."""
    if len(holder.outvars) != len(jaxpr.outvars):
        return set(holder.outvars)
    pairs = zip(holder.outvars, jaxpr.outvars, strict=True)
    return {v for v, inner in pairs if _is_in(inner, reached)}


def _is_in(atom: Any, variables: set[Var]) -> bool:
    return type(atom) is not Literal and atom in variables


def value_scopes(value: NamedValue) -> ScopePath:
    """The scopes around the program that a value is computed in."""
    holders = reversed(value.place.chain[1:])
    return tuple(scope for equation in holders for scope in path(equation))
