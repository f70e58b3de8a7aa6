"""Which results of a program are found by loops that stop when they are near enough."""

from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params

from clipgrad._jaxpr.programs import CALLS, CUSTOM_RULES, JIT, REMAT, equations, opened

_CALLING = JIT | REMAT | CALLS | CUSTOM_RULES


def found_by_loops(program: Any) -> list[bool]:
    """Which results depend on a loop that stops when its numbers are near enough."""
    jaxpr = opened(program)[0]
    return _through_loops(jaxpr, [False] * len(jaxpr.invars))


def _through_loops(jaxpr: Any, flags: list[bool]) -> list[bool]:
    found = {variable for variable, flag in zip(jaxpr.invars, flags, strict=True) if flag}
    for equation in jaxpr.eqns:
        known = [not isinstance(atom, Literal) and atom in found for atom in equation.invars]
        programs = [opened(inner)[0] for inner in jaxprs_in_params(equation.params)]
        if len(programs) == 1 and equation.primitive.name in _CALLING:
            flags = _through_loops(programs[0], known)
        else:
            inside = (inner for program in programs for inner in equations(program))
            stops = any(map(_stops_by_its_numbers, [equation, *inside]))
            flags = [any(known) or stops] * len(equation.outvars)
        found |= {variable for variable, flag in zip(equation.outvars, flags, strict=True) if flag}
    return [not isinstance(atom, Literal) and atom in found for atom in jaxpr.outvars]


def _stops_by_its_numbers(equation: Any) -> bool:
    if equation.primitive.name != "while":
        return False
    compared = equations(equation.params["cond_jaxpr"])
    avals: list[Any] = [atom.aval for inner in compared for atom in inner.invars]
    return any(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals)
