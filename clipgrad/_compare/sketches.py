"""Sketches: a few numbers of an array; two sketches are as far apart as their arrays, nearly."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipgrad._compat import to_varying, varying_axes
from clipgrad._programs import measuring, mixed
from clipgrad._sharding import on_every_device

SHIFTS = 0x3C6EF372  # so that the hashes that turn rows are others than those of signs
NUMBERS = 256  # the norm of a difference is right to sqrt(2 / 256), 9 %
MASKED = 1e6  # what masks are made of has a sketch of its own, in which it hides nothing
TINY = 1e-140  # squares of smaller numbers underflow in float64
SCALE = 2.0**-64  # sums of the largest float32 would overflow
NORM_AT, LARGEST_AT = 2 * NUMBERS, 2 * NUMBERS + 1  # the places of these in a sketch
SIZES = slice(NORM_AT, LARGEST_AT + 1)
LENGTH = 2 * NUMBERS + 3
CODE_BITS = np.uint32(0xFFFFFF)  # float32 has each number of 24 bits
MOST_AXES = 4  # 24 orders
AT_ONCE = 2**16  # the elements of which a sketch is made at once, where there are more
MOST_PARTS = 64  # of an array in a program


def sketch_dtype(dtype: Any) -> Any:
    """The type of a sketch: float64 for values in it, or else float32."""
    return np.dtype(np.float64 if jnp.finfo(dtype).bits == 64 else np.float32)


@measuring  # traced once for each shape
def sketch(x: jax.Array) -> jax.Array:
    r"""The sketch of an array, shape (515,): of ordinary, of large and of non-finite elements.

    The first 256 numbers are sums of elements below 1e6 in magnitude, each with a sign and in a
    bucket by a hash of its position, the next 256 sums of larger ones, times :math:`2^{-64}`. Then
    come the norm and the largest magnitude of the finite elements, which only describe it. The last
    number is an exact code of which elements are NaN, inf and -inf. The squared norm of a sum with
    random signs is on average the squared norm of the summed vector (Charikar, Chen and
    Farach-Colton, "Finding frequent items in data streams", 2002).
    """
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-1)
    flat, dtype = on_every_device(x).ravel(), sketch_dtype(x.dtype)
    if flat.size <= AT_ONCE:
        return _sketch_sums(flat.astype(dtype), np.uint32(0), jnp)
    return _sketch_of_parts(flat, dtype)


def _sketch_of_parts(flat: jax.Array, dtype: Any) -> jax.Array:
    """The sketch of a large array, whose sums need as much memory as a part of it."""
    rows = -(-flat.size // NUMBERS)
    count = max(n for n in range(1, MOST_PARTS + 1) if rows % n == 0)
    count = count if count > MOST_PARTS // 4 else MOST_PARTS
    size = -(-rows // count) * NUMBERS
    padded = jnp.pad(flat, (0, count * size - flat.size))  # zeros change no sketch
    first = to_varying(jnp.zeros(LENGTH, dtype), varying_axes(flat))

    def step(before: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        part = lax.dynamic_slice(padded, (start,), (size,)).astype(dtype)
        return _joined(before, _sketch_sums(part, start, jnp), jnp), None

    return lax.scan(step, first, jnp.arange(count, dtype=np.uint32) * np.uint32(size))[0]


def host_sketch(x: np.ndarray) -> np.ndarray:
    """The `sketch` of an array in NumPy, in float64."""
    return host_sketches(x, x.ndim)


def host_sketches(x: np.ndarray, axes: int) -> np.ndarray:
    """The sketches in NumPy of each array of the last ``axes`` axes, shape (..., 515)."""
    lead, size = x.shape[: x.ndim - axes], math.prod(x.shape[x.ndim - axes :])
    if np.iscomplexobj(x):
        x, size = np.stack([np.real(x), np.imag(x)], axis=-1), 2 * size
    flat = x.reshape(math.prod(lead), size)
    at_once = max(1, AT_ONCE // max(1, size))
    sketches = [_host_parts(flat[i : i + at_once]) for i in range(0, len(flat), at_once)]
    return np.concatenate([np.zeros((0, LENGTH)), *sketches]).reshape(*lead, LENGTH)


def _host_parts(flat: np.ndarray) -> np.ndarray:
    """The sketches in NumPy of arrays, shape (n, size), from their parts."""
    starts = range(0, max(1, flat.shape[-1]), AT_ONCE)
    sketches = (_host_sums(flat[:, i : i + AT_ONCE], i) for i in starts)
    return functools.reduce(lambda a, b: _joined(a, b, np), sketches)


@np.errstate(invalid="ignore", over="ignore")  # NumPy warns of the largest of bfloat16 with NaN
def _host_sums(flat: np.ndarray, start: int) -> np.ndarray:
    """The `_sketch_sums` in NumPy, in a tenth of the time unless squares overflow or underflow."""
    flat = flat.astype(np.float64) if flat.dtype.kind in "biu" else flat
    size, position = flat.shape[-1], np.uint32(start)
    largest, code = _largest(flat), np.zeros((*flat.shape[:-1], 1))
    if not np.all(np.isfinite(largest)):
        finite = np.isfinite(flat)
        code = _code_of(flat, finite, hashes_of(np.arange(size, dtype=np.uint32) + position), np)
        flat = np.where(finite, flat, np.zeros((), flat.dtype))
        largest = _largest(flat)
    if not np.all((largest == 0) | (largest > TINY) & (largest < 1 / TINY)):
        sums = _sketch_sums(flat.astype(np.float64), position, np)
        return np.concatenate([sums[..., :-1], code], axis=-1)
    wide = flat.astype(np.float64)
    norm = np.sqrt(np.einsum("...i,...i->...", wide, wide))[..., None]
    large = np.zeros((*flat.shape[:-1], NUMBERS))
    if np.any(largest >= MASKED):
        is_large, none = np.abs(flat) >= MASKED, np.zeros((), flat.dtype)
        large = _host_buckets(np.where(is_large, flat, none), start) * SCALE
        flat = np.where(is_large, none, flat)
    return np.concatenate([_host_buckets(flat, start), large, norm, largest, code], axis=-1)


def _largest(flat: np.ndarray) -> np.ndarray:
    """The largest magnitudes, shape (..., 1); NaN where there is one."""
    return np.max(np.abs(flat), axis=-1, initial=0, keepdims=True).astype(np.float64)


def _host_buckets(flat: np.ndarray, start: int) -> np.ndarray:
    """The sums of elements, each with its sign and in its bucket, in NumPy."""
    lead, size = flat.shape[:-1], flat.shape[-1]
    signs, shifts = _host_turns(size, start)
    dtype = flat.dtype if flat.dtype.itemsize > 2 else np.float32
    signed = np.zeros((*lead, len(shifts) * NUMBERS), dtype)
    np.multiply(flat, signs, out=signed[..., :size], casting="same_kind")
    rows = signed.reshape(*lead, len(shifts), NUMBERS)
    twice = np.concatenate([rows, rows], axis=-1)  # so a row that is turned is one piece of memory
    windows = np.lib.stride_tricks.sliding_window_view(twice, NUMBERS, axis=-1)
    turned = windows[..., np.arange(len(shifts)), shifts, :]
    return np.asarray(np.sum(turned, axis=-2, dtype=np.float64))


@functools.lru_cache(maxsize=128)  # 9 MiB at most
def _host_turns(size: int, start: int) -> tuple[np.ndarray, np.ndarray]:
    """The signs of the elements of a part, and by how much its rows are turned."""
    hashes = hashes_of(np.arange(size, dtype=np.uint32) + np.uint32(start))
    signs = 1 - 2 * (hashes >> np.uint32(13) & np.uint32(1)).astype(np.int8)
    return signs, _shifts(-(-size // NUMBERS), np.uint32(start), np).astype(np.intp)


def _shifts(count: int, start: Any, xp: Any) -> Any:
    """For each row of 256 elements the number of the element that comes into the first bucket."""
    numbers = xp.arange(count, dtype=np.uint32) + start // np.uint32(NUMBERS)
    return hashes_of(numbers, SHIFTS) & np.uint32(NUMBERS - 1)


def _columns(count: int, start: Any, xp: Any) -> Any:
    """For each row of 256 elements the order in which these come into the buckets."""
    columns = xp.arange(NUMBERS, dtype=np.uint32)[None, :] + _shifts(count, start, xp)[:, None]
    return (columns & np.uint32(NUMBERS - 1)).astype(np.int32)


def _joined(a: Any, b: Any, xp: Any) -> Any:
    """The sketch of an array from those of two parts."""
    norm = xp.hypot(a[..., NORM_AT], b[..., NORM_AT])
    largest = xp.maximum(a[..., LARGEST_AT], b[..., LARGEST_AT])
    code = a[..., -1].astype(np.uint32) + b[..., -1].astype(np.uint32) & CODE_BITS
    sizes = xp.stack([norm, largest, code.astype(a.dtype)], axis=-1)
    return xp.concatenate([a[..., :NORM_AT] + b[..., :NORM_AT], sizes], axis=-1)


def _sketch_sums(flat: Any, start: Any, xp: Any) -> Any:
    """The numbers of the sketches of arrays, shape (..., size), in NumPy or in JAX.

    Elements are in rows of 256, each rotated by a hash of its number: so neither neighbors nor a
    column of a matrix come into one bucket. Those of a part begin at the position ``start``, with
    which a row begins.
    """
    lead, size = flat.shape[:-1], flat.shape[-1]
    hashes = hashes_of(xp.arange(size, dtype=np.uint32) + start)
    finite, large = xp.isfinite(flat), xp.abs(flat) >= MASKED
    signed = flat * (1 - 2 * (hashes >> np.uint32(13) & np.uint32(1)).astype(flat.dtype))
    parts = [xp.where(finite & ~large, signed, 0), xp.where(finite & large, signed * SCALE, 0)]
    count = -(-size // NUMBERS)
    room = [(0, 0)] * (len(lead) + 1)
    padded = xp.pad(xp.stack(parts, axis=-2), [*room, (0, count * NUMBERS - size)])
    rows = padded.reshape(*lead, 2, count, NUMBERS)
    columns = _columns(count, start, xp).reshape(*[1 for _ in lead], 1, count, NUMBERS)
    turned = xp.take_along_axis(rows, columns, axis=-1)
    code = _code_of(flat, finite, hashes, xp).astype(flat.dtype)
    sizes = _sizes(xp.where(finite, flat, 0), xp)
    buckets = xp.sum(turned, axis=-2).reshape(*lead, 2 * NUMBERS)
    return xp.concatenate([buckets, *sizes, code], axis=-1)


def _code_of(flat: Any, finite: Any, hashes: Any, xp: Any) -> Any:
    """The code of which elements are not finite, shape (..., 1)."""
    kinds = xp.where(xp.isnan(flat), 1, xp.where(finite, 0, xp.where(flat > 0, 2, 3)))
    odd = hashes | np.uint32(1)  # of the first position it is 0, and would hide what is there
    sums = xp.sum(kinds.astype(np.uint32) * odd, axis=-1, keepdims=True, dtype=np.uint32)
    return sums & CODE_BITS


def _sizes(x: Any, xp: Any) -> tuple[Any, Any]:
    """The norms and the largest magnitudes, each of shape (..., 1); squares do not overflow."""
    largest = xp.max(xp.abs(x), axis=-1, initial=0, keepdims=True)
    # XLA multiplies by the inverse, and that of the largest numbers it flushes to 0.
    most = 2.0 ** (jnp.finfo(x.dtype).maxexp * 25 // 32)
    scale = xp.where(largest > 0, xp.where(largest > most, most, largest), 1)
    squares = xp.sum(xp.square(x / scale), axis=-1, keepdims=True)
    return scale * xp.sqrt(squares), largest


def hashes_of(positions: Any, first: int = 0) -> Any:
    """A number of 32 bits for each position, in NumPy or in JAX."""
    return mixed(positions * np.uint32(2654435761) + np.uint32(first))


def part_of(x: np.ndarray, start: int) -> np.ndarray:
    """The sums of ordinary numbers of a sketch, or of large ones."""
    return x[..., start : start + NUMBERS]


def scalar_of(sketch: np.ndarray) -> float:
    """The number of which this is the sketch."""
    sign = 1.0 - 2.0 * float(hashes_of(np.zeros(1, np.uint32))[0] >> np.uint32(13) & np.uint32(1))
    ordinary, large = (float(part_of(sketch, start).sum()) for start in (0, NUMBERS))
    return sign * (ordinary + large / SCALE)


def orders_of(shape: tuple[int, ...], turned: str) -> list[tuple[int, ...]]:
    """The orders of the axes that are longer than 1, of up to four all; its own is the first."""
    if turned == "stack":
        return [(0, *(i + 1 for i in order)) for order in orders_of(shape[1:], "all")]
    axes = [i for i, size in enumerate(shape) if size != 1]
    if not turned:
        return [tuple(axes)]
    if len(axes) <= MOST_AXES:
        return list(itertools.permutations(axes))
    first, second, *rest = axes
    known = [axes, [first, *rest, second], [*rest, second, first], axes[::-1]]
    return list(dict.fromkeys(map(tuple, known)))


def turned_sketches(x: np.ndarray, turned: str) -> np.ndarray:
    """The sketch of an array in every order of its axes, shape (orders, 515)."""
    every = {*range(x.ndim)}
    orders = orders_of(x.shape, turned)
    return np.stack([host_sketch(np.transpose(x, (*o, *sorted(every - {*o})))) for o in orders])


@jax.custom_vjp
def tapped(x: jax.Array, tap: jax.Array) -> jax.Array:
    """A value; the sketch of its cotangent becomes the cotangent of the tap."""
    del tap
    return x


@jax.custom_vjp
def tapped_whole(x: jax.Array, tap: jax.Array) -> jax.Array:
    """A value; its cotangent becomes that of the tap, too."""
    del tap
    return x


def _to_tap(note: jax.Array, tap: jax.Array) -> jax.Array:
    return to_varying(note.astype(tap.dtype), varying_axes(tap))


tapped.defvjp(lambda x, tap: (x, tap), lambda tap, back: (back, _to_tap(sketch(back), tap)))
tapped_whole.defvjp(lambda x, tap: (x, tap), lambda tap, back: (back, _to_tap(back, tap)))
