"""Whether a program is linear with fixed factors."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal, Var

from clipgrad._jaxpr import Primal, evaluate, opened
from clipgrad._program.dependence import active_variables


def has_fixed_factors(
    program: Any, moved: Sequence[int], results: Sequence[int], active: frozenset[Var]
) -> bool:
    """Whether results are linear in some inputs, with factors that depend on no active variable."""
    jaxpr = opened(program)[0]

    def tangent(tangents, inputs):
        def run(values):
            changed = dict(zip(moved, values, strict=True))
            every = [changed.get(i, x) for i, x in enumerate(inputs)]
            found = evaluate(program, every, Primal())
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
