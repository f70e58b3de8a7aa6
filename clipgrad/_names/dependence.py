"""The inputs that each equation and each variable of a program depends on."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import stop_gradient_p, while_p

from clipgrad._programs import (
    Chain,
    differentiated_programs,
    flow,
    flow_through,
    holds_floats,
    is_cond,
    is_reference,
    is_while,
    opened,
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
    """The inputs on which each operand depends, by the key of the equation's `Place`.

    ``inputs`` limits the answer to some inputs. Equations inside of others have entries, too, if
    their operations are followed one by one.
    """
    by_place: dict[tuple[int, ...], list[Sources]] = {}

    def step(chain: Chain, operands: list, inside: Callable[[], list]) -> list[Sources]:
        by_place[tuple(map(id, chain))] = operands
        return inside()

    flow(program, _each(program, inputs), step, _joined_sources, tracked_programs)
    return by_place


def sources_of_results(program: Any) -> list[Sources]:
    """The inputs on which each result of a program depends, by a chosen branch, too."""

    def step(chain: Chain, operands: list, inside: Callable[[], list]) -> list[Sources]:
        control = operands[:1] if is_cond(chain[0]) else operands if is_while(chain[0]) else []
        return [sources.union(*control) for sources in inside()]

    return flow(program, _each(program, None), step, _joined_sources, tracked_programs)


def active_variables(program: Any, inputs: Iterable[int]) -> frozenset[Var]:
    """Return the variables that can be differentiated by these inputs.

    Only such variables have cotangents. Variables of programs inside are included; if a program is
    called several times, one call decides.
    """
    known: dict[Var, Sources] = {}
    chosen = [i for i in inputs if holds_floats(opened(program)[0].invars[i])]
    sources = _each(program, chosen)
    flow(program, sources, _derivatives, _joined_sources, differentiated_programs, known)
    return frozenset(variable for variable, origins in known.items() if origins)


def active_results(equation: JaxprEqn, active: Sequence[bool]) -> list[bool]:
    """For each result, whether an active operand can differentiate it."""
    pairs = zip(equation.invars, active, strict=True)
    operands = [_ONE if on and holds_floats(v) else _NONE for v, on in pairs]
    results = flow_through(
        equation, operands, _derivatives, _joined_sources, differentiated_programs
    )
    return list(map(bool, results))


def data_results(equation: JaxprEqn, operand: int) -> list[bool]:
    """For each result, whether an operand is computed with, and does not only choose or end it."""
    operands = [_ONE if i == operand else _NONE for i in range(len(equation.invars))]
    by_data = lambda chain, operands, inside: inside()  # noqa: E731
    return list(map(bool, flow_through(equation, operands, by_data, _joined_sources)))


def _derivatives(chain: Chain, operands: list, inside: Callable[[], list]) -> list[Sources]:
    """The inputs that each result can be differentiated by."""
    equation = chain[0]
    if equation.primitive in STOPPING:
        return [_NONE] * len(equation.outvars)
    pairs = zip(equation.outvars, inside(), strict=True)
    return [sources if holds_floats(v) or is_reference(v) else _NONE for v, sources in pairs]


def _joined_sources(*sources: Sources) -> Sources:
    return _NONE.union(*sources)


def _each(program: Any, chosen: Iterable[int] | None) -> list[Sources]:
    """For each input of a program: the input itself if it is chosen, else nothing."""
    count = len(opened(program)[0].invars)
    some = set(range(count) if chosen is None else chosen)
    return [frozenset({i} & some) for i in range(count)]
