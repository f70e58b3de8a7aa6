"""The operation whose VJP makes a cotangent that is not finite of finite ones."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal

import clipgrad._jaxpr as _jaxpr
from clipgrad._diagnose.cotangents import (
    CotangentSite,
    Measured,
    Summary,
    measure,
    operation_sites,
)
from clipgrad._diagnose.sums import SumFault, sum_fault
from clipgrad._diagnose.units import ProgramBlock, Unit
from clipgrad._jaxpr import OPERAND, RESULT, Place

# So many operations are measured one by one in one compiled program.
_AT_ONCE = 240
# Of several operations at fault, those whose NaN a mask drops are not the reason: the gradient is
# measured again without the NaN of each, of so many at most.
_TRIED_VJPS = 4


class VjpFault(NamedTuple):
    """An operation, the steps of the scans around it, and its operands where it goes wrong."""

    place: Place
    steps: tuple[int, ...]
    values: tuple[float, ...]
    finite_inputs: bool
    device: str | None = None


def fault(
    program: Any,
    inputs: Sequence[Any],
    chosen: Sequence[int],
    block: ProgramBlock,
    grads: list[Summary],
    measured: Measured,
    excused: Place | None,
) -> VjpFault | SumFault | None:
    """The first operation in backward order whose VJP is at fault, else the sum that is.

    Args:
      program: the loss, evaluated at the flat ``inputs``.
      inputs: its inputs.
      chosen: the positions of those that it is differentiated by.
      block: the program in units.
      grads: the gradients of the chosen inputs.
      measured: the cotangents of what leaves each unit.
      excused: an operation whose value is not finite, so that nothing is said of its VJP.
    """
    tops = block.programs[0].invars
    bad = {tops[i]: g.nonfinite > 0 for i, g in zip(chosen, grads, strict=True)}
    units = [u for u in block.all_units() if not u.holder]
    suspects = [u for u in units if np.any(_may_be_at_fault(u, bad, measured))]
    every: Measured = {}
    for batch in _batches(suspects or units):
        sites = operation_sites(batch)
        *_, found = measure(program, inputs, chosen, sites)
        every |= found
        faults = [f for f in _faults(sites, found) if not _is_excused(f[1].place, excused)]
        ordered = sorted(faults, key=lambda f: (f[1].finite_inputs, f[0]), reverse=True)
        for _, found_fault in ordered[:_TRIED_VJPS] if len(ordered) > 1 else ():
            own = [s for s in sites if s.equation is found_fault.place.equation]
            _, cured, _ = measure(program, inputs, chosen, own, cured=True)
            if _count_nonfinite(cured) < _count_nonfinite(grads):
                return found_fault
        if ordered:
            return ordered[0][1]
    return sum_fault(chosen, block, grads, measured | every)


def _count_nonfinite(grads: list[Summary]) -> float:
    return sum(float(np.sum(grad.nonfinite)) for grad in grads)


def _may_be_at_fault(unit: Unit, bad: dict, measured: Measured) -> Any:
    """At which steps and devices a unit reads a bad cotangent, and nothing bad leaves it."""
    reads = [_is_bad(unit.block, v, bad, measured) for v in unit.reads]
    leaves = [_is_bad(unit.block, v, bad, measured) for v in unit.leaves]
    shape = unit.block.shape
    return np.any([np.broadcast_to(flag, shape) for flag in [*reads, False]], axis=0) & ~np.any(
        [np.broadcast_to(flag, shape) for flag in [*leaves, False]], axis=0
    )


def _is_bad(block: ProgramBlock, variable: Any, bad: dict, measured: Measured) -> Any:
    """Whether the cotangent of a variable is not finite, for each step and device around it."""
    if variable in block.makers:
        return measured[block.makers[variable].leaves[variable]].nonfinite > 0
    if block.carried.get(variable) in measured:
        return measured[block.carried[variable]].nonfinite > 0
    around = block.outer.get(variable)
    if around is None or isinstance(around, Literal) or block.outside is None:
        return bad.get(variable, False)
    flags = np.broadcast_to(_is_bad(block.outside, around, bad, measured), block.outside.shape)
    return flags.reshape(flags.shape + (1,) * (len(block.shape) - flags.ndim))


def _batches(units: list[Unit]) -> Iterator[list[Unit]]:
    """The units in backward order, in groups of bounded size."""
    batch, size = [], 0
    for unit in reversed(units):
        batch.append(unit)
        size += sum(
            unit.block.children[id(e)].count if id(e) in unit.block.children else 1
            for e in unit.equations
        )
        if size >= _AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _faults(sites: list[CotangentSite], found: Measured) -> Iterator[tuple[list[int], VjpFault]]:
    """The operations that make bad cotangents of good ones, with their order in time."""
    operations: dict[tuple, list[CotangentSite]] = {}
    for site in sites:
        operations.setdefault(site.site.place, []).append(site)
    for own in operations.values():
        block, equation = own[0].block, own[0].equation
        assert equation is not None
        results = [found[s.site] for s in own if s.site.kind == RESULT]
        operands = [found[s.site] for s in own if s.site.kind == OPERAND]
        good = np.all([r.nonfinite == 0 for r in results], axis=0)
        if _is_joint(equation):  # the cotangents of the results come from all devices
            devices = tuple(i for i, (name, _) in enumerate(block.axes) if name != "scan")
            good = np.all(good, axis=devices, keepdims=True)
        at_fault = good & np.any([o.nonfinite > 0 for o in operands], axis=0) if operands else ()
        found_at = [tuple(map(int, index)) for index in np.argwhere(at_fault)]
        steps_at = [block.apart(index)[0] for index in found_at]
        times = [(block.time(equation, steps), steps) for steps in steps_at]
        if times:
            time, steps = max(times)
            here = [index for index in found_at if block.apart(index)[0] == steps]
            shown = [o for o in operands if o.nonfinite[here[0]] > 0]
            finite = not any(o.bad_values[here[0]] for o in operands)
            values = tuple(float(o.value[here[0]]) for o in shown)
            place = Place(equation, block.parent)
            device = place.device(block.apart(index)[1] for index in here)
            yield time, VjpFault(place, steps, values, finite, device)


def _is_joint(equation: JaxprEqn) -> bool:
    """Whether the VJP may join what several devices hold; a rule is not seen from outside."""
    is_rule = equation.primitive.name == "custom_vjp_call"
    return is_rule or bool(_jaxpr.crossed_axes(equation))


def _is_excused(place: Place, excused: Place | None) -> bool:
    chains = [[id(e) for e in p.chain] if p else [] for p in (place, excused)]
    return bool(excused) and chains[1][-len(chains[0]) :] == chains[0]
