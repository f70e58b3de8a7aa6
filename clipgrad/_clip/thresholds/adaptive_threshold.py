"""The protocol of adaptive thresholds, and what a threshold may be."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
from jax.typing import ArrayLike


@runtime_checkable
class AdaptiveThreshold(Protocol):
    """A threshold that is computed from past gradient norms, instead of a number.

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
      init: takes zeros in the shape of the norms; returns the state before the first update.
      update: takes a state and this step's norms; returns this step's thresholds, in the shape of
        the norms, and the next state.

    You can pass such an object to `clip_by_global_norm` and all other gradient clips wherever you
    can pass a schedule; the clip keeps the state. To write your own threshold, write a class with
    these two methods, without side effects. The state is a pytree of arrays; structure, shapes and
    dtypes never change.

    The norms of a step are the smallest thresholds at which the rule would change nothing. For
    `clip_by_global_norm` that is one number, the norm. For all other rules you get an array with
    one entry for each leaf, so each leaf has its own history and threshold: the largest slice norm
    for `clip_by_norm`, the rms for `clip_by_block_rms`, the largest element for `clip_by_value`,
    the largest unit ratio for `adaptive_grad_clip`. Norms may be NaN, inf or 0. No derivative goes
    through a threshold.
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
