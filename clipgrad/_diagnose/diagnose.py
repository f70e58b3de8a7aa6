"""From a loss and its arguments to the operation that spoils its gradient."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import clipgrad._jaxpr as _jaxpr
from clipgrad._diagnose.cotangents import measure, module_sites
from clipgrad._diagnose.diagnosis import GradientDiagnosis, GradientFinding
from clipgrad._diagnose.findings import value_finding, vjp_finding
from clipgrad._diagnose.subject import Subject, subject
from clipgrad._diagnose.units import Block
from clipgrad._diagnose.values import origin_of_loss
from clipgrad._diagnose.vjps import fault


def diagnose(
    fun: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any] | None = None,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> GradientDiagnosis:
    """Finds the operation that makes a gradient NaN, explode, vanish or underflow."""
    return _diagnosis(subject(fun, args, kwargs, argnums, has_aux))


def _diagnosis(given: Subject) -> GradientDiagnosis:
    block = Block([given.program])
    sites = module_sites(block)
    loss, grads, measured = measure(given.program, given.inputs, given.chosen, block, sites)
    findings: list[GradientFinding] = []
    origin = None if np.isfinite(loss) else origin_of_loss(given.program, given.inputs)
    if origin:
        findings.append(value_finding(origin, given))
    if any(np.any(grad.nonfinite) for grad in grads):
        excused = origin.place if origin else None
        found = fault(
            given.program, given.inputs, given.chosen, block, grads, measured, excused
        )
        if found and (found.finite_inputs or not origin):
            findings.append(vjp_finding(found))
    return GradientDiagnosis(tuple(findings), (), ())
