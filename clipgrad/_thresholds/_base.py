"""The protocol of adaptive thresholds, and what the thresholds of this library share."""

import dataclasses
import functools
import math
import numbers
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

FEEDS = ("raw", "clipped")


@runtime_checkable
class AdaptiveThreshold(Protocol):
    """A threshold computed from the norms of past gradients, in place of a number.

    Only a gradient clip has the state for it: `clip_by_global_norm` and the others accept such an
    object wherever they accept a schedule. Your own is a class with these two methods, which have
    no side effects. The state is a pytree of arrays whose structure, shapes and dtypes never
    change.

    The norms of a step are the least thresholds at which the rule would change nothing. For
    `clip_by_global_norm` this is the norm, one number; for the other rules an array with one
    entry for each leaf, which then gets a threshold of its own: the largest norm of its slices
    for `clip_by_norm`, the rms for `clip_by_block_rms`, the largest element for `clip_by_value`,
    the largest ratio of its units for `adaptive_grad_clip`. Norms may be NaN, inf or 0. The
    threshold is a constant to differentiation.

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
      init: from zeros in the shape of the norms to the first state.
      update: from a state and the norms of this step to the thresholds of this step, like the
        norms, and the next state.
    """

    def init(self, norms: jax.Array) -> Any:
        """The state before the first update."""
        ...

    def update(self, state: Any, norms: jax.Array) -> tuple[jax.Array, Any]:
        """The thresholds of this step and the next state."""
        ...


def is_adaptive(value: Any) -> bool:
    """Whether ``value`` is an adaptive threshold, not a tuple such as optax's transformations."""
    return isinstance(value, AdaptiveThreshold) and not isinstance(value, (tuple, type))


def unlimited(norms: jax.Array) -> jax.Array:
    """The largest finite number: a threshold that clips nothing, and is not inf."""
    return jnp.full(norms.shape, jnp.finfo(norms.dtype).max, norms.dtype)


def counts(norms: jax.Array) -> jax.Array:
    """Which norms enter a history: those that are finite, and not the 0 of an unused leaf."""
    # Subnormal numbers act as 0 on most devices.
    return jnp.isfinite(norms) & (norms >= jnp.finfo(norms.dtype).tiny)


def fed(feed: str, norms: jax.Array, thresholds: jax.Array) -> jax.Array:
    """The norms for a history, raw or clipped; 0 in place of those that never enter one."""
    clipped = jnp.minimum(norms, thresholds) if feed == "clipped" else norms
    return jnp.where(counts(norms), clipped, 0)


def check_steps(name: str, value: Any, least: int = 1) -> None:
    """Checks a number of steps.

    Raises:
      ValueError: if ``value`` is not an integer, or is too small.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(
            f"{name}: got {value!r}, expected an integer of at least {least}{_if_injected(value)}"
        )


def check_between(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Checks that a value is a finite number in [low, high].

    Raises:
      ValueError: if ``value`` is out of range.
      TypeError: if it is not a number.
    """
    expected = f"a number in [{low:g}, {high:g}]" if high < math.inf else f"a number >= {low:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(
            f"{name}: got {value!r} of type {type(value).__name__}, expected {expected}"
            f"{_if_injected(value)}"
        )
    if not (low <= value <= high and math.isfinite(value)):
        raise ValueError(f"{name}: got {value!r}, expected {expected}")


def number(default: float | None, low: float, high: float = math.inf) -> Any:
    """A field for a number in [low, high], or ``None`` if that is its default."""
    check = functools.partial(check_between, low=low, high=high)
    return dataclasses.field(default=default, metadata={"check": check})


def steps(default: int | None) -> Any:
    """A field for a positive number of steps, or ``None`` if that is its default."""
    return dataclasses.field(default=default, metadata={"check": check_steps})


def feeds(default: str) -> Any:
    """A field for the name of the norms that enter a history."""
    return dataclasses.field(default=default, metadata={"check": _check_feed})


def check_fields(threshold: Any) -> None:
    """Checks each field, and makes NumPy's numbers Python's, which don't change a dtype."""
    for field in dataclasses.fields(threshold):
        value, check = getattr(threshold, field.name), field.metadata.get("check")
        if check is not None and not (value is None and field.default is None):
            check(field.name, value)
        if isinstance(value, np.generic):
            object.__setattr__(threshold, field.name, value.item())


def _check_feed(name: str, value: Any) -> None:
    if value not in FEEDS:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(FEEDS)}")


def _if_injected(value: Any) -> str:
    injected = isinstance(value, jax.Array)
    return "; for optax.inject_hyperparams name it in static_args" if injected else ""
