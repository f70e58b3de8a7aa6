"""Signatures: of an array the numbers that a file keeps, by which its equals are known.

Arrays of another framework are close to one of JAX in some order of their axes.
"""

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from clipgrad._compare.differences import Exact, Judgment, host_values, rounding
from clipgrad._compare.sketches import LENGTH, NUMBERS, host_sketch, judge_sketches, judge_values

Order = tuple[int, ...]
_MOST_AXES = 4  # 24 orders
_STILL = np.zeros(LENGTH)
NEAR = 0.3  # a difference of which the two may be one value


class Signature(NamedTuple):
    """The signature of an array; of another framework's in several orders of its axes.

    Attributes:
      shape: its shape.
      dtype: its type, or the name that this has in another framework.
      sketches: of floating numbers the sketch in each order, shape (orders, 515); of others none.
      digests: of others a hash of all bits, of another framework's as int32 in each order.
      stacked: whether the first axis is of layers, and stays the first.
      floor: how far rounding moves the first sketch.
    """

    shape: tuple[int, ...]
    dtype: Any
    sketches: np.ndarray
    digests: tuple[str, ...]
    stacked: bool = False
    floor: np.ndarray = _STILL

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def orders(self) -> list[Order]:
        """The orders of axes that are signed, of another framework's array."""
        return orders_of(self.shape, self.stacked)


def signature(x: Any) -> Signature:
    shape, dtype = np.shape(x), x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    (host,) = host_values([x])
    if isinstance(host, Exact):
        digest = hashlib.sha256(np.ascontiguousarray(host.values).tobytes()).hexdigest()
        return Signature(shape, dtype, np.zeros((0, LENGTH)), (digest,))
    return Signature(shape, dtype, host_sketch(host)[None], ())


def layouts(x: np.ndarray, dtype: str, stacked: bool = False) -> Signature:
    """Sign an array, whose type in its own framework has this name, in every order of its axes."""
    orders = orders_of(x.shape, stacked)
    turned = [np.transpose(x, (*o, *sorted({*range(x.ndim)} - {*o}))) for o in orders]
    if x.dtype.kind not in "fc":
        digests = (hashlib.sha256(t.astype(np.int32).tobytes()).hexdigest() for t in turned)
        return Signature(x.shape, dtype, np.zeros((0, LENGTH)), tuple(digests), stacked)
    return Signature(x.shape, dtype, np.stack([host_sketch(t) for t in turned]), (), stacked)


def orders_of(shape: tuple[int, ...], stacked: bool = False) -> list[Order]:
    """The orders of the axes that are longer than 1, all of up to four; the order itself first."""
    if stacked:
        return [(0, *(i + 1 for i in order)) for order in orders_of(shape[1:])]
    axes = [i for i, size in enumerate(shape) if size != 1]
    if len(axes) <= _MOST_AXES:
        return list(itertools.permutations(axes))
    first, second, *rest = axes
    known = [axes, [first, *rest, second], [*rest, second, first], axes[::-1]]
    return list(dict.fromkeys(map(tuple, known)))


def judge_signatures(own: Signature, other: Signature) -> Judgment:
    """Compare two arrays that should be the same numbers, but for the rounding of their types."""
    if own.shape != other.shape or bool(own.digests) != bool(other.digests):
        return Judgment(float("inf"), 0.0)
    if own.digests:
        return Judgment(0.0 if own.digests == other.digests else 1.0, 0.0)
    eps = rounding(own.dtype, other.dtype)
    return judge_sketches(own.sketches[0], other.sketches[0], own.floor, eps, None)


class Closest(NamedTuple):
    """Two arrays in the order of axes in which they are closest, and in others as close.

    Attributes:
      judgment: how close they are.
      agrees: whether they are the same numbers.
      at: the numbers of the orders in which they are, or else of the closest one.
    """

    judgment: Judgment
    agrees: bool
    at: tuple[int, ...]


