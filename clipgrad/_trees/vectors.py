"""Leaves in NumPy, in 64 bits; memory that is given back."""

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

Array = Any
# Freed pieces of up to 32 MB, which most leaves are, stay with the process, and what is larger does
# not fit into them: a check would take half as much again.
TRIMMED = 2**20  # elements


def wide_dtype(dtype: Any) -> np.dtype:
    """The 64-bit dtype of the same kind; integers and the rest stay as they are."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def widened_leaf(leaf: Array) -> np.ndarray:
    """A leaf in NumPy, in float64 or complex128."""
    return np.asarray(leaf).astype(wide_dtype(leaf.dtype), copy=False)


@functools.cache
def _trim() -> Callable[[int], object]:
    with contextlib.suppress(Exception):  # glibc alone has it
        return ctypes.CDLL(None).malloc_trim
    return lambda padding: 0


def give_back(elements: int) -> None:
    """Give freed memory back to the system, after work on arrays of so many elements."""
    if elements >= TRIMMED:
        _trim()(0)
