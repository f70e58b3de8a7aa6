"""The value whose uses bring finite cotangents that are not finite when they are summed."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import Literal

from clipgrad._diagnose.cotangents import Measured, Summary
from clipgrad._diagnose.units import ProgramBlock
from clipgrad._jaxpr import OPERAND, Place, Site, holds_floats


class SumFault(NamedTuple):
    """A value that is used several times: an argument, or the result of an operation."""

    argument: int | None
    place: Place | None
    steps: tuple[int, ...]
    uses: int
    device: str | None = None


OperandUses = list[tuple[ProgramBlock, Site]]  # operands, and the blocks that they are in


def sum_fault(
    chosen: Sequence[int], block: ProgramBlock, grads: list[Summary], found: Measured
) -> SumFault | None:
    """The last value in program order whose cotangent overflows in the sum over its uses."""
    uses: dict[tuple, OperandUses] = {}
    for inner, equation in block.all_equations():
        for i, v in enumerate(equation.invars):
            if type(v) is not Literal and holds_floats(v):
                use = inner, inner.site(OPERAND, equation, i)
                uses.setdefault(inner.source(v), []).append(use)
    faults = []
    for inner, v, key, place in block.values():
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


def _sum_overflows(total: Summary, uses: OperandUses, found: Measured) -> list[tuple]:
    """The steps and devices at which a sum is not finite though its terms are known and finite."""
    keys = [site for _, site in uses]
    bad = np.asarray(total.nonfinite) > 0
    if not keys or not bad.any() or any(key not in found for key in keys):
        return []
    for key in keys:
        term = np.asarray(found[key].nonfinite) > 0
        bad = bad & ~term.reshape(*bad.shape, -1).any(-1)
    return [tuple(map(int, steps)) for steps in np.argwhere(bad)]


def _count_terms(uses: OperandUses, block: ProgramBlock, found: Measured) -> int:
    """How many cotangents are summed: one for each use, at each step of the scans inside."""
    reached = [own for own, site in uses if np.any(found[site].reached)]
    return sum(math.prod(own.nest[len(block.nest) :]) for own in reached)
