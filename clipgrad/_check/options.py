"""The options of a check, listed once: defaults, choices, what is refused, help."""

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np

MODES = ("auto", "fast", "full")
CHECKS = (
    "primal", "cotangent", "finite", "value", "points", "devices", "determinism", "linearity",
    "jit", "vmap", "forward", "outputs",
)  # fmt: skip


def _option(default: Any, **words: Any) -> Any:
    """A field whose metadata are the words of the command line's option of its name."""
    return dataclasses.field(default=default, metadata=words)


@dataclasses.dataclass(frozen=True)
class Options:
    """How to check: the arguments of `check_grads` that select no leaves; it documents them."""

    order: int = _option(1, metavar="{1,2}", type=int, help="2 to check the VJP's own VJP too")
    mode: str = _option(
        "auto",
        metavar="{auto,fast,full}",
        help="auto: every element, with the help of plain AD in float64; fast: random directions; "
        "full: every element by differences",
    )
    delta: float | None = _option(
        None, metavar="STEP", type=float, help="an absolute step, such as Paddle's 0.005"
    )
    max_relative_error: float | None = _option(
        None, metavar="ERROR", type=float, help="Paddle's tolerance, such as 0.005"
    )
    points: int = _option(2, metavar="N", type=int, help="how many points to check")
    seed: int = _option(0, metavar="N", type=int, help="of all that is random")
    skip: Collection[str] = _option(
        frozenset(),
        metavar="CHECKS",
        action="extend",
        type=lambda text: text.split(","),
        help=f"checks not to run, such as vmap,jit; of {', '.join(CHECKS)}",
    )

    def __post_init__(self):
        """Refuse values that make no sense."""
        skip = [self.skip] if isinstance(self.skip, str) else list(self.skip)
        object.__setattr__(self, "skip", frozenset(skip))
        unknown = [name for name in skip if name not in CHECKS]
        if self.order not in (1, 2):
            _refuse("order", self.order, "1, or 2 to check the VJP's own VJP too")
        if self.mode not in MODES:
            _refuse("mode", self.mode, f"one of {', '.join(MODES)}")
        if self.max_relative_error is not None and not self.max_relative_error > 0:
            _refuse("max_relative_error", self.max_relative_error, "a number above 0, or None")
        if not _is_count(self.points, 1):
            _refuse("points", self.points, "a whole number, 1 or more")
        if not _is_count(self.seed, 0):
            _refuse("seed", self.seed, "a whole number, 0 or more")
        if unknown:
            _refuse("skip", unknown, f"some of {', '.join(CHECKS)}")
        require_delta(self.delta)


def require_delta(delta: float | None) -> None:
    """Refuse a step that is not a positive number."""
    if delta is not None and not (np.isfinite(delta) and delta > 0):
        _refuse("delta", delta, "a positive number, such as 0.005, or None")


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int | np.integer) and int(value) >= least


def _refuse(name: str, got: Any, expected: str) -> None:
    raise ValueError(f"{name}: got {got!r}, expected {expected}")
