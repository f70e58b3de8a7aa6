"""Layouts: an array of another framework, signed in every order of its axes."""

import hashlib
import itertools
from typing import NamedTuple

import numpy as np

from clipgrad._compare.sketches import LENGTH, host_sketch

Order = tuple[int, ...]
_MOST_AXES = 4  # 24 orders


class Layouts(NamedTuple):
    """The signatures of an array, as a file keeps them.

    Attributes:
      shape: its shape.
      dtype: the name of its type.
      sketches: the sketch in each of `orders_of`, shape (orders, 515); of integers none.
      digests: of integers a hash of their bits as int32 in each order.
      stacked: whether the first axis is of layers, and stays the first.
    """

    shape: tuple[int, ...]
    dtype: str
    sketches: np.ndarray
    digests: tuple[str, ...]
    stacked: bool = False

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))

    @property
    def orders(self) -> list[Order]:
        """The orders of axes that are signed."""
        return orders_of(self.shape, self.stacked)


def orders_of(shape: tuple[int, ...], stacked: bool = False) -> list[Order]:
    """The orders of the axes that are longer than 1, all of up to four; the order itself first."""
    if stacked:
        return [(0, *(i + 1 for i in order)) for order in orders_of(shape[1:])]
    axes = [i for i, size in enumerate(shape) if size != 1]
    if len(axes) <= _MOST_AXES:
        return list(itertools.permutations(axes))
    first, second, *rest = axes
    known = [axes, [first, *rest, second], [*rest, second, first], axes[::-1]]
    return list(dict.fromkeys(map(tuple, known)))


def layouts(x: np.ndarray, dtype: str, stacked: bool = False) -> Layouts:
    """Sign an array, whose type in its own framework has this name."""
    orders = orders_of(x.shape, stacked)
    turned = [np.transpose(x, (*o, *sorted({*range(x.ndim)} - {*o}))) for o in orders]
    if x.dtype.kind not in "fc":
        digests = (hashlib.sha256(t.astype(np.int32).tobytes()).hexdigest() for t in turned)
        return Layouts(x.shape, dtype, np.zeros((0, LENGTH)), tuple(digests), stacked)
    sketches = np.stack([host_sketch(t) for t in turned])
    return Layouts(x.shape, dtype, sketches, (), stacked)
