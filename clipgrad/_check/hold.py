"""Holding what `stop_gradient` hides at one row of a batch."""

import copy
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params

from clipgrad._jaxpr import Widen, opened


class HeldStops(Widen):
    """Widens to float64, and holds what `stop_gradient` hides at row 0 of a batch along ``axis``.

    But for the factors that a linear solve is given: `jnp.linalg.solve` stops the gradient of its
    LU factors because the solve's own rule differentiates the matrix; held factors would solve with
    the unperturbed matrix.
    """

    def __init__(self, program: Any, axis: str):
        super().__init__(jnp.float64, lambda x: lax.all_gather(x, axis)[0])
        self._factors = _stopped_factors(program)

    def inside(self, equation: JaxprEqn, step: Any) -> Widen:
        """The hook for a program inside, which knows the factors there too."""
        hook: Any = copy.copy(super().inside(equation, step))
        programs = jaxprs_in_params(equation.params)
        hook._factors = self._factors.union(*map(_stopped_factors, programs))
        return hook

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results; those of a stop before a linear solve are its operands."""
        if equation.outvars and equation.outvars[0] in self._factors:
            return inputs
        return super().__call__(equation, inputs)


# Needed by test_the_factors_of_a_linear_solve_are_not_held.
def _stopped_factors(program: Any) -> frozenset:
    """The results of `stop_gradient` that reach nothing but the factors of linear solves."""
    jaxpr = opened(program)[0]
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    for equation in reversed(jaxpr.eqns):
        if needed.isdisjoint(equation.outvars):
            continue
        atoms = list(equation.invars)
        if equation.primitive.name == "custom_linear_solve":
            matvec, vecmat, *factors = equation.params["const_lengths"]
            del atoms[matvec + vecmat : matvec + vecmat + sum(factors)]
        needed |= {atom for atom in atoms if not isinstance(atom, Literal)}
    stops = (e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "stop_gradient")
    return frozenset(variable for variable in stops if variable not in needed)
