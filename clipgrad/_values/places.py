"""The values with names of a program, and where each is."""

import math
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
      jaxpr: the program that the equation is in.
      variable: the result of the equation.
      scopes: the scopes of this program that the value leaves; none for a tag.
    """

    position: tuple[int, ...]
    name: str
    kind: str
    place: _names.Place
    jaxpr: Any
    variable: Var
    scopes: _names.ScopePath

    @property
    def in_while(self) -> bool:
        """Whether it is in a `while` loop, so that it has no cotangent."""
        return any(e.primitive.name == "while" for e in self.place.chain[1:])

    @property
    def maps(self) -> list[JaxprEqn]:
        """The `shard_map`s around it, outermost first."""
        around = reversed(self.place.chain[1:])
        return [equation for equation in around if equation.primitive.name == "shard_map"]

    def time(self, steps: tuple[int, ...] = ()) -> tuple[float, ...]:
        """When it is computed, at these steps of the scans around; a tag is before its module."""
        *around, number, output, depth = self.position
        left = iter(steps)
        moment: list[float] = []
        holders = reversed(self.place.chain[1:])
        for i, equation in enumerate(holders):
            own, program = around[2 * i : 2 * i + 2]
            is_scan = equation.primitive.name == "scan"
            step = next(left, 0) if is_scan else 0
            moment += [own, -step if is_scan and equation.params["reverse"] else step, program]
        return (*moment, number, math.inf, output, -math.inf if self.kind == "tag" else -depth)


def named_values(program: Any) -> list[NamedValue]:
    """Return the floating values that a `ValueHook` sees, in the order of computation."""
    return sorted(_values_of(program), key=lambda value: value.time())


def _values_of(program: Any) -> Iterator[NamedValue]:
    for own, place, jaxpr, scopes in _names.placed_equations(program, _jaxpr.value_programs):
        equation = place.equation
        for output, variable in enumerate(equation.outvars):
            if not _jaxpr.holds_floats(variable):
                continue
            position = (*own, output)
            rest = (place, jaxpr, variable)
            if equation.primitive.name == "name" and not _names.is_mark(equation):
                yield NamedValue((*position, 0), equation.params["name"], "tag", *rest, ())
            for left in _left(jaxpr, equation, variable):
                name = "/".join((*scopes, *left))
                yield NamedValue((*position, len(left)), name, "module", *rest, left)


def _left(jaxpr: Any, equation: JaxprEqn, variable: Var) -> list[_names.ScopePath]:
    exit = _names.exits(jaxpr).get(variable)
    return exit.left if exit else _names.left_unused(jaxpr, equation, variable)
