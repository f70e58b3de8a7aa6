"""The last norms that were seen, and what can be said of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._export import exportable
from clipgrad._thresholds._base import counts, unlimited

# A norm that is further than this from the median, as a factor, is no sample of the same process.
FAR = 10.0


@exportable
class Window(NamedTuple):
    """The last norms, oldest first, of one or several groups that are clipped.

    Attributes:
      norms: shape ``(size, *groups)``; 0 where there is none yet.
      seen: how many there are in each group, at most ``size``; int32, shape ``groups``.
    """

    norms: jax.Array
    seen: jax.Array

    @classmethod
    def empty(cls, size: int, norms: jax.Array) -> "Window":
        """A window without norms, for groups of this shape."""
        return cls(jnp.zeros((size, *norms.shape), norms.dtype), jnp.zeros(norms.shape, jnp.int32))

    def push(self, norms: jax.Array) -> "Window":
        """The window after these norms; NaN, inf and 0 do not enter."""
        enters = counts(norms)
        shifted = jnp.concatenate([self.norms[1:], norms[None]])
        return Window(
            jnp.where(enters[None], shifted, self.norms),
            jnp.where(enters, jnp.minimum(self.seen + 1, len(self.norms)), self.seen),
        )

    @property
    def held(self) -> jax.Array:
        """Which entries are norms, shape ``(size, *groups)``."""
        size = len(self.norms)
        places = jnp.arange(size, dtype=jnp.int32).reshape(size, *(1 for _ in self.seen.shape))
        return places >= size - self.seen[None]

    def percentile(self, percentile: float) -> jax.Array:
        """A percentile of the norms, interpolated linearly; inf of none."""
        ordered = jnp.sort(jnp.where(self.held, self.norms, jnp.inf), axis=0)
        last = jnp.maximum(self.seen - 1, 0)
        place = jnp.asarray(percentile / 100, ordered.dtype) * last.astype(ordered.dtype)
        below = jnp.floor(place).astype(jnp.int32)
        low, high = (
            jnp.take_along_axis(ordered, i[None], axis=0)[0]
            for i in (below, jnp.minimum(below + 1, last))
        )
        part = place - below.astype(place.dtype)
        return jnp.where(part == 0, low, jnp.minimum(low + (high - low) * part, high))

    def without_far(self) -> jax.Array:
        """Which entries are norms within a factor of ten of their median."""
        median = self.percentile(50)[None]
        near = (self.norms <= FAR * median) & (self.norms >= median / FAR)
        return self.held & near

    def mean_and_deviation(self) -> tuple[jax.Array, jax.Array]:
        """Mean and standard deviation of the norms that are not far above their median."""
        median = jnp.where(self.seen > 0, self.percentile(50), 1)
        # In units of the median, since squares of the norms may be out of range.
        units = self.norms / median[None]
        near = self.held & (units <= FAR)
        number = jnp.maximum(jnp.sum(near, axis=0), 1).astype(units.dtype)
        mean = jnp.sum(jnp.where(near, units, 0), axis=0) / number
        squares = jnp.square(units - mean[None])
        variance = jnp.sum(jnp.where(near, squares, 0), axis=0) / number
        most = unlimited(median)
        return jnp.minimum(mean * median, most), jnp.sqrt(variance) * median
