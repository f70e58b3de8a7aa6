"""Which variables of a program depend on what is differentiated."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._jaxpr.programs import entered_programs, opened, scan_counts


def active_variables(program: Any, inputs: Iterable[int]) -> frozenset[Var]:
    """Return the variables that depend on these inputs, in the program and in those inside it.

    Only such a variable has a cotangent. One of a program that is called from several places is
    among them if it depends on the inputs in one of the calls.
    """
    jaxpr, chosen = opened(program)[0], set(inputs)
    found: set[Var] = set()
    _spread_activity(jaxpr, [i in chosen for i in range(len(jaxpr.invars))], found)
    return frozenset(found)


def _spread_activity(jaxpr: Any, inputs: Sequence[bool], found: set[Var]) -> list[bool]:
    """Add what depends on the inputs; return which outputs do."""
    own = {v for v, is_active in zip(jaxpr.invars, inputs, strict=True) if is_active}
    own = {variable for variable in own if _is_floating_variable(variable)}
    for equation in jaxpr.eqns:
        flags = [not isinstance(atom, Literal) and atom in own for atom in equation.invars]
        if any(flags) and equation.primitive.name != "stop_gradient":
            outputs = zip(equation.outvars, _through(equation, flags, found), strict=True)
            own |= {v for v, is_active in outputs if is_active and _is_floating_variable(v)}
    found |= own
    return [not isinstance(atom, Literal) and atom in own for atom in jaxpr.outvars]


def _through(equation: JaxprEqn, flags: list[bool], found: set[Var]) -> list[bool]:
    """Which outputs of an equation depend on these of its inputs."""
    inner = [opened(program)[0] for program in entered_programs(equation)[0]]
    if not inner or equation.primitive.name == "custom_linear_solve":
        for jaxpr in inner:
            _spread_activity(jaxpr, [True] * len(jaxpr.invars), found)
        return [True] * len(equation.outvars)
    flags = flags[len(flags) - len(inner[0].invars) :]  # a cond has its index before the inputs
    outputs = _of_any(inner, flags, found)
    if equation.primitive.name == "scan":
        constants, carried = scan_counts(equation)
        rest = constants + carried
        while outputs[:carried] != flags[constants:rest]:
            state = [a or b for a, b in zip(outputs, flags[constants:rest], strict=False)]
            if state == flags[constants:rest]:
                break
            flags = [*flags[:constants], *state, *flags[rest:]]
            outputs = _of_any(inner, flags, found)
    return outputs


def _of_any(programs: Sequence[Any], flags: Sequence[bool], found: set[Var]) -> list[bool]:
    each = [_spread_activity(jaxpr, flags, found) for jaxpr in programs]
    return [any(outputs) for outputs in zip(*each, strict=True)]


def _is_floating_variable(variable: Var) -> bool:
    aval = variable.aval
    return isinstance(aval, ShapedArray) and jnp.issubdtype(aval.dtype, jnp.inexact)
