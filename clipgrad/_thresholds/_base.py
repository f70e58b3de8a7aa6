"""What an adaptive threshold is, and what may be said in making one."""

import dataclasses
import math
import numbers
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

FEEDS = ("raw", "clipped")


@runtime_checkable
class AdaptiveThreshold(Protocol):
    """A threshold that follows the norms of past gradients, in place of a number.

    Only a gradient clip can follow norms, since it has a state: `clip_by_global_norm` and the
    others take such an object where they take a schedule. One of your own is a class with these
    two methods, which have no side effects. The state is a pytree of arrays whose structure,
    shapes and dtypes never change.

    What is followed is the least threshold at which the rule would change nothing: the norm of
    `clip_by_global_norm`, one number; for the other rules an array with one entry for each leaf,
    each of which gets a threshold of its own (the largest norm of its slices for `clip_by_norm`,
    the rms for `clip_by_block_rms`, the largest element for `clip_by_value`, the largest ratio of
    its units for `adaptive_grad_clip`). It may be NaN, inf or 0, and is a constant to
    differentiation.

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
    """Whether ``value`` is an adaptive threshold; optax's transformations, tuples, are none."""
    return isinstance(value, AdaptiveThreshold) and not isinstance(value, (tuple, type))


def unlimited(norms: jax.Array) -> jax.Array:
    """The largest finite number: a threshold that clips nothing, but can be saved and plotted."""
    return jnp.full(norms.shape, jnp.finfo(norms.dtype).max, norms.dtype)


def counts(norms: jax.Array) -> jax.Array:
    """Which norms say something: those that are finite, and not the 0 of an unused leaf."""
    # Subnormal numbers act as 0 on most devices.
    return jnp.isfinite(norms) & (norms >= jnp.finfo(norms.dtype).tiny)


def fed(feed: str, norms: jax.Array, thresholds: jax.Array) -> jax.Array:
    """What enters a history; 0, which never does, for norms that say nothing."""
    clipped = jnp.minimum(norms, thresholds) if feed == "clipped" else norms
    return jnp.where(counts(norms), clipped, 0)


def check_feed(feed: Any) -> None:
    """Refuses what is not the name of a norm.

    Raises:
      ValueError: lists the names.
    """
    if feed not in FEEDS:
        raise ValueError(f"feed: got {feed!r}, expected one of {', '.join(FEEDS)}")


def check_steps(name: str, value: Any, least: int = 1) -> None:
    """Refuses what is no number of steps.

    Raises:
      ValueError: if ``value`` is no integer or too small.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(
            f"{name}: got {value!r}, expected an integer of at least {least}{_if_injected(value)}"
        )


def check_between(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Refuses what is no finite number in [low, high].

    Raises:
      ValueError: if ``value`` is out of range.
      TypeError: if it is no number.
    """
    expected = f"a number in [{low:g}, {high:g}]" if high < math.inf else f"a number >= {low:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(
            f"{name}: got {value!r} of type {type(value).__name__}, expected {expected}"
            f"{_if_injected(value)}"
        )
    if not (low <= value <= high and math.isfinite(value)):
        raise ValueError(f"{name}: got {value!r}, expected {expected}")


def hold_python_numbers(threshold: Any) -> None:
    """Makes Python's numbers of NumPy's, so that a product has the dtype of the norms."""
    for field in dataclasses.fields(threshold):
        value = getattr(threshold, field.name)
        if isinstance(value, np.generic):
            object.__setattr__(threshold, field.name, value.item())


def _if_injected(value: Any) -> str:
    injected = isinstance(value, jax.Array)
    return "; for optax.inject_hyperparams name it in static_args" if injected else ""
