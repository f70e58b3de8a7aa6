"""A traced function evaluated with every floating type widened to 64 bits."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

import clipgrad._jaxpr as _jaxpr
from clipgrad._check.carriers import grain
from clipgrad._check.hold import HeldStops
from clipgrad._check.loops import HeldLonger, Longer

AXIS = "clipgrad_perturbation"
# Further iterations of a loop that stops when it is near enough: each leaves nine tenths of the
# error or less, so a twentieth is left of them all.
MORE = 30
# Operations whose results are rounded; others, such as `floor`, are exact.
ROUNDED = frozenset(
    "add add_any sub mul div exp exp2 log log1p expm1 tanh logistic sin cos tan sqrt rsqrt cbrt "
    "pow integer_pow square erf erfc erf_inv atan2 dot_general conv_general_dilated reduce_sum "
    "reduce_prod cumsum cumprod cumlogsumexp lgamma digamma reduce scatter-add scatter-sub "
    "scatter-mul reduce_window reduce_window_sum select_and_scatter_add".split()
)


@contextlib.contextmanager
def one_promotion() -> Iterator[None]:
    """A context in which the arithmetic of hooks does not depend on a user's settings of JAX."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


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
      is_entered: whether a hook sees all operations as the program runs; those in the programs of a
        linear solve or a reduction it sees as they are traced again, closing over nothing.

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
        hook = _jaxpr.Widen(jnp.float64)
        whole = (e for e in found if not _jaxpr.is_entered(e, hook))
        self.is_entered = not any(map(_jaxpr.held_programs, whole))

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


class Moved(_jaxpr.Widen):
    """Moves numbers up or down at random, in one of two ways.

    The way may be an argument of the program, so that one compiled program serves both.
    """

    WAYS = (0, 1)

    def __init__(self, way: Any):
        super().__init__(jnp.float64)
        self._first = way == self.WAYS[0]
        self._rngs = [np.random.default_rng(seed) for seed in self.WAYS]

    def _signs(self, shape: tuple[int, ...]) -> Any:
        return jnp.where(self._first, *(rng.choice([-1.0, 1.0], shape) for rng in self._rngs))


class MovedConstants(Moved):
    """Moves each constant by one rounding: 0.1 in float32 is not the 0.1 that was meant.

    Numbers of few binary digits, such as 0.5, 3 and 1024, are meant as they are.
    """

    DIGITS = 2.0**12
    LARGEST = 4096  # of arrays moved each element its own way; a larger one moves as a whole

    def constant(self, value, aval):
        wide = super().constant(value, aval)
        if not _jaxpr.holds_floats(aval):
            return wide
        if not isinstance(value, Tracer):
            mantissa = np.frexp(np.stack([np.real(wide), np.imag(wide)]))[0] * self.DIGITS
            if np.all((mantissa == np.round(mantissa)) | ~np.isfinite(mantissa)):
                return wide
        shape = np.shape(wide) if np.size(wide) <= self.LARGEST else ()
        part = float(jnp.finfo(aval.dtype).eps) / 2 * self._signs(shape)
        return wide * (1 + part).astype(wide.dtype)


class Jitter(Moved):
    """Moves each result that is rounded by a part of itself, up or down.

    So what is nothing but rounding, as 1 - tanh(18) ** 2, moves as far as it is off. A sum of
    thousands does not: its roundings are not all in one direction, so a reduction is rounded once,
    and each step of a scan its own way.
    """

    MANY = 16

    def __init__(self, way: Any, by: Any):
        super().__init__(way)
        self._by, self._whole = by, _jaxpr.Widen(jnp.float64)._bound

    def results(self, equation, outputs):
        if equation.primitive.name not in ROUNDED:
            return outputs
        return [
            self._moved(y) if _jaxpr.holds_floats(v) else y
            for v, y in zip(equation.outvars, outputs, strict=True)
        ]

    def steps(self, equation):
        return self._signs((equation.params["length"],))

    def inside(self, equation, step):
        inner: Any = copy.copy(super().inside(equation, step))
        inner._by = self._by * step if equation.primitive.name == "scan" else self._by
        return inner

    def _bound(self, equation, inputs):
        in_parts = equation.primitive.name == "custom_linear_solve"
        return super()._bound(equation, inputs) if in_parts else self._whole(equation, inputs)

    def _moved(self, result):
        signs = self._signs(np.shape(result)[-1:])  # not an array of its size
        return result * (1 + self._by * signs)
