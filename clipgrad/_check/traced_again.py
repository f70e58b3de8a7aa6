"""A function whose only rules are JAX's: its value and gradient as one program, compiled once.

Outside of `jax.jit` JAX compiles each operation, forward and backward, and a loop at each call,
since its body is a new function each time. What such a function computes is what its trace says.
Its Python runs again in a trace, and if that is the same program, the one that is compiled already
has the numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

import clipgrad._programs as _programs
from clipgrad._check.checked_function import CheckedFunction, Leaves, traced
from clipgrad._check.tolerances import VJPS
from clipgrad._check.user_code import call_compiled, call_user
from clipgrad._names import is_rule_of_jax


def is_traced(function: CheckedFunction) -> bool:
    """Whether a trace says what a function computes, and its only rules are JAX's, as of `relu`."""
    if function.program is None or _programs.side_effects(function.program):
        return False
    ruled = filter(_has_rule, _programs.equations(function.program))
    return all(map(is_rule_of_jax, ruled))


def has_rules(function: CheckedFunction) -> bool:
    """Whether a derivative has a rule beside those of primitives, of JAX or of a user."""
    if function.program is None:
        return True
    return any(map(_has_rule, _programs.equations(function.program)))


def _has_rule(equation: JaxprEqn) -> bool:
    return _programs.is_foreign(equation) or _programs.has_own_derivative(equation)


def is_traced_alike(function: CheckedFunction) -> bool:
    """Whether the Python of a function that JAX compiles anew is again the same program."""
    if not (is_traced(function) and _holds_loops(function.program)):
        return False
    return is_same_program(traced(function.fun, function.inputs), function.program)


def is_same_program(a: Any, b: Any) -> bool:
    """Whether two traces compute the same from the same arguments: their texts and constants."""
    if a is None or b is None or str(a) != str(b):
        return False
    pairs = list(zip(_constants(a), _constants(b), strict=True))
    return all(x is y or _has_same_bits(x, y) for x, y in pairs)


Run = Callable[[Sequence[Any], Sequence[Any]], tuple[Leaves, Leaves]]


class CompiledVJP:
    """Value and gradient of a function as one program, traced at once and compiled when it runs.

    Args:
      function: the function.

    Raises:
      UserError: it cannot be traced.
    """

    def __init__(self, function: CheckedFunction):
        self._function, self._first = function, _value_and_gradient(function)
        self._program = self._traced(self._first, function.inputs)

    def first(self, xs: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Leaves, Leaves]:
        """The outputs and the gradient by a cotangent, of the program that was traced first."""
        return call_compiled(self._first, list(xs), list(cotangents))

    def again(self, xs: Sequence[Any]) -> Run:
        """The same, of the function as its Python, which runs again, is at a point.

        What was traced again is compiled only if it is another program.

        Raises:
          UserError: it cannot be traced again.
        """
        run = _value_and_gradient(self._function)
        if is_same_program(self._traced(run, xs), self._program):
            return self.first
        return lambda xs, cotangents: call_compiled(run, list(xs), list(cotangents))

    def _traced(self, run: Any, xs: Sequence[Any]) -> Any:
        like = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in self._function.outputs]
        return call_user(lambda: run.trace(list(xs), like).jaxpr)


def _value_and_gradient(function: CheckedFunction) -> Callable:
    def run(xs, cotangents):
        outputs, pull = jax.vjp(function.fun, xs)
        return outputs, pull(cotangents)[0]

    return _programs.jit_by_size(function.program, VJPS)(run)


def _holds_loops(program: Any) -> bool:
    """Whether a program holds programs but in a `jit`, which keeps what it has compiled."""
    held = [(e, _programs.held_programs(e)) for e in _programs.opened(program)[0].eqns]
    return any(
        inner and (not _programs.is_jit(e) or any(map(_holds_loops, inner))) for e, inner in held
    )


def _constants(program: Any) -> Iterator[Any]:
    """The constants of a program and of those in it, in order."""
    yield from _programs.opened(program)[1]
    for equation in _programs.opened(program)[0].eqns:
        for inner in _programs.held_programs(equation):
            yield from _constants(inner)


def _has_same_bits(x: Any, y: Any) -> bool:
    if getattr(x, "dtype", None) != getattr(y, "dtype", None) or np.shape(x) != np.shape(y):
        return False
    if not hasattr(x, "dtype") or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return False
    return np.asarray(x).tobytes() == np.asarray(y).tobytes()
