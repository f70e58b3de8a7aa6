"""The value whose uses bring finite cotangents that are not finite when they are summed."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from clipgrad._diagnose.cotangents import Measured, Summary
from clipgrad._diagnose.units import ProgramBlock
from clipgrad._jaxpr import OPERAND, RESULT, Place, Site, holds_floats


class SumFault(NamedTuple):
    """A value that is used several times: an argument, or the result of an operation."""

    argument: int | None
    place: Place | None
    steps: tuple[int, ...]
    uses: int
    device: str | None = None


class Use(NamedTuple):
    """An operand of an equation."""

    block: ProgramBlock
    equation: JaxprEqn
    position: int


def sum_fault(
    chosen: Sequence[int], block: ProgramBlock, grads: list[Summary], found: Measured
) -> SumFault | None:
    """The last value in program order whose cotangent overflows in the sum over its uses."""
    uses: dict[tuple, list[Use]] = {}
    for inner, equation in block.all_equations():
        for i, v in enumerate(equation.invars):
            if type(v) is not Literal and holds_floats(v):
                uses.setdefault(inner.source(v), []).append(Use(inner, equation, i))
    faults = []
    for inner, v, key, place in _values(block):
        own = uses.get((inner, v), [])
        over = _sum_overflows(found[key], own, found) if key in found else []
        if over and v not in inner.leaving:
            pairs = [inner.apart(index) for index in over]
            steps = max(steps for steps, _ in pairs)
            device = place.device(d for s, d in pairs if s == steps)
            faults.append(SumFault(None, place, steps, _count_terms(own, inner, found), device))
    if faults:
        return faults[-1]
    for i, grad in zip(chosen, grads, strict=True):
        own = uses.get((block, block.programs[0].invars[i]), [])
        if _sum_overflows(grad, own, found):
            return SumFault(i, None, (), _count_terms(own, block, found))
    return None


def _sum_overflows(total: Summary, uses: list[Use], found: Measured) -> list[tuple]:
    """The steps and devices at which a sum is not finite though its terms are known and finite."""
    keys = [_use_key(use) for use in uses]
    bad = np.asarray(total.nonfinite) > 0
    if not keys or not bad.any() or any(key not in found for key in keys):
        return []
    for key in keys:
        term = np.asarray(found[key].nonfinite) > 0
        bad = bad & ~term.reshape(*bad.shape, -1).any(-1)
    return [tuple(map(int, steps)) for steps in np.argwhere(bad)]


def _values(block: ProgramBlock) -> Iterator[tuple[ProgramBlock, Any, Site, Place]]:
    """What scans carry, and then the results of equations in program order, with their keys."""
    for inner in block.blocks():
        if inner.parent:
            for v in inner.states:
                yield inner, v, inner.state(v), inner.parent
    for inner, equation in block.all_equations():
        for i, v in enumerate(equation.outvars):
            yield inner, v, inner.site(RESULT, equation, i), Place(equation, inner.parent)


def _count_terms(uses: list[Use], block: ProgramBlock, found: Measured) -> int:
    """How many cotangents are summed: one for each use, at each step of the scans inside."""
    reached = [u for u in uses if np.any(found[_use_key(u)].reached)]
    return sum(math.prod(use.block.nest[len(block.nest) :]) for use in reached)


def _use_key(use: Use) -> Site:
    return use.block.site(OPERAND, use.equation, use.position)
