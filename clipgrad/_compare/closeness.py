"""Closeness: how far arrays of one framework are from those of another, in any order of axes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from clipgrad._compare.differences import Judgment, rounding
from clipgrad._compare.signatures import Signature
from clipgrad._compare.sketches import LENGTH, NUMBERS, judge_values

NEAR = 0.3  # a difference of which the two may be one value


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
