"""The numbers with which an operation goes wrong, and how they are written."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_float(x: Any) -> bool:
    """Whether a variable, a type or an array holds floating or complex numbers."""
    dtype = dtype_of(x)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def dtype_of(x: Any) -> Any:
    """The dtype of a variable, a type or an array; None for a token."""
    return getattr(getattr(x, "aval", x), "dtype", None)


def at_index(x: Any, shape: tuple[int, ...], index: jax.Array) -> jax.Array:
    """The element of ``x`` at a flat index of ``shape``, the largest where that has no meaning."""
    size = jnp.abs(x) if jnp.iscomplexobj(x) else jnp.asarray(x)
    size = size.astype(jnp.result_type(float))
    if size.shape == shape:
        return size.ravel()[index]
    return jnp.max(jnp.abs(size), initial=0)


def short(value: Any) -> str:
    """A number of at most four digits."""
    return f"{np.float64(value):.4g}"
