"""The variables of modules: the values that leave the named scopes of a program.

What is added to a program, such as statistics, is no value of the modules around it, and is marked
as such. Marks are tags, because all transformations keep them, and they cost nothing when compiled.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import DropVar, JaxprEqn, Literal, Var

from clipgrad._names.scopes import ScopePath, common_start, outside_of_scopes, path
from clipgrad._programs import (
    Hook,
    ProgramValues,
    entered_programs,
    is_linear_solve,
    is_move,
    is_tag,
    opened,
    read_once,
    tag_of,
)

_LOOK, _ASIDE = "clipgrad: look", "clipgrad: aside"


def look(x: Any) -> Any:
    """A copy of a value for statistics: it does not count as a use, and has no derivative.

    In eager code a value may be one of JAX's own number types, which are no arrays.
    """
    x = x if isinstance(x, jax.Array) else jnp.asarray(x, x.dtype)
    return lax.stop_gradient(checkpoint_name(x, _LOOK))


def aside(x: Any) -> Any:
    """A result that was added to the program."""
    return checkpoint_name(x, _ASIDE)


def is_mark(equation: JaxprEqn) -> bool:
    """Whether an equation is one of these marks, and no tag of the user's."""
    return tag_of(equation) in (_LOOK, _ASIDE)


def users_tag(equation: JaxprEqn) -> str | None:
    """The name that a tag of the user's gives its value; None for another equation."""
    tag = tag_of(equation)
    return None if tag in (_LOOK, _ASIDE) else tag


def _is_look(equation: JaxprEqn) -> bool:
    return tag_of(equation) == _LOOK


@read_once
def _asides(jaxpr: Any) -> frozenset[Var]:
    """Return the variables that clipgrad added to a program and that leave it, or an equation in
    it.

    Statistics from a program inside of an equation are among the equation's results, so without
    this they would seem to leave the modules around.
    """
    marks = [mark for mark in jaxpr.eqns if is_mark(mark)]
    atoms = [a for m in marks for a in (*m.outvars, *(() if _is_look(m) else m.invars))]
    return frozenset(atom for atom in atoms if isinstance(atom, Var))


@read_once
def without_added(jaxpr: Any) -> frozenset[Var]:
    """Return the results in a program without added ones: statistics, and what is made of these."""
    added, results = set(_asides(jaxpr)), []
    for equation in jaxpr.eqns:
        if added and any(not isinstance(a, Literal) and a in added for a in equation.invars):
            added.update(equation.outvars)
        results += [v for v in equation.outvars if v not in added]
    return frozenset(results)


def _own_values(jaxpr: Any) -> Iterator[tuple[JaxprEqn, list[Var]]]:
    """The equations of a program with scopes, and the arrays among their results."""
    for equation in jaxpr.eqns if any(map(path, jaxpr.eqns)) else ():
        arrays = (v for v in equation.outvars if isinstance(v.aval, ShapedArray))
        values = [v for v in arrays if not isinstance(v, DropVar) and v not in _asides(jaxpr)]
        yield equation, values


class Exit(NamedTuple):
    """A value that leaves scopes: it is used, or returned, outside of them."""

    path: ScopePath  # the scopes in which it is computed, outermost first
    kept: int  # how many of these, from the outermost on, all its uses are in, too

    @property
    def left(self) -> list[ScopePath]:
        """The scopes that it leaves, innermost first."""
        return [self.path[:depth] for depth in range(len(self.path), self.kept, -1)]


@read_once
def exits(jaxpr: Any) -> dict[Var, Exit]:
    """Return the arrays of a program that leave scopes of it, in the order of computation."""
    leaving = {}
    for equation, values in _own_values(jaxpr):
        around = path(equation)
        for variable in values:
            if (kept := _kept_scopes(around, uses(jaxpr).get(variable, ()))) < len(around):
                leaving[variable] = Exit(around, kept)
    return leaving


@read_once
def module_entries(jaxpr: Any) -> dict[Var, ScopePath]:
    """Return, for each array that enters a scope and leaves none, the scope that it enters.

    Inputs in another form, such as a cast or a slice of stacked weights, are left out.
    """
    entering = {}
    moved = {*jaxpr.invars, *jaxpr.constvars}
    for equation, values in _own_values(jaxpr):
        operands = (atom for atom in equation.invars if not isinstance(atom, Literal))
        if is_move(equation) and moved.issuperset(operands):
            moved.update(values)
            continue
        depth = len(path(equation))
        for variable in values if not is_tag(equation) else ():
            used = uses(jaxpr).get(variable, ())
            deeper = sorted(use[: depth + 1] for use in used if len(use) > depth)
            if deeper and variable not in exits(jaxpr):
                entering[variable] = deeper[0]
    return entering


@read_once
def variables_of_modules(jaxpr: Any) -> frozenset[Var]:
    """Return the variables of a program, and of those inside it, that leave scopes."""
    inner = (p for equation in jaxpr.eqns for p in entered_programs(equation)[0])
    return frozenset(exits(jaxpr)).union(*map(variables_of_modules, inner))


