"""Signatures: of an array the numbers that a file keeps, by which its equals are known."""

import hashlib
import itertools
from typing import Any, NamedTuple

import numpy as np

from clipgrad._compare.differences import Exact, Judgment, host_values, rounding
from clipgrad._compare.sketches import LENGTH, host_sketch, judge_sketches

Order = tuple[int, ...]
_MOST_AXES = 4  # 24 orders
_STILL = np.zeros(LENGTH)


class Signature(NamedTuple):
    """The signature of an array; of another framework's in several orders of its axes.

    Attributes:
      shape: its shape.
      dtype: its type, or the name that this has in another framework.
      sketches: of floating numbers the sketch in each order, shape (orders, 515); of others none.
      digests: of others a hash of all bits, of another framework's as int32 in each order.
      stacked: whether the first axis is of layers, and stays the first.
      floor: how far rounding moves the first sketch.
    """

    shape: tuple[int, ...]
    dtype: Any
    sketches: np.ndarray
    digests: tuple[str, ...]
    stacked: bool = False
    floor: np.ndarray = _STILL

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))

    @property
    def orders(self) -> list[Order]:
        """The orders of axes that are signed, of another framework's array."""
        return orders_of(self.shape, self.stacked)


def signature(x: Any) -> Signature:
    """The signature of an array."""
    shape, dtype = np.shape(x), x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    (host,) = host_values([x])
    if isinstance(host, Exact):
        digest = hashlib.sha256(np.ascontiguousarray(host.values).tobytes()).hexdigest()
        return Signature(shape, dtype, np.zeros((0, LENGTH)), (digest,))
    return Signature(shape, dtype, host_sketch(host)[None], ())


def layouts(x: np.ndarray, dtype: str, stacked: bool = False) -> Signature:
    """Sign an array, whose type in its own framework has this name, in every order of its axes."""
    orders = orders_of(x.shape, stacked)
    turned = [np.transpose(x, (*o, *sorted({*range(x.ndim)} - {*o}))) for o in orders]
    if x.dtype.kind not in "fc":
        digests = (hashlib.sha256(t.astype(np.int32).tobytes()).hexdigest() for t in turned)
        return Signature(x.shape, dtype, np.zeros((0, LENGTH)), tuple(digests), stacked)
    return Signature(x.shape, dtype, np.stack([host_sketch(t) for t in turned]), (), stacked)


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


def judge_signatures(own: Signature, other: Signature) -> Judgment:
    """Compare two arrays that should be the same numbers, but for the rounding of their types."""
    if own.shape != other.shape or bool(own.digests) != bool(other.digests):
        return Judgment(float("inf"), 0.0)
    if own.digests:
        return Judgment(0.0 if own.digests == other.digests else 1.0, 0.0)
    eps = rounding(own.dtype, other.dtype)
    return judge_sketches(own.sketches[0], other.sketches[0], own.floor, eps, None)
