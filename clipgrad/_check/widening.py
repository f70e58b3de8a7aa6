"""A traced function evaluated with every floating type widened to 64 bits."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params

import clipgrad._jaxpr as _jaxpr
from clipgrad._check.carriers import grain
from clipgrad._check.loops import Longer
from clipgrad._program import one_promotion

AXIS = "clipgrad_perturbation"
# Further iterations of a loop that stops when it is near enough: each leaves nine tenths of the
# error or less, so a twentieth is left of them all.
MORE = 30


class Unsupported(Exception):
    """The program holds something that cannot be widened."""


class Widened:
    """A traced function from list to list, to be evaluated in float64.

    Attributes:
      key: what the program is, equal for equal programs.
      narrow: the names of the floating types that the program computes in.
      stops: whether it holds a `stop_gradient`.
      looks_at_bits: whether it looks at the bits of its numbers, which widening changes.
      grain: the narrowest type in whose bits it carries numbers, whatever types are widened.

    Raises:
      Unsupported: a primitive that cannot be widened, such as a callback or a foreign call; or
        the function could not be traced, and `program` is None.
    """

    def __init__(self, program: Any, key: Any = None):
        if program is None:
            raise Unsupported("it cannot be traced")
        found = list(_jaxpr.equations(program))
        names = {equation.primitive.name for equation in found}
        if foreign := names & _jaxpr.FOREIGN_PROGRAMS:
            raise Unsupported(f"it holds {', '.join(sorted(foreign))}")
        # Kept longer than its constants, and than what its rules close over.
        self._program = _jaxpr.without_rules(_jaxpr.opened(program)[0])
        self.key = key
        self.narrow = _jaxpr.computed_types(program)
        self.stops = bool(names & {"stop_gradient", "random_gamma"})
        bits = [e for e in found if e.primitive.name in _jaxpr.OWN_TYPES]
        self.looks_at_bits = any(_jaxpr.holds_floats(v) for e in bits for v in e.invars)
        self.grain = grain(self._program)

    def call(self, constants: Sequence, xs: list, hook: _jaxpr.Hook | None = None) -> list:
        """The outputs in float64, custom rules stripped: to be differentiated, it is plain AD."""
        program = _jaxpr.with_constants(self._program, constants)
        with one_promotion():
            return _jaxpr.evaluate(program, xs, hook or _jaxpr.Widen(jnp.float64))

    def measured(self, held: bool, longer: bool) -> Callable[[Sequence, list], list]:
        """The call whose slopes are measured.

        With `held` it runs under `jax.vmap(axis_name=AXIS)` and has `stop_gradient` held at row 0:
        so differences see what JAX differentiates, and a straight-through estimator is right. With
        `longer`, loops that stop when they are near enough run on to what they converge to.
        """
        program, more = self._program, MORE if longer else 0
        hook = _Held(program, more) if held else Longer(jnp.float64, more=more)
        return functools.partial(self.call, hook=hook)


def widened_program(program: Any) -> Widened:
    """The widened program, the same object for the same program."""
    if program is None:
        return Widened(program)
    key = _jaxpr.program_key(program)
    return _jaxpr.kept_by_key(("widened", key), lambda: Widened(program, key))


class _Held(Longer):
    """Widens to float64, and holds what `stop_gradient` hides at row 0 of a batch along `AXIS`.

    But for the factors that a linear solve is given: `jnp.linalg.solve` stops the gradient of its
    LU factors because the solve's own rule differentiates the matrix; held factors would solve with
    the unperturbed matrix.
    """

    def __init__(self, program: Any, more: int):
        super().__init__(jnp.float64, lambda x: lax.all_gather(x, AXIS)[0], more=more)
        self._factors = _stopped_factors(program)

    def inside(self, equation: JaxprEqn, step: Any) -> Longer:
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
    jaxpr = _jaxpr.opened(program)[0]
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
