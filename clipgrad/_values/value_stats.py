"""Statistics of values, as sums that add up over places, steps and devices."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._compat import by_platform, exportable, is_local, to_varying, varying_axes
from clipgrad._jaxpr import dtype_of, holds_floats
from clipgrad._numerics import (
    flags_of_bits,
    from_bits,
    larger,
    largest,
    nan_unless,
    real_or_absolute,
    reduced_together,
    root_of_sums,
    stacked_sums,
    sums_by_largest,
    three_squares,
    to_bits,
)

Maxima = tuple[jax.Array, jax.Array]
Measurements = tuple[jax.Array, Maxima, jax.Array, jax.Array]


@exportable
class ValueStats(NamedTuple):
    r"""Statistics of the values with a name, see `with_value_stats`.

    Let $x_1, \ldots, x_n$ be the elements of all of them; of complex numbers the magnitudes. The
    fields are sums and maxima, so that statistics of several values can be joined; the
    properties are derived from them. Each has the axes that the name has: one for each scan around,
    and the axis that ``watch`` keeps.

    ``norm`` is $\sqrt{\sum_i x_i^2}$, ``rms`` is $\sqrt{\sum_i x_i^2 / n}$, and ``zeros`` is the
    share of elements that are exactly 0.

    Guarantees:
      * The norm is right from 1.2e-38 to 3.4e38 in float32, as the norm of `ClipStats`.
      * NaN is not hidden, on one device or many: if an element is NaN, so are ``max``,
        ``highest``, ``norm`` and ``rms``.
      * Of no elements ``norm``, ``rms``, ``max``, ``highest`` and ``zeros`` are 0.

    Attributes:
      squares: sums of squares of elements scaled down, as they are, and scaled up, of shape
        ``(..., 3)``.
      max: the largest magnitude.
      nonfinite: the number of elements that are NaN or inf. Counts are floating, exact up to
        2 ** 24 in float32.
      zero_count: the number of elements that are 0.
      size: the number of elements.
      highest: the largest element, with its sign; 0 if none is above 0.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> stats = cg.types.ValueStats.of(jnp.array([3.0, -4.0, 0.0, 0.0]))
      >>> print(stats.norm, stats.rms, stats.max, stats.highest, stats.zeros)
      5.0 2.5 4.0 3.0 0.5
      >>> print(cg.types.ValueStats.of(jnp.array([[3.0, -4.0], [0.0, 1.0]]), axis=0).max)
      [4. 1.]
    """

    squares: jax.Array
    max: jax.Array
    nonfinite: jax.Array
    zero_count: jax.Array
    size: jax.Array
    highest: jax.Array

    @property
    def norm(self) -> jax.Array:
        """The L2 norm."""
        return root_of_sums(self.squares)

    @property
    def rms(self) -> jax.Array:
        """The root of the mean square; 0 if there are no elements."""
        return self.norm / jnp.sqrt(jnp.maximum(self.size, 1))

    @property
    def zeros(self) -> jax.Array:
        """The share of elements that are exactly 0; 0 if there are no elements."""
        return self.zero_count / jnp.maximum(self.size, 1)

    @classmethod
    def of(cls, x: Any, axis: int | None = None, dtype: Any = None) -> "ValueStats":
        """The statistics of an array.

        Args:
          x: an array of floating or complex numbers.
          axis: an axis for each index of which there is one entry; ``None``: one for the array.
          dtype: float32 or float64; by default float64 if the array is.

        Raises:
          TypeError: if ``x`` is not an array of floating or complex numbers.
          ValueError: if it has no such axis.
        """
        if not holds_floats(x):
            raise TypeError(
                f"x: got {dtype_of(x) or type(x).__name__}, expected an array of floating or "
                "complex numbers"
            )
        size = real_or_absolute(x)
        wide = "float64" if size.dtype == jnp.float64 else "float32"
        size = size.astype(wide if dtype is None else dtype)
        if axis is not None and not -size.ndim <= axis < size.ndim:
            raise ValueError(f"axis: got {axis}, expected an axis of an array of shape {x.shape}")
        over = tuple(i for i in range(size.ndim) if axis is None or i != axis % size.ndim)
        return _measured_magnitudes(size, over)

    def joined(self, other: "ValueStats") -> "ValueStats":
        """The statistics of what two statistics are of."""
        sums = jax.tree.map(jnp.add, self, other)
        # Element by element: on a GPU a reduction of two numbers would be a kernel for each pair.
        return sums._with_maxima(map(larger, self._maxima, other._maxima))

    def over(self, axis: int) -> "ValueStats":
        """The statistics joined along an axis that is not negative, such as the axis of steps."""
        sums = jax.tree.map(lambda x: jnp.sum(x, axis), self)
        return sums._with_maxima(largest(x, axis) for x in self._maxima)

    @property
    def _maxima(self) -> tuple[jax.Array, jax.Array]:
        return self.max, self.highest

    def _with_maxima(self, maxima: Iterable[jax.Array]) -> "ValueStats":
        return self._replace(**dict(zip(("max", "highest"), maxima, strict=True)))

    def over_devices(self, sizes: Sequence[int], cut: Sequence[int]) -> "ValueStats":
        """The statistics of all devices of a mesh, of those of each along a leading axis.

        Args:
          sizes: the lengths of the axes of the mesh.
          cut: the positions of those that cut the axis that is kept, the outermost first. The
            entries of their devices come one after the other; all else is joined.
        """
        if not cut:
            return self.over(0)
        found = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), self)
        for axis in sorted({*range(len(sizes))} - {*cut}, reverse=True):
            found = found.over(axis)
        order = [sorted(cut).index(axis) for axis in cut]
        arrays = [_in_a_row(x, order, behind=x is found.squares) for x in found]
        return ValueStats(*arrays)


def _in_a_row(x: jax.Array, devices: Sequence[int], behind: int) -> jax.Array:
    """Leading axes of devices joined with an axis, which has ``behind`` others behind it."""
    kept = x.ndim - 1 - behind
    between = range(len(devices), kept)
    length = math.prod(x.shape[i] for i in (*devices, kept))
    shape = (*[x.shape[i] for i in between], length, *x.shape[kept + 1 :])
    return x.transpose(*between, *devices, *range(kept, x.ndim)).reshape(shape)


@functools.partial(jax.jit, static_argnums=1)
def _measured_magnitudes(x: jax.Array, over: tuple[int, ...]) -> ValueStats:
    forms = {"cpu": _measured_by_largest, "gpu": _measured_together, "default": _measured_apart}
    found = by_platform(x, **{k: functools.partial(form, over) for k, form in forms.items()})
    squares, (top, highest), nonfinite, zeros = found
    count = jnp.full(top.shape, math.prod(x.shape[i] for i in over), x.dtype)
    return ValueStats(squares, top, nonfinite, zeros, count, highest)


def _maxima(over: tuple[int, ...], x: jax.Array, total: jax.Array | None = None) -> Maxima:
    """The largest magnitude, and the largest element or 0."""
    top = largest(jnp.abs(x), over, total)
    return top, largest(x, over, top)


def _measured_together(over: tuple[int, ...], x: jax.Array) -> Measurements:
    """All in one reduction, where a GPU has a value whose rows are reduced; it stores columns."""
    if not is_local(x) or x.ndim - 1 not in over:
        return _measured_apart(over, x)
    # As integers they need no array of zeros, which JAX would store before a scan.
    sums, maxima = reduced_together(_measured_terms(x), [to_bits(jnp.abs(x)), to_bits(x)], over)
    *squares, bad, zeros = sums
    top, highest = map(from_bits, maxima)
    return stacked_sums(*squares), (top, nan_unless(~jnp.isnan(top), highest)), bad, zeros


def _measured_apart(over: tuple[int, ...], x: jax.Array) -> Measurements:
    """The sums apart, which share one read on a TPU; a stack would be stored there."""
    *squares, bad, zeros = (jnp.sum(term, over) for term in _measured_terms(x))
    return stacked_sums(*squares), _maxima(over, x, squares[1]), bad, zeros


def _measured_terms(x: jax.Array) -> list[jax.Array]:
    """The terms of sums: squares in three ranges, 1 if not finite, 1 if zero."""
    return [*three_squares(x), *flags_of_bits(x)]


def _measured_by_largest(over: tuple[int, ...], x: jax.Array) -> Measurements:
    """Few passes: on a CPU each sum is one, and a branch that is not taken costs nothing.

    What goes into a branch is stored, so it is no copy of the data.
    """
    top, highest = _maxima(over, x)
    none = to_varying(jnp.zeros_like(top), varying_axes(top))
    bad = jax.lax.cond(
        jnp.all(jnp.isfinite(top)),
        lambda: none,
        lambda: jnp.sum((~jnp.isfinite(x)).astype(x.dtype), over),
    )
    squares = sums_by_largest(jnp.abs(x), top, over)
    return squares, (top, highest), bad, jnp.sum((x == 0).astype(x.dtype), over)
