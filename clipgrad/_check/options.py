"""The options of a check, listed once; what is refused, and what to write instead."""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np

MODES = ("auto", "fast", "full")
CHECKS = (
    "primal", "cotangent", "finite", "value", "points", "devices", "determinism", "linearity",
    "jit", "vmap", "forward", "outputs", "alone",
)  # fmt: skip


def _option(default: Any, **words: Any) -> Any:
    """A field whose metadata describe the command-line option of the same name."""
    return dataclasses.field(default=default, metadata=words)


@dataclasses.dataclass(frozen=True)
class Options:
    """How to check: the arguments of `check_grads` that select no leaves; it documents them."""

    order: int = _option(1, metavar="{1,2}", type=int, help="2 also checks the second derivative")
    mode: str = _option(
        "auto",
        metavar="{auto,fast,full}",
        help="auto: every element, with help from plain AD in float64; fast: random directions; "
        "full: every element with finite differences",
    )
    delta: float | None = _option(
        None, metavar="STEP", type=float, help="an absolute step, such as Paddle's 0.005"
    )
    max_relative_error: float | None = _option(
        None, metavar="ERROR", type=float, help="Paddle's tolerance, such as 0.005"
    )
    tolerance: float | None = _option(
        None, metavar="ERROR", type=float, help="the relative error that the backward may have"
    )
    min_verified: float | None = _option(
        None, metavar="SHARE", type=float, help="the least share of elements to verify, such as 0.9"
    )
    time_budget: float | None = _option(
        None, metavar="SECONDS", type=float, help="after which what is left is not verified"
    )
    points: int = _option(2, metavar="N", type=int, help="number of points to check")
    seed: int = _option(0, metavar="N", type=int, help="seed of everything random")
    skip: Collection[str] = _option(
        frozenset(),
        metavar="CHECKS",
        action="extend",
        type=lambda text: text.split(","),
        help=f"checks to switch off, such as vmap,jit; some of {', '.join(CHECKS)}",
    )

    def __post_init__(self):
        """Refuse values that make no sense."""
        skip = [self.skip] if isinstance(self.skip, str) else list(self.skip)
        object.__setattr__(self, "skip", frozenset(skip))
        unknown = [name for name in skip if name not in CHECKS]
        if self.order not in (1, 2):
            _refuse("order", self.order, "1, or 2 to check the second derivative as well")
        if self.mode not in MODES:
            _refuse("mode", self.mode, f"one of {', '.join(MODES)}")
        if self.max_relative_error is not None and not self.max_relative_error > 0:
            _refuse("max_relative_error", self.max_relative_error, "a number above 0, or None")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            _refuse("tolerance", self.tolerance, "a number between 0 and 1, such as 1e-2, or None")
        if self.min_verified is not None and not 0 <= self.min_verified <= 1:
            _refuse("min_verified", self.min_verified, "a share from 0 to 1, or None for a half")
        if self.time_budget is not None and not self.time_budget > 0:
            _refuse("time_budget", self.time_budget, "a number of seconds above 0, or None")
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


P = ParamSpec("P")
R = TypeVar("R")
_STEP_HABIT = "the step follows the scale of each element; for an absolute step write delta={}"
_TOLERANCE = "the tolerance follows the dtype; for another write tolerance={}"
_BOTH = "leave it out: check_grads checks forward and reverse mode"
# Arguments of jax.test_util, chex, torch and Paddle, and the argument here that stands for each;
# a brace is where the value goes.
HABITS = {
    "modes": ("mode", _BOTH),
    "check_forward_ad": ("mode", _BOTH),
    "eps": ("delta", _STEP_HABIT),
    "check_eps": ("delta", _STEP_HABIT),
    "numeric_grad_delta": ("delta", _STEP_HABIT),
    "atol": ("tolerance", _TOLERANCE),
    "rtol": ("tolerance", _TOLERANCE),
    "fast_mode": ("mode", 'write mode="fast" for random directions only'),
    "nondet_tol": (
        "skip",
        'results must be bit-identical; to allow others write skip="determinism"',
    ),
    "check_batched_grad": ("skip", 'it is always checked; to switch it off write skip="vmap"'),
    "raise_exception": ("raise_on_failure", "write raise_on_failure={}"),
    "inputs_to_check": ("wrt", "write wrt={}"),
    "input_to_check": ("wrt", "write wrt={}"),
    "output_name": ("output", "write output={}"),
    "no_grad_set": ("no_grad", "write no_grad=..., a name or a list of names"),
    "only_cpu": ("devices", 'write devices="cpu"'),
}
POSITIONAL = {int: "order={}", float: "delta={}"}


def with_hints(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose errors about its arguments say what to write instead."""
    parameters = inspect.signature(function).parameters
    by_name = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    most = len(parameters) - len(by_name)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        wrong = next((name for name in kwargs if name not in parameters), None)
        if wrong is not None:
            hint = _option_hint(wrong, kwargs[wrong], parameters)
            raise TypeError(
                f"{function.__name__}() got an unexpected keyword argument {wrong!r}{hint}"
            )
        if len(args) > most:
            raise TypeError(
                f"{function.__name__}() takes {most} positional arguments but {len(args)} were "
                f"given; write the others by name, of {', '.join(f'{name}=' for name in by_name)}"
            )
        return function(*args, **kwargs)

    return call


def require_mapping(kwargs: Any) -> None:
    """Refuse an order, a step or the like in the place of the keyword arguments."""
    if kwargs is not None and not isinstance(kwargs, Mapping):
        instead = POSITIONAL.get(type(kwargs))
        hint = f"; write {instead.format(repr(kwargs))}" if instead else ""
        raise TypeError(
            f"kwargs: got {kwargs!r}, expected a mapping of fun's keyword arguments, or None{hint}"
        )


def _option_hint(wrong: str, value: Any, parameters: Mapping[str, Any]) -> str:
    needed, text = HABITS.get(wrong, ("", ""))
    if needed in parameters:
        shown = repr(value) if isinstance(value, int | float | str) else "..."
        return f"; {text.format(shown)}"
    nearest = difflib.get_close_matches(wrong, parameters, 1)
    return f". Did you mean {nearest[0]!r}?" if nearest else ""
