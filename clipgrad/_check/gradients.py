"""The gradient as a user's program computes it, and the exact ones to compare it with."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

import clipgrad._jaxpr as _jaxpr
import clipgrad._trees as _trees
from clipgrad._check.differences import in_float64
from clipgrad._check.subject import CheckSubject
from clipgrad._check.widening import Strip, widened_program


class VJP(NamedTuple):
    """The result of `jax.vjp` at one point: the outputs, and the map from cotangents."""

    outputs: list[jax.Array]
    pull: Callable[[Sequence], tuple]
    like: Sequence[jax.Array]

    def __call__(self, covector: np.ndarray) -> np.ndarray:
        """The real gradient for a real cotangent vector."""
        return _trees.gradient_vector(self.pull(_trees.cotangent_leaves(covector, self.like))[0])

    def rows(self, covectors: np.ndarray) -> np.ndarray:
        """The gradients for several cotangents, shape (cotangents, inputs)."""
        return _rows((self(covector) for covector in covectors), len(covectors))


def differentiated(subject: CheckSubject, xs: Sequence[jax.Array]) -> VJP:
    """`jax.vjp` at a point, outside of `jax.jit` as in a user's program."""
    return VJP(*jax.vjp(subject.fun, list(xs)), subject.outputs)


def has_rules(subject: CheckSubject) -> bool:
    """Whether a derivative rule is not JAX's own, as far as can be seen."""
    if subject.program is None:
        return True
    names = {equation.primitive.name for equation in _jaxpr.equations(subject.program)}
    return bool(names & _jaxpr.FOREIGN_PROGRAMS) or any(n.startswith("custom_") for n in names)


def _rows(vectors: Iterator[np.ndarray], count: int) -> np.ndarray:
    """Vectors stacked, of which no more than one is there besides."""
    first = next(vectors)
    rows = np.empty((count, first.size))
    for row, vector in zip(rows, itertools.chain([first], vectors), strict=True):
        row[:] = vector
    return rows


class Gradient:
    """A gradient as a program of inputs and a cotangent, to be evaluated in float64.

    Args:
      program: what `traced_vjp` gives.
      outputs: the outputs at the base point, for shapes and dtypes.

    Raises:
      Unsupported: it cannot be traced or widened.
    """

    def __init__(self, program: Any, outputs: Sequence):
        self.program, self._outputs = program, outputs
        self.widened = widened_program(program)

    def __call__(self, xs: Sequence[jax.Array], covectors: np.ndarray) -> np.ndarray:
        """The gradients in float64 for each cotangent, shape (cotangents, inputs)."""
        return self._wide("call", self.widened.call, xs, covectors)

    def moved_by_constants(self, xs, covectors: np.ndarray) -> np.ndarray:
        """How far the gradient moves when every constant does by one rounding of its type."""
        exact, nudged = self(xs, covectors), self.widened.nudged
        moved = [self._wide(seed, nudged(seed), xs, covectors) for seed in (0, 1)]
        return np.max([np.abs(gradient - exact) for gradient in moved], axis=0)

    def in_own_types(self, xs, covectors: np.ndarray) -> np.ndarray:
        """The gradients in the types of the program.

        Eagerly, since a compiler may simplify away just what loses precision.
        """
        inputs = ([*xs, *_trees.cotangent_leaves(row, self._outputs)] for row in covectors)
        rows = [_jaxpr.evaluate(self.program, leaves, Strip()) for leaves in inputs]
        return np.stack([_trees.gradient_vector(row) for row in rows])

    def _wide(self, name: Any, call: Callable, xs, covectors) -> np.ndarray:
        run = _jaxpr.kept_by_key((name, self.widened.text), lambda: _jaxpr.low_jit(call))
        constants = _jaxpr.opened(self.program)[1]
        with in_float64():
            leaves = [np.asarray(_trees.widened_leaf(x)) for x in xs]
            like = [
                jax.ShapeDtypeStruct(y.shape, _trees.wide_dtype(y.dtype)) for y in self._outputs
            ]
            cotangents = [_trees.cotangent_leaves(row, like) for row in covectors]
            found = (_trees.gradient_vector(run(constants, [*leaves, *u])) for u in cotangents)
            return _rows(found, len(cotangents))


def traced_vjp(fun: Callable, subject: CheckSubject) -> Any:
    """The VJP of a function as a program of a subject's inputs and cotangents."""
    cotangents = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in subject.outputs]
    pulled = lambda xs, u: jax.vjp(fun, xs)[1](u)[0]  # noqa: E731
    return jax.make_jaxpr(pulled)(subject.inputs, cotangents)


def stripped(program: Any, stop: Callable = lax.stop_gradient) -> Callable[[list], list]:
    """The function of a program, with what custom rules compute in their place.

    Its derivative, plain AD, is exact for every element at the price of one backward pass, and
    nominates suspects. It is never the last word: it shares JAX's rules, and has subgradients of
    its own at kinks.
    """
    return lambda xs: _jaxpr.evaluate(program, xs, Strip(stop))
