"""The values with names of a program, and where each is."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Var

import clipgrad._jaxpr as _jaxpr
import clipgrad._names as _names


class NamedValue(NamedTuple):
    """A value with a name, at its position in a program.

    Attributes:
      position: the key of its notes in a `ValueHook`.
      name: the tag, or the path of the module.
      kind: ``"tag"`` or ``"module"``.
      place: the equation that computes it, and those around.
      variable: the result of the equation.
    """

    position: tuple[int, ...]
    name: str
    kind: str
    place: _names.Place
    variable: Var

    @property
    def in_while(self) -> bool:
        """Whether it is in a `while` loop, so that it has no cotangent."""
        return any(e.primitive.name == "while" for e in self.place.chain[1:])

    @property
    def maps(self) -> list[JaxprEqn]:
        """The `shard_map`s around it, outermost first."""
        around = reversed(self.place.chain[1:])
        return [equation for equation in around if equation.primitive.name == "shard_map"]


def named_values(program: Any) -> Iterator[NamedValue]:
    """The floating values that a `ValueHook` sees."""
    for own, place, jaxpr, scopes in _names.placed_equations(program, _jaxpr.value_programs):
        equation = place.equation
        for output, variable in enumerate(equation.outvars):
            if not _jaxpr.holds_floats(variable):
                continue
            position = (*own, output)
            if equation.primitive.name == "name" and not _names.is_mark(equation):
                yield NamedValue((*position, 0), equation.params["name"], "tag", place, variable)
            for left in _left(jaxpr, equation, variable):
                name = "/".join((*scopes, *left))
                yield NamedValue((*position, len(left)), name, "module", place, variable)


def _left(jaxpr: Any, equation: JaxprEqn, variable: Var) -> list[_names.ScopePath]:
    exit = _names.exits(jaxpr).get(variable)
    return exit.left if exit else _names.left_unused(jaxpr, equation, variable)
