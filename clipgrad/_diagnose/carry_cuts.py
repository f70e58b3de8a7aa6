"""Carries of scans that a step writes and the next one does not read."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._diagnose.blocks import MeasuredBlock
from clipgrad._diagnose.cuts import CARRY, ZeroCut
from clipgrad._diagnose.edges import OPERAND
from clipgrad._diagnose.probe import RESULT
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._program import active_dependence

_REARRANGED_BY = {
    "transpose",
    "reshape",
    "broadcast_in_dim",
    "squeeze",
    "convert_element_type",
    "copy",
}


def carry_cuts(given: DiagnosisSubject, block: MeasuredBlock) -> Iterator[ZeroCut]:
    """All writes of a step of a scan to the carry that the next step does not read."""
    active = active_dependence(given.program, given.chosen)
    for body in block.blocks():
        if body.parent is None or body.outer is None:
            continue
        equation = body.parent.equation
        number = next(i for i, e in enumerate(body.outer.jaxpr.eqns) if e is equation)
        for k, v in enumerate(v for n, v in enumerate(body.jaxpr.invars) if body.is_carry(n)):
            result = body.outer.values.cotangent(number, RESULT, k)
            end = body.jaxpr.outvars[k]
            if result is None or type(end) is Literal or _has_reader(body, v):
                continue
            steps = np.arange(equation.params["length"])
            is_last = steps == (steps[0] if equation.params["reverse"] else steps[-1])
            where = (np.asarray(result) != 0)[..., None] & ~is_last
            own, producer = _producer(body, end)
            if producer is not None and where.any():
                yield _carry_cut(own, producer, where, float(np.max(result)), active)


def _has_reader(block: MeasuredBlock, variable: Var) -> bool:
    """Whether an operation with a derivative reads a value, or a program hands it on."""
    if any(v is variable for v in block.jaxpr.outvars):
        return True
    for i, equation in enumerate(block.jaxpr.eqns):
        for k in (k for k, v in enumerate(equation.invars) if v is variable):
            inner = block.children.get(i, [])
            inputs = [b.jaxpr.invars[k - len(equation.invars)] for b in inner]
            if block.values.cotangent(i, OPERAND, k) is not None and (
                not inner or any(map(_has_reader, inner, inputs))
            ):
                return True
    return False


def _producer(block: MeasuredBlock, atom: Any) -> tuple[MeasuredBlock, JaxprEqn | None]:
    """The operation that makes a result, and its program, inside of calls and before moves."""
    number, equation, k = block.producers.get(atom, (0, None, 0))
    while equation is not None and equation.primitive.name in _REARRANGED_BY:
        before = equation.invars[0]
        if type(before) is Literal or before not in block.producers:
            break
        number, equation, k = block.producers[before]
    inner = block.children.get(number, []) if equation is not None else []
    if len(inner) == 1 and equation is not None and equation.primitive.name != "scan":
        own, found = _producer(inner[0], inner[0].jaxpr.outvars[k])
        return (own, found) if found is not None else (block, equation)
    return block, equation


def _carry_cut(
    block: MeasuredBlock, equation: JaxprEqn, where: np.ndarray, largest: float, active: dict
) -> ZeroCut:
    place = block.place(equation)
    own = active[place.key]
    operand = max(range(len(own)), key=lambda k: len(own[k]), default=0)
    return ZeroCut(CARRY, block, place, operand, where, largest, frozenset().union(*own), ())