@read_once
def uses(jaxpr: Any) -> dict[Var, frozenset[ScopePath]]:
    """Return the scopes in which a program uses each variable; returning is a use in no scope."""
    scopes: dict[Var, set[ScopePath]] = {
        v: {()} for v in jaxpr.outvars if not isinstance(v, Literal)
    }
    for equation in itertools.filterfalse(_is_look, jaxpr.eqns):
        for atom, places in zip(equation.invars, uses_of_inputs(equation), strict=True):
            if not isinstance(atom, Literal):
                scopes.setdefault(atom, set()).update(places)
    return {variable: frozenset(places) for variable, places in scopes.items()}


def uses_of_inputs(equation: JaxprEqn) -> list[frozenset[ScopePath]]:
    """Return the scopes in which an equation, or the programs inside of it, use each input."""
    around = path(equation)
    places = [frozenset({around})] * len(equation.invars)
    inner, _ = entered_programs(equation)
    if not inner or is_linear_solve(equation):
        return places
    programs = [opened(program)[0] for program in inner]
    first = len(places) - len(programs[0].invars)  # a cond has its index before the inputs
    for i in range(first, len(places)):
        used = [uses(jaxpr).get(jaxpr.invars[i - first], ()) for jaxpr in programs]
        places[i] = frozenset(around + use for of_program in used for use in of_program)
    return places


def is_used(jaxpr: Any, variable: Var) -> bool:
    return not isinstance(variable, DropVar) and variable in uses(jaxpr)


def left_unused(jaxpr: Any, equation: JaxprEqn, variable: Var) -> list[ScopePath]:
    """Return the scopes that a result leaves, innermost first, if nothing uses it."""
    is_value = isinstance(variable.aval, ShapedArray) and variable not in _asides(jaxpr)
    scopes = path(equation) if is_value and not is_used(jaxpr, variable) else ()
    return [scopes[:depth] for depth in range(len(scopes), 0, -1)]


def _kept_scopes(around: ScopePath, places: Iterable[ScopePath]) -> int:
    """The number of scopes around a value that are around all these uses of it."""
    return len(common_start([around, *places]))


class _Views(NamedTuple):
    """A value inside of its scopes, and as `leave` returned it outside of each one."""

    path: ScopePath
    depths: tuple[int, ...]  # the depths of the scopes that were asked for, innermost first
    values: tuple[Any, ...]  # one more

    def at(self, places: Iterable[ScopePath]) -> Any:
        kept = _kept_scopes(self.path, places)
        return self.values[sum(depth > kept for depth in self.depths)]


class ModuleValues(ProgramValues):
    """The values of a program, each with the replacements outside of the scopes that the value
    leaves.

    Uses inside of the scopes see the value itself; all other uses see the replacement, which the
    function from `leave` made. Only ``variables`` are replaced; ``None``: all. With ``outside`` the
    operations of that function stand outside of the scopes, too.
    """

    def __init__(
        self, hook: Hook, jaxpr: Any, variables: frozenset[Var] | None, outside: bool
    ) -> None:
        super().__init__(hook)
        leaving = exits(jaxpr).items()
        self._exits = {v: e for v, e in leaving if variables is None or v in variables}
        self._outside = outside
        self._views: dict[Var, _Views] = {}

    def leave(self, variable: Var, scopes: ScopePath) -> Callable[[Any], Any] | None:
        """The function of the values of a variable that leave scopes of the program, or None."""
        raise NotImplementedError

    def write(self, variables: Sequence[Var], values: Sequence[Any]) -> None:
        super().write(variables, values)
        for variable in [v for v in variables if v in self._exits] if self._exits else ():
            exit = self._exits[variable]
            views, depths = [self.read(variable)], []
            for scopes in exit.left:
                if (function := self.leave(variable, scopes)) is not None:
                    left = len(exit.path) - len(scopes) + 1 if self._outside else 0
                    with outside_of_scopes(left):
                        views.append(function(views[-1]))
                    depths.append(len(scopes))
            if depths:
                self._views[variable] = _Views(exit.path, tuple(depths), tuple(views))

    def inputs(self, equation: JaxprEqn) -> list:
        """Return the inputs of an equation, as they are at its place."""
        return self._read_at(equation.invars, lambda: uses_of_inputs(equation))

    def outputs(self, jaxpr: Any) -> list:
        """Return the results of the program: they leave all its scopes."""
        return self._read_at(jaxpr.outvars, lambda: [[()]] * len(jaxpr.outvars))

    def _read_at(self, atoms: Sequence, places: Callable[[], Sequence]) -> list:
        known = self._views
        views = [None if isinstance(a, Literal) else known.get(a) for a in atoms] if known else ()
        if not any(views):
            return [self.read(atom) for atom in atoms]
        triples = zip(atoms, views, places(), strict=True)
        return [self.read(a) if view is None else view.at(used) for a, view, used in triples]
