"""A traced function evaluated with every floating type widened to 64 bits."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

import clipgrad._jaxpr as _jaxpr
from clipgrad._check.carriers import grain
from clipgrad._check.hold import HeldStops
from clipgrad._check.loops import HeldLonger, Longer
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

    def held(self, constants: Sequence, xs: list) -> list:
        """The call under `jax.vmap(axis_name=AXIS)`, `stop_gradient` held at row 0.

        So differences see what JAX differentiates: a straight-through estimator is right.
        """
        return self.call(constants, xs, HeldStops(self._program, AXIS))

    def longer(self, constants: Sequence, xs: list) -> list:
        """The outputs to which loops converge that stop when they are near enough."""
        return self._run_on(constants, xs, Longer(jnp.float64))

    def held_longer(self, constants: Sequence, xs: list) -> list:
        """The call with longer loops under `jax.vmap`, `stop_gradient` held at row 0."""
        return self._run_on(constants, xs, HeldLonger(self._program, AXIS))

    def _run_on(self, constants: Sequence, xs: list, hook: Longer) -> list:
        hook.more = MORE
        return self.call(constants, xs, hook)


def widened_program(program: Any) -> Widened:
    """The widened program, the same object for the same program."""
    if program is None:
        return Widened(program)
    key = _jaxpr.program_key(program)
    return _jaxpr.kept_by_key(("widened", key), lambda: Widened(program, key))
