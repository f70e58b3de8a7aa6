"""The value whose cotangents a program adds up, and how many there are."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._jaxpr import opened, scan_counts, tracked_programs
from clipgrad._names import Place
from clipgrad._program.gradient import GradientProgram
from clipgrad._program.marks import Marks


class SummedValue(NamedTuple):
    """A value that is used several times.

    Attributes:
      argument: the position of the input that it is, or None.
      place: the operation of the function that computes it, or the scan that carries it.
      loops: how many loops are around it.
      uses: how many cotangents are summed.
      scans: those scans of the function at whose steps they are summed.
    """

    argument: int | None
    place: Place | None
    loops: int
    uses: int
    scans: tuple[Place, ...] = ()


def summed_value(gradient: GradientProgram, place: Place) -> SummedValue | None:
    """The value whose cotangents a sum of a gradient adds up; None if it is not found.

    The value is the operand that all operations have in common whose cotangents are summed. Where
    there is no such operand, the sum is followed to the operation that consumes it: the one that
    computes the value, since the backward pass goes from it to its operands.
    """
    level, v = _Level.around(gradient, place), place.equation.outvars[0]
    scans: list[Place] = []
    while True:
        known = level.common_operand(v)
        while (sums := level.sums(v)) and (not known or level.common_operand(sums[0]) == known):
            v = sums[0]
        consumers = level.derived_from(level.users(v))
        maker = known or max(consumers, key=gradient.marks.order, default=None)
        if maker:
            return SummedValue(None, maker, level.loops, level.terms(v), (*scans,))
        position = next((i for i, out in enumerate(level.jaxpr.outvars) if out is v), None)
        if position is None:
            return None
        if level.parent is None:
            first = len(level.jaxpr.outvars) - len(gradient.chosen)
            argument = gradient.chosen[position - first]
            return SummedValue(argument, None, 0, level.terms(v), (*scans,))
        scan = gradient.marks.place(level.parent)
        if level.is_carried(position) and not level.adds_up(position):
            return SummedValue(None, scan, level.loops, level.terms(v), (*scans,))
        scans += [scan] if scan and level.is_carried(position) else []
        v = level.parent.equation.outvars[position]
        level = _Level.around(gradient, level.parent)


class _Level:
    """One program of a gradient, with its equations by the variables that they compute."""

    def __init__(self, jaxpr: Any, parent: Place | None, marks: Marks):
        self.jaxpr, self.parent, self.marks = jaxpr, parent, marks
        self.makers = {v: equation for equation in jaxpr.eqns for v in equation.outvars}

    @classmethod
    def around(cls, gradient: GradientProgram, place: Place) -> "_Level":
        """The program that an equation is in."""
        return cls(place.program_in(gradient.program), place.parent, gradient.marks)

    @property
    def loops(self) -> int:
        chain = self.parent.chain if self.parent else []
        return sum(e.primitive.name in ("scan", "while") for e in chain)

    def users(self, v: Var) -> list[JaxprEqn]:
        return [e for e in self.jaxpr.eqns if any(atom is v for atom in e.invars)]

    def sums(self, v: Var) -> list[Var]:
        """The sums that a variable is a term of."""
        return [e.outvars[0] for e in self.users(v) if _is_sum(e)]

    def end_of_sum(self, v: Var) -> Var:
        while sums := self.sums(v):
            v = sums[0]
        return v

    def derived_from(self, equations: Iterable[JaxprEqn]) -> list[Place]:
        """The operations of the function that equations of this program are derived from."""
        found = (self.marks.place(Place(equation, self.parent)) for equation in equations)
        return [place for place in found if place]

    def common_operand(self, v: Var) -> Place | None:
        """The operation that computes the one operand that all terms of a sum are derived from."""
        makers = self.makers_of_terms(v)
        places = self.derived_from(equation for equation in makers if equation)
        return self.marks.common_operand(places) if None not in makers else None

    def is_carried(self, position: int) -> bool:
        """Whether a result is what a scan carries."""
        around = self.parent.equation if self.parent else None
        return bool(around and around.primitive.name == "scan") and position < self._counts[1]

    @property
    def _counts(self) -> tuple[int, int]:
        assert self.parent is not None
        return scan_counts(self.parent.equation)

    def adds_up(self, position: int) -> bool:
        """Whether a scan only adds to what it carries there: the cotangent of a constant."""
        state = self.jaxpr.invars[self._counts[0] + position]
        users = self.users(state)
        result = self.jaxpr.outvars[position]
        return bool(users) and all(
            _is_sum(e) and self.end_of_sum(e.outvars[0]) is result for e in users
        )

    def terms(self, v: Any) -> int:
        """The number of cotangents in the sum of a variable, at all steps of the scans inside."""
        equation = None if isinstance(v, Literal) else self.makers.get(v)
        if equation is None:
            return 0 if v in self._states() else 1
        if _is_sum(equation):
            return sum(map(self.terms, equation.invars))
        programs, position = tracked_programs(equation), equation.outvars.index(v)
        place = Place(equation, self.parent)
        inner = [_Level(opened(program)[0], place, self.marks) for program in programs]
        if not inner or equation.primitive.name in ("while", "shard_map"):
            return 1
        if equation.primitive.name != "scan":
            return max(level.terms(level.jaxpr.outvars[position]) for level in inner)
        (body,) = inner
        if not body.is_carried(position) or not body.adds_up(position):
            return 1
        start = equation.invars[body._counts[0] + position]
        maker = None if isinstance(start, Literal) else self.makers.get(start)
        before = self.terms(start) if maker is not None and _is_sum(maker) else 0
        return before + equation.params["length"] * body.terms(body.jaxpr.outvars[position])

    def makers_of_terms(self, v: Any) -> list[JaxprEqn | None]:
        """The operations that compute the terms of a sum; None for a term from outside."""
        equation = None if isinstance(v, Literal) else self.makers.get(v)
        if equation is None:
            return [] if v in self._states() else [None]
        if not _is_sum(equation):
            return [equation]
        return [e for atom in equation.invars for e in self.makers_of_terms(atom)]

    def _states(self) -> list[Var]:
        if self.parent is None or self.parent.equation.primitive.name != "scan":
            return []
        constants, carried = self._counts
        return self.jaxpr.invars[constants : constants + carried]


def _is_sum(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "add_any"
