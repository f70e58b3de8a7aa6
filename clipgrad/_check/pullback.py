"""The analytic gradient, as a user's program would compute it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from clipgrad._check.problem import Problem
from clipgrad._check.real import cotangent_leaves, gradient_vector


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


def pull_back(problem: Problem, xs: Sequence[jax.Array] | None = None) -> PullBack:
    """Differentiate eagerly at `xs`, or at the problem's own point."""
    outputs, pull = jax.vjp(problem.fun, list(problem.inputs if xs is None else xs))
    return PullBack(outputs, lambda cotangents: pull(list(cotangents))[0], problem.outputs)
