"""Real differences: beyond a dtype's rounding, and beyond the changes that rounding makes."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._jaxpr import holds_floats, on_host
from clipgrad._trees import widened_leaf

RUNS = 8  # with other roundings: their root mean square is right to about 1 / 4
EQUAL_ROUNDINGS = 4  # of the dtype; two orders of one sum differ by fewer
FLOORS = 1  # times the measured floor; right pairs in mixed precision differ by up to 0.91 of it
# A sum in float32 on a CPU may lose more than its terms do: right pairs differ by up to 1.8 floors.
# Floors of a program that computes in half precision are above this one.
FLOORS_IN_FLOAT32, MOST_IN_FLOAT32 = 4, 2.0**-13
UNJUDGED = 0.1  # what rounding moves by more is judged only by
CLEAR = 4  # times the floor


class Judgment(NamedTuple):
    """Whether two versions of a value differ.

    Attributes:
      difference: the norm of the difference over the elements that are not equal, relative to the
        norm of the other version there, or of the first one if the other is zero; inf if they are
        not finite in different ways.
      tolerance: what rounding explains, in the same measure.
      is_judged: whether rounding leaves anything to judge.
      sizes: the norm and the largest magnitude of both versions, where they are known.
    """

    difference: float
    tolerance: float
    is_judged: bool = True
    sizes: tuple[tuple[float, float], ...] = ()

    @property
    def differs(self) -> bool:
        """Whether the versions differ by more than rounding explains."""
        return self.is_judged and not self.difference <= self.tolerance


class Exact(NamedTuple):
    """Numbers that are compared exactly: integers, booleans, and the data of keys."""

    values: np.ndarray


def host_values(leaves: Sequence[Any]) -> list[Any]:
    """Leaves in NumPy: `Exact`, or float64 or complex128; what is no number stays as it is."""
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in arrays]
    data = (jax.random.key_data(x) if key else x for x, key in zip(arrays, keys, strict=True))
    found = iter(on_host(list(data)))
    return [_host(next(found) if isinstance(x, jax.Array) else x) for x in leaves]


def plain_numbers(leaves: Sequence[Any]) -> list[np.ndarray]:
    """The numbers of arrays in NumPy, also those that are `Exact`."""
    return [x.values if isinstance(x, Exact) else x for x in host_values(leaves)]


def _host(x: Any) -> Any:
    if not isinstance(x, np.ndarray | np.generic | bool | int | float | complex):
        return x
    x = np.asarray(x)
    return widened_leaf(x) if holds_floats(x) else Exact(x)


def rounding(*dtypes: Any) -> float:
    """One rounding of the coarsest of some floating dtypes, relative to the number."""
    return max(float(jnp.finfo(dtype).eps) for dtype in dtypes)


def floor_of(own: Any, runs: Iterable[Any]) -> Any:
    """The movement of numbers in a tree by rounding: the root mean square over runs of each."""
    total, count = jax.tree.map(lambda x: np.zeros(np.shape(x)), own), 0
    for run in runs:
        total, count = jax.tree.map(_with_run, total, own, run), count + 1
    return jax.tree.map(lambda x: x / math.sqrt(max(1, count)), total)


def _with_run(total: np.ndarray, own: np.ndarray, moved: np.ndarray) -> np.ndarray:
    own, moved = np.asarray(own), np.asarray(moved)
    same = (own == moved) | (np.isnan(own) & np.isnan(moved))
    with np.errstate(invalid="ignore", over="ignore"):
        wide = np.result_type(own, np.float64)
        distance = np.abs(np.subtract(moved, own, dtype=wide))
        return np.hypot(total, np.where(same, 0, np.where(np.isnan(distance), np.inf, distance)))


def judge(
    own: np.ndarray, other: np.ndarray, floor: np.ndarray | None, eps: float, rtol: float | None
) -> Judgment:
    r"""Compare two versions of a value, shape (...), in float64 or complex128.

    With :math:`S` the elements that are not equal, the versions differ if
    :math:`\lVert a - b\rVert_S > \max(4 \epsilon \lVert b\rVert_S, \lVert f\rVert_S, \min(4
    \lVert f\rVert_S, 2^{-13} \lVert b\rVert_S))`: the elements are judged by what rounding does
    to these elements, so that a mask of -1e9 beside them hides nothing. Of what rounding moves by
    more than 10 % only a difference of four times the floor is judged.

    Args:
      own: the value in the first version.
      other: that in the second.
      floor: how far rounding moves each element of the first version; see `floor_of`;
        None for not at all.
      eps: one rounding of the dtype.
      rtol: the tolerance in place of all this, or None.
    """
    floor = np.zeros(np.shape(own)) if floor is None else floor
    own, other, floor = _with_room(*map(np.ravel, (own, other, floor)))
    is_stable = relative_floor(own, floor) <= UNJUDGED
    odd = ~np.isfinite(own) | ~np.isfinite(other)
    if not np.array_equal(own[odd], other[odd], equal_nan=True):
        return Judgment(math.inf, rtol or EQUAL_ROUNDINGS * eps, rtol is not None or is_stable)
    unequal = ~odd & (own != other)
    own_part, other_part = own[unequal], other[unequal]
    distance, size = _norm(own_part - other_part), _norm(other_part) or _norm(own_part)
    found = relative(distance, size)
    if rtol is not None:
        return Judgment(found, rtol)
    moved = _norm(floor[unequal])
    if not math.isfinite(moved):
        return Judgment(found, math.inf, found == 0)
    least = min(relative(FLOORS_IN_FLOAT32 * moved, size), MOST_IN_FLOAT32)
    tolerance = max(EQUAL_ROUNDINGS * eps, relative(FLOORS * moved, size), least)
    is_judged = is_stable or found <= EQUAL_ROUNDINGS * eps or distance > CLEAR * moved
    return Judgment(found, tolerance, is_judged)


def judge_exactly(own: np.ndarray, other: np.ndarray, floor: np.ndarray | None) -> Judgment:
    """Compare integers: their difference is the share of those that are not equal."""
    return Judgment(float(np.mean(own != other)) if own.size else 0.0, 0.0, not np.any(floor))


def relative(distance: float, size: float) -> float:
    """A distance relative to a size: nothing is no difference, also beside nothing."""
    return 0.0 if distance == 0 else math.inf if size == 0 else float(distance / size)


def relative_floor(own: np.ndarray, floor: np.ndarray) -> float:
    """The movement of the finite numbers of a value by rounding, relative to them."""
    finite = np.isfinite(own)
    return relative(_norm(floor[finite]), _norm(own[finite]))


def _with_room(*arrays: np.ndarray) -> list[np.ndarray]:
    """The arrays, or all times a power of two if differences of the largest would overflow."""
    parts = [np.abs([np.real(x), np.imag(x)]) for x in arrays]  # the size of a number may overflow
    largest = max(np.max(x, where=np.isfinite(x), initial=0) for x in parts)
    return [x * 2.0**-4 for x in arrays] if largest > np.finfo(np.float64).max / 16 else [*arrays]


def _norm(x: np.ndarray) -> float:
    """The L2 norm, without overflow and underflow of squares."""
    largest = float(np.max(np.abs(x), initial=0))
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(np.linalg.norm(x / largest))
