"""Limits: the thresholds of rules, checked where they are written, never negative in use."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from clipgrad._arrays import Norm, described, is_array
from clipgrad._clip.thresholds import is_adaptive
from clipgrad._sharding import broadcast_like

# The classes of this library's rules, in the order in which `pytree_rule` made them.
# A module that is reloaded keeps the list, which other modules hold.
RULES: list[type] = globals().get("RULES", [])


class PerLeaf(NamedTuple):
    """A threshold for each leaf that is clipped, instead of one for all of them."""

    values: jax.Array


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
    elif _is_schedule(value):
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


def _is_schedule(value: Any) -> bool:
    """Whether this is a function of the step, and no class and no rule, which has states."""
    return callable(value) and not isinstance(value, type) and not hasattr(value, "update")


def is_own(rule: Any) -> bool:
    """Whether a rule is of this library: all that it computes with is in its fields.

    A subclass is not: it may keep anything else. See also `is_data`.
    """
    return type(rule) in RULES


def is_norm_rule(rule: Any) -> bool:
    """Whether a rule, or a subclass of it, scales groups of elements by their norms."""
    return isinstance(rule, tuple(RULES)) and rule.acts_on != "element"


# The methods by which a norm rule clips.
_CLIPPING = ("__call__", "measure", "norms_and_limits", "l2_limits", "changes", "scale")


def scales_by_norms(rule: Any) -> bool:
    """Whether a norm rule scales as its norms and limits say: no subclass has a way of its own."""
    if not is_norm_rule(rule):
        return False
    known = next(cls for cls in type(rule).__mro__ if cls in RULES)
    return all(getattr(type(rule), name) is getattr(known, name) for name in _CLIPPING)


def is_data(rule: Any) -> bool:
    """Whether all that a rule computes with is data, so that what was traced may be kept.

    A function in a field, such as ``axis`` of `AdaptiveClip`, may depend on anything.
    """
    return is_own(rule) and not any(map(callable, vars(rule).values()))


def leaf_fields(rule: Any) -> list[str]:
    """The fields of a rule, or of its class, that are leaves: its main threshold is the first."""
    return [f.name for f in dataclasses.fields(rule) if not f.metadata.get("static")]


def schedules_of(rule: Any) -> dict[str, Any]:
    """The thresholds of a rule that are functions of the step, by field."""
    fields = leaf_fields(rule) if isinstance(rule, tuple(RULES)) else ()
    return {name: value for name in fields if _is_schedule(value := getattr(rule, name))}


def resolve_schedules(rule: Any, count: jax.Array) -> Any:
    """``rule`` with its schedules evaluated at the step ``count``."""
    values = {}
    for name, schedule in schedules_of(rule).items():
        values[name] = schedule(count)
        if not is_real(values[name]):
            raise TypeError(
                f"{name}: got {values[name]!r} from the schedule, expected a number or an array"
            )
    return _with(rule, values) if values else rule


def main_threshold(rule: Any) -> Any:
    """The first field of a rule, which is its threshold; ``None`` for a function."""
    return getattr(rule, leaf_fields(rule)[0]) if isinstance(rule, tuple(RULES)) else None


def adaptive_threshold(rule: Any) -> Any:
    """The threshold of a rule if it is an adaptive one, or ``None``."""
    threshold = main_threshold(rule)
    return threshold if is_adaptive(threshold) else None


def with_threshold(rule: Any, threshold: Any) -> Any:
    """``rule`` with another first threshold."""
    return _with(rule, {leaf_fields(rule)[0]: threshold})


def _with(rule: Any, values: dict[str, Any]) -> Any:
    # Not dataclasses.replace: what a rule is made of may be checked only once, since a schedule
    # may fall below 0, which then acts as 0; and a subclass may keep more than the fields.
    changed = copy.copy(rule)
    for name, value in values.items():
        object.__setattr__(changed, name, value)
    return changed


def require_numbers(rule: Any) -> None:
    """Raises `TypeError` for a schedule or an adaptive threshold, where there are no steps."""
    for name in schedules_of(rule):
        raise TypeError(
            f"{name}: got a schedule, which only a gradient clip can evaluate since it counts the "
            f"steps; expected a number or an array, {type(rule).__name__}({name}=schedule(step))"
        )
    if (adaptive := adaptive_threshold(rule)) is not None:
        raise TypeError(
            f"{leaf_fields(rule)[0]}: got {adaptive!r}, which only a gradient clip can use since "
            "it keeps the history; expected a number or an array, or clipgrad.gradient_clip(rule)"
        )


def thresholds_by_leaf(rule: Any, count: int) -> list[Any]:
    """The first threshold of a rule for each of ``count`` leaves."""
    threshold = main_threshold(rule)
    if not isinstance(threshold, PerLeaf):
        return [threshold] * count
    if threshold.values.shape != (count,):
        raise ValueError(
            f"grads: got {count} leaves to clip, expected {threshold.values.shape[0]}, one for "
            "each threshold; pass the parameters to init: init(params)"
        )
    return list(threshold.values)


def limits_by_leaf(rule: Any, norms: Sequence[Norm]) -> list[jax.Array]:
    """The limit of each norm of a leaf by the first threshold of a rule."""
    return limits_of(thresholds_by_leaf(rule, len(norms)), norms)


def limits_of(thresholds: Sequence[Any], norms: Sequence[Norm]) -> list[jax.Array]:
    """The limit of each norm, computed once for a threshold and all norms of one type."""
    known: dict[Any, jax.Array] = {}
    limits = []
    for threshold, norm in zip(thresholds, norms, strict=True):
        key = id(threshold), jax.typeof(norm.root)
        if key not in known:
            known[key] = limit_of(threshold, norm)
        limits.append(known[key])
    return limits


def limit_of(threshold: Any, norm: Norm) -> jax.Array:
    """A threshold as an array like the norms, in their dtype.

    Raises:
      ValueError: if it does not broadcast to the norms.
    """
    limit = nonnegative(threshold, norm.root.dtype)
    if not broadcasts_into(limit.shape, norm.root.shape):
        raise ValueError(
            f"threshold: got an array of shape {limit.shape}, expected one that broadcasts to the "
            f"norms, of shape {norm.root.shape}"
        )
    return broadcast_like(limit, norm.root)


def broadcasts_into(shape: tuple[Any, ...], target: tuple[Any, ...]) -> bool:
    """Whether an array of a shape broadcasts to another without enlarging it."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(n in (1, size) for n, size in pairs)


def nonnegative(value: Any, dtype: Any) -> jax.Array:
    """A threshold as an array; a negative one acts as 0."""
    if isinstance(value, jax.Array):
        return jnp.maximum(value.astype(dtype), 0)
    return threshold_array(np.maximum(np.asarray(value, np.float64), 0), dtype)


def threshold_array(value: Any, dtype: Any) -> jax.Array:
    """A threshold in the given dtype, without a detour through int32."""
    if isinstance(value, jax.Array):
        return value.astype(dtype)
    with np.errstate(over="ignore"):
        return jnp.asarray(np.asarray(value, np.float64).astype(dtype))
