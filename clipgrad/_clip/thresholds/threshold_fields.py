"""The fields of the adaptive thresholds of this library, each with its check."""

import dataclasses
import functools
import math
import numbers
from typing import Any, get_args

import jax
import numpy as np

from clipgrad._clip.thresholds.window import Feed
from clipgrad._errors import warn


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
