"""Calls of public functions: keywords as other libraries call them, and arguments one by one."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from clipgrad._arrays.trees import described, is_array

Explained = TypeVar("Explained", bound=Callable[..., Any])

# A keyword of optax, torch, jax.test_util, Paddle, a trainer or another function here, and the
# keywords that stand for it: the first that the function takes is meant. Those that are spelled
# much alike, as ``no_grad_set``, are found without it.
ALIASES = {
    "accumulation_steps": ["accumulate"],
    "atol": ["tolerance", "rtol"],
    "check_batched_grad": ["skip"],
    "check_eps": ["delta"],
    "clip_norm": ["max_norm"],
    "clip_value": ["max"],
    "clipping_threshold": ["max_norm", "threshold", "max", "clipping"],
    "eps": ["delta"],
    "error_clip": ["rules"],
    "error_clip_by_name": ["error_clip", "rules"],
    "every_k_schedule": ["accumulate"],
    "fast_mode": ["mode"],
    "gradient_accumulation_steps": ["accumulate"],
    "grad_accum": ["accumulate"],
    "inputs_to_check": ["wrt"],
    "input_to_check": ["wrt"],
    "mask": ["where"],
    "max_delta": ["max"],
    "norm_type": ["ord"],
    "numeric_grad_delta": ["delta"],
    "raise_exception": ["raise_on_failure"],
    "reduction": ["reduce"],
    "rtol": ["tolerance"],
    "rules": ["error_clip"],
    "tol": ["tolerance", "rtol"],
    "tolerance": ["rtol"],
    "threshold": ["max_norm", "max", "clipping"],
}


def explain_call(
    instead: str = "", name: str = "", /, **keywords: str
) -> Callable[[Explained], Explained]:
    """A decorator: a call that does not fit the signature is an error that says what to write.

    Args:
      instead: what to write instead of more positional arguments than there are parameters. A
        function of ``(fun, args)`` needs none.
      name: what users call a method, which they call without ``self``.
      **keywords: what to write instead of a keyword that no other keyword stands for.
    """

    def decorate(function: Explained) -> Explained:
        signature = inspect.signature(function)
        if name:  # a method
            signature = signature.replace(parameters=[*signature.parameters.values()][1:])

        @functools.wraps(function)
        def explained(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            try:
                return function(*args, **kwargs)
            except TypeError:
                given = args[1:] if name else args
                if wrong := _misfit(function, signature, given, kwargs, instead, keywords):
                    raise TypeError(f"{name or function.__name__}: {wrong}") from None
                raise

        return explained  # type: ignore[return-value]

    return decorate


def _misfit(
    function: Any,
    signature: inspect.Signature,
    args: Any,
    kwargs: Any,
    instead: str,
    keywords: dict[str, str],
) -> str:
    """The error of a call that does not fit; empty for one that does."""
    known = signature.parameters
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in known.values()):
        return ""
    if wrong := next((name for name in kwargs if name not in known), None):
        own = next((name for name in ALIASES.get(wrong, []) if name in known), None)
        if not own and wrong in keywords:
            return f"got {wrong}={_as_written(kwargs[wrong])}; {keywords[wrong]}"
        near = [own] if own else difflib.get_close_matches(wrong, known, 1)
        expected = near[0] if near else f"some of {', '.join(known)}"
        value = f"={_as_written(kwargs[wrong])}"
        return f"got {wrong}{value}, expected {expected}{value if near else ''}"
    positional = [name for name, p in known.items() if p.kind is not p.KEYWORD_ONLY]
    if len(args) <= len(positional):
        return ""
    got = f"got {len(args)} positional arguments, expected"
    if not instead and "args" in positional:
        first = positional.index("args")
        given = ", ".join([*positional[:first], _tuple_of(args[0], args[first:])])
        return f"{got} those of {positional[0]} in one tuple; write {function.__name__}({given})"
    by_name = [f"{name}=" for name in known if name not in positional]
    hint = instead or (f"write the others by name, of {', '.join(by_name)}" if by_name else "")
    most = f"at most {len(positional)}, ({', '.join(positional)})"
    return f"{got} {most}{'; ' * bool(hint)}{hint}"


def _as_written(value: Any) -> str:
    """A number or a text as it is written; arrays and trees are never printed."""
    return repr(value) if isinstance(value, bool | int | float | str | None) else "..."


def _tuple_of(fun: Any, values: Sequence[Any]) -> str:
    """A tuple of arguments as somebody would write it, by the names of the parameters of `fun`."""
    names = parameter_names(fun, len(values))
    names += [f"x{i}" for i in range(len(names), len(values))]
    return f"({', '.join(names)}{',' * (len(names) == 1)})"


def check_arguments(fun: Any, args: Any, kwargs: Any = None) -> None:
    """Raises `TypeError` for what is no function, no tuple of arguments, or no mapping of others.

    This is the one reader of calls ``f(fun, args, kwargs)``. The error says what to write where the
    arguments are there one by one, in a list, or alone.
    """
    if not callable(fun):
        hint = "; write the function itself, without calling it" if is_array(fun) else ""
        got = repr(fun) if isinstance(fun, bool | int | float | str) else described(fun)
        raise TypeError(f"fun: got {got}, expected a function{hint}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        if isinstance(args, tuple):
            is_option = isinstance(kwargs, bool | int | float | str)
            got = repr(kwargs) if is_option else described(kwargs)
            hint = "; write an option by its name" if is_option else ""
            raise TypeError(
                f"kwargs: got {got}, expected a mapping of fun's keyword arguments, such as a "
                f"dict{hint}"
            )
        raise TypeError(
            "args: got the arguments of fun one by one, expected a tuple of them; write "
            f"{_tuple_of(fun, (args, kwargs))}"
        )
    if isinstance(args, str):
        raise TypeError(f"args: got {args!r}, expected the tuple of arguments, before a path")
    if not isinstance(args, tuple):
        values, one = (args, "") if isinstance(args, list) else ([args], "for one argument ")
        raise TypeError(
            f"args: got {described(args)}, expected a tuple; {one}write {_tuple_of(fun, values)}"
        )


def parameter_names(fun: Callable, count: int) -> list[str]:
    """The names of the first `count` positional parameters, as far as they have names."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds][:count]


def argument_name(which: int | str) -> str:
    """An argument as messages name it: `args[0]`, `kwargs['x']`."""
    return f"args[{which}]" if isinstance(which, int) else f"kwargs[{which!r}]"
