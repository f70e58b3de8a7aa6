"""Evaluating a program in a wider floating type."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as jax_primitives

from clipgrad._programs.elements import dtype_of, holds_floats
from clipgrad._programs.evaluate import Hook, Part, bind, is_entered, retrace
from clipgrad._programs.kinds import (
    CUSTOM_RULES,
    JIT,
    LINEAR_SOLVES,
    REMAT,
    detaches,
    has_custom_rule,
)
from clipgrad._programs.numeric import Does, does, is_print, numeric_of
from clipgrad._programs.programs import equations, is_foreign, map_programs, opened

_DTYPES = ("new_dtype", "preferred_element_type", "dtype", "out_dtype")


def is_stopped(equation: JaxprEqn) -> bool:
    """Whether `Widen` stops something there: by its ``stop``, or at which a sample is drawn."""
    return detaches(equation) or equation.primitive is jax_primitives.random_gamma_p


class Widen(Hook):
    """Replaces every floating type that is narrower than ``dtype`` by ``dtype``.

    Custom rules are entered, so that the derivative is plain AD's; a `stop_gradient` inside of a
    rule, which JAX ignores, is not applied. In float64 products have the precision of the type.
    Foreign programs, and operations on bits, keep their types; nothing is printed.

    Args:
      dtype: float32 or float64; complex numbers become pairs of such numbers.
      stop: what `stop_gradient` becomes, and the parameter at which a sample is drawn.
    """

    in_place = (JIT, REMAT, CUSTOM_RULES)
    whole = (LINEAR_SOLVES,)

    def __init__(self, dtype: Any, stop: Callable[[Any], Any] = lax.stop_gradient):
        self.dtype, self.stop, self._base = jnp.dtype(dtype), stop, stop

    def wide_dtype(self, dtype: Any) -> Any:
        """The type that takes the place of another."""
        if not _is_float(dtype) or jnp.finfo(dtype).bits >= jnp.finfo(self.dtype).bits:
            return dtype
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        return np.dtype(np.complex128) if is_complex else self.dtype

    def constant(self, value: Any, aval: Any) -> Any:
        """A literal, a constant or an input, widened."""
        dtype = getattr(value, "dtype", None)
        if dtype is None:  # a Python number, which has more digits than its type in the program
            array = np.asarray(value)
            narrow = getattr(aval, "dtype", array.dtype)
            return array.astype(self.wide_dtype(narrow)) if array.dtype.kind in "fc" else value
        if (wide := self.wide_dtype(dtype)) == dtype:
            return value
        return value.astype(wide) if isinstance(value, Tracer) else np.asarray(value).astype(wide)

    def inside(self, equation: JaxprEqn, part: Part) -> "Widen":
        """The hook for the program of a custom rule stops nothing."""
        if not has_custom_rule(equation):
            return self
        freely = copy.copy(self)
        freely.stop = lambda x: x
        return freely

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results in the wide type; None where the equation is entered."""
        if detaches(equation):
            return [self.stop(inputs[0])]
        if does(equation) is Does.REDUCES and not _is_power_of_two(equation):
            return inputs
        if is_print(equation):
            return []
        if equation.primitive is jax_primitives.random_gamma_p:
            return [self._sample(equation, inputs)]
        if numeric_of(equation).has_bits or is_foreign(equation):
            return self._as_they_are(equation, inputs)
        return None if is_entered(equation, self) else self._bound(equation, inputs)

    def _as_they_are(self, equation: JaxprEqn, inputs: list) -> list:
        pairs = zip(equation.invars, inputs, strict=True)
        narrow = [jnp.asarray(x, dtype_of(v)) if holds_floats(v) else x for v, x in pairs]
        return [self.constant(x, None) for x in bind(equation, narrow)]

    def _sample(self, equation: JaxprEqn, inputs: list) -> Any:
        """A sample of a gamma distribution, with the implicit derivative that JAX defines.

        It is linear in its parameter: for a fixed key it is no smooth function of it.
        """
        key, parameter = inputs
        at = self._base(parameter)
        (sample,) = self._as_they_are(equation, [key, at])
        value = lax.exp(sample) if equation.params["log_space"] else sample
        least = jnp.finfo(value.dtype).tiny
        slope = lax.random_gamma_grad(at, jnp.maximum(value, least))  # pyright: ignore[reportCallIssue]
        slope = slope / value if equation.params["log_space"] else slope
        return sample + slope * (parameter - at)

    def _bound(self, equation: JaxprEqn, inputs: list) -> list:
        params = equation.params
        dtypes = {k for k, v in params.items() if isinstance(v, np.dtype) or k in _DTYPES}
        changed: dict[str, Any] = {
            name: self.wide_dtype(params[name]) for name in dtypes if _is_float(params[name])
        }
        if numeric_of(equation).is_product and self.dtype == jnp.float64:
            changed["precision"] = None
        return bind(equation, inputs, **changed, **map_programs(equation, self._widened))

    def _widened(self, program: Any) -> Any:
        variables = opened(program)[0].invars
        types = [
            jax.ShapeDtypeStruct(v.aval.shape, self.wide_dtype(dtype_of(v))) for v in variables
        ]
        return retrace(program, types, self)


class NoRules(Widen):
    """Replaces custom rules by the functions that they are for; types stay."""

    def wide_dtype(self, dtype: Any) -> Any:
        return dtype

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results, rounded where the program rounds."""
        rounds = does(equation) is Does.REDUCES or numeric_of(equation).is_product
        return bind(equation, inputs) if rounds else super().__call__(equation, inputs)


def _is_power_of_two(equation: JaxprEqn) -> bool:
    """Whether the result is a scale, as of a norm: not a number that a narrow type would round."""
    return equation.params["mantissa_bits"] == 0


def computed_types(program: Any) -> set[str]:
    """The names of the floating types that a program computes in."""
    results = [v for equation in equations(program) for v in equation.outvars]
    floats = [dtype_of(v) for v in results if holds_floats(v)]
    return {np.dtype(jnp.finfo(dtype).dtype).name for dtype in floats}


def _is_float(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
