"""Signatures: of an array the numbers that a file keeps, by which its equals are known."""

import hashlib
from typing import Any, NamedTuple

import numpy as np

from clipgrad._compare.differences import Exact, Judgment, host_values, rounding
from clipgrad._compare.sketches import LENGTH, host_sketch, judge_sketches


class Signature(NamedTuple):
    """The signature of an array.

    Attributes:
      shape: its shape.
      dtype: its type.
      sketch: of floating numbers their sketch, shape (515,); of others empty.
      digest: of others a hash of all bits; of floating numbers "".
    """

    shape: tuple[int, ...]
    dtype: Any
    sketch: np.ndarray
    digest: str


def signature(x: Any) -> Signature:
    """The signature of an array."""
    shape, dtype = np.shape(x), x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    (host,) = host_values([x])
    if isinstance(host, Exact):
        bits = np.ascontiguousarray(host.values)
        digest = hashlib.sha256(bits.tobytes()).hexdigest()
        return Signature(shape, dtype, np.zeros(0), digest)
    return Signature(shape, dtype, host_sketch(host), "")


def judge_signatures(own: Signature, other: Signature) -> Judgment:
    """Compare two arrays that should be the same numbers, but for the rounding of their types."""
    if own.shape != other.shape or bool(own.digest) != bool(other.digest):
        return Judgment(float("inf"), 0.0)
    if own.digest:
        return Judgment(0.0 if own.digest == other.digest else 1.0, 0.0)
    eps = rounding(own.dtype, other.dtype)
    return judge_sketches(own.sketch, other.sketch, np.zeros(LENGTH), eps, None)
