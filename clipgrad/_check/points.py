"""Points, and the random vectors of a check: cotangents, directions, steps by scale."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import clipgrad._trees as _trees
from clipgrad._check.beside import Beside
from clipgrad._check.subject import CheckSubject
from clipgrad._check.tolerances import NearbySizes, pieces

COTANGENTS = 2
# Directions in which a point is moved: three dense ones, and single
# elements by their scale.
DENSE, SINGLE = (0, 1, 2), 3
NEARBY = 2.0**-4  # the part by which all elements are moved, to see the gradient around a point
EIGHTHS = np.concatenate([-np.arange(4, 13), np.arange(4, 13)]) / 8
# Numbers so much larger than the median of their leaf are no inputs of one function: a step of a
# part of them would be larger than the others (the case garbage_in_the_padding).
GARBAGE = 2.0**24
LEAST_SHORT = -100  # above this power of two, float32 is exact with room for steps
ROOT = 1.4142135  # a little less than the root of 2, for (0, 8)
BIAS, DIGITS = 1023, 52  # of the exponent in the bits of a float64, and the bits behind it


class Scales:
    """The scale of each element, a power of two, of which the exponent is kept.

    The scale is about |x|, at least the root mean square of the leaf, and 1 for a leaf of zeros. A
    leaf with garbage in it, as in the padding of a batch, has its median in place of the mean.

    Attributes:
      size: the number of elements.
      dtype: float32 if it holds all scales exactly, far enough from its limits, or else float64.
    """

    def __init__(self, xs: Sequence[jax.Array]):
        self._exponents = np.concatenate([_exponents(x) for x in xs])
        is_short = self._exponents.dtype == np.int8
        self.dtype: Any = np.dtype(np.float32 if is_short else np.float64)
        self.size = self._exponents.size

    def __getitem__(self, where: Any) -> Any:
        return np.ldexp(self.dtype.type(1), self._exponents[where])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.times(np.ones(self.size, self.dtype)).astype(dtype or self.dtype, copy=False)

    def times(self, along: np.ndarray) -> np.ndarray:
        """The direction, multiplied in its own memory."""
        for where in pieces(0, self.size):
            along[where] *= self[where]
        return along


def _exponents(leaf: Any) -> np.ndarray:
    flat = np.asarray(leaf).reshape(-1)
    typical, found = _typical(flat), np.empty(flat.size, np.int16)
    for where in pieces(0, flat.size):
        size = np.maximum(_magnitude(flat[where]), typical) * ROOT
        found[where] = (size.view(np.int64) >> DIGITS) - BIAS
    found = np.repeat(found, 2) if _trees.is_complex(leaf) else found
    is_short = found.min(initial=0) > LEAST_SHORT and found.max(initial=0) <= np.iinfo(np.int8).max
    return found.astype(np.int8) if is_short else found


def _typical(flat: np.ndarray) -> float:
    total = sum(float(np.sum(_magnitude(flat[where]) ** 2)) for where in pieces(0, flat.size))
    typical = np.sqrt(total / max(flat.size, 1))
    if not typical > 0:
        return 1.0
    tiny = (np.count_nonzero(GARBAGE * _magnitude(flat[w]) < typical) for w in pieces(0, flat.size))
    if 2 * sum(tiny) < flat.size:
        return typical
    sizes = _magnitude(flat)
    middle = np.median(sizes[sizes > 0])
    return middle if typical > GARBAGE * middle else typical


def _magnitude(numbers: np.ndarray) -> np.ndarray:
    return np.abs(_trees.widened_leaf(numbers))


@dataclasses.dataclass(frozen=True)
class Point:
    """A point, and the gradients there, arrays of shape (cotangents, inputs).

    Attributes:
      xs: the input leaves.
      gradient: the gradient as it was computed; 0 where it is not finite.
      finite: which of its elements are finite.
      exact: the same rule evaluated in float64, an array or `Beside`; None if it is not finite.
      reference: plain AD in float64, custom rules stripped; None if it is not finite.
      scale: the scale of each element, a power of two, an array or `Scales`.
      direction: gives the vector of a direction.
      around: gives what is known of plain AD's gradient where each element is moved by `NEARBY` of
        its own, or None if it cannot be had.
      rounded: gives how far such roundings move each element of the rule's and of plain AD's.
    """

    xs: Sequence[jax.Array]
    gradient: np.ndarray
    finite: np.ndarray
    exact: Any
    reference: Any
    scale: Any
    direction: Callable[[int], np.ndarray]
    around: Callable[[], NearbySizes | None] = lambda: None
    rounded: Callable[..., Any] = lambda *parts: 0.0

    @functools.cached_property
    def vector(self) -> np.ndarray:
        """All elements in float64."""
        return _trees.to_numpy(self.xs)


def moved_apart(
    subject: CheckSubject, xs, seed: int, part: float, least: Any = None
) -> list[jax.Array]:
    """The point with each element moved by about a part of its own, equal ones apart.

    It is in its own types, or in one that is as precise as `least`.
    """
    scales, moved = Scales(xs), []
    for x, name, (start, stop) in zip(xs, subject.names, subject.ranges, strict=True):
        move = _dense([x], [f"direction {SINGLE} {name}"], seed)
        for where in pieces(0, stop - start):
            move[where] *= scales[where.start + start : where.stop + start]
        move *= part
        wide = jax.ShapeDtypeStruct(x.shape, _trees.wide_dtype(x.dtype))
        (move,) = _trees.from_rows(move, [wide])
        np.add(_trees.widened_leaf(x), move, out=move)
        dtype = np.promote_types(x.dtype, least or x.dtype)
        moved.append(jax.device_put(move.astype(dtype, copy=False)))
    return moved


def make_point(
    subject: CheckSubject,
    xs,
    gradients,
    seed: int,
    delta: float | None = None,
) -> Point:
    """A point from the gradients there: as computed, the rule's in float64, plain AD's."""
    gradient, exact, reference = gradients
    finite = np.asarray(np.isfinite(gradient).all(axis=0))
    if finite.all():
        finite = np.broadcast_to(True, finite.shape)
    else:
        gradient = np.where(finite, gradient, 0.0)
    exact, reference = _finite_or_none(exact), _finite_or_none(reference)
    scale = Scales(xs) if delta is None else np.broadcast_to(delta, gradient.shape[1:])

    def direction(row: int) -> np.ndarray:
        if row == SINGLE:
            return np.array(scale)
        along = random_direction(subject, seed, row, scale.dtype)
        for where in pieces(0, scale.size):
            along[where] *= scale[where]
        return along

    return Point(xs, gradient, finite, exact, reference, scale, direction)


def _finite_or_none(rows: Any) -> Any:
    """Rows of which all is finite, as is what is kept beside others; else None."""
    return rows if rows is None or isinstance(rows, Beside) or np.isfinite(rows).all() else None


def generator(seed: int, name: str) -> np.random.Generator:
    """A generator of the name's own, so that adding a leaf changes no other leaf's numbers."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def dense_numbers(rng: np.random.Generator, size: int, out: np.ndarray | None = None) -> np.ndarray:
    """Numbers of random sign and magnitude in [0.5, 1.5], in eighths: short in binary."""
    eighths = EIGHTHS if out is None else EIGHTHS.astype(out.dtype)
    return eighths.take(rng.integers(0, len(EIGHTHS), size, np.uint8), out=out, mode="clip")


