"""Lists of float arrays as one real vector: complex numbers are two reals, side by side."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipgrad._arrays import is_complex as is_complex
from clipgrad._arrays import wide_dtype as wide_dtype
from clipgrad._arrays import widened_leaf as widened_leaf

Leaf = Any


def real_name(leaf: Leaf) -> str:
    """The name of the type of a leaf's real numbers."""
    return np.dtype(jnp.finfo(leaf.dtype).dtype).name


def real_size(leaf: Leaf) -> int:
    """The number of a leaf's real numbers."""
    return leaf.size * (2 if is_complex(leaf) else 1)


def offsets(leaves: Sequence[Leaf]) -> np.ndarray:
    """The place of each leaf in the vector; the last entry is the vector's length."""
    return np.cumsum([0] + [real_size(leaf) for leaf in leaves])


def areas(leaves: Sequence[Leaf]) -> list[tuple[int, int]]:
    """The range of each leaf in the vector."""
    places = offsets(leaves)
    return [(int(a), int(b)) for a, b in zip(places[:-1], places[1:], strict=True)]


def to_vector(leaves: Sequence[Leaf], dtype: Any) -> jax.Array:
    """Flatten traced leaves into one real vector."""
    parts = [_real_parts(leaf, jnp).astype(dtype) for leaf in leaves]
    return jnp.concatenate(parts) if parts else jnp.zeros(0, dtype)


def to_numpy(leaves: Sequence[Leaf]) -> np.ndarray:
    """Flatten concrete leaves into one vector of float64."""
    parts = [_real_parts(widened_leaf(leaf), np) for leaf in leaves]
    return np.concatenate(parts, dtype=np.float64) if parts else np.zeros(0)


def leaves_of(vector: Any, like: Sequence[Leaf]) -> list[Any]:
    """Cut a real vector, of NumPy or traced, into leaves."""
    leaves = []
    for leaf, (start, stop) in zip(like, areas(like), strict=True):
        part = vector[start:stop]
        if is_complex(leaf):
            is_numpy = isinstance(part, np.ndarray)
            part = part[::2] + 1j * part[1::2] if is_numpy else lax.complex(part[::2], part[1::2])
        leaves.append(part.astype(leaf.dtype).reshape(leaf.shape))
    return leaves


def moved_leaves(leaves: Sequence[Leaf], seed: int, is_wide: bool = False) -> list[np.ndarray]:
    """Leaves of which each number is moved up or down by one rounding, of its type or float64.

    Numbers of one size move alike, so that what is equal stays equal.
    """
    dtypes = [wide_dtype(leaf.dtype) if is_wide else leaf.dtype for leaf in leaves]
    like = [jax.ShapeDtypeStruct(x.shape, t) for x, t in zip(leaves, dtypes, strict=True)]
    eps = np.repeat([float(jnp.finfo(t).eps) for t in dtypes], [real_size(x) for x in like])
    numbers = to_numpy(leaves)
    sizes, which = np.unique(np.abs(numbers), return_inverse=True)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], len(sizes))[which]
    return leaves_of(numbers * (1 + eps * signs), like)


def gradient_vector(cotangents: Sequence[Leaf]) -> np.ndarray:
    """The real gradient: JAX hands back the conjugate of d/d(re) + i d/d(im)."""
    return to_numpy([np.conj(leaf) if is_complex(leaf) else leaf for leaf in cotangents])


def cotangent_leaves(vector: np.ndarray, like: Sequence[Leaf]) -> list[jax.Array]:
    """The cotangent whose real part of `ct * dy` is the inner product of `vector` and dy."""
    return [jax.device_put(np.conj(leaf)) for leaf in leaves_of(vector, like)]


def covector_of(cotangent: Any, outputs: Sequence[Leaf]) -> np.ndarray:
    """The real vector of a user's cotangent; ones for None.

    JAX pairs a cotangent with dy by the real part of their product, without conjugation.
    """
    ones = [np.ones(y.shape) for y in outputs]
    leaves = ones if cotangent is None else jax.tree.leaves(cotangent)
    shapes = [np.shape(leaf) for leaf in leaves]
    if shapes != [y.shape for y in outputs]:
        raise ValueError(
            f"cotangent: got the shapes {shapes}, expected those of the chosen outputs, "
            f"{[y.shape for y in outputs]}"
        )
    pairs = zip(map(np.asarray, leaves), outputs, strict=True)
    return to_numpy([np.conj(u).astype(wide_dtype(y.dtype)) for u, y in pairs])


def as_held(vector: np.ndarray, like: Sequence[Leaf]) -> np.ndarray:
    """A vector of the numbers that leaves can hold, which are few in a type of 8 bits."""
    return to_numpy(leaves_of(vector, like))


def stacked(rows: Sequence[Sequence[Leaf]]) -> list[np.ndarray]:
    """Lists of leaves, stacked leaf by leaf along a new leading axis."""
    return [np.stack([np.asarray(x) for x in leaves]) for leaves in zip(*rows, strict=True)]


def root_mean_square(values: np.ndarray) -> float:
    """The typical size of some numbers, of those that are finite; 0 of none."""
    finite = values[np.isfinite(values)]
    return float(np.sqrt(np.mean(np.abs(finite) ** 2))) if finite.size else 0.0


def _real_parts(leaf: Leaf, xp: Any) -> Any:
    if is_complex(leaf):
        leaf = xp.stack([leaf.real, leaf.imag], -1)
    return xp.ravel(leaf)
