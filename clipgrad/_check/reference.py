"""JAX's own derivative of the float64 shadow, every custom rule stripped.

It is exact for every element at the price of one backward pass, and nominates suspects. It is
never the last word: it shares JAX's rules, and has subgradients of its own at kinks.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import lax

from clipgrad._check.compiling import quick_jit
from clipgrad._check.differences import on_cpu
from clipgrad._check.real import cotangent_leaves, gradient_vector, stacked, widen
from clipgrad._check.shadow import Shadow


class Reference:
    """Gradients of the stripped function: in float64, and in its own precision.

    Args:
      shadow: the traced function.
      outputs: the outputs at the base point, for shapes and dtypes.
    """

    def __init__(self, shadow: Shadow, outputs: Sequence[jax.Array]):
        self._outputs = outputs
        self._wide = _pullback(shadow.fun)
        self._native = shadow.native

    def gradient(self, xs: Sequence[jax.Array], covectors: np.ndarray) -> np.ndarray:
        """The gradients for each cotangent, shape (cotangents, inputs), in float64."""
        with jax.enable_x64(True), on_cpu():
            leaves = [np.asarray(widen(x)) for x in xs]
            like = [jax.ShapeDtypeStruct(y.shape, widen(y).dtype) for y in self._outputs]
            return _rows(self._wide, leaves, covectors, like)

    def rounding(self, xs: Sequence[jax.Array], covectors: np.ndarray) -> np.ndarray:
        """How far the stripped function's own gradient is off, for want of precision.

        Eagerly, since a compiler may simplify away just what loses precision.
        """
        _, pull = jax.vjp(self._native, list(xs))
        cotangents = [cotangent_leaves(row, self._outputs) for row in covectors]
        native = np.stack([gradient_vector(pull(leaves)[0]) for leaves in cotangents])
        return np.abs(native - self.gradient(xs, covectors))


def _pullback(fun: Callable[[list], list]) -> Callable:
    def pull(xs, cotangents):
        _, pullback = jax.vjp(fun, xs)
        return lax.map(lambda u: pullback(u)[0], cotangents)

    return quick_jit(pull)


def _rows(program, xs, covectors, like) -> np.ndarray:
    cotangents = stacked([cotangent_leaves(row, like) for row in covectors])
    pulled = [np.asarray(leaf) for leaf in program(xs, cotangents)]
    return np.stack([gradient_vector([leaf[k] for leaf in pulled]) for k in range(len(covectors))])
