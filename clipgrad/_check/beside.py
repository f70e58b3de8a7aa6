"""`Beside`: gradients in float64, kept as what they add to those in float32."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

import clipgrad._trees as _trees
from clipgrad._check.tolerances import pieces

# Of fewer elements, gradients are kept as they are.
MANY = 2**16
# Below this, a difference loses digits in float32, and above it may overflow.
TINIEST, HUGEST = 2.0**-100, 2.0**100
# How far two gradients that are kept so may be apart for that, as a part of what they add.
PART = 2.0**-23


class Beside(NDArrayOperatorsMixin):
    """Rows of float64, each the sum of one of float32 and of one that is kept for it.

    In expressions and where it is indexed it is an array, but for a slice of rows or of all of
    their elements, which is another view.
    """

    dtype, ndim = np.dtype(np.float64), 2

    def __init__(self, near: np.ndarray, rest: np.ndarray):
        self._near, self._rest = near, rest
        self.shape = near.shape

    def __len__(self) -> int:
        return len(self._near)

    def __getitem__(self, where: Any) -> Any:
        near, rest = self._near[where], self._rest[where]
        is_view = np.ndim(near) == 2 and np.shares_memory(near, self._near)
        return Beside(near, rest) if is_view else np.add(near, rest, dtype=np.float64)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.add(self._near, self._rest, dtype=np.float64)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        arrays = (np.asarray(x) if isinstance(x, Beside) else x for x in inputs)
        return getattr(ufunc, method)(*arrays, **options)

    @property
    def terms(self) -> tuple[np.ndarray, np.ndarray]:
        """The first row as what float32 holds, and what is added."""
        return self._near[0], self._rest[0]

    def error(self, row: int, where: Any) -> np.ndarray:
        """The distance of elements of a row from those of another that comes from keeping them."""
        return PART * np.abs(self._rest[row, where])


def kept_beside(gradient: np.ndarray, leaves_of: Callable[[int], list | None]) -> Any:
    """Rows of float64 beside the gradient, if that is enough; None if one is None.

    `leaves_of(k)` gives the leaves of a row. Few elements are kept as they are, and so are those
    beside gradients of another type.
    """
    is_short = gradient.dtype == np.float32 and gradient.shape[1] > MANY
    found = _trees.rows_in_place(gradient.shape, np.float32 if is_short else np.float64)
    for k in range(len(gradient)):
        leaves = leaves_of(k)
        if leaves is None:
            return None
        if is_short and not _put_rest(found[k], gradient[k], leaves):
            rows, is_short, leaves = found[:k], False, leaves_of(k) or []
            found = np.empty(gradient.shape)
            found[:k] = Beside(gradient[:k], rows)
        if not is_short:
            found[k] = _trees.gradient_vector(leaves)
        _trees.give_back(gradient.shape[1])
    return Beside(gradient, found) if is_short else found


def _put_rest(found: np.ndarray, near: np.ndarray, leaves: list) -> bool:
    """Write what leaves, which are released, add; return whether float32 holds it."""
    while leaves:
        start = int(_trees.offsets(leaves)[-2])
        leaf = _trees.gradient_vector([leaves.pop()])
        for where in pieces(start, start + leaf.size):
            rest = leaf[where.start - start : where.stop - start] - near[where]
            size = np.abs(rest)
            if not np.all((size == 0) | (size > TINIEST) & (size < HUGEST)):
                return False
            found[where] = rest
    return True
