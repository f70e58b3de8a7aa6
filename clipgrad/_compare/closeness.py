"""Closeness: how far arrays of one framework are from those of another, in any order of axes."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from clipgrad._compare.differences import Judgment, rounding
from clipgrad._compare.layouts import Layouts
from clipgrad._compare.sketches import LENGTH, NUMBERS, judge_values

K = TypeVar("K", bound=Hashable)
NEAR = 0.3  # a difference of which the two may be one value


class Sketched(NamedTuple):
    """The sketch of an array in JAX, and its movement by rounding."""

    sketch: np.ndarray
    floor: np.ndarray
    shape: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))


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


def judged(own: Sketched, other: Layouts, at: int, rtol: float | None = None) -> Judgment:
    """Compare two arrays in one of the orders; rounding of the other framework adds as much."""
    eps = rounding(own.dtype, _float_type(other.dtype))
    return judge_values(own.sketch, other.sketches[at], 2 * own.floor, eps, rtol)


@functools.cache
def _float_type(name: str) -> Any:
    try:
        return jnp.finfo(name).dtype
    except (TypeError, ValueError):  # a type that JAX does not have
        return jnp.dtype("float32")


class Candidates:
    """Arrays of the other framework, to be compared with arrays of as many elements."""

    def __init__(self, every: Sequence[Layouts]) -> None:
        self._every = every
        by_size: dict[int, list[int]] = {}
        for i, own in enumerate(every):
            if len(own.sketches):
                by_size.setdefault(own.size, []).append(i)
        self._by_size = {
            size: (numbers, np.concatenate([every[i].sketches for i in numbers]))
            for size, numbers in by_size.items()
        }

    def closest(self, own: Sketched, rtol: float | None = None) -> dict[int, Closest]:
        """Each array of this size, by its number, in its closest order."""
        numbers, sketches = self._by_size.get(own.size, ([], np.zeros((0, LENGTH))))
        ends = np.cumsum([len(self._every[i].sketches) for i in numbers])[:-1]
        parts = np.split(distances(own.sketch, sketches), ends)
        pairs = zip(numbers, parts, strict=False)
        return {i: closest(own, self._every[i], far, rtol) for i, far in pairs}


def closest(own: Sketched, other: Layouts, far: np.ndarray, rtol: float | None) -> Closest:
    """Compare two arrays of as many elements in every order of axes.

    What is far in each order, by `distances`, has a rough judgment, see `rejudged`.
    """
    best = int(np.argmin(far))
    near = [i for i in range(len(far)) if far[i] < NEAR]
    if not near and (rtol or 0) < NEAR:
        return Closest(Judgment(float(far[best]), 0.0), False, (best,))
    found = {i: judged(own, other, i, rtol) for i in near or [best]}
    agree = tuple(i for i, j in found.items() if j.is_judged and not j.differs)
    return Closest(found[best], bool(agree), agree or (best,))


def rejudged(found: Closest, own: Sketched, other: Layouts, rtol: float | None) -> Closest:
    """A pair with what rounding explains, which is not measured of each that is far."""
    if found.judgment.sizes or own.size != other.size:
        return found
    return found._replace(judgment=judged(own, other, found.at[0], rtol))


def closest_of(
    own: Sketched, other: Layouts, orders: Sequence[int], rtol: float | None
) -> Judgment:
    """Compare two arrays in the closest of some orders of axes."""
    found = [judged(own, other, at, rtol) for at in orders]
    return min(found, key=lambda j: (j.differs, j.difference))


def best_pairs(pairs: Sequence[tuple[K, int]], score: Callable[[K, int], float]) -> dict[K, int]:
    """One partner for each: the best pairs first."""
    found: dict[K, int] = {}
    used: set[int] = set()
    for own, other in sorted(pairs, key=lambda pair: -score(*pair)):
        if own not in found and other not in used:
            found[own] = other
            used.add(other)
    return found


def distances(own: np.ndarray, others: np.ndarray) -> np.ndarray:
    """About how far a sketch is from others, shape (n, 515)."""
    found = np.where(others[:, -1] == own[-1], 0, np.inf)
    for part in (slice(0, NUMBERS), slice(NUMBERS, 2 * NUMBERS)):
        apart = np.linalg.norm(others[:, part] - own[part], axis=1)
        size = np.maximum(np.linalg.norm(others[:, part], axis=1), np.linalg.norm(own[part]))
        found = np.maximum(found, np.divide(apart, size, where=size > 0, out=np.zeros_like(apart)))
    return found
