"""The options of a check, listed once; what is refused, and what to write instead."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

MODES = ("auto", "full")
CHECKS = tuple(
    "primal cotangent finite value points devices determinism linearity jit vmap outputs".split()
)
# For each option which values make sense, and how an error says so.
MEANINGFUL: dict[str, tuple[Callable[[Any], bool], str]] = {
    "order": (lambda x: x in (1, 2), "1, or 2 to check the second derivative as well"),
    "mode": (lambda x: x in MODES, f"one of {', '.join(MODES)}"),
    "max_relative_error": (lambda x: x is None or x > 0, "a number above 0, or None"),
    "tolerance": (lambda x: x is None or 0 < x < 1, "a number between 0 and 1, or None"),
    "min_verified": (lambda x: x is None or 0 <= x <= 1, "a share from 0 to 1, or None for a half"),
    "time_budget": (lambda x: x is None or x > 0, "a number of seconds above 0, or None"),
    "points": (lambda x: _is_count(x, 1), "a whole number, 1 or more"),
    "seed": (lambda x: _is_count(x, 0), "a whole number, 0 or more"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `check_grads` that select no leaves; it documents them."""

    order: int
    mode: str
    max_relative_error: float | None
    tolerance: float | None
    min_verified: float | None
    time_budget: float | None
    points: int
    seed: int
    skip: Collection[str]

    def __post_init__(self):
        """Refuse values that make no sense."""
        skip = [self.skip] if isinstance(self.skip, str) else list(self.skip)
        object.__setattr__(self, "skip", frozenset(skip))
        for name, (is_meaningful, expected) in MEANINGFUL.items():
            if not is_meaningful(getattr(self, name)):
                _refuse(name, getattr(self, name), expected)
        if unknown := [name for name in skip if name not in CHECKS]:
            _refuse("skip", unknown, f"some of {', '.join(CHECKS)}")


def require_delta(delta: float | None) -> None:
    """Refuse a step that is not a positive number."""
    if delta is not None and not (np.isfinite(delta) and delta > 0):
        _refuse("delta", delta, "a positive number, such as 0.005, or None")


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int | np.integer) and int(value) >= least


def _refuse(name: str, got: Any, expected: str) -> None:
    raise ValueError(f"{name}: got {got!r}, expected {expected}")
