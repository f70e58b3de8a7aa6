"""How far two gradients may be apart, by the precision the function computes in."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

PRECISIONS = ("bfloat16", "float16", "float32", "float64")
RELATIVE = {"float64": 1e-6, "float32": 5e-4, "float16": 1e-2, "bfloat16": 5e-2}
ALONG = {"float64": 1e-8, "float32": 3e-5, "float16": 5e-3, "bfloat16": 3e-2}
ROUNDINGS = {"float64": 50.0, "float32": 50.0, "float16": 8.0, "bfloat16": 4.0}
VANISHING = 1e-13


class Tolerance(NamedTuple):
    """Tolerances of every element of the input vector.

    |numeric - analytic| <= relative * max(|numeric|, |analytic|) + error + floor, where the floor
    allows 50 roundings of the leaf's gradient, fewer in half precision; along a direction v, the
    tolerance is `along` * |v * gradient|.
    With `paddle` set, Paddle's rule for elements: |numeric - analytic| <= paddle * |numeric|,
    or paddle where |numeric| < 1e-3.
    """

    ranges: Sequence[tuple[int, int]]
    relative: np.ndarray
    along: np.ndarray
    eps: np.ndarray
    roundings: np.ndarray
    tiny: np.ndarray
    paddle: float | None = None

    def floor(self, gradient: np.ndarray, scale: np.ndarray, exact: bool = False) -> np.ndarray:
        """What rounding alone may do to each element of a gradient, shape (K, inputs).

        A leaf whose gradient vanishes gets what the other leaves' effects leave there when they
        cancel. Of an `exact` gradient it is known which leaves those are.
        """
        typical = self.typical(gradient)
        others = self.overall(gradient, scale)[:, None] / scale
        if exact:
            others = np.where(typical > VANISHING * others, 0.0, others)
        else:
            others = 0.01 * others
        return self.roundings * (self.eps * (typical + others) + self.tiny)

    def typical(self, gradient: np.ndarray) -> np.ndarray:
        """The root mean square over each leaf, at each element."""
        out = np.zeros_like(gradient)
        for start, stop in self.ranges:
            part = gradient[:, start:stop]
            out[:, start:stop] = np.sqrt(np.mean(part**2, axis=1, keepdims=True))
        return out

    def overall(self, gradient: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """The largest effect that any leaf has on the output, per cotangent."""
        return self.typical(gradient * scale).max(axis=1)


def narrowest(dtypes: Iterable[str]) -> str:
    """The least precise of some dtypes; an unknown one counts as bfloat16."""
    known = [name if name in PRECISIONS else "bfloat16" for name in dtypes]
    return min(known, key=PRECISIONS.index)


def make_tolerance(
    ranges: Sequence[tuple[int, int]],
    dtypes: Sequence[str],
    inner: Iterable[str] = (),
    max_relative_error: float | None = None,
) -> Tolerance:
    """Tolerances for leaves of the given dtypes in a function that computes in `inner` ones."""
    names = [narrowest([dtype, *inner]) for dtype in dtypes]
    sizes = [stop - start for start, stop in ranges]

    def spread(values) -> np.ndarray:
        return np.repeat(np.asarray(values, np.float64), sizes)

    return Tolerance(
        ranges=ranges,
        relative=spread([RELATIVE[name] for name in names]),
        along=spread([ALONG[name] for name in names]),
        eps=spread([float(jnp.finfo(name).eps) for name in names]),
        roundings=spread([ROUNDINGS[name] for name in names]),
        tiny=spread([float(jnp.finfo(name).tiny) for name in names]),
        paddle=max_relative_error,
    )
