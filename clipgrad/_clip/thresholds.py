"""The protocol of adaptive thresholds, and what the thresholds of this library share."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from clipgrad._compat import exportable
from clipgrad._errors import warn

# The norms that enter a history.
Feed = Literal["raw", "clipped"]
# A norm further than this factor from the median is not a sample of the same process.
FAR_ABOVE_MEDIAN = 10.0


@runtime_checkable
class AdaptiveThreshold(Protocol):
    """A threshold computed from the norms of past gradients, instead of a number.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> class LargestSoFar:
      ...     def init(self, norms):
      ...         return norms
      ...     def update(self, state, norms):
      ...         return state, jnp.fmax(state, norms)
      >>> tx = cg.clip_by_global_norm(LargestSoFar())
      >>> state = tx.init(jnp.zeros(2))
      >>> for grads in (jnp.array([3.0, 4.0]), jnp.array([6.0, 8.0])):
      ...     updates, state = tx.update(grads, state)
      >>> updates
      Array([3., 4.], dtype=float32)

    Attributes:
      init: takes zeros in the shape of the norms, and returns the state before the first update.
      update: takes a state and the norms of this step, and returns the thresholds of this step, in
        the shape of the norms, and the next state.

    A gradient clip has the state for it: `clip_by_global_norm` and the others accept such an object
    wherever they accept a schedule. A custom threshold is a class with these two methods, without
    side effects. The state is a pytree of arrays whose structure, shapes and dtypes never change.

    The norms of a step are the smallest thresholds at which the rule would change nothing. For
    `clip_by_global_norm` this is the norm, one number. For the other rules it is an array with an
    entry for each leaf, which has its own history and threshold: the largest norm of its
    slices for `clip_by_norm`, the rms for `clip_by_block_rms`, the largest element for
    `clip_by_value`, the largest ratio of its units for `adaptive_grad_clip`. Norms may be NaN, inf
    or 0. The threshold is a constant to differentiation.
    """

    def init(self, norms: jax.Array) -> Any: ...  # noqa: D102
    def update(self, state: Any, norms: jax.Array) -> tuple[jax.Array, Any]: ...  # noqa: D102


# A number of a rule, and its threshold. In the backward pass, where no steps are counted, schedules
# (functions of the step, as in optax) and adaptive thresholds are refused.
Number = ArrayLike | Callable[[Any], ArrayLike]
Threshold = Number | AdaptiveThreshold


def is_adaptive(value: Any) -> bool:
    """Whether ``value`` is an adaptive threshold, no rule and none of optax's transformations."""
    is_other = isinstance(value, (tuple, type)) or callable(value)
    return isinstance(value, AdaptiveThreshold) and not is_other


def unlimited(norms: jax.Array) -> jax.Array:
    """The largest finite number: a threshold that clips nothing, and is not inf."""
    return jnp.full(norms.shape, jnp.finfo(norms.dtype).max, norms.dtype)


def counts(norms: jax.Array) -> jax.Array:
    """Whether a norm enters a history: it is finite, and not the 0 of an unused leaf."""
    # Subnormal numbers act as 0 on most devices.
    return jnp.isfinite(norms) & (norms >= jnp.finfo(norms.dtype).tiny)


def fed(feed: Feed, norms: jax.Array, thresholds: jax.Array) -> jax.Array:
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


def check_steps(name: str, value: Any, least: int = 1) -> None:
    """Raises `ValueError` for what is not an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(
            f"{name}: got {value!r}, expected an integer of at least {least}{_if_injected(value)}"
        )


def check_between(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Raises `TypeError` for what is not a number, `ValueError` for one not in [low, high]."""
    expected = f"a number in [{low:g}, {high:g}]" if high < math.inf else f"a number >= {low:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(
            f"{name}: got {value!r} of type {type(value).__name__}, expected {expected}"
            f"{_if_injected(value)}"
        )
    if not (low <= value <= high and math.isfinite(value)):
        raise ValueError(f"{name}: got {value!r}, expected {expected}")


def number(default: Any, low: float, high: float = math.inf) -> Any:
    """A field for a number in [low, high], or ``None`` if that is its default."""
    check = functools.partial(check_between, low=low, high=high)
    return dataclasses.field(default=default, metadata={"check": check})


def steps(default: int | None) -> Any:
    """A field for a positive number of steps, or ``None`` if that is its default."""
    return dataclasses.field(default=default, metadata={"check": check_steps})


def feeds(default: Feed) -> Any:
    """A field for the name of the norms that enter a history."""
    return dataclasses.field(default=default, metadata={"check": _check_feed})


def check(threshold: Any) -> None:
    """Checks each field, and makes NumPy's numbers Python's, which don't change a dtype."""
    for field in dataclasses.fields(threshold):
        value = getattr(threshold, field.name)
        if value is not None or field.default is not None:
            field.metadata["check"](field.name, value)
        if isinstance(value, np.generic):
            object.__setattr__(threshold, field.name, value.item())


def _check_feed(name: str, value: Any) -> None:
    if value not in get_args(Feed):
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(get_args(Feed))}")


def _if_injected(value: Any) -> str:
    injected = isinstance(value, jax.Array)
    return "; for optax.inject_hyperparams name it in static_args" if injected else ""


def warn_of_share(percentile: float) -> None:
    """Warns of a percentile that looks like a share, such as 0.9."""
    if 0 < percentile < 1:
        warn(
            f"percentile: got {percentile!r}, which is the {percentile}th percentile, since "
            f"percentiles are from 0 to 100; for this share write {100 * percentile:g}"
        )
