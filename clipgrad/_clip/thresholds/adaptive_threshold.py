"""The protocol of adaptive thresholds, and what a threshold may be."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
from jax.typing import ArrayLike


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
