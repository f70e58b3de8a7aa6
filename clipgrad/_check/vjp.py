"""The VJP of a function, as it is computed: as one program, or operation by operation."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from clipgrad._check import contract, vectors
from clipgrad._check.checked_function import CheckedFunction
from clipgrad._check.slopes import spread
from clipgrad._check.tolerances import RUNS_OF_GRADIENT, narrowest, precision
from clipgrad._check.traced_again import CompiledVJP, Run, is_traced
from clipgrad._check.user_code import UserError, call_user
from clipgrad._programs import computed_types


class VJP(NamedTuple):
    """The result of `jax.vjp` at one point: the outputs, and the map from cotangents.

    Attributes:
      function: the function.
      outputs: its outputs there.
      pull: the map from cotangents to a tuple of the gradient's leaves.
      compiled: value and gradient as one program, if that computes them.
    """

    function: CheckedFunction
    outputs: list[jax.Array]
    pull: Callable[[Sequence], tuple]
    compiled: CompiledVJP | None = None

    def __call__(self, covector: np.ndarray) -> np.ndarray:
        """The real gradient for a real cotangent vector, as it is computed."""
        cotangents = vectors.cotangent_leaves(covector, self.function.outputs)
        leaves = call_user(lambda: jax.block_until_ready(self.pull(cotangents)[0]))
        return vectors.gradient_vector(leaves)

    def rows(self, covectors: np.ndarray) -> np.ndarray:
        """The gradients for several cotangents, shape (cotangents, inputs)."""
        return np.stack([self(u) for u in covectors])

    def moved_with_inputs(self, xs: Sequence, covectors: np.ndarray) -> np.ndarray:
        """The distance that a rounding of each input moves each element by.

        0 where a user's rule runs, which may not write off what it loses.
        """
        if self.compiled is None:
            return np.zeros(vectors.offsets(xs)[-1])
        run = self.compiled.first

        def rows(leaves):
            pull = lambda cotangents: (run(leaves, cotangents)[1],)  # noqa: E731
            return self._replace(pull=pull).rows(covectors)

        moved = lambda seed: rows(vectors.moved_leaves(xs, seed))  # noqa: E731
        return spread(moved, rows(xs), RUNS_OF_GRADIENT).max(axis=0)

    def again(self, xs: Sequence) -> "VJP":
        """The VJP at a point, after this one: without compiling the same again."""
        if self.compiled is None:
            return differentiated(self.function, xs)
        return _of_program(self.function, self.compiled, self.compiled.again(xs), xs)


def differentiated(function: CheckedFunction, xs: Sequence) -> VJP:
    """`jax.vjp` at a point, outside of `jax.jit`."""
    outputs, pull = call_user(jax.vjp, function.fun, list(xs))
    return VJP(function, outputs, pull)


def first_vjp(function: CheckedFunction) -> VJP:
    """The VJP at the point of a function, the first that a check computes.

    Where the only rules are JAX's, and the outputs near those of the call, one program computes
    outputs and gradient: JAX would otherwise compile each operation for each shape. Any other
    function is differentiated outside of `jax.jit`, where a user's rule itself runs.
    """
    vjp = _in_one_program(function) if is_traced(function) else None
    return differentiated(function, function.inputs) if vjp is None else vjp


def _in_one_program(function: CheckedFunction) -> VJP | None:
    """The VJP as one program; None if it cannot be one, or has other outputs than the call."""
    try:
        compiled = CompiledVJP(function)
        vjp = _of_program(function, compiled, compiled.first, function.inputs)
    except UserError:
        return None
    types = [*function.dtypes, *computed_types(function.program)]
    # XLA leaves out roundings between operations, in all that it computes at once. Float64 shows
    # smaller differences: `require_same_values`.
    room = precision(narrowest(types)).relative
    return None if contract.primal(function, vjp.outputs, "compiled", room) else vjp


def _of_program(function: CheckedFunction, compiled: CompiledVJP, run: Run, xs: Sequence) -> VJP:
    zeros = np.zeros(vectors.offsets(function.outputs)[-1])
    outputs, _ = run(xs, vectors.cotangent_leaves(zeros, function.outputs))
    return VJP(function, outputs, lambda cotangents: (run(xs, cotangents)[1],), compiled)
