"""The last norms, which of them count, and what is read from them."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._compat import exportable

# The norms that enter a history.
Feed = Literal["raw", "clipped"]

# A norm further than this factor from the median is not a sample of the same process.
FAR_ABOVE_MEDIAN = 10.0


def unlimited(norms: jax.Array) -> jax.Array:
    """The largest finite number: a threshold that clips nothing, and is not inf."""
    return jnp.full(norms.shape, jnp.finfo(norms.dtype).max, norms.dtype)


def counts(norms: jax.Array) -> jax.Array:
    """Whether a norm enters a history: it is finite, and not the 0 of an unused leaf."""
    # Subnormal numbers act as 0 on most devices.
    return jnp.isfinite(norms) & (norms >= jnp.finfo(norms.dtype).tiny)


def entering(feed: Feed, norms: jax.Array, thresholds: jax.Array) -> jax.Array:
    """The norms for a history, raw or clipped; 0 instead of those that never enter one."""
    clipped = jnp.minimum(norms, thresholds) if feed == "clipped" else norms
    return jnp.where(counts(norms), clipped, 0)


@exportable
class Window(NamedTuple):
    """The last norms, oldest first, of one or several groups of leaves.

    Attributes:
      norms: shape ``(size, *groups)``; 0 where there is no norm yet.
      seen: the number of norms in each group, at most ``size``; int32, shape ``groups``.
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
    def filled(self) -> jax.Array:
        """Whether each entry is a norm, shape ``(size, *groups)``."""
        size = len(self.norms)
        places = jnp.arange(size, dtype=jnp.int32).reshape(size, *(1 for _ in self.seen.shape))
        return places >= size - self.seen[None]

    def percentile(self, percentile: float) -> jax.Array:
        """A percentile of the norms, interpolated linearly; the largest number without norms."""
        ordered = jnp.sort(jnp.where(self.filled, self.norms, unlimited(self.norms)), axis=0)
        last = jnp.maximum(self.seen - 1, 0)
        place = jnp.asarray(percentile / 100, ordered.dtype) * last.astype(ordered.dtype)
        below = jnp.floor(place).astype(jnp.int32)
        low, high = (
            jnp.take_along_axis(ordered, i[None], axis=0)[0]
            for i in (below, jnp.minimum(below + 1, last))
        )
        part = place - below.astype(place.dtype)
        return jnp.where(part == 0, low, jnp.minimum(low + (high - low) * part, high))

    def near(self, low: bool = True) -> jax.Array:
        """Whether each entry is a norm within a factor of ten of the median, or not far above."""
        median = self.percentile(50)[None]
        near = self.filled & (self.norms / FAR_ABOVE_MEDIAN <= median)
        return near & (self.norms >= median / FAR_ABOVE_MEDIAN) if low else near

    def mean_and_deviation(self) -> tuple[jax.Array, jax.Array]:
        """Mean and standard deviation of the norms that are not far above their median."""
        median = jnp.where(self.seen > 0, self.percentile(50), 1)
        near = self.near(low=False)
        number = jnp.maximum(jnp.sum(near, axis=0), 1).astype(median.dtype)
        # In units of the median, since squares of the norms may be out of range.
        units = jnp.where(near, self.norms, 0) / median[None]
        mean = jnp.sum(units, axis=0) / number
        squares = jnp.square(jnp.where(near, units - mean[None], 0))
        variance = jnp.sum(squares, axis=0) / number
        return jnp.minimum(mean * median, unlimited(median)), jnp.sqrt(variance) * median
