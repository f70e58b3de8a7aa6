"""A traced function evaluated with every floating type widened to 64 bits."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params

import clipgrad._programs as _programs
from clipgrad._programs import one_promotion

AXIS = "clipgrad_perturbation"


class Unsupported(Exception):
    """The program holds something that cannot be widened."""


class Wide:
    """A program, to be evaluated in float64 with its custom rules stripped.

    Differentiated, it is plain AD.

    Attributes:
      program: the traced function.

    Raises:
      Unsupported: a primitive that cannot be widened, such as a callback or a foreign call; one
        that looks at the bits of numbers, which widening changes; or there is no program.
    """

    def __init__(self, program: Any):
        if program is None:
            raise Unsupported("it cannot be traced")
        equations = list(_programs.equations(program))
        if foreign := {_programs.operation_name(e) for e in equations if _programs.is_foreign(e)}:
            raise Unsupported(f"it holds {', '.join(sorted(foreign))}")
        bits = (e for e in equations if _programs.numeric_of(e).has_bits)
        if any(_programs.holds_floats(v) for e in bits for v in e.invars):
            raise Unsupported("it looks at the bits of its numbers, or carries them as integers")
        self.program = program

    def __call__(self, leaves: Sequence, hook: _programs.Hook | None = None) -> list:
        """The outputs, in float64 if there is no other hook."""
        with one_promotion():
            return _programs.evaluate(self.program, leaves, hook or _programs.Widen(jnp.float64))


def held(program: Any, is_wide: bool) -> _programs.Hook | None:
    """The hook of slopes: `stop_gradient` is held at row 0 of `jax.vmap(axis_name=AXIS)`.

    So slopes see what JAX differentiates, and a straight-through estimator is right. None where
    nothing is stopped.
    """
    if program is None or not any(map(_programs.is_stopped, _programs.equations(program))):
        return None
    return _HeldInFloat64(program) if is_wide else _HeldAsItIs(program)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """A context that computes with 64 bits, on the CPU where there is one."""
    try:
        device = jax.devices("cpu")[0]
    except RuntimeError:
        device = None
    with jax.enable_x64(True), jax.default_device(device):
        yield


class _Held(_programs.Widen):
    """Holds what `stop_gradient` hides at row 0 of a batch along `AXIS`.

    But for the factors that a linear solve is given: `jnp.linalg.solve` stops the gradient of its
    LU factors because the solve's own rule differentiates the matrix; held factors would solve with
    the unperturbed matrix.
    """

    def __init__(self, program: Any):
        super().__init__(jnp.float64, lambda x: lax.all_gather(x, AXIS)[0])
        self._factors = _stopped_factors(program)

    def inside(self, equation: JaxprEqn, part: _programs.Part) -> _programs.Widen:
        """The hook for a program inside, which knows the factors there too."""
        hook: Any = copy.copy(super().inside(equation, part))
        programs = jaxprs_in_params(equation.params)
        hook._factors = self._factors.union(*map(_stopped_factors, programs))
        return hook

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results; those of a stop before a linear solve are its operands."""
        if equation.outvars and equation.outvars[0] in self._factors:
            return inputs
        return super().__call__(equation, inputs)


class _HeldInFloat64(_Held):
    """Widens to float64 besides."""


class _HeldAsItIs(_Held, _programs.NoRules):
    """Leaves every type as it is; kernels and callbacks see one row at a time."""

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results."""
        if not _programs.is_foreign(equation):
            return super().__call__(equation, inputs)
        call = lambda *operands: _programs.bind(equation, operands)  # noqa: E731
        return jax.custom_batching.sequential_vmap(call)(*inputs)


def _stopped_factors(program: Any) -> frozenset:
    """The results of `stop_gradient` that reach nothing but the factors of linear solves."""
    jaxpr = _programs.opened(program)[0]
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    for equation in reversed(jaxpr.eqns):
        if needed.isdisjoint(equation.outvars):
            continue
        atoms = list(equation.invars)
        if _programs.is_linear_solve(equation):
            matvec, vecmat, *factors = equation.params["const_lengths"]
            del atoms[matvec + vecmat : matvec + vecmat + sum(factors)]
        needed |= {atom for atom in atoms if not isinstance(atom, Literal)}
    stops = (e.outvars[0] for e in jaxpr.eqns if _programs.detaches(e))
    return frozenset(variable for variable in stops if variable not in needed)
