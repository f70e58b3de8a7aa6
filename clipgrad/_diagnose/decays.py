"""Why a gradient that shrinks from step to step may be as it should."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Literal

import clipgrad._jaxpr as _jaxpr
from clipgrad._diagnose.cotangents import Summary
from clipgrad._diagnose.records import GradientRow
from clipgrad._diagnose.subject import DiagnosisSubject
from clipgrad._diagnose.trends import FAR_IN_ALL, GATED, REPEATED, STATED, finite_norm
from clipgrad._diagnose.units import Unit
from clipgrad._jaxpr import holds_floats

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
    inner = unit.holder
    largest = max((float(g.norm) for g in gradients), default=0.0)
    if inner is None or inner.parent is None or not largest * FAR_IN_ALL >= finite_norm(row).max():
        return None
    body, equation = inner.programs[0], inner.parent.equation
    active = _jaxpr.active_variables(given.program, given.chosen)
    constants, carried = _jaxpr.scan_counts(equation)
    names = {e.primitive.name for e in _jaxpr.equations(body)}
    elements = [v for v in body.invars[constants + carried :] if holds_floats(v)]
    if not elements and not names & _INDEXED:
        return REPEATED
    if _is_stated(body, constants, carried, active):
        return STATED
    return GATED if names & _SIGMOIDS and _has_gate(body, active) else None


def has_vanished(layers: Sequence[GradientRow], gradients: Sequence[Summary]) -> bool:
    """Whether the first layer, and the gradient of a parameter, are smaller by four orders."""
    norms = [float(finite_norm(row)) for row in layers]
    largest, parameters = max(norms), [float(g.norm) for g in gradients if np.any(g.reached)]
    return (
        norms[0] * FAR_IN_ALL <= norms[-1] and min(parameters, default=0.0) * FAR_IN_ALL <= largest
    )


def _is_stated(body: Any, constants: int, carried: int, active: frozenset) -> bool:
    """Whether a step is linear in what is carried, with factors that are not differentiated."""
    state = range(constants, constants + carried)
    moved = [i for i in state if holds_floats(body.invars[i])]

    def tangent(tangents, inputs):
        def step(values):
            changed = dict(zip(moved, values, strict=True))
            every = [changed.get(i, x) for i, x in enumerate(inputs)]
            results = _jaxpr.evaluate(body, every, _Flat())
            return [results[i - constants] for i in moved]

        return jax.jvp(step, ([inputs[i] for i in moved],), (tangents,))[1]

    avals: list[Any] = [_aval(v) for v in body.invars]
    try:
        program = jax.make_jaxpr(tangent)([avals[i] for i in moved], avals)
    except (TypeError, ValueError, NotImplementedError, NameError):
        return False  # a step that has no derivative by itself, or a collective
    within = [i for i, v in enumerate(body.invars) if v in active or i in moved]
    found = _jaxpr.active_variables(program, [len(moved) + i for i in within])
    return not any(v in found for v in program.jaxpr.outvars if type(v) is not Literal)


class _Flat(_jaxpr.Hook):
    """Enters custom rules by their primal program."""

    flatten = True


def _aval(variable: Any) -> Any:
    aval = variable.aval
    assert isinstance(aval, ShapedArray)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _has_gate(body: Any, active: frozenset) -> bool:
    """Whether two values that are differentiated are multiplied with each other."""
    products = (e.invars for e in _jaxpr.equations(body) if e.primitive.name == "mul")
    return any(
        a is not b and all(type(v) is not Literal and v in active for v in (a, b))
        for a, b in products
    )
