"""The inputs that each equation and each variable of a program depends on."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var
from jax.extend.core.primitives import stop_gradient_p, while_p

from clipgrad._names.places import Place
from clipgrad._programs import (
    differentiated_programs,
    holds_floats,
    is_reference,
    opened,
    scan_counts,
    tracked_programs,
)

Sources = frozenset[int]  # positions among the inputs of the program
_NONE: Sources = frozenset()
_ONE: Sources = frozenset((0,))
# Nothing is differentiated through these: of a loop of unknown length JAX refuses what would be.
STOPPING = frozenset((stop_gradient_p, while_p))


def dependence(
    program: Any, inputs: Iterable[int] | None = None
) -> dict[tuple[int, ...], list[Sources]]:
    """Those of some inputs, or of all, that each operand depends on, by the key of its `Place`.

    Equations inside of others are among them, as far as operations are followed one by one there.
    """
    walk = _Walk(tracked_programs, lambda equation, variable: True)
    walk.start(program, inputs)
    return walk.operands


def sources_of_results(program: Any) -> list[Sources]:
    """The inputs that each result of a program depends on, also by the choice of a branch."""
    walk = _Walk(tracked_programs, lambda equation, variable: True, with_control=True)
    return walk.start(program, None)


def active_variables(program: Any, inputs: Iterable[int]) -> frozenset[Var]:
    """Return the variables that depend on these inputs so that they can be differentiated by them.

    Those of programs inside are among them. Only such a variable has a cotangent. One of a program
    with several calls is among them if it depends on the inputs in one of the calls.
    """
    walk = _Walk(differentiated_programs, _passes_derivatives)
    walk.start(program, [i for i in inputs if holds_floats(opened(program)[0].invars[i])])
    return frozenset(walk.variables)


def active_results(equation: JaxprEqn, active: Sequence[bool]) -> list[bool]:
    """For each result whether it can be differentiated by the operands that are active."""
    walk = _Walk(differentiated_programs, _passes_derivatives)
    pairs = zip(equation.invars, active, strict=True)
    return walk.passed(equation, [_ONE if on and holds_floats(v) else _NONE for v, on in pairs])


def data_results(equation: JaxprEqn, operand: int) -> list[bool]:
    """For each result whether an operand is computed with, not used to choose it or to end it."""
    walk = _Walk(tracked_programs, lambda equation, variable: True)
    return walk.passed(
        equation, [_ONE if i == operand else _NONE for i in range(len(equation.invars))]
    )


def _passes_derivatives(equation: JaxprEqn, variable: Var) -> bool:
    is_floating = holds_floats(variable) or is_reference(variable)
    return equation.primitive not in STOPPING and is_floating


class _Walk:
    """One walk through a program and the programs inside, with what each variable depends on.

    Args:
      programs: the programs inside of an equation that the walk enters.
      passes: whether what an equation depends on passes to a result.
      with_control: whether results depend on what chooses a branch or ends a loop.
    """

    def __init__(
        self,
        programs: Callable[[JaxprEqn], list[Any]],
        passes: Callable[[JaxprEqn, Var], bool],
        with_control: bool = False,
    ):
        self._programs, self._passes, self._with_control = programs, passes, with_control
        self.operands: dict[tuple[int, ...], list[Sources]] = {}
        self.variables: set[Var] = set()  # those that depend on something

    def start(self, program: Any, inputs: Iterable[int] | None) -> list[Sources]:
        """Walk through a program; returns what each result depends on."""
        jaxpr = opened(program)[0]
        chosen = set(range(len(jaxpr.invars)) if inputs is None else inputs)
        sources = [frozenset({i} & chosen) for i in range(len(jaxpr.invars))]
        return self._through(jaxpr, sources, None)

    def passed(self, equation: JaxprEqn, operands: list[Sources]) -> list[bool]:
        """For each result of an equation alone whether it depends on something."""
        results = zip(equation.outvars, self._results(Place(equation), operands), strict=True)
        return [bool(sources) and self._passes(equation, v) for v, sources in results]

    def _through(
        self, jaxpr: Any, inputs: Sequence[Sources], parent: Place | None
    ) -> list[Sources]:
        known: dict[Var, Sources] = dict(zip(jaxpr.invars, inputs, strict=True))
        for equation in jaxpr.eqns:
            place = Place(equation, parent)
            operands = [
                _NONE if type(v) is Literal else known.get(v, _NONE) for v in equation.invars
            ]
            self.operands[place.key] = operands
            results = zip(equation.outvars, self._results(place, operands), strict=True)
            known |= {v: own for v, own in results if self._passes(equation, v)}
            everything = _NONE.union(*operands)
            # What an operation writes to a reference, others read.
            changed = [v for v in equation.invars if is_reference(v)]
            known |= {v: everything for v in changed}
        self.variables |= {v for v, sources in known.items() if sources}
        return [_NONE if type(v) is Literal else known.get(v, _NONE) for v in jaxpr.outvars]

    def _results(self, place: Place, operands: list[Sources]) -> list[Sources]:
        found, name = self._by_data(place, operands), place.equation.primitive.name
        if not self._with_control or name not in ("cond", "while"):
            return found
        control = operands[0] if name == "cond" else _NONE.union(*operands)
        return [own | control for own in found]

    def _by_data(self, place: Place, operands: list[Sources]) -> list[Sources]:
        equation, name = place.equation, place.equation.primitive.name
        programs = [opened(program)[0] for program in self._programs(equation)]
        if not programs:
            return [_NONE.union(*operands)] * len(equation.outvars)
        if name == "scan":
            return self._loop(place, programs[0], operands, *scan_counts(equation))
        if name == "while":
            condition, constants = (equation.params[f"{k}_nconsts"] for k in ("cond", "body"))
            rest = operands[condition:]
            return self._loop(place, programs[0], rest, constants, len(rest) - constants)
        given = operands[1:] if name == "cond" else operands
        each = [self._through(jaxpr, given, place) for jaxpr in programs]
        return [_NONE.union(*results) for results in zip(*each, strict=True)]

    def _loop(
        self, place: Place, body: Any, inputs: list[Sources], constants: int, carried: int
    ) -> list[Sources]:
        end = constants + carried
        written = _NONE.union(*inputs)  # what a step writes to a reference, the next may read
        pairs = zip(inputs, body.invars, strict=True)
        inputs = [written if is_reference(v) else own for own, v in pairs]
        while True:
            outputs = self._through(body, inputs, place)
            state = [a | b for a, b in zip(inputs[constants:end], outputs, strict=False)]
            if state == inputs[constants:end]:
                return outputs
            inputs = [*inputs[:constants], *state, *inputs[end:]]
