"""Thresholds: checked where they are written, numbers or schedules, never negative in use."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def check_threshold(name: str, value: Any, negative: bool = False) -> None:
    """Refuses what cannot be a threshold; a tracer or a schedule is believed.

    Raises:
      TypeError: if ``value`` is neither a number nor an array nor a function of the step.
      ValueError: if it is NaN, or negative where that is not allowed.
    """
    if isinstance(value, Tracer) or _is_schedule(value):
        return
    expected = "a number, an array or a schedule (a function of the step)"
    if isinstance(value, (bool, str, type)) or not isinstance(
        value, (int, float, np.ndarray, np.generic, jax.Array)
    ):
        raise TypeError(
            f"{name}: got {value!r} of type {type(value).__name__}, expected {expected}"
        )
    numbers = np.asarray(value, np.float64)
    if np.isnan(numbers).any():
        raise ValueError(f"{name}: got {value!r}, expected a threshold that is not NaN")
    if not negative and (numbers < 0).any():
        raise ValueError(f"{name}: got {value!r}, expected a threshold that is not negative")


def broadcasts_into(shape: tuple[Any, ...], target: tuple[Any, ...]) -> bool:
    """Whether an array of a shape broadcasts to another without enlarging it."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(n in (1, size) for n, size in pairs)


def is_own(rule: Any) -> bool:
    """Whether a rule is one of this library's dataclasses, whose fields are thresholds."""
    return getattr(type(rule), "_fields_are_thresholds", False)


def schedules_of(rule: Any) -> dict[str, Any]:
    """The thresholds of a rule that are functions of the step, by field."""
    if not is_own(rule):
        return {}
    fields = {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule)}
    static = {f.name for f in dataclasses.fields(rule) if f.metadata.get("static")}
    return {n: v for n, v in fields.items() if n not in static and _is_schedule(v)}


def resolve_schedules(rule: Any, count: jax.Array) -> Any:
    """``rule`` with its schedules evaluated at the step ``count``."""
    values = {name: schedule(count) for name, schedule in schedules_of(rule).items()}
    # Not dataclasses.replace: a schedule may fall below 0, which then acts as 0.
    resolved = object.__new__(type(rule)) if values else rule
    for field in dataclasses.fields(rule) if values else ():
        value = values.get(field.name, getattr(rule, field.name))
        object.__setattr__(resolved, field.name, value)
    return resolved


def main_threshold(rule: Any) -> Any:
    """The first field of a rule, which is its threshold; ``None`` for a function."""
    if not is_own(rule):
        return None
    fields = [f for f in dataclasses.fields(rule) if not f.metadata.get("static")]
    return getattr(rule, fields[0].name) if fields else None


def require_numbers(rule: Any) -> None:
    """Refuses a rule with schedules, where there is no step to evaluate them at.

    Raises:
      TypeError: names the threshold.
    """
    for name in schedules_of(rule):
        raise TypeError(
            f"{name}: got a schedule, which only a gradient clip can evaluate since it counts the "
            f"steps; expected a number or an array, {type(rule).__name__}({name}=schedule(step))"
        )


def nonnegative(value: Any, dtype: Any) -> jax.Array:
    """A threshold as an array; a negative one acts as 0."""
    if isinstance(value, jax.Array):
        return jnp.maximum(value.astype(dtype), 0)
    return as_array(np.maximum(np.asarray(value, np.float64), 0), dtype)


def as_array(value: Any, dtype: Any) -> jax.Array:
    """A threshold in the given dtype, without a detour through int32."""
    if isinstance(value, jax.Array):
        return value.astype(dtype)
    with np.errstate(over="ignore"):
        return jnp.asarray(np.asarray(value, np.float64).astype(dtype))


def _is_schedule(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)
