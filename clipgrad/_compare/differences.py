"""Real differences: beyond a dtype's rounding, and beyond the changes that rounding makes."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._jaxpr import holds_floats, on_host
from clipgrad._trees import widened_leaf

EQUAL_ROUNDINGS = 4  # of the dtype; two orders of one sum differ by fewer
FLOORS = 4  # times the measured floor; with 8 a halved scale of attention in bfloat16 is missed
UNJUDGED = 0.1  # a place that one rounding of the arguments moves by more is decided by rounding


class Judgment(NamedTuple):
    """Whether two versions of a value differ.

    Attributes:
      difference: the norm of the difference over the elements that are not equal, relative to the
        norm of the other version there, or of the first one if the other is zero; inf if they are
        not finite in different ways.
      tolerance: what rounding explains, in the same measure.
      is_judged: whether rounding leaves anything to judge.
    """

    difference: float
    tolerance: float
    is_judged: bool = True

    @property
    def differs(self) -> bool:
        """Whether the versions differ by more than rounding explains."""
        return self.is_judged and not self.difference <= self.tolerance


class Exact(NamedTuple):
    """Numbers that are compared exactly: integers, booleans, and the data of keys."""

    values: np.ndarray


def host_values(leaves: Sequence[Any]) -> list[Any]:
    """Leaves in NumPy: `Exact`, or float64 or complex128; what is no number stays as it is."""
    arrays = [isinstance(x, jax.Array) for x in leaves]
    data = [_data(x) for x, is_one in zip(leaves, arrays, strict=True) if is_one]
    found = iter(on_host(data))
    return [_host(next(found) if is_one else x) for x, is_one in zip(leaves, arrays, strict=True)]


def _data(x: jax.Array) -> jax.Array:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def _host(x: Any) -> Any:
    if not isinstance(x, np.ndarray | np.generic | bool | int | float | complex):
        return x
    x = np.asarray(x)
    return widened_leaf(x) if holds_floats(x) else Exact(x)


def rounding(*dtypes: Any) -> float:
    """One rounding of the coarsest of some floating dtypes, relative to the number."""
    return max(float(jnp.finfo(dtype).eps) for dtype in dtypes)


def judge(
    own: np.ndarray, other: np.ndarray, moved: Sequence[np.ndarray], eps: float, rtol: float | None
) -> Judgment:
    r"""Compare two versions of a value, shape (...), in float64 or complex128.

    With :math:`S` the elements that are not equal, the versions differ if
    :math:`\lVert a - b\rVert_S > 4 \max(\epsilon \lVert b\rVert_S, f_S)`, where :math:`f_S` is the
    root mean square over the runs ``moved`` of :math:`\lVert a' - a\rVert_S`: the elements are
    judged by what rounding did to these elements, so that a mask of -1e9 beside them hides nothing.

    Args:
      own: the value in the first version.
      other: the value in the second version.
      moved: the value in runs of the first version with arguments moved by one rounding.
      eps: one rounding of the dtype.
      rtol: the tolerance in place of all this, or None.
    """
    own, other, *moved = _with_room(own, other, *moved)
    own, other = np.ravel(own), np.ravel(other)
    odd = ~np.isfinite(own) | ~np.isfinite(other)
    if not np.array_equal(own[odd], other[odd], equal_nan=True):
        return Judgment(
            math.inf, rtol or EQUAL_ROUNDINGS * eps, rtol is not None or _is_stable(own, moved)
        )
    unequal = ~odd & (own != other)
    own_part, other_part = own[unequal], other[unequal]
    distance, size = _norm(own_part - other_part), _norm(other_part) or _norm(own_part)
    found = relative(distance, size)
    if rtol is not None:
        return Judgment(found, rtol)
    floor = _root_mean_square([_norm(np.ravel(m)[unequal] - own_part) for m in moved])
    if not math.isfinite(floor):
        return Judgment(found, math.inf, found == 0)
    tolerance = max(EQUAL_ROUNDINGS * eps, relative(FLOORS * floor, size))
    return Judgment(found, tolerance, found <= EQUAL_ROUNDINGS * eps or _is_stable(own, moved))


def judge_exactly(own: np.ndarray, other: np.ndarray, moved: Sequence[np.ndarray]) -> Judgment:
    """Compare integers: their difference is the share of those that are not equal."""
    stays = all(np.array_equal(own, m) for m in moved)
    return Judgment(float(np.mean(own != other)) if own.size else 0.0, 0.0, stays)


def relative(distance: float, size: float) -> float:
    """A distance relative to a size: nothing is no difference, also beside nothing."""
    return 0.0 if distance == 0 else math.inf if size == 0 else float(distance / size)


def movement(own: np.ndarray, moved: Sequence[np.ndarray]) -> float:
    """The distance of runs with moved arguments from a value, relative to it."""
    own = np.ravel(own)
    finite = np.isfinite(own)
    distances = [_norm(np.ravel(m)[finite] - own[finite]) for m in moved]
    return relative(_root_mean_square(distances), _norm(own[finite]))


def _with_room(*arrays: np.ndarray) -> list[np.ndarray]:
    """The arrays, or all times a power of two if differences of the largest would overflow."""
    sizes = [magnitudes(x[np.isfinite(x)]) for x in arrays]
    is_large = any(np.any(size > np.finfo(np.float64).max / 16) for size in sizes)
    return [x * 2.0**-4 for x in arrays] if is_large else [*arrays]


def magnitudes(x: np.ndarray) -> np.ndarray:
    """The larger of real and imaginary part of each number, which does not overflow as `abs`."""
    return np.maximum(np.abs(np.real(x)), np.abs(np.imag(x)))


def _is_stable(own: np.ndarray, moved: Sequence[np.ndarray]) -> bool:
    return movement(own, moved) <= UNJUDGED


def _norm(x: np.ndarray) -> float:
    """The L2 norm, without overflow and underflow of squares."""
    largest = float(np.max(np.abs(x), initial=0))
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(np.linalg.norm(x / largest))


def _root_mean_square(values: Sequence[float]) -> float:
    return _norm(np.asarray(values, np.float64)) / math.sqrt(max(1, len(values)))
