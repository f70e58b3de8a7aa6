"""Lists of float arrays as one real vector: complex numbers are two reals, side by side."""

import contextlib
import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipgrad._trees.trees import is_complex, widened_leaf

Array = Any
# Freed pieces of up to 32 MB, which most leaves are, stay with the process, and what is larger does
# not fit into them: a check would take half as much again.
TRIMMED = 2**20  # elements


def real_dtype(leaf: Array) -> np.dtype:
    return np.dtype(jnp.finfo(leaf.dtype).dtype)


def real_size(leaf: Array) -> int:
    return leaf.size * (2 if is_complex(leaf) else 1)


def offsets(leaves: Sequence[Array]) -> np.ndarray:
    """The place of each leaf in the vector; the last entry is the vector's length."""
    return np.cumsum([0] + [real_size(leaf) for leaf in leaves])


def areas(leaves: Sequence[Array]) -> list[tuple[int, int]]:
    places = offsets(leaves)
    return [(int(a), int(b)) for a, b in zip(places[:-1], places[1:], strict=True)]


def to_vector(leaves: Sequence[Array], dtype: Any) -> jax.Array:
    """Flatten traced leaves into one real vector."""
    parts = [_real_parts(leaf, jnp).astype(dtype) for leaf in leaves]
    return jnp.concatenate(parts) if parts else jnp.zeros(0, dtype)


def split(rows: jax.Array, like: Sequence[Array]) -> list[jax.Array]:
    """Cut traced real vectors, shape (rows, n), into leaves of a leading axis; see `from_rows`."""
    leaves = []
    for leaf, (start, stop) in zip(like, areas(like), strict=True):
        part = lax.slice_in_dim(rows, start, stop, axis=1)
        if is_complex(leaf):
            pairs = part.reshape((len(rows), *leaf.shape, 2))
            part = lax.complex(pairs[..., 0], pairs[..., 1])
        leaves.append(part.reshape((len(rows), *leaf.shape)).astype(leaf.dtype))
    return leaves


def zeros_in_place(size: int, dtype: Any = np.float64) -> np.ndarray:
    """A vector of zeros at a multiple of 64 bytes, which XLA on a CPU reads without a copy."""
    count = size * np.dtype(dtype).itemsize
    whole = np.zeros(count + 64, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + count].view(dtype)


def rows_in_place(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Zeros of a shape that XLA on a CPU reads without a copy."""
    return zeros_in_place(math.prod(shape), dtype).reshape(shape)


def to_numpy(leaves: Sequence[Array], out: np.ndarray | None = None) -> np.ndarray:
    """Flatten concrete leaves into one vector: `out`, or of float64."""
    known = (x if x.dtype.kind in "fc" else widened_leaf(x) for x in map(np.asarray, leaves))
    parts = [_real_parts(leaf, np) for leaf in known]
    out = np.empty(int(offsets(leaves)[-1])) if out is None else out
    return np.concatenate(parts, out=out) if parts else out


def from_rows(rows: np.ndarray, like: Sequence[Array]) -> list[np.ndarray]:
    """Cut real vectors, shape (..., n), into leaves of leading shape (...)."""
    leaves = []
    for leaf, (start, stop) in zip(like, areas(like), strict=True):
        part = rows[..., start:stop]
        if is_complex(leaf):
            part = part[..., ::2] + 1j * part[..., 1::2]
        shape = (*rows.shape[:-1], *leaf.shape)
        leaves.append(part.astype(leaf.dtype, copy=False).reshape(shape))
    return leaves


def gradient_vector(cotangents: Sequence[Array]) -> np.ndarray:
    """The real gradient: JAX hands back the conjugate of d/d(re) + i d/d(im)."""
    return gradient_rows([cotangents], 1)[0]


def gradient_rows(found: Iterable[Sequence[Array]], count: int) -> np.ndarray:
    """Several real gradients, of float32 if all leaves are, else of float64.

    Each leaf is released when it is copied, so that no gradient need be there twice.
    """
    rows, row = np.zeros((count, 0)), 0
    for leaves in found:
        leaves, places = list(leaves), offsets(leaves)
        give_back(int(places[-1]))
        if not row:
            is_single = all(real_dtype(leaf) == np.float32 for leaf in leaves)
            shape = count, int(places[-1])
            rows = rows_in_place(shape, np.float32 if is_single else np.float64)
        for start, stop in reversed(areas(leaves)):
            leaf = leaves.pop()
            to_numpy([np.conj(leaf) if is_complex(leaf) else leaf], rows[row, start:stop])
            del leaf
        row += 1
        give_back(rows.shape[1])
    return rows


def leaves_of(vector: np.ndarray, like: Sequence[Array]) -> list[jax.Array]:
    """A real vector as arrays like `like`; compiles nothing."""
    return [jax.device_put(leaf) for leaf in from_rows(vector, like)]


def cotangent_leaves(vector: np.ndarray, like: Sequence[Array]) -> list[jax.Array]:
    """The cotangent whose real part of `ct * dy` is the inner product of `vector` and dy."""
    return [jax.device_put(np.conj(leaf)) for leaf in from_rows(vector, like)]


def stacked(rows: Sequence[Sequence[Array]]) -> list[np.ndarray]:
    """Trees of leaves stacked leaf by leaf along a new leading axis; compiles nothing."""
    found = []
    for leaves in zip(*rows, strict=True):
        found.append(rows_in_place((len(leaves), *leaves[0].shape), leaves[0].dtype))
        np.stack([np.asarray(leaf) for leaf in leaves], out=found[-1])
    return found


def _real_parts(leaf, xp):
    if is_complex(leaf):
        leaf = xp.stack([leaf.real, leaf.imag], -1)
    return xp.ravel(leaf)


@functools.cache
def _trim() -> Callable[[int], object]:
    with contextlib.suppress(Exception):  # glibc alone has it
        return ctypes.CDLL(None).malloc_trim
    return lambda padding: 0


def give_back(elements: int) -> None:
    """Give freed memory back to the system, after work on arrays of so many elements."""
    if elements >= TRIMMED:
        _trim()(0)
