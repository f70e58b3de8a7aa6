"""What people write who know other checkers, and what to write here instead."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_STEP = "the step follows the scale of each element, or write delta={} for an absolute one"
_TOLERANCE = "the tolerance follows the dtype, or write max_relative_error={} for Paddle's rule"
_BOTH = "forward and reverse mode are both checked: leave it out"
# Arguments of jax.test_util, chex, torch and Paddle, and the argument here that stands for each;
# a brace is where the value goes.
HABITS = {
    "modes": ("mode", _BOTH),
    "check_forward_ad": ("mode", _BOTH),
    "eps": ("delta", _STEP),
    "check_eps": ("delta", _STEP),
    "numeric_grad_delta": ("delta", _STEP),
    "atol": ("max_relative_error", _TOLERANCE),
    "rtol": ("max_relative_error", _TOLERANCE),
    "fast_mode": ("mode", 'write mode="fast" for random directions only'),
    "nondet_tol": ("skip", 'the same bits are expected twice, or write skip="determinism"'),
    "check_batched_grad": ("skip", 'it is checked, or write skip="vmap"'),
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
            hint = _hint(wrong, kwargs[wrong], parameters)
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


def _hint(wrong: str, value: Any, parameters: Mapping[str, Any]) -> str:
    needed, text = HABITS.get(wrong, ("", ""))
    if needed in parameters:
        shown = repr(value) if isinstance(value, int | float | str) else "..."
        return f"; {text.format(shown)}"
    nearest = difflib.get_close_matches(wrong, parameters, 1)
    return f". Did you mean {nearest[0]!r}?" if nearest else ""
