"""The analytic gradient, as a user's program would compute it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import Primitive, primitives

import clipgrad._jaxpr as _jaxpr
from clipgrad._check.compiling import quick_jit
from clipgrad._check.contexts import is_steady
from clipgrad._check.problem import Problem
from clipgrad._check.real import cotangent_leaves, gradient_vector
from clipgrad._check.shadow import OPAQUE
from clipgrad._check.structure import primal

OWN = frozenset(p for p in vars(primitives).values() if isinstance(p, Primitive))
FOREIGN = ("custom_", *sorted(OPAQUE))


class PullBack(NamedTuple):
    """The result of `jax.vjp` at one point: the outputs, and the map from cotangents."""

    outputs: list[jax.Array]
    leaves: Callable[[Sequence], list]
    like: Sequence[jax.Array]

    def __call__(self, covector: np.ndarray) -> np.ndarray:
        """The real gradient for a real cotangent vector."""
        return gradient_vector(self.leaves(cotangent_leaves(covector, self.like)))

    def rows(self, covectors: np.ndarray) -> np.ndarray:
        """The gradients for several cotangents, shape (cotangents, inputs)."""
        return np.stack([self(covector) for covector in covectors])


class Differentiate(NamedTuple):
    """Differentiates a function at a point, `compiled` as one program or eagerly.

    `steady` is False if JAX's own operations alone were seen, but others in another context.
    """

    call: Callable[[Sequence[jax.Array]], PullBack]
    compiled: bool
    steady: bool = True

    def __call__(self, xs: Sequence[jax.Array]) -> PullBack:
        """`jax.vjp` at a point."""
        return self.call(xs)


def differentiator(problem: Problem) -> Differentiate:
    """How to differentiate the function at a point.

    Where the function holds rules of its own, or does not do the same in every context, as a
    user's program would: eagerly. JAX's own operations are compiled as one, unless the compiler
    simplifies their rounding away.
    """
    eager = Differentiate(lambda xs: eagerly(problem, xs), compiled=False)
    if not is_plain(problem):
        return eager
    if not is_steady(problem):
        return eager._replace(steady=False)
    compiled = Differentiate(_compiled(problem), compiled=True)
    try:
        same = not primal(problem, compiled(problem.inputs).outputs, "compiled")
    except Exception:
        same = False
    return compiled if same else eager


def is_plain(problem: Problem) -> bool:
    """Whether the function is made of JAX's own operations alone, with no custom rule."""
    if problem.program is None:
        return False
    return all(
        equation.primitive in OWN and not equation.primitive.name.startswith(FOREIGN)
        for equation in _jaxpr.equations(problem.program)
    )


def eagerly(problem: Problem, xs: Sequence[jax.Array], pulled: Callable | None = None) -> PullBack:
    """`jax.vjp` outside of `jax.jit`; `pulled(pull, cotangents)` calls what it hands back."""
    outputs, pull = jax.vjp(problem.fun, list(xs))
    pulled = pulled or (lambda pull, cotangents: pull(cotangents))
    return PullBack(outputs, lambda cts: pulled(pull, list(cts))[0], problem.outputs)


def _compiled(problem: Problem) -> Callable[[Sequence[jax.Array]], PullBack]:
    @quick_jit
    def program(xs, cotangents):
        outputs, pull = jax.vjp(problem.fun, xs)
        return outputs, pull(cotangents)[0]

    def differentiate(xs):
        xs = list(xs)
        outputs, _ = program(xs, problem.outputs)
        return PullBack(outputs, lambda cts: program(xs, list(cts))[1], problem.outputs)

    return differentiate
