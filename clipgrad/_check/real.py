"""Lists of float arrays as one real vector: complex numbers are two reals, side by side."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any


def is_float(leaf: Array) -> bool:
    """Whether a leaf holds real or complex floating-point numbers."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_complex(leaf: Array) -> bool:
    """Whether a leaf holds complex numbers."""
    return jnp.issubdtype(leaf.dtype, jnp.complexfloating)


def real_dtype(leaf: Array) -> np.dtype:
    """The dtype of the leaf's real numbers."""
    return np.dtype(jnp.finfo(leaf.dtype).dtype)


def wide_dtype(dtype: Any) -> np.dtype:
    """The 64-bit dtype of the same kind; integers and the rest stay as they are."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def widen(leaf: Array) -> np.ndarray:
    """A leaf in NumPy, in float64 or complex128."""
    return np.asarray(leaf).astype(wide_dtype(leaf.dtype))


def real_size(leaf: Array) -> int:
    """How many real numbers the leaf holds."""
    return leaf.size * (2 if is_complex(leaf) else 1)


def offsets(leaves: Sequence[Array]) -> np.ndarray:
    """Where each leaf begins in the vector; the last entry is the vector's length."""
    return np.cumsum([0] + [real_size(leaf) for leaf in leaves])


def to_vector(leaves: Sequence[Array], dtype: Any) -> jax.Array:
    """Flatten traced leaves into one real vector."""
    parts = [_parts(leaf, jnp).astype(dtype) for leaf in leaves]
    return jnp.concatenate(parts) if parts else jnp.zeros(0, dtype)


def to_numpy(leaves: Sequence[Array]) -> np.ndarray:
    """Flatten concrete leaves into one float64 vector."""
    parts = [_parts(widen(leaf), np) for leaf in leaves]
    return np.concatenate(parts) if parts else np.zeros(0)


def from_vector(vector: Array, like: Sequence[Array]) -> list[jax.Array]:
    """Cut a real vector into leaves of the shapes and dtypes of `like`."""
    places = offsets(like)
    return [
        _leaf(vector[places[k] : places[k + 1]], leaf.shape, leaf.dtype)
        for k, leaf in enumerate(like)
    ]


def gradient_vector(cotangents: Sequence[Array]) -> np.ndarray:
    """The real gradient: JAX hands back the conjugate of d/d(re) + i d/d(im)."""
    return to_numpy([np.conj(widen(leaf)) for leaf in cotangents])


def leaves_of(vector: np.ndarray, like: Sequence[Array]) -> list[jax.Array]:
    """The same as `from_vector`, for a concrete vector; compiles nothing."""
    places = offsets(like)
    return [
        jnp.asarray(_numpy_leaf(vector[places[k] : places[k + 1]], leaf.shape, leaf.dtype))
        for k, leaf in enumerate(like)
    ]


def cotangent_leaves(vector: np.ndarray, like: Sequence[Array]) -> list[jax.Array]:
    """The cotangent whose real part of `ct * dy` is the inner product of `vector` and dy."""
    parts = []
    for k, leaf in enumerate(like):
        start, stop = offsets(like)[k : k + 2]
        parts.append(jnp.asarray(np.conj(_numpy_leaf(vector[start:stop], leaf.shape, leaf.dtype))))
    return parts


def stacked(rows: Sequence[Sequence[Array]]) -> list[np.ndarray]:
    """Trees of leaves stacked leaf by leaf along a new leading axis; compiles nothing."""
    return [np.stack([np.asarray(leaf) for leaf in leaves]) for leaves in zip(*rows, strict=True)]


def _parts(leaf, xp):
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = xp.stack([leaf.real, leaf.imag], -1)
    return xp.ravel(leaf)


def _leaf(part, shape, dtype):
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return part.astype(dtype).reshape(shape)
    pairs = part.astype(jnp.finfo(dtype).dtype).reshape((*shape, 2))
    return jax.lax.complex(pairs[..., 0], pairs[..., 1])


def _numpy_leaf(part, shape, dtype):
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return part.astype(dtype).reshape(shape)
    pairs = part.reshape((*shape, 2))
    return (pairs[..., 0] + 1j * pairs[..., 1]).astype(dtype)
