"""The arguments of a run: copies, since a function may donate them; and hashes of positions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._program import mixed
from clipgrad._trees import is_array


def copied(tree: Any) -> Any:
    """The tree with copies of its arrays, with the same types and layouts."""
    return jax.tree.map(lambda x: x.copy() if is_array(x) else x, tree)


def sign_of(hashes: Any) -> Any:
    """A sign by a bit of each hash, in float32."""
    library: Any = np if isinstance(hashes, np.ndarray) else jnp
    bits = (hashes >> library.uint32(13)) & library.uint32(1)
    return 1.0 - 2.0 * bits.astype(library.float32)


def hashed(positions: Any, run: Any) -> Any:
    """A number of 32 bits for each position, in NumPy or in JAX."""
    salt = 0x9E3779B9
    if isinstance(run, int):
        shift: Any = np.uint32(run * salt % 2**32)
    else:
        shift = run.astype(np.uint32) * np.uint32(salt)
    return mixed(positions.astype(np.uint32) * np.uint32(2654435761) + shift)
