"""The float64 shadow: a function's jaxpr evaluated with every floating type widened."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import jaxprs_in_params

import clipgrad._jaxpr as _jaxpr
from clipgrad._check.real import wide_dtype

AXIS = "clipgrad_perturbation"
OPAQUE = frozenset(
    "pure_callback io_callback debug_callback pallas_call custom_call ffi_call "
    "custom_partitioning run_state xla_pmap".split()
)
NATIVE = frozenset("bitcast_convert_type nextafter random_gamma rng_uniform".split())
DTYPE_PARAMETERS = ("new_dtype", "preferred_element_type", "dtype", "out_dtype")


class Unsupported(Exception):
    """The program holds something that cannot be widened."""


class Shadow(NamedTuple):
    """A traced function that can be evaluated in float64.

    `fun(xs)` strips custom rules and treats `stop_gradient` as JAX does; it is meant to be
    differentiated. `held(xs)` runs under `jax.vmap(axis_name=AXIS)` and takes the values behind
    `stop_gradient` from row 0, so that differences see what JAX differentiates. `native(xs)`
    strips custom rules and keeps all dtypes.
    """

    fun: Callable[[list], list]
    held: Callable[[list], list]
    native: Callable[[list], list]
    narrow: set[str]
    stops: bool


class _Native(_jaxpr.Hook):
    flatten = True


class _Widen(_Native):
    def __init__(self, stop: Callable[[Any], Any]):
        self.stop = stop

    def constant(self, value, aval):
        del aval
        return _wide(value)

    def __call__(self, equation, inputs):
        name = equation.primitive.name
        if name == "stop_gradient":
            return [self.stop(inputs[0])]
        if name == "reduce_precision":
            return inputs
        if name in NATIVE:
            return _bind_native(equation, inputs)
        if _jaxpr.is_entered(equation, self):
            return None
        return _bind_wide(equation, inputs, self)


def make_shadow(program: Any) -> Shadow:
    """Return the float64 evaluations of a traced function from list to list.

    Raises:
      Unsupported: a primitive that cannot be widened, such as a callback or a foreign call; or
        the function could not be traced, and `program` is None.
    """
    if program is None:
        raise Unsupported("it cannot be traced")
    found = list(_jaxpr.equations(program))
    names = {equation.primitive.name for equation in found}
    if names & OPAQUE:
        raise Unsupported(f"it holds {', '.join(sorted(names & OPAQUE))}")

    def run(hook):
        return lambda leaves: _jaxpr.evaluate(program, leaves, hook)

    return Shadow(
        fun=run(_Widen(lax.stop_gradient)),
        held=run(_Hold()),
        native=run(_Native()),
        narrow=_float_dtypes(found),
        stops="stop_gradient" in names,
    )


class _Hold(_Widen):
    """Holds `stop_gradient` at row 0, but for the factors that a linear solve is given.

    `jnp.linalg.solve` stops the gradient of its LU factors because the solve's own rule
    differentiates the matrix; held factors would solve with the unperturbed matrix.
    """

    def __init__(self):
        super().__init__(lambda x: lax.all_gather(x, AXIS)[0])

    def inside(self, equation, step):
        del step
        solves = any(map(_solves, jaxprs_in_params(equation.params)))
        return _Widen(lambda x: x) if solves else self


def _solves(program) -> bool:
    names = {equation.primitive.name for equation in _jaxpr.opened(program)[0].eqns}
    return "custom_linear_solve" in names


def _wide(value):
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
    return [_wide(out) for out in _jaxpr.bind(equation, inputs)]


def _bind_wide(equation, inputs, hook):
    changed: dict[str, Any] = {
        name: wide_dtype(equation.params[name])
        for name in DTYPE_PARAMETERS
        if _is_float_dtype(equation.params.get(name))
    }
    if equation.primitive.name in ("dot_general", "conv_general_dilated"):
        changed["precision"] = None
    changed |= _jaxpr.map_programs(equation, lambda program: _widened(program, hook))
    return _jaxpr.bind(equation, inputs, **changed)


def _is_float_dtype(dtype) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _widened(program, hook):
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
