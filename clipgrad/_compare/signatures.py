"""Signatures: of an array the numbers that a file keeps, by which its equals are known."""

import hashlib
from typing import Any, NamedTuple

import numpy as np

from clipgrad._compare.differences import Exact, Judgment, host_values, rounding
from clipgrad._compare.sketches import (
    LENGTH,
    MASKED,
    NUMBERS,
    SCALE,
    SHIFTS,
    hashes_of,
    judge_sketches,
    signs_of,
)


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


def host_sketch(x: np.ndarray) -> np.ndarray:
    """The `sketch` of an array in NumPy, in float64."""
    if np.iscomplexobj(x):
        x = np.stack([np.real(x), np.imag(x)], axis=-1)
    flat = np.ravel(x).astype(np.float64)
    hashes = hashes_of(np.arange(flat.size, dtype=np.uint32))
    finite, large = np.isfinite(flat), np.abs(flat) >= MASKED
    signed = flat * signs_of(hashes)
    parts = [np.where(finite & ~large, signed, 0), np.where(finite & large, signed * SCALE, 0)]
    count = -(-flat.size // NUMBERS)
    rows = np.pad(np.stack(parts), ((0, 0), (0, count * NUMBERS - flat.size)))
    shifts = hashes_of(np.arange(count, dtype=np.uint32), SHIFTS)[:, None]
    columns = np.arange(NUMBERS, dtype=np.uint32)[None, :] + shifts & np.uint32(NUMBERS - 1)
    turned = np.take_along_axis(rows.reshape(2, count, NUMBERS), columns.astype(int)[None], axis=2)
    kinds = np.where(np.isnan(flat), 1, np.where(finite, 0, np.where(flat > 0, 2, 3)))
    code = np.sum(kinds.astype(np.uint32) * hashes, dtype=np.uint32) & np.uint32(0xFFFFFF)
    sizes = _host_sizes(np.where(finite, flat, 0))
    return np.concatenate([np.sum(turned, axis=1).ravel(), sizes, [float(code)]])


def _host_sizes(x: np.ndarray) -> tuple[float, float]:
    """The norm and the largest magnitude; squares do not overflow."""
    largest = float(np.max(np.abs(x), initial=0))
    return largest * float(np.linalg.norm(x / (largest or 1))), largest


def judge_signatures(own: Signature, other: Signature) -> Judgment:
    """Compare two arrays that should be the same numbers, but for the rounding of their types."""
    if own.shape != other.shape or bool(own.digest) != bool(other.digest):
        return Judgment(float("inf"), 0.0)
    if own.digest:
        return Judgment(0.0 if own.digest == other.digest else 1.0, 0.0)
    eps = rounding(own.dtype, other.dtype)
    return judge_sketches(own.sketch, other.sketch, np.zeros(LENGTH), eps, None)
