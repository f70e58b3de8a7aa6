"""A traced function evaluated with every floating type widened to 64 bits."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import Literal, jaxprs_in_params

import clipgrad._jaxpr as _jaxpr
from clipgrad._check.programs import with_constants
from clipgrad._check.vectors import wide_dtype

AXIS = "clipgrad_perturbation"
OPAQUE = frozenset(
    "pure_callback io_callback pallas_call custom_call ffi_call "
    "custom_partitioning run_state xla_pmap".split()
)
NATIVE = frozenset("bitcast_convert_type nextafter rng_uniform".split())
SILENT = frozenset({"debug_callback", "debug_print"})
DTYPE_PARAMETERS = ("new_dtype", "preferred_element_type", "dtype", "out_dtype")


class Unsupported(Exception):
    """The program holds something that cannot be widened."""


class Widened:
    """A traced function from list to list, to be evaluated in float64.

    Each evaluation is a function of the program's constants and the input leaves. Custom rules are
    stripped, so that differentiating `call` is plain AD.

    Attributes:
      text: the program as text.
      narrow: the names of the floating types that the program computes in.
      stops: whether it holds a `stop_gradient`.
      looks_at_bits: whether it looks at the bits of its numbers, which widening changes.

    Raises:
      Unsupported: a primitive that cannot be widened, such as a callback or a foreign call; or
        the function could not be traced, and `program` is None.
    """

    def __init__(self, program: Any, text: str = ""):
        if program is None:
            raise Unsupported("it cannot be traced")
        found = list(_jaxpr.equations(program))
        names = {equation.primitive.name for equation in found}
        if names & OPAQUE:
            raise Unsupported(f"it holds {', '.join(sorted(names & OPAQUE))}")
        self._program, _ = _jaxpr.opened(program)  # kept longer than its constants
        self.text = text
        self.narrow = _float_dtypes(found)
        self.stops = bool(names & {"stop_gradient", "random_gamma"})
        self.looks_at_bits = any(map(_looks_at_bits, found))

    def call(self, constants: Sequence, xs: list) -> list:
        """The outputs in float64; to be differentiated."""
        return self._run(constants, xs, _Widen(lax.stop_gradient))

    def freely(self, constants: Sequence, xs: list) -> list:
        """The outputs in float64, `stop_gradient` ignored."""
        return self._run(constants, xs, _Widen(lambda x: x))

    def held(self, constants: Sequence, xs: list) -> list:
        """The same under `jax.vmap(axis_name=AXIS)`, `stop_gradient` held at row 0.

        So differences see what JAX differentiates: a straight-through estimator is right.
        """
        return self._run(constants, xs, _Hold(self._program))

    def nudged(self, seed: int) -> Callable[[Sequence, list], list]:
        """`call` with every constant off by one rounding of its own type, up or down."""
        return lambda constants, xs: self._run(constants, xs, _Nudge(lax.stop_gradient, seed))

    def native(self, constants: Sequence, xs: list) -> list:
        """The outputs in the program's own types."""
        return self._run(constants, xs, _Native())

    def _run(self, constants, xs, hook) -> list:
        return _jaxpr.evaluate(with_constants(self._program, constants), xs, hook)


class _Native(_jaxpr.Hook):
    flatten = True


class _Widen(_Native):
    """Widens; `stop` stands for `stop_gradient`, and `base` gives the point of linearization.

    What a custom rule's own program stops is nothing to JAX, which differentiates by the rule.
    """

    def __init__(self, stop: Callable[[Any], Any], base: Callable[[Any], Any] | None = None):
        self.stop, self.base = stop, base or stop

    def constant(self, value, aval):
        del aval
        return _wide_value(value)

    def inside(self, equation, step):
        del step
        if equation.primitive.name not in _jaxpr.CUSTOM_RULES:
            return self
        freely = copy.copy(self)
        freely.stop = lambda x: x
        return freely

    def __call__(self, equation, inputs):
        name = equation.primitive.name
        if name == "stop_gradient":
            return [self.stop(inputs[0])]
        if name == "reduce_precision":
            return inputs
        if name in SILENT:
            return []
        if name == "random_gamma":
            return [_gamma_sample(equation, inputs, self.base)]
        if name in NATIVE:
            return _bind_native(equation, inputs)
        if _jaxpr.is_entered(equation, self):
            return None
        return _bind_wide(equation, inputs, self)


