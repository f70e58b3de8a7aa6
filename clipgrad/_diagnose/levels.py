"""Levels of numbers: finite, inf or NaN, and whether there are any at all."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from clipgrad._programs import holds_floats, on_host

FINITE, INF, NAN = 0, 1, 2


def levels(x: Any, axes: int = 0) -> np.ndarray:
    """0 finite, 1 has inf, 2 has NaN: of all of an array, or of each part along its first axes."""
    if x is None or not holds_floats(x):
        return np.zeros(() if x is None else np.shape(x)[:axes], int)
    array = wide(x)
    inner = tuple(range(axes, array.ndim))
    return np.where(np.isnan(array).any(inner), NAN, np.where(np.isinf(array).any(inner), INF, 0))


def level(x: Any) -> int:
    """The level of an array; `FINITE` if there is none."""
    return int(levels(x))


def wide(x: Any) -> np.ndarray:
    """Numbers on the host, also those that other processes hold, in a type that NumPy knows."""
    array = on_host(x) if isinstance(x, jax.Array) else np.asarray(x)
    is_known = array.dtype.kind in "fciub"
    return array if is_known else array.astype(np.float32)


def holds_zeros(x: Any) -> bool:
    """Whether there is nothing but zeros, or no array."""
    return x is None or not np.any(wide(x))


def range_of(xs: Sequence[Any]) -> tuple[float, float]:
    """The smallest and the largest number of some arrays; 0 if there is none."""
    flat = [np.real(wide(x)).astype(np.float64).ravel() for x in xs if holds_floats(x)]
    every = np.concatenate([*flat, np.zeros(0)])
    return (float(every.min()), float(every.max())) if every.size else (0.0, 0.0)
