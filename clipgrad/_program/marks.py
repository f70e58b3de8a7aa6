"""From an equation of a gradient back to the equation of the function that it is derived from."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from clipgrad._jaxpr import held_programs, map_programs, opened
from clipgrad._names import Place, marks, with_mark


class Marks:
    """Marks each equation of a program by its position, inside of others too.

    JAX keeps the scopes of an equation in all that it derives from it: what the backward pass
    needs, transposes, what a rule computes. A program that is called several times stays one
    program.

    Attributes:
      program: the program without marks.
      marked: the same with marks.
    """

    def __init__(self, program: Any):
        self.program = program
        self._numbers: dict[int, int] = {}  # of the jaxprs, by their id
        self._marked: dict[int, Any] = {}
        self._positions: dict[int, int] = {}  # of the equations, by their id
        self.marked = self._with_marks(program)

    def place(self, derived: Place) -> Place | None:
        """The equation that a place in a gradient is derived from.

        Where a rule of the user's computes it, this is the equation with the rule.
        """
        found, programs = None, [self.program]
        for number, position in (m for e in reversed(derived.chain) for m in marks(e)):
            known = {self._numbers.get(id(opened(program)[0])): program for program in programs}
            if number in known:
                found = Place(opened(known[number])[0].eqns[position], found)
                programs = held_programs(found.equation)
        return found

    def order(self, place: Place) -> tuple[int, ...]:
        """When the program comes to an equation: the positions of those around, and its own."""
        return tuple(self._positions[id(e)] for e in reversed(place.chain))

    def common_operand(self, places: Sequence[Place]) -> Place | None:
        """The operation that computes the one operand that some operations have in common."""
        sets = [{v for v in p.equation.invars if type(v) is not Literal} for p in places]
        common = set.intersection(*sets) if sets else set()
        if len(common) != 1 or len({p.parent and p.parent.key for p in places}) != 1:
            return None
        around = places[0].parent
        programs = [self.program] if around is None else held_programs(around.equation)
        made = (e for p in programs for e in opened(p)[0].eqns if common & {*e.outvars})
        return next((Place(equation, around) for equation in made), None)

    def _with_marks(self, program: Any) -> Any:
        jaxpr = opened(program)[0]
        if id(jaxpr) not in self._marked:
            number = self._numbers[id(jaxpr)] = len(self._numbers)
            found = [self._equation(e, number, i) for i, e in enumerate(jaxpr.eqns)]
            self._marked[id(jaxpr)] = jaxpr.replace(eqns=found)
        own = self._marked[id(jaxpr)]
        return own if program is jaxpr else program.replace(jaxpr=own)

    def _equation(self, equation: JaxprEqn, number: int, position: int) -> JaxprEqn:
        self._positions[id(equation)] = position
        inner = map_programs(equation, self._with_marks)
        marked = with_mark(equation, number, position)
        return marked.replace(params={**equation.params, **inner}) if inner else marked
