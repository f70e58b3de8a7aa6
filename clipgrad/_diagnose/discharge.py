"""A program without references and prints, whose operations a tape can run one by one."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from clipgrad._programs import (
    Hook,
    Use,
    bind,
    called_program,
    equations,
    evaluate,
    is_jit,
    is_print,
    is_reference,
    is_scan,
    opened,
    operation_name,
    scan_counts,
    use_of,
)


class _Cell:
    """A reference: what its array holds now."""

    def __init__(self, value: Any):
        self.value = value


def discharged(program: Any) -> Any:
    """The program with values instead of references, and without prints.

    A scan carries the arrays of its references. Each other operation on a reference, also a branch
    or a loop of unknown length, becomes one function of the arrays before it.
    """
    every = list(equations(program))
    has_prints = any(map(is_print, every))
    if not (has_prints or any(is_reference(v) for e in every for v in [*e.invars, *e.outvars])):
        return program
    types = [v.aval for v in opened(program)[0].invars]
    return jax.make_jaxpr(lambda *xs: evaluate(program, xs, _Discharge()))(*types)


class _Discharge(Hook):
    """Has references replaced by cells while a program is evaluated."""

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results; None where there is nothing to discharge."""
        if is_print(equation):
            return []
        if use_of(equation) is Use.MAKES_REFERENCE:
            return [_Cell(inputs[0])]
        if use_of(equation) is Use.ENDS_REFERENCE:
            return [inputs[0].value]
        if not any(type(x) is _Cell for x in inputs):
            return None
        if is_jit(equation):
            return evaluate(called_program(equation), inputs, self)
        return (
            self._scan(equation, inputs) if is_scan(equation) else _of_references(equation, inputs)
        )

    def _scan(self, equation: JaxprEqn, inputs: list) -> list:
        constants, carried = scan_counts(equation)
        split, params = constants + carried, equation.params

        def step(state: Any, elements: Any) -> Any:
            left = iter(state[0])
            now = [_Cell(next(left)) if type(x) is _Cell else x for x in inputs[:constants]]
            results = evaluate(params["jaxpr"], [*now, *state[1], *elements], self)
            return (_held(now), results[:carried]), results[carried:]

        start = _held(inputs), inputs[constants:split]
        (held, last), stacked = lax.scan(
            step, start, inputs[split:], params["length"], params["reverse"]
        )
        _put(inputs, held)
        return [*last, *stacked]


def _of_references(equation: JaxprEqn, inputs: list) -> list:
    """An operation on references, as a function of the arrays before it."""
    where = [i for i, x in enumerate(inputs) if type(x) is _Cell]

    def run(*xs: Any) -> Any:
        operands = [jax.new_ref(x) if i in where else x for i, x in enumerate(xs)]
        results = bind(equation, operands)
        return results, [jax.freeze(operands[i]) for i in where]

    run.__name__ = operation_name(equation)
    results, held = jax.jit(run)(*(x.value if type(x) is _Cell else x for x in inputs))
    _put(inputs, held)
    return results


def _held(inputs: Sequence) -> list:
    """The arrays that the references among some inputs hold."""
    return [x.value for x in inputs if type(x) is _Cell]


def _put(inputs: Sequence, values: Sequence) -> None:
    """Have the references among some inputs hold these values."""
    for cell, value in zip((x for x in inputs if type(x) is _Cell), values, strict=True):
        cell.value = value