def _gamma_sample(equation, inputs, base: Callable):
    """A sample, linear in its parameter with the implicit derivative that JAX defines.

    For a fixed key the sample itself is no smooth function of the parameter.
    """
    key, parameter = inputs
    at = base(parameter)
    (sample,) = _bind_native(equation, [key, at])
    value = lax.exp(sample) if equation.params["log_space"] else sample
    least = np.finfo(np.float64).tiny
    slope = lax.random_gamma_grad(at, jnp.maximum(value, least))  # pyright: ignore[reportCallIssue]
    slope = slope / value if equation.params["log_space"] else slope
    return sample + slope * (parameter - at)


class _Hold(_Widen):
    """Holds `stop_gradient` at row 0, but for the factors that a linear solve is given.

    `jnp.linalg.solve` stops the gradient of its LU factors because the solve's own rule
    differentiates the matrix; held factors would solve with the unperturbed matrix.
    """

    def __init__(self, program: Any):
        super().__init__(lambda x: lax.all_gather(x, AXIS)[0])
        self._factors = _stopped_factors(program)

    def inside(self, equation, step):
        hook = copy.copy(super().inside(equation, step))
        programs = jaxprs_in_params(equation.params)
        hook._factors = self._factors.union(*map(_stopped_factors, programs))
        return hook

    def __call__(self, equation, inputs):
        if equation.outvars and equation.outvars[0] in self._factors:
            return inputs
        return super().__call__(equation, inputs)


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


class _Nudge(_Widen):
    """Moves each constant by one rounding: 0.1 in float32 is not the 0.1 that was meant.

    Numbers of few binary digits, such as 0.5, 3 and 1024, are meant as they are.
    """

    DIGITS = 2.0**12
    LARGEST = 4096  # of arrays moved each element its own way; a larger one moves as a whole

    def __init__(self, stop, seed: int):
        super().__init__(stop)
        self._rng = np.random.default_rng(seed)

    def constant(self, value, aval):
        wide = _wide_value(value)
        dtype = getattr(aval, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            return wide
        if not isinstance(value, Tracer) and self._is_short(np.asarray(wide)):
            return wide
        shape = np.shape(wide) if np.size(wide) <= self.LARGEST else ()
        part = float(jnp.finfo(dtype).eps) / 2 * self._rng.choice([-1.0, 1.0], shape)
        return wide * (1 + part)

    def _is_short(self, value: np.ndarray) -> bool:
        parts = np.stack([np.real(value), np.imag(value)])
        mantissa = np.frexp(parts)[0] * self.DIGITS
        return bool(np.all((mantissa == np.round(mantissa)) | ~np.isfinite(parts)))


def _looks_at_bits(equation) -> bool:
    dtypes = [getattr(atom.aval, "dtype", None) for atom in equation.invars]
    return equation.primitive.name in NATIVE and any(map(_is_float_dtype, dtypes))


def _wide_value(value):
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        value = np.asarray(value)
        return value.astype(wide_dtype(value.dtype)) if value.dtype.kind in "fc" else value
    if not jnp.issubdtype(dtype, jnp.inexact) or dtype == wide_dtype(dtype):
        return value
    if isinstance(value, Tracer):
        return value.astype(wide_dtype(dtype))
    return np.asarray(value).astype(wide_dtype(dtype))


def _bind_native(equation, inputs):
    inputs = [
        x.astype(atom.aval.dtype) if jnp.issubdtype(atom.aval.dtype, jnp.inexact) else x
        for x, atom in zip(inputs, equation.invars, strict=True)
    ]
    return [_wide_value(out) for out in _jaxpr.bind(equation, inputs)]


def _bind_wide(equation, inputs, hook):
    changed: dict[str, Any] = {
        name: wide_dtype(equation.params[name])
        for name in DTYPE_PARAMETERS
        if _is_float_dtype(equation.params.get(name))
    }
    if equation.primitive.name in ("dot_general", "conv_general_dilated"):
        changed["precision"] = None
    changed |= _jaxpr.map_programs(equation, lambda program: _widened_program(program, hook))
    return _jaxpr.bind(equation, inputs, **changed)


def _is_float_dtype(dtype) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _widened_program(program, hook):
    avals = [
        jax.ShapeDtypeStruct(v.aval.shape, wide_dtype(v.aval.dtype))
        for v in _jaxpr.opened(program)[0].invars
    ]
    return _jaxpr.retrace(program, avals, hook)


def _float_dtypes(found) -> set[str]:
    dtypes = {
        variable.aval.dtype
        for equation in found
        for variable in equation.outvars
        if hasattr(variable.aval, "dtype") and jnp.issubdtype(variable.aval.dtype, jnp.inexact)
    }
    return {np.dtype(jnp.finfo(dtype).dtype).name for dtype in dtypes}
