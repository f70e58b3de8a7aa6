"""Additions to a program, such as statistics: they are no values of the modules around them.

Marks are tags, because all transformations keep them, and they cost nothing in a compiled program.
"""

import weakref
from typing import Any

from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Literal, Var

_LOOK, _ASIDE = "clipgrad: look", "clipgrad: aside"

_ASIDES: weakref.WeakKeyDictionary[Any, frozenset[Var]] = weakref.WeakKeyDictionary()


def look(x: Any) -> Any:
    """A copy of a value to compute statistics of, which is no use of it, and has no derivative."""
    return lax.stop_gradient(checkpoint_name(x, _LOOK))


def aside(x: Any) -> Any:
    """A result that was added to the program."""
    return checkpoint_name(x, _ASIDE)


def is_mark(equation: JaxprEqn) -> bool:
    """Whether an equation is one of these marks, and no tag of the user's."""
    return equation.primitive.name == "name" and equation.params["name"] in (_LOOK, _ASIDE)


def is_look(equation: JaxprEqn) -> bool:
    """Whether an equation only looks at its operand."""
    return equation.primitive.name == "name" and equation.params["name"] == _LOOK


def asides(jaxpr: Any) -> frozenset[Var]:
    """Return the variables that were added to a program, and leave it or equations in it.

    Where statistics leave the program inside of an equation, they are among its results, and seem
    to leave the modules around it.
    """
    if jaxpr not in _ASIDES:
        marks = list(filter(is_mark, jaxpr.eqns))
        atoms = [v for mark in marks for v in mark.outvars]
        atoms += [v for mark in marks if not is_look(mark) for v in mark.invars]
        _ASIDES[jaxpr] = frozenset(atom for atom in atoms if not isinstance(atom, Literal))
    return _ASIDES[jaxpr]
