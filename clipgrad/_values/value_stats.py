"""Statistics of values, as sums that add up over places, steps and devices."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._arrays import (
    answers_lookups,
    fit_one_reduction,
    flags_of_bits,
    from_bits,
    larger,
    largest,
    real_or_absolute,
    reduced_together,
    root_of_sums,
    stacked_sums,
    three_squares,
    to_bits,
)
from clipgrad._compat import exportable
from clipgrad._programs import dtype_of, holds_floats


@exportable
@answers_lookups("stats")
class ValueStats(NamedTuple):
    r"""Norm, largest magnitude, NaN and zeros of the values with one name, see `with_value_stats`.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> stats = cg.types.ValueStats.of(jnp.array([3.0, -4.0, 0.0, 0.0]))
      >>> print(stats.norm, stats.rms, stats.max, stats.zero_fraction)
      5.0 2.5 4.0 0.5
      >>> print(cg.types.ValueStats.of(jnp.array([[3.0, -4.0], [0.0, 1.0]]), axis=0).max)
      [4. 1.]

    Attributes:
      squares: sums of squares of elements scaled down, as they are, and scaled up, of shape
        ``(..., 3)``; read ``norm`` and ``rms`` instead.
      max: the largest magnitude of an element.
      nonfinite: the number of elements that are NaN or inf. Counts are floating, exact up to
        2 ** 24 in float32.
      zero_count: the number of elements that are 0.
      size: the number of elements.

    Let $x_1, \ldots, x_n$ be the elements of all values with the name, or their magnitudes if they
    are complex. ``norm`` is $\sqrt{\sum_i x_i^2}$, ``rms`` is $\sqrt{\sum_i x_i^2 / n}$, and
    ``zero_fraction`` is the share of elements that are exactly 0. All attributes are sums, or a
    maximum, so that statistics of several values can be joined. Each attribute has one axis for
    each scan around the name, and the axis that ``watch`` keeps.

    Guarantees:
      * The norm is right from 1.2e-38 to 3.4e38 in float32.
      * NaN is not hidden, on one device or many: if an element is NaN, so are ``max``, ``norm`` and
        ``rms``.
      * If there are no elements, ``norm``, ``rms``, ``max`` and ``zero_fraction`` are 0.
    """

    squares: jax.Array
    max: jax.Array
    nonfinite: jax.Array
    zero_count: jax.Array
    size: jax.Array

    @property
    def norm(self) -> jax.Array:
        """The L2 norm."""
        return root_of_sums(self.squares)

    @property
    def rms(self) -> jax.Array:
        """The root mean square; 0 if there are no elements."""
        return self.norm / jnp.sqrt(jnp.maximum(self.size, 1))

    @property
    def zero_fraction(self) -> jax.Array:
        """The share of elements that are exactly 0; 0 if there are no elements."""
        return self.zero_count / jnp.maximum(self.size, 1)

    @classmethod
    def of(cls, x: Any, axis: int | None = None, dtype: Any = None) -> "ValueStats":
        """The statistics of an array.

        Args:
          x: an array of floating or complex numbers.
          axis: an axis to keep, with one entry for each index; ``None``: one entry for the array.
          dtype: float32 or float64; by default float64 if the array is.

        Raises:
          TypeError: if ``x`` is not an array of floating or complex numbers.
          ValueError: if ``x`` has no such axis.
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
        return _measured_value(size, over)

    def joined(self, other: "ValueStats") -> "ValueStats":
        """The statistics of all elements of both."""
        sums = jax.tree.map(jnp.add, self, other)
        return sums._replace(max=larger(self.max, other.max))

    def over(self, axis: int) -> "ValueStats":
        """The statistics joined along an axis that is not negative, such as the axis of steps."""
        sums = jax.tree.map(lambda x: jnp.sum(x, axis), self)
        return sums._replace(max=largest(self.max, axis))


@functools.partial(jax.jit, static_argnums=1)
def _measured_value(x: jax.Array, over: tuple[int, ...]) -> ValueStats:
    """All sums in one reduction, which reads a value on one device once.

    Without this, a CPU or GPU reads the value once for each sum, a TPU once in all. A value on
    several devices is not reduced in this way, since XLA would gather the whole value, or store
    columns.
    """
    terms = [*three_squares(x), *flags_of_bits(x)]
    if fit_one_reduction([x], [over]) and x.dtype == jnp.float32:
        # As integers, magnitudes need no array of zeros, which JAX would store before a scan.
        sums, (bits,) = reduced_together(terms, [to_bits(jnp.abs(x))], over)
        top = from_bits(bits)
    else:
        sums = [jnp.sum(term, over) for term in terms]
        top = largest(jnp.abs(x), over, sums[1])
    *squares, nonfinite, zeros = sums
    count = jnp.full(top.shape, math.prod(x.shape[i] for i in over), x.dtype)
    return ValueStats(stacked_sums(*squares), top, nonfinite, zeros, count)
