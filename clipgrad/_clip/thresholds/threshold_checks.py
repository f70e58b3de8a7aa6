"""What can be the threshold of a rule: a number, an array, a schedule, or an adaptive one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from clipgrad._arrays import described, is_array
from clipgrad._clip.thresholds.adaptive_threshold import is_adaptive


def check_threshold(
    name: str,
    value: Any,
    negative: bool = False,
    adaptive: bool = False,
    infinite: bool = True,
) -> None:
    """Refuses what can't be a threshold here; the values of tracers and schedules are not known."""
    expected = "a number, an array or a schedule (a function of the step)"
    if is_adaptive(value):
        if adaptive:
            return
        expected += "; only the first threshold of a clip by limits can be adaptive"
    elif is_schedule(value):
        return
    if not is_real(value):
        expected += _instead_of_threshold(value)
        raise TypeError(f"{name}: got {_shown_threshold(value)}, expected {expected}")
    if isinstance(value, Tracer):
        return
    numbers = np.asarray(value, np.float64)
    wrong = {
        "not NaN": np.isnan(numbers),
        "not negative": not negative and numbers < 0,
        "finite": not infinite and np.isinf(numbers),
    }
    for wanted, elements in wrong.items():
        if np.any(elements):
            raise ValueError(f"{name}: got {value!r}, expected a threshold that is {wanted}")


def _shown_threshold(value: Any) -> str:
    """A value in a message; arrays are never printed."""
    if any(map(is_array, jax.tree.leaves(value))):
        return described(value)
    return f"{value!r} of type {type(value).__name__}"


def _instead_of_threshold(value: Any) -> str:
    """A hint for gradients, or for the class of an adaptive threshold, instead of a threshold."""
    if isinstance(value, type):
        return f"; did you mean an object, {value.__name__}(...)?"
    if any(map(is_array, jax.tree.leaves(value))):
        return "; to clip gradients at once write clip_grads(grads, ClipByGlobalNorm(max_norm))"
    return ""


def is_real(value: Any) -> bool:
    """Whether this is a real number or an array of these."""
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.integer, jnp.floating))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_schedule(value: Any) -> bool:
    """Whether this is a function of the step, and no class and no rule, which has states."""
    return callable(value) and not isinstance(value, type) and not hasattr(value, "update")
