"""`Scales`: by how much each element of a point is moved, a power of two."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import clipgrad._trees as _trees
from clipgrad._check.tolerances import pieces

# Numbers so much larger than the median of their leaf are no inputs of one function: a step of a
# part of them would be larger than the others (the case garbage_in_the_padding).
GARBAGE = 2.0**24
LEAST_SHORT = -100  # above this power of two, float32 is exact with room for steps
ROOT = 1.4142135  # a little less than the root of 2, for (0, 8)
BIAS, DIGITS = 1023, 52  # of the exponent in the bits of a float64, and the bits behind it


class Scales:
    """The scale of each element, a power of two, of which the exponent is kept.

    The scale is about |x|, at least the root mean square of the leaf, and 1 for a leaf of zeros. A
    leaf with garbage in it, as in the padding of a batch, has its median in place of the mean.

    Attributes:
      size: the number of elements.
      dtype: float32 if it holds all scales exactly, far enough from its limits, or else float64.
    """

    def __init__(self, xs: Sequence[jax.Array]):
        self._exponents = np.concatenate([_exponents(x) for x in xs])
        is_short = self._exponents.dtype == np.int8
        self.dtype: Any = np.dtype(np.float32 if is_short else np.float64)
        self.size = self._exponents.size

    def __getitem__(self, where: Any) -> Any:
        return np.ldexp(self.dtype.type(1), self._exponents[where])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.times(np.ones(self.size, self.dtype)).astype(dtype or self.dtype, copy=False)

    def times(self, along: np.ndarray) -> np.ndarray:
        """The direction, multiplied in its own memory."""
        for where in pieces(0, self.size):
            along[where] *= self[where]
        return along


def _exponents(leaf: Any) -> np.ndarray:
    flat = np.asarray(leaf).reshape(-1)
    typical, found = _typical(flat), np.empty(flat.size, np.int16)
    for where in pieces(0, flat.size):
        size = np.maximum(_magnitude(flat[where]), typical) * ROOT
        found[where] = (size.view(np.int64) >> DIGITS) - BIAS
    found = np.repeat(found, 2) if _trees.is_complex(leaf) else found
    is_short = found.min(initial=0) > LEAST_SHORT and found.max(initial=0) <= np.iinfo(np.int8).max
    return found.astype(np.int8) if is_short else found


def _typical(flat: np.ndarray) -> float:
    total = sum(float(np.sum(_magnitude(flat[where]) ** 2)) for where in pieces(0, flat.size))
    typical = np.sqrt(total / max(flat.size, 1))
    if not typical > 0:
        return 1.0
    tiny = (np.count_nonzero(GARBAGE * _magnitude(flat[w]) < typical) for w in pieces(0, flat.size))
    if 2 * sum(tiny) < flat.size:
        return typical
    sizes = _magnitude(flat)
    middle = np.median(sizes[sizes > 0])
    return middle if typical > GARBAGE * middle else typical


def _magnitude(numbers: np.ndarray) -> np.ndarray:
    return np.abs(_trees.widened_leaf(numbers))
