"""A program without references and prints, whose operations a tape can run one by one."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from clipgrad._jaxpr import (
    CALLS,
    JIT,
    PRINTS,
    REMAT,
    Hook,
    bind,
    called_program,
    equations,
    evaluate,
    is_reference,
    opened,
    scan_counts,
)


class _Cell:
    """A reference: what its array holds now."""

    def __init__(self, value: Any):
        self.value = value


def discharged(program: Any) -> Any:
    """The program with values in place of references, and without prints.

    Each read and each write of a reference becomes a function of the array before it. A loop
    carries the arrays of the references that it reads.
    """
    names = {equation.primitive.name for equation in equations(program)}
    has_references = any(
        is_reference(v) for e in equations(program) for v in [*e.invars, *e.outvars]
    )
    if not (has_references or names & PRINTS):
        return program
    types = [v.aval for v in opened(program)[0].invars]
    return jax.make_jaxpr(lambda *xs: evaluate(program, xs, _Discharge()))(*types)


class _Discharge(Hook):
    """Has references replaced by cells while a program is evaluated."""

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results; None where there is nothing to discharge."""
        name = equation.primitive.name
        if name in PRINTS:
            return []
        if name == "new_ref":
            return [_Cell(inputs[0])]
        if name == "freeze":
            return [inputs[0].value]
        if not any(type(x) is _Cell for x in inputs):
            return None
        if name in JIT | CALLS | REMAT:
            return evaluate(called_program(equation), inputs, self)
        if name in ("scan", "while", "cond"):
            return {"scan": self._scan, "while": self._while, "cond": self._cond}[name](
                equation, inputs
            )
        return _of_reference(equation, inputs)

    def _scan(self, equation: JaxprEqn, inputs: list) -> list:
        constants, carried = scan_counts(equation)
        split, params = constants + carried, equation.params

        def step(state: Any, own: Any) -> Any:
            cells, carry = state
            now = _with(inputs[:constants], cells)
            results = evaluate(called_program(equation), [*now, *carry, *own], self)
            return (_values(now), results[:carried]), results[carried:]

        start = _values(inputs[:constants]), inputs[constants:split]
        (cells, last), stacked = lax.scan(
            step, start, inputs[split:], params["length"], params["reverse"]
        )
        _put(inputs, cells)
        return [*last, *stacked]

    def _while(self, equation: JaxprEqn, inputs: list) -> list:
        params = equation.params
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]

        def again(state: Any) -> Any:
            now = _with(inputs[:second], state[0])
            return evaluate(params["cond_jaxpr"], [*now[:first], *state[1]], self)[0]

        def body(state: Any) -> Any:
            now = _with(inputs[:second], state[0])
            return _values(now), evaluate(params["body_jaxpr"], [*now[first:], *state[1]], self)

        cells, last = lax.while_loop(again, body, (_values(inputs[:second]), inputs[second:]))
        _put(inputs, cells)
        return last

    def _cond(self, equation: JaxprEqn, inputs: list) -> list:
        def branch(program: Any) -> Any:
            def run(cells: list, *xs: Any) -> Any:
                now = _with([c if type(c) is _Cell else x for c, x in pairs(xs)], cells)
                return _values(now), evaluate(program, now, self)

            return run

        def pairs(xs: Sequence) -> Any:
            return zip(inputs[1:], xs, strict=True)

        plain = [0 if type(x) is _Cell else x for x in inputs[1:]]
        branches = [branch(program) for program in equation.params["branches"]]
        cells, results = lax.switch(
            jnp.asarray(inputs[0], jnp.int32), branches, _values(inputs[1:]), *plain
        )
        _put(inputs, cells)
        return results


def _values(inputs: Sequence) -> list:
    """What the references among some inputs hold."""
    return [x.value for x in inputs if type(x) is _Cell]


def _with(inputs: Sequence, values: Sequence) -> list:
    """The inputs, with cells of their own that hold these values."""
    left = iter(values)
    return [_Cell(next(left)) if type(x) is _Cell else x for x in inputs]


def _put(inputs: Sequence, values: Sequence) -> None:
    """Have the references among some inputs hold these values."""
    for cell, value in zip((x for x in inputs if type(x) is _Cell), values, strict=True):
        cell.value = value


def _of_reference(equation: JaxprEqn, inputs: list) -> list:
    """An operation on references, as a function of the arrays before it."""
    where = [i for i, x in enumerate(inputs) if type(x) is _Cell]

    def run(*xs: Any) -> Any:
        own = [jax.new_ref(x) if i in where else x for i, x in enumerate(xs)]
        results = bind(equation, own)
        return results, [jax.freeze(own[i]) for i in where]

    run.__name__ = equation.primitive.name
    plain = [x.value if i in where else x for i, x in enumerate(inputs)]
    results, values = jax.jit(run)(*plain)
    _put(inputs, values)
    return results
