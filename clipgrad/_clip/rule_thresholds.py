"""The thresholds of a rule: which is the main one, and what a step makes of them."""

import copy
import dataclasses
from typing import Any, NamedTuple

import jax

from clipgrad._clip.known_rules import RULES
from clipgrad._clip.thresholds import is_adaptive, is_real, is_schedule

# In the metadata of a field: it is the main threshold of its rule, which the state of a gradient
# clip shows, and which a history may set.
MAIN = "main"


class PerLeaf(NamedTuple):
    """A threshold for each leaf that is clipped, instead of one for all of them."""

    values: jax.Array


def leaf_fields(rule: Any) -> list[str]:
    """The fields of a rule, or of its class, that are leaves: its thresholds."""
    return [f.name for f in dataclasses.fields(rule) if not f.metadata.get("static")]


def main_fields(rule: Any) -> list[str]:
    """The fields of a rule, or of its class, that are marked as its main threshold: one."""
    return [f.name for f in dataclasses.fields(rule) if f.metadata.get(MAIN)]


def schedules_of(rule: Any) -> dict[str, Any]:
    """The thresholds of a rule that are functions of the step, by field."""
    fields = leaf_fields(rule) if isinstance(rule, tuple(RULES)) else ()
    return {name: value for name in fields if is_schedule(value := getattr(rule, name))}


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
    """The main threshold of a rule; ``None`` for a function."""
    return getattr(rule, _main_field(rule)) if isinstance(rule, tuple(RULES)) else None


def adaptive_threshold(rule: Any) -> Any:
    """The main threshold of a rule if it is an adaptive one, or ``None``."""
    threshold = main_threshold(rule)
    return threshold if is_adaptive(threshold) else None


def with_threshold(rule: Any, threshold: Any) -> Any:
    """``rule`` with another main threshold."""
    return _with(rule, {_main_field(rule): threshold})


def _main_field(rule: Any) -> str:
    (name,) = main_fields(rule)
    return name


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
            f"{_main_field(rule)}: got {adaptive!r}, which only a gradient clip can use since "
            "it keeps the history; expected a number or an array, or clipgrad.gradient_clip(rule)"
        )


def thresholds_by_leaf(rule: Any, count: int) -> list[Any]:
    """The main threshold of a rule for each of ``count`` leaves."""
    threshold = main_threshold(rule)
    if not isinstance(threshold, PerLeaf):
        return [threshold] * count
    if threshold.values.shape != (count,):
        raise ValueError(
            f"grads: got {count} leaves to clip, expected {threshold.values.shape[0]}, one for "
            "each threshold; pass the parameters to init: init(params)"
        )
    return list(threshold.values)
