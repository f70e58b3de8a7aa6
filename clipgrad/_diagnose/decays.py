"""Why a gradient that shrinks from step to step may be as it should."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

import clipgrad._jaxpr as _jaxpr
from clipgrad._diagnose.cotangents import Summary
from clipgrad._diagnose.records import GradientRow
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._diagnose.trends import FAR_IN_ALL, GATED, REPEATED, STATED, finite_norm
from clipgrad._diagnose.units import Unit
from clipgrad._jaxpr import holds_floats
from clipgrad._program import active_variables, has_fixed_factors

# What reads another part of an array at each step.
_INDEXED = frozenset({"dynamic_slice", "gather"})
_SIGMOIDS = frozenset({"logistic", "exp"})


def reason(
    unit: Unit, row: GradientRow, given: DiagnosisSubject, gradients: Sequence[Summary]
) -> str | None:
    """Why the decay in a scan is no disease; None if it may be.

    A part of what is differentiated has to keep a gradient: one that is not smaller by four orders
    of magnitude than the largest cotangent of what the scan carries.
    """
    largest = max((float(g.norm) for g in gradients), default=0.0)
    if not unit.inside or not largest * FAR_IN_ALL >= finite_norm(row).max():
        return None
    body, equation = unit.inside[0].jaxpr, unit.place.equation
    active = active_variables(given.program, given.chosen)
    constants, carried = _jaxpr.scan_counts(equation)
    names = {e.primitive.name for e in _jaxpr.equations(body)}
    elements = [v for v in body.invars[constants + carried :] if holds_floats(v)]
    if not elements and not names & _INDEXED:
        return REPEATED
    moved = [i for i in range(constants, constants + carried) if holds_floats(body.invars[i])]
    if has_fixed_factors(body, moved, [i - constants for i in moved], active):
        return STATED
    return GATED if names & _SIGMOIDS and _has_gate(body, active) else None


def has_vanished(layers: Sequence[GradientRow], parameters: Sequence[Summary]) -> bool:
    """Whether the first layer, and the gradient of a parameter, are smaller by four orders."""
    norms = [float(finite_norm(row)) for row in layers]
    least = min((float(g.norm) for g in parameters if np.any(g.reached)), default=0.0)
    return norms[0] * FAR_IN_ALL <= norms[-1] and least * FAR_IN_ALL <= max(norms)


def _has_gate(body: Any, active: frozenset) -> bool:
    """Whether two values that are differentiated are multiplied with each other."""
    products = (e.invars for e in _jaxpr.equations(body) if e.primitive.name == "mul")
    return any(
        a is not b and all(type(v) is not Literal and v in active for v in (a, b))
        for a, b in products
    )
