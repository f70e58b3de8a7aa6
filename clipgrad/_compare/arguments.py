"""The arguments of a run: copies, since a function may donate them, moved by roundings or not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._compare.differences import magnitudes, rounding
from clipgrad._trees import is_array, is_float_array, widened_leaf


def copied(tree: Any) -> Any:
    """The tree with copies of its arrays, with the same types and layouts."""
    return jax.tree.map(lambda x: x.copy() if is_array(x) else x, tree)


def moved_by_rounding(tree: Any, run: int) -> Any:
    """The tree with each floating number multiplied by 1 plus or minus one rounding of its dtype.

    The signs follow from the index of the element and the number of the run; numbers near the
    largest of their dtype move toward zero. Zeros stay.
    """
    return jax.tree.map(lambda x: _moved_array(x, run) if is_float_array(x) else x, copied(tree))


def _moved_array(x: Any, run: int) -> Any:
    if isinstance(x, np.ndarray):
        return nudged(x, np.arange(x.size), run)
    if x.weak_type:  # an array from NumPy would have a type of its own
        return x * (1 + rounding(x.dtype) * float(_inward(np.asarray(x), np.arange(1), run)[0]))
    parts = {_key(shard.index, x.shape): np.asarray(shard.data) for shard in x.addressable_shards}
    positions = np.arange(x.size).reshape(x.shape)

    def part(index: Any) -> np.ndarray:
        return nudged(parts[_key(index, x.shape)], np.asarray(positions[index]), run)

    if not x.committed:
        return jnp.asarray(part((slice(None),) * x.ndim))
    return jax.make_array_from_callback(x.shape, x.sharding, part)


def _key(index: Any, shape: tuple[int, ...]) -> tuple:
    return tuple(part.indices(size) for part, size in zip(index, shape, strict=True))


def nudged(x: np.ndarray, positions: np.ndarray, run: int) -> np.ndarray:
    """An array in NumPy, moved by one rounding of its dtype."""
    own = _inward(x, positions.ravel(), run).reshape(x.shape)
    factors = 1 + rounding(x.dtype) * own  # in float32 it would be 1 for float64
    return (widened_leaf(x) * factors).astype(x.dtype)


def _inward(x: np.ndarray, positions: np.ndarray, run: int) -> np.ndarray:
    """The sign of each movement; -1 for a number near the largest one, which would become inf."""
    is_large = magnitudes(np.ravel(widened_leaf(x))) > float(jnp.finfo(x.dtype).max) / 2
    return np.where(is_large, -1.0, signs(positions, run).astype(np.float64))


def signs(positions: Any, run: Any) -> Any:
    """A sign for each position, 1.0 or -1.0: a hash of it and of the number of the run."""
    return sign_of(hashed(positions, run))


def sign_of(hashes: Any) -> Any:
    """A sign by a bit of each hash, in float32."""
    library: Any = np if isinstance(hashes, np.ndarray) else jnp
    bits = (hashes >> library.uint32(13)) & library.uint32(1)
    return 1.0 - 2.0 * bits.astype(library.float32)


def hashed(positions: Any, run: Any) -> Any:
    """A number of 32 bits for each position, in NumPy or in JAX."""
    library: Any = np if isinstance(positions, np.ndarray) else jnp
    salt = 0x9E3779B9
    if isinstance(run, int):
        shift = library.uint32(run * salt % 2**32)
    else:
        shift = run.astype(library.uint32) * library.uint32(salt)
    h = positions.astype(library.uint32) * library.uint32(2654435761) + shift
    for right, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):
        h = (h ^ (h >> library.uint32(right))) * library.uint32(factor)
    return h