def cotangents(subject: CheckSubject, seed: int) -> np.ndarray:
    """Random dense cotangents as real vectors, shape (2, outputs), of both signs at each output."""
    names, leaves = subject.output_names, subject.outputs
    rows = [_dense(leaves, [f"{row} {name}" for name in names], seed) for row in range(COTANGENTS)]
    if len(rows[0]) > 1 and (rows[0] == rows[0][0]).all():
        rows[0][0] *= -1  # alike they see no more than the sum of the outputs
    firsts = [int(start) for start in _trees.offsets(leaves)[:-1] if start < len(rows[0])]
    rows[1][firsts] = -np.sign(rows[0][firsts]) * np.abs(rows[1][firsts])
    return np.stack(rows)


def _dense(
    leaves: Sequence, names: Sequence[str], seed: int, dtype: Any = np.float64
) -> np.ndarray:
    places = _trees.offsets(leaves)
    whole = _trees.zeros_in_place(int(places[-1]), dtype)
    for name, start, stop in zip(names, places[:-1], places[1:], strict=True):
        dense_numbers(generator(seed, name), stop - start, whole[start:stop])
    return whole


def masked_rows(subject: CheckSubject, seed: int) -> np.ndarray:
    """A vector over the outputs, 1 on about half of the rows of each and 0 on the others."""
    masks = []
    for name, leaf in zip(subject.output_names, subject.outputs, strict=True):
        rows = leaf.shape[0] if leaf.ndim else 1
        kept = generator(seed, f"mask {name}").permutation(rows) < (rows + 1) // 2
        masks.append(np.repeat(kept.astype(float), _trees.real_size(leaf) // max(rows, 1)))
    return np.concatenate(masks)


def random_direction(
    subject: CheckSubject, seed: int, row: int, dtype: Any = np.float64
) -> np.ndarray:
    """A random dense vector over all inputs, leaf by leaf."""
    names = [f"direction {row} {name}" for name in subject.names]
    return _dense(subject.inputs, names, seed, dtype)
