"""What each equation of a program depends on."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal, Var

from clipgrad._jaxpr import Place, is_reference, opened, scan_counts, tracked_programs

Sources = frozenset[int]  # positions among the inputs of the program
_NONE: Sources = frozenset()


def dependence(program: Any) -> dict[tuple[int, ...], list[Sources]]:
    """The inputs that each operand depends on, by the key of the `Place` of its equation.

    Equations inside of others are among them, as far as operations are followed one by one there.
    """
    walk = _Walk()
    jaxpr = opened(program)[0]
    walk.through(jaxpr, [frozenset([i]) for i in range(len(jaxpr.invars))], None)
    return walk.found


class _Walk:
    """One walk through a program and all programs inside, with what each variable depends on."""

    def __init__(self):
        self.found: dict[tuple[int, ...], list[Sources]] = {}

    def through(self, jaxpr: Any, inputs: Sequence[Sources], parent: Place | None) -> list[Sources]:
        known: dict[Var, Sources] = dict(zip(jaxpr.invars, inputs, strict=True))
        for equation in jaxpr.eqns:
            place = Place(equation, parent)
            operands = [
                _NONE if type(v) is Literal else known.get(v, _NONE) for v in equation.invars
            ]
            self.found[place.key] = operands
            outputs = self._results(place, operands)
            known |= dict(zip(equation.outvars, outputs, strict=True))
            everything = _NONE.union(*operands)
            # What an operation writes to a reference, others read.
            changed = [v for v in equation.invars if is_reference(v)]
            known |= {v: everything for v in changed}
        return [_NONE if type(v) is Literal else known.get(v, _NONE) for v in jaxpr.outvars]

    def _results(self, place: Place, operands: list[Sources]) -> list[Sources]:
        equation, name = place.equation, place.equation.primitive.name
        programs = [opened(program)[0] for program in tracked_programs(equation)]
        if not programs:
            return [_NONE.union(*operands)] * len(equation.outvars)
        if name == "scan":
            return self._loop(place, programs[0], operands, *scan_counts(equation))
        if name == "while":
            condition, constants = (equation.params[f"{k}_nconsts"] for k in ("cond", "body"))
            rest = operands[condition:]
            return self._loop(place, programs[0], rest, constants, len(rest) - constants)
        given = operands[1:] if name == "cond" else operands
        each = [self.through(jaxpr, given, place) for jaxpr in programs]
        return [_NONE.union(*results) for results in zip(*each, strict=True)]

    def _loop(
        self, place: Place, body: Any, inputs: list[Sources], constants: int, carried: int
    ) -> list[Sources]:
        end = constants + carried
        written = _NONE.union(*inputs)  # what a step writes to a reference, the next may read
        pairs = zip(inputs, body.invars, strict=True)
        inputs = [written if is_reference(v) else own for own, v in pairs]
        while True:
            outputs = self.through(body, inputs, place)
            state = [a | b for a, b in zip(inputs[constants:end], outputs, strict=False)]
            if state == inputs[constants:end]:
                return outputs
            inputs = [*inputs[:constants], *state, *inputs[end:]]
