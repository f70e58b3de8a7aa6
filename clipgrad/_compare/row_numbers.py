"""The numbers of a row: from arrays on the host, and from what a compiled program returns."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._compare.record import TEXT, Numbers, Row
from clipgrad._compare.sketches import LENGTH, host_sketch, host_sketches
from clipgrad._programs import holds_floats, on_host


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def host_array(x: Any) -> Any:
    """An array on the host, of a key its data; what is no number stays as it is."""
    if isinstance(x, jax.Array):
        x = jax.random.key_data(x) if is_key(x) else x
        return on_host(x)
    return np.asarray(x) if isinstance(x, np.ndarray | np.generic | int | float | complex) else x


def is_key(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)


def plain_row(kind: str, name: str, x: Any, **more: Any) -> Row:
    """The row of an array, a number or any other object, without its numbers."""
    host = x if hasattr(x, "dtype") else host_array(x)
    if not hasattr(host, "dtype"):
        return Row(kind, name, (), TEXT, **more)
    return Row(kind, name, tuple(host.shape), str(host.dtype), **more)


def numbers_of(x: Any, by_layer: bool = False) -> Numbers:
    """The numbers of an array or another object: its sketch, and of what is exact a hash.

    By layer, there is a sketch for each element of the first axis of a floating array.

    Integers and booleans of any width have the hash of their values in 64 bits. Keys and what is no
    number have no sketch.
    """
    host = host_array(x)
    if not isinstance(host, np.ndarray) or host.dtype.kind not in "biufcV":
        return Numbers(digest(repr(host).encode()), whole=host)
    if is_key(x):
        return Numbers(digest(np.ascontiguousarray(host).tobytes()), whole=host)
    if holds_floats(host):
        sketches = host_sketches(host, host.ndim - by_layer)
        return Numbers("", sketches[..., None, :], whole=host)
    is_large = host.dtype == np.uint64 and bool(np.any(host >> np.uint64(63)))
    wide = np.ascontiguousarray(host.astype(np.uint64 if is_large else np.int64))
    exact = digest(f"{is_large}".encode() + wide.tobytes())
    return Numbers(exact, host_sketch(host)[None], whole=host)


def by_steps(x: np.ndarray, row: Row, devices: tuple[int, ...]) -> np.ndarray:
    """The sketches of a row, shape (steps..., devices, 515), with steps in the order of time.

    ``devices`` are the axes of ``x`` that are over devices.
    """
    x = np.moveaxis(np.asarray(x, np.float64), devices, range(-1 - len(devices), -1))
    lengths = [n for n in row.around if n]
    x = np.flip(x, tuple(i for i, n in enumerate(lengths) if n < 0))
    return x.reshape(*x.shape[: len(lengths)], -1, LENGTH)


def one_copy(sketch: np.ndarray) -> np.ndarray:
    """The sketch on the first device that holds the row, shape (..., 1, 515)."""
    return sketch[..., int(np.argmax(_holders(sketch))), None, :]


def of_devices(sketch: np.ndarray) -> np.ndarray:
    """One sketch where it is the same on each device that holds the row, or those of all."""
    held = sketch[..., _holders(sketch), :]
    return one_copy(sketch) if np.all(held == held[..., :1, :]) else sketch


def _holders(sketch: np.ndarray) -> np.ndarray:
    """Which devices hold the row: elsewhere its sketch is 0 at all steps."""
    return np.any(sketch.reshape(-1, *sketch.shape[-2:]), axis=(0, 2))
