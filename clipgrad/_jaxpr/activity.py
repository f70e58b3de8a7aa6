"""Which variables of a program depend on what is differentiated."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._jaxpr.evaluate import Hook, evaluate
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


def has_fixed_factors(
    program: Any, moved: Sequence[int], results: Sequence[int], active: frozenset[Var]
) -> bool:
    """Whether results are linear in some inputs, with factors that depend on no active variable."""
    jaxpr = opened(program)[0]

    def tangent(tangents, inputs):
        def run(values):
            changed = dict(zip(moved, values, strict=True))
            every = [changed.get(i, x) for i, x in enumerate(inputs)]
            found = evaluate(program, every, _Flat())
            return [found[i] for i in results]

        return jax.jvp(run, ([inputs[i] for i in moved],), (tangents,))[1]

    types: list[Any] = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    try:
        derivative = jax.make_jaxpr(tangent)([types[i] for i in moved], types)
    except (TypeError, ValueError, NotImplementedError, NameError):
        return False  # a step that has no derivative by itself, or a collective
    within = [i for i, v in enumerate(jaxpr.invars) if v in active or i in moved]
    found = active_variables(derivative, [len(moved) + i for i in within])
    return not any(type(v) is not Literal and v in found for v in derivative.jaxpr.outvars)


class _Flat(Hook):
    """Enters custom rules by their primal program."""

    flatten = True
