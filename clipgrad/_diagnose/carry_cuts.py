"""Carries of scans that a step writes and the next one does not read."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._diagnose.blocks import Block
from clipgrad._diagnose.cuts import CARRY, ZeroCut
from clipgrad._diagnose.edges import OPERAND
from clipgrad._diagnose.flags import SAME_AS_OPERAND
from clipgrad._diagnose.probe import RESULT
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._program import active_dependence


def carry_cuts(given: DiagnosisSubject, block: Block) -> Iterator[ZeroCut]:
    """All writes of a step of a scan to the carry that the next step does not read."""
    active = active_dependence(given.program, given.chosen)
    for body in block.blocks():
        if body.parent is None or body.outer is None:
            continue
        equation = body.parent.equation
        number = next(i for i, e in enumerate(body.outer.jaxpr.eqns) if e is equation)
        for k, v in enumerate(v for n, v in enumerate(body.jaxpr.invars) if body.is_carry(n)):
            result = body.outer.cotangent(number, RESULT, k)
            producer = _producer(body, body.jaxpr.outvars[k])
            if result is None or producer is None or _has_reader(body, v):
                continue
            steps = np.arange(equation.params["length"])
            is_last = steps == (steps[0] if equation.params["reverse"] else steps[-1])
            where = (np.asarray(result) != 0)[..., None] & ~is_last
            if where.any():
                yield _carry_cut(*producer, where, float(np.max(result)), active)


def _has_reader(block: Block, variable: Var) -> bool:
    """Whether an operation with a derivative reads a value, or a program hands it on."""
    if any(v is variable for v in block.jaxpr.outvars):
        return True
    for i, equation in enumerate(block.jaxpr.eqns):
        for k in (k for k, v in enumerate(equation.invars) if v is variable):
            inner = block.children.get(i, [])
            inputs = [b.jaxpr.invars[k - len(equation.invars)] for b in inner]
            if block.cotangent(i, OPERAND, k) is not None and (
                not inner or any(map(_has_reader, inner, inputs))
            ):
                return True
    return False


def _producer(block: Block, atom: Any) -> tuple[Block, JaxprEqn] | None:
    """The operation that makes a result, and its program, inside of calls and before moves."""
    if type(atom) is Literal or atom not in block.producers:
        return None
    number, equation, k = block.producers[atom]
    name, inner, deeper = equation.primitive.name, block.children.get(number, []), None
    if name in SAME_AS_OPERAND:
        deeper = _producer(block, equation.invars[0])
    elif len(inner) == 1 and name != "scan":
        deeper = _producer(inner[0], inner[0].jaxpr.outvars[k])
    return deeper or (block, equation)


def _carry_cut(
    block: Block, equation: JaxprEqn, where: np.ndarray, largest: float, active: dict
) -> ZeroCut:
    place = block.place(equation)
    own = active[place.key]
    operand = max(range(len(own)), key=lambda k: len(own[k]), default=0)
    return ZeroCut(CARRY, block, place, operand, where, largest, frozenset().union(*own), ())
