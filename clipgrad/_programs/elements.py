"""The contents of values: dtypes, and elements of arrays whatever their sharding."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from clipgrad._sharding import on_every_device


def holds_floats(x: Any) -> bool:
    """Whether a variable, a type or an array holds floating or complex numbers; no reference."""
    dtype = None if is_reference(x) else dtype_of(x)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def is_reference(x: Any) -> bool:
    """Whether a variable is a reference to an array that operations may change."""
    return hasattr(getattr(x, "aval", x), "inner_aval")


def dtype_of(x: Any) -> Any:
    """The dtype of a variable, a type or an array; None for a token."""
    return getattr(getattr(x, "aval", x), "dtype", None)


def byte_count(x: Any) -> int:
    """The bytes of the numbers of a variable, on all devices."""
    shape = getattr(x.aval, "shape", ())
    return math.prod(shape) * getattr(dtype_of(x), "itemsize", 0)


def at_first(where: Any, x: Any) -> jax.Array:
    """The first element of ``x`` where it is so, the largest if the shapes do not match.

    An operand may have length 1 along an axis where the result is longer.
    """
    size = jnp.abs(x) if jnp.iscomplexobj(x) else jnp.asarray(x)
    size = size.astype(jnp.result_type(float))
    pairs = zip(size.shape, where.shape, strict=False)
    if size.ndim == where.ndim and size.size and all(length in (1, n) for length, n in pairs):
        index = jnp.argmax(on_every_device(where).ravel())
        return jnp.broadcast_to(on_every_device(size), where.shape).ravel()[index]
    # Gathered, since XLA's maximum over devices drops NaN.
    return jnp.max(jnp.abs(on_every_device(size)), initial=0)


def on_host(tree: Any) -> Any:
    """Results of one compiled program as NumPy arrays, also of parts that other processes hold."""
    parts = [x for x in jax.tree.leaves(tree) if not x.is_fully_addressable]
    away = [x.sharding for x in parts if not x.is_fully_replicated]
    if away:
        whole = NamedSharding(away[0].mesh, PartitionSpec())
        tree = jax.jit(lambda tree: tree, out_shardings=whole)(tree)
    return jax.tree.map(np.asarray, tree)
