"""What the values of a tape are computed from: arguments of the loss, and random numbers."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal

from clipgrad._diagnose.segments import as_program
from clipgrad._diagnose.tape import Entry, Tape
from clipgrad._programs import (
    Chain,
    Use,
    equations,
    flow,
    held_programs,
    is_cond,
    is_while,
    tracked_programs,
    use_of,
)


class Sources(NamedTuple):
    """What a value is computed from, or chosen by.

    Attributes:
      arguments: the inputs of the loss.
      is_drawn: whether random numbers are among it.
    """

    arguments: frozenset[int] = frozenset()
    is_drawn: bool = False


def sources(tape: Tape, atoms: Iterable[Any]) -> Sources:
    """What some values of a tape are computed from."""
    known = _known(tape)
    return _joined(*(_read(known, atom) for atom in atoms))


_NOTHING = Sources()
_KNOWN: weakref.WeakKeyDictionary[Tape, dict[Any, Sources]] = weakref.WeakKeyDictionary()


def _joined(*each: Sources) -> Sources:
    arguments = frozenset().union(*(sources.arguments for sources in each))
    return Sources(arguments, any(sources.is_drawn for sources in each))


def _known(tape: Tape) -> dict[Any, Sources]:
    """The sources of all variables of a tape."""
    if tape not in _KNOWN:
        if tape.within is None:
            inputs = [Sources(frozenset({i})) for i in range(len(tape.jaxpr.invars))]
        else:
            inputs = _of_inputs(tape, tape.within.entry)
        _KNOWN[tape] = _flowed(tape.jaxpr, inputs)
    return _KNOWN[tape]


def _of_inputs(tape: Tape, holder: Entry) -> list[Sources]:
    """The sources of the inputs of a program inside, which a loop carries around, too."""
    outside = _known(holder.tape)
    program = as_program([holder.equation], holder.tape.jaxpr, holder.equation.outvars)
    inside = _flowed(program, [outside.get(v, _NOTHING) for v in program.invars])
    behind = (tape.outside(i)[1] for i in range(len(tape.jaxpr.invars)))
    # The condition of a `while` is not followed; it is only looked at as the loop begins.
    pairs = zip(tape.jaxpr.invars, behind, strict=True)
    return [inside[v] if v in inside else _read(outside, atom) for v, atom in pairs]


def _read(known: dict[Any, Sources], atom: Any) -> Sources:
    return _NOTHING if type(atom) is Literal else known.get(atom, _NOTHING)


def _flowed(program: Any, inputs: list[Sources]) -> dict[Any, Sources]:
    known: dict[Any, Sources] = {}
    flow(program, inputs, _step, _joined, known=known)
    return known


def _step(chain: Chain, operands: list, inside: Callable[[], list]) -> list[Sources]:
    equation = chain[0]
    control = operands[:1] if is_cond(equation) else operands if is_while(equation) else []
    chosen_by = _joined(Sources(is_drawn=_draws(equation)), *control)
    return [_joined(chosen_by, result) for result in inside()]


def _draws(equation: JaxprEqn) -> bool:
    """Whether an operation draws random numbers, or holds one that does and is not followed."""
    whole = [] if tracked_programs(equation) else held_programs(equation)
    return any(
        use_of(e) is Use.DRAWS for e in [equation, *(e for p in whole for e in equations(p))]
    )