def _judged(own: Signature, other: Signature, at: int, rtol: float | None) -> Judgment:
    """Compare two arrays in one of the orders; rounding of the other framework adds as much."""
    eps = rounding(own.dtype, _float_type(other.dtype))
    return judge_values(own.sketches[0], other.sketches[at], 2 * own.floor, eps, rtol)


@functools.cache
def _float_type(name: str) -> Any:
    try:
        return jnp.finfo(name).dtype
    except (TypeError, ValueError):  # a type that JAX does not have
        return jnp.dtype("float32")


class Candidates:
    """Arrays of the other framework, to be compared with arrays of as many elements."""

    def __init__(self, every: Sequence[Signature]) -> None:
        self._every = every
        by_size: dict[int, list[int]] = {}
        for i, own in enumerate(every):
            if len(own.sketches):
                by_size.setdefault(own.size, []).append(i)
        self._by_size = {
            size: (numbers, np.concatenate([every[i].sketches for i in numbers]))
            for size, numbers in by_size.items()
        }

    def closest(self, own: Signature, rtol: float | None = None) -> dict[int, Closest]:
        """Each array of this size, by its number, in its closest order."""
        numbers, sketches = self._by_size.get(own.size, ([], np.zeros((0, LENGTH))))
        ends = np.cumsum([len(self._every[i].sketches) for i in numbers])[:-1]
        parts = np.split(_distances(own.sketches[0], sketches), ends)
        pairs = zip(numbers, parts, strict=False)
        return {i: _closest(own, self._every[i], far, rtol) for i, far in pairs}


def _closest(own: Signature, other: Signature, far: np.ndarray, rtol: float | None) -> Closest:
    """Compare two arrays of as many elements in every order of axes.

    What is far in each order, by `_distances`, has a rough judgment, see `rejudged`.
    """
    best, near = int(np.argmin(far)), np.flatnonzero(far < NEAR).tolist()
    if not near and (rtol or 0) < NEAR:
        return Closest(Judgment(float(far[best]), 0.0), False, (best,))
    found = {i: _judged(own, other, i, rtol) for i in near or [best]}
    agree = tuple(i for i, j in found.items() if j.is_judged and not j.differs)
    return Closest(found[best], bool(agree), agree or (best,))


def rejudged(found: Closest, own: Signature, other: Signature, rtol: float | None) -> Judgment:
    """The judgment with what rounding explains, which is not measured of each that is far."""
    is_rough = not found.judgment.sizes and own.size == other.size
    return _judged(own, other, found.at[0], rtol) if is_rough else found.judgment


def is_among(own: Signature, others: Iterable[Signature]) -> bool:
    """Whether one of some arrays is this one, in any order of axes, such as what is flattened."""
    return any(np.any(np.all(other.sketches == own.sketches[:1], axis=1)) for other in others)


def closest_of(
    own: Signature, other: Signature, orders: Sequence[int], rtol: float | None
) -> Judgment:
    """Compare two arrays in the closest of some orders of axes."""
    found = [_judged(own, other, at, rtol) for at in orders]
    return min(found, key=lambda j: (j.differs, j.difference))


def best_pairs(
    pairs: Sequence[tuple[Any, int]], score: Callable[[Any, int], float]
) -> dict[Any, int]:
    """One partner for each: the best pairs first."""
    found: dict[Any, int] = {}
    used: set[int] = set()
    for own, other in sorted(pairs, key=lambda pair: -score(*pair)):
        if own not in found and other not in used:
            found[own] = other
            used.add(other)
    return found


def _distances(own: np.ndarray, others: np.ndarray) -> np.ndarray:
    """About how far a sketch is from others, shape (n, 515)."""
    found = np.where(others[:, -1] == own[-1], 0, np.inf)
    for part in (slice(0, NUMBERS), slice(NUMBERS, 2 * NUMBERS)):
        apart = np.linalg.norm(others[:, part] - own[part], axis=1)
        size = np.maximum(np.linalg.norm(others[:, part], axis=1), np.linalg.norm(own[part]))
        found = np.maximum(found, np.divide(apart, size, where=size > 0, out=np.zeros_like(apart)))
    return found
