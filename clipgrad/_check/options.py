"""The options of a check, listed once; what is refused, and what to write instead."""

import dataclasses
import numbers
import time
from collections.abc import Callable, Collection
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

Mode = Literal["auto", "full"]
# The names of `behavior.CHECKS`, for type checkers; a test holds them together.
Check = Literal[
    "primal", "cotangent", "finite", "value", "points", "devices", "determinism", "linearity",
    "jit", "vmap", "outputs",
]  # fmt: skip
MODES = get_args(Mode)
# For each option which values make sense, and how an error says so.
MEANINGFUL: dict[str, tuple[Callable[[Any], bool], str]] = {
    "order": (
        lambda x: _is_real_number(x) and x in (1, 2),
        "1, or 2 to check the second derivative as well",
    ),
    "mode": (lambda x: isinstance(x, str) and x in MODES, f"one of {', '.join(MODES)}"),
    "max_relative_error": (lambda x: _is_none_or(x, 0, np.inf), "a number above 0, or None"),
    "tolerance": (lambda x: _is_none_or(x, 0, 1) and x != 1, "a number between 0 and 1, or None"),
    "min_verified": (
        lambda x: _is_none_or(x, 0, 1, with_least=True),
        "a share from 0 to 1, or None for a half",
    ),
    "time_budget": (lambda x: _is_none_or(x, 0, np.inf), "a number of seconds above 0, or None"),
    "points": (lambda x: _is_count(x, 1), "a whole number, 1 or more"),
    "seed": (lambda x: _is_count(x, 0), "a whole number, 0 or more"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `check_grads` that select no leaves; it documents them."""

    order: int
    mode: Mode
    max_relative_error: float | None
    tolerance: float | None
    min_verified: float | None
    time_budget: float | None
    points: int
    seed: int
    skip: Collection[str]
    started: float = dataclasses.field(default_factory=time.monotonic)

    def is_late(self) -> bool:
        """Whether the time budget is spent."""
        return self.time_budget is not None and self.seconds > self.time_budget

    @property
    def seconds(self) -> float:
        """The time since the check began."""
        return time.monotonic() - self.started

    def __post_init__(self):
        """Refuse values that make no sense."""
        for name, (is_meaningful, expected) in MEANINGFUL.items():
            if not is_meaningful(getattr(self, name)):
                refuse(name, getattr(self, name), expected)


def require_delta(delta: float | None) -> None:
    """Refuse a step that is not a positive number."""
    if delta is not None and not (_is_real_number(delta) and 0 < delta < np.inf):
        refuse("delta", delta, "a positive number, such as 0.005, or None")


def _is_count(value: Any, least: int) -> bool:
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_whole and int(value) >= least


def _is_real_number(value: Any) -> bool:
    """Whether a value is a real number, of Python, NumPy or a concrete array of JAX."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    return is_number or (dtype is not None and shape == () and jnp.issubdtype(dtype, jnp.floating))


def _is_none_or(value: Any, least: float, most: float, with_least: bool = False) -> bool:
    if value is None:
        return True
    return (
        _is_real_number(value)
        and (least < value or (with_least and value == least))
        and value <= most
    )


def refuse(name: str, got: Any, expected: str) -> None:
    """Raise the error for an argument of no sense."""
    raise ValueError(f"{name}: got {got!r}, expected {expected}")
