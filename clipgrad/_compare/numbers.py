"""The numbers of a row: from arrays on the host, and from what a compiled program returns."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._compare.record import Row
from clipgrad._compare.sketches import LENGTH, host_sketch
from clipgrad._jaxpr import holds_floats, on_host
from clipgrad._trees import widened_leaf


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def host_array(x: Any) -> Any:
    """An array on the host: the data of a key; what is no number stays as it is."""
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
        return Row(kind, name, (), "text", **more)
    return Row(kind, name, tuple(host.shape), str(host.dtype), **more)


def sketched(host: Any, of_key: bool = False) -> tuple[np.ndarray | None, str]:
    """The sketch of a host array, shape (1, 515), or None; of what is exact a hash of its values.

    Integers and booleans of any width have the hash of the 64 bits that they stand for.
    """
    if not isinstance(host, np.ndarray) or host.dtype.kind not in "biufcV":
        return None, digest(repr(host).encode())
    if of_key:
        return None, digest(np.ascontiguousarray(host).tobytes())
    if holds_floats(host):
        return host_sketch(widened_leaf(host))[None], ""
    is_large = host.dtype == np.uint64 and bool(np.any(host >> np.uint64(63)))
    whole = np.ascontiguousarray(host.astype(np.uint64 if is_large else np.int64))
    return host_sketch(host)[None], digest(f"{is_large}".encode() + whole.tobytes())


def with_numbers(row: Row, x: Any) -> Row:
    """The row with the sketch and the hash of an array."""
    row.sketch, row.exact = sketched(host_array(x), is_key(x))
    return row


def by_steps(x: np.ndarray, axes: list[tuple[bool, bool]]) -> np.ndarray:
    """Sketches as (..., devices, 515), in the order of time.

    Args:
      x: shape (..., 515).
      axes: for each whether it is of a scan, not of devices; and whether this is in reverse.
    """
    order = sorted(range(len(axes)), key=lambda i: not axes[i][0])
    scans = sum(is_scan for is_scan, _ in axes)
    x = np.transpose(np.asarray(x, np.float64), (*order, len(axes)))
    x = np.flip(x, tuple(i for i, own in enumerate(order[:scans]) if axes[own][1]))
    return x.reshape(*x.shape[:scans], -1, LENGTH)


def with_one_copy(row: Row) -> None:
    """Keep one copy of what is the same on every device that holds it."""
    if row.sketch is None or row.sketch.shape[-2] == 1 or row.turned:
        return
    flat = row.sketch.reshape(-1, *row.sketch.shape[-2:])
    used = np.any(flat, axis=(0, 2))
    first = int(np.argmax(used))
    is_same = bool(np.all(flat[:, used] == flat[:, first : first + 1]))
    # The cotangents of parts are summed later, also those that happen to be equal.
    if used.sum() <= 1 or is_same and row.kind == "value":
        row.sketch = row.sketch[..., first, :][..., None, :]
        row.moved = None if row.moved is None else row.moved[..., first, :][..., None, :]
