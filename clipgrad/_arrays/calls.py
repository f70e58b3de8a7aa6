"""Calls of public functions: keywords as other libraries call them, and arguments one by one."""

import difflib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

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


# A rule that has a field, for calls with the field instead of a rule.
RULES_BY_FIELD = {
    "max": "ClipByValue",
    "max_norm": "ClipByGlobalNorm",
    "threshold": "ClipByBlockRMS",
    "clipping": "AdaptiveClip",
}


def explain_call(
    instead: str = "", name: str = "", /, **keywords: str
) -> Callable[[Explained], Explained]:
    """A decorator: a call that does not fit the signature is an error that says what to write.

    It decorates functions, methods and classes, of which it explains the call that makes one.

    Args:
      instead: what to write instead of more positional arguments than there are parameters. A
        function of ``(fun, args)`` needs none.
      name: what users call it, if that is another name than the one that it is defined by.
      **keywords: what to write instead of a keyword that no other keyword stands for.
    """

    def decorate(target: Any) -> Any:
        function = target.__init__ if isinstance(target, type) else target
        is_method = "." in function.__qualname__.rpartition("<locals>.")[2]
        called = Signature(
            name or (target.__name__ if isinstance(target, type) else function.__name__),
            inspect.signature(function),
            is_method,
        )

        @functools.wraps(function)
        def explained(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            try:
                return function(*args, **kwargs)
            except TypeError:
                if wrong := called.misfit(args, kwargs, instead, keywords):
                    raise TypeError(f"{called.name}: {wrong}") from None
                raise

        if function is target:
            return explained
        target.__init__ = explained
        return target

    return decorate


class Signature:
    """The signature of a public function, and what is wrong with a call of it."""

    def __init__(self, name: str, signature: inspect.Signature, is_method: bool):
        self.name, self.signature, self.is_method = name, signature, is_method
        self.known = dict(list(signature.parameters.items())[is_method:])
        self.positional = [n for n, p in self.known.items() if p.kind is not p.KEYWORD_ONLY]

    def misfit(self, args: Any, kwargs: Any, instead: str, keywords: dict[str, str]) -> str:
        """The error of a call that does not fit; empty for one that does."""
        if fits(self.signature, args, kwargs):
            return ""
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in self.known.values()):
            return ""
        args = args[self.is_method :]
        if wrong := next((name for name in kwargs if name not in self.known), None):
            return self._wrong_keyword(wrong, args, kwargs, keywords)
        if len(args) > len(self.positional):
            return self._too_many(args, instead)
        if twice := next((name for name in self.positional[: len(args)] if name in kwargs), None):
            return f"got {twice} by position and by name, expected it once"
        return self._missing(args, kwargs)

    def _wrong_keyword(self, wrong: str, args: Any, kwargs: Any, keywords: dict[str, str]) -> str:
        value = _as_written(kwargs[wrong])
        meant = next((name for name in ALIASES.get(wrong, []) if name in self.known), None)
        if not meant and wrong in keywords:
            return f"got {wrong}={value}; {keywords[wrong]}"
        if not meant and args and self._is_of_function(wrong, args, kwargs):
            return (
                f"got {wrong}={value}, an argument of {self.positional[0]}, expected it in the "
                f"tuple of arguments; write {self._with_arguments(args[0], [])}"
            )
        if not meant and (call := self._with_rule(wrong, kwargs[wrong])):
            return f"got {wrong}={value}, expected a rule with it; write {call}"
        near = [meant] if meant else difflib.get_close_matches(wrong, self.known, 1)
        expected = near[0] if near else f"some of {', '.join(self.known)}"
        return f"got {wrong}={value}, expected {expected}{f'={value}' * bool(near)}"

    def _with_rule(self, field: str, value: Any) -> str:
        """The call with a rule that has this field, for a function of rules; or empty."""
        names = [field, *ALIASES.get(field, [])]
        place = next((name for name in ("rule", "rules", "inputs") if name in self.known), None)
        own = next((name for name in names if name in RULES_BY_FIELD), None)
        if own is None or place is None:
            return ""
        is_of_cotangents = "error" in self.name or "cotangent" in self.name
        rule = f"{'Error' * (is_of_cotangents and own == 'max')}{RULES_BY_FIELD[own]}"
        written = f"{rule}({own}={_as_written(value)})"
        before = self.positional[: self.positional.index(place)] if place != "inputs" else []
        written = f'{{"name": {written}}}' if place == "rules" else written
        return f"{self.name}({', '.join([*before, written])})"

    def _too_many(self, args: Any, instead: str) -> str:
        got = f"got {len(args)} positional arguments, expected"
        if not instead and self._takes_arguments():
            first = self.positional.index("args")
            call = self._with_arguments(args[0], args[first:])
            return f"{got} those of {self.positional[0]} in one tuple; write {call}"
        by_name = [f"{name}=" for name in self.known if name not in self.positional]
        hint = instead or (f"write the others by name, of {', '.join(by_name)}" if by_name else "")
        most = f"at most {len(self.positional)}, ({', '.join(self.positional)})"
        return f"{got} {most}{'; ' * bool(hint)}{hint}"

    def _missing(self, args: Any, kwargs: Any) -> str:
        """The parameters without a default that got nothing, and the whole call."""
        needed = [name for name, p in self.known.items() if p.default is p.empty]
        missing = [n for n in needed if n not in kwargs and n not in self.positional[: len(args)]]
        if self._takes_arguments() and missing == ["args"]:
            call = self._with_arguments(args[0], [])
            if callable(args[0]):
                return f"got no args, expected the tuple of the arguments; write {call}"
            return (
                f"got {described(args[0])} alone, expected a function, without calling it, and the "
                f"tuple of its arguments; write {call}"
            )
        by_name = [n if n in self.positional else f"{n}={n}" for n in needed]
        call = f"{self.name}({', '.join(by_name)})"
        return f"got no {' and no '.join(missing)}, expected one; write {call}"

    def _takes_arguments(self) -> bool:
        """Whether this is a function of a function and the tuple of its arguments."""
        return "args" in self.positional[1:]

    def _is_of_function(self, wrong: str, args: Any, kwargs: Any) -> bool:
        """Whether a keyword is an argument of the function that comes first."""
        if not self._takes_arguments():
            return False
        is_there = "args" in kwargs or len(args) > self.positional.index("args")
        return wrong in parameter_names(args[0]) or not is_there

    def _with_arguments(self, fun: Any, values: Sequence[Any]) -> str:
        """The call with the arguments in a tuple."""
        first = self.positional.index("args")
        before = ["loss" if not callable(fun) else self.positional[0], *self.positional[1:first]]
        return f"{self.name}({', '.join([*before, _whole_tuple_of(fun, values)])})"


def fits(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call fits a signature."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _as_written(value: Any) -> str:
    """A number or a text as it is written; arrays and trees are never printed."""
    return repr(value) if isinstance(value, bool | int | float | str | None) else "..."


def _tuple_of(fun: Any, values: Sequence[Any]) -> str:
    """The tuple of some arguments as somebody would write it, by the names of fun's parameters."""
    names = parameter_names(fun, len(values))
    return _tuple([*names, *(f"x{i}" for i in range(len(names), len(values)))])


def _whole_tuple_of(fun: Any, values: Sequence[Any]) -> str:
    """The tuple of some arguments, or of all that `fun` needs if those are more."""
    if not callable(fun):
        return "(params, x)"
    needed = _needed(fun)
    return _tuple(needed) if len(needed) > len(values) else _tuple_of(fun, values)


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)}{',' * (len(names) == 1)})"


def check_arguments(fun: Any, args: Any, kwargs: Any = None) -> None:
    """Raises `TypeError` for what is no function, no tuple of arguments, or no mapping of others.

    This is the one reader of calls ``f(fun, args, kwargs)``. The error says what to write where the
    arguments are there one by one, in a list, or alone, and where `fun` can't be called with them.
    """
    if callable(args) and not callable(fun):
        raise TypeError(
            f"fun: got {described(fun)}, expected a function; it comes first, write (fun, args)"
        )
    check_is_function(fun)
    if isinstance(args, tuple):
        if kwargs is not None and not isinstance(kwargs, Mapping):
            is_option = isinstance(kwargs, bool | int | float | str)
            hint = "; write an option by its name" if is_option else ""
            got = repr(kwargs) if is_option else described(kwargs)
            raise TypeError(
                f"kwargs: got {got}, expected a mapping of fun's keyword arguments, such as a "
                f"dict{hint}"
            )
        return _check_fits(fun, args, kwargs or {})
    if isinstance(args, str):
        raise TypeError(f"args: got {args!r}, expected the tuple of arguments{_for_text(args)}")
    if kwargs is not None and not _are_keywords(fun, kwargs):
        raise TypeError(
            "args: got the arguments of fun one by one, expected a tuple of them; write "
            f"{_tuple_of(fun, (args, kwargs))}"
        )
    values, one = (args, "") if isinstance(args, list) else ([args], "for one argument ")
    written, whole = _tuple_of(fun, values), _whole_tuple_of(fun, values)
    more = f", for those that fun needs {whole}" if whole != written else ""
    raise TypeError(f"args: got {described(args)}, expected a tuple; {one}write {written}{more}")


def _for_text(args: str) -> str:
    """A hint for shapes as on the command line, or for a path, instead of the arguments."""
    if shapes := re.findall(r"^[a-z]+\d+\w*\[([\d, ]*)\]", args):
        shape = shapes[0] + "," * ("," not in shapes[0] and bool(shapes[0].strip()))
        return f"; write (jnp.ones(({shape})),), the text is for the command line"
    return ", before a path"


def _are_keywords(fun: Any, kwargs: Any) -> bool:
    """Whether this is a mapping from parameters of `fun`; else it is one more argument."""
    signature = _signature(fun)
    if not isinstance(kwargs, Mapping) or signature is None:
        return isinstance(kwargs, Mapping)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    return takes_any or all(name in signature.parameters for name in kwargs)


def _check_fits(fun: Any, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Raises `TypeError` for a call that `fun` would refuse."""
    signature = _signature(fun)
    if signature is None or fits(signature, args, kwargs):
        return
    names, needed = parameter_names(fun), _needed(fun)
    if not _are_keywords(fun, kwargs):
        wrong = next(name for name in kwargs if name not in signature.parameters)
        raise TypeError(
            f"kwargs: got {wrong!r}, expected names of parameters of fun, ({', '.join(names)}); if "
            f"it is the batch, write {_tuple_of(fun, [*args, kwargs])}"
        )
    written = _tuple(needed)
    if len(args) > len(names) > 1:
        last = _tuple([f"x{i}" for i in range(len(args) - len(names) + 1)])
        written = _tuple([*names[:-1], last])
    raise TypeError(
        f"args: got {len(args)} argument{'s' * (len(args) != 1)}, expected those of fun, "
        f"({', '.join(names)}); write {written}"
    )


def check_takes(name: str, fun: Any, *parameters: str) -> None:
    """Raises `TypeError` for what is not a function of these parameters, such as a batch.

    A function of more, as of x and y, gets the last one as a tuple of them.
    """
    check_is_function(fun, name)
    signature = _signature(fun)
    if signature is None or fits(signature, parameters, {}):
        return
    *first, last = parameters
    needed = _needed(fun)
    expected = f"expected one of ({', '.join(parameters)})"
    if len(needed) <= len(parameters):
        raise TypeError(
            f"{name}: got a function of ({', '.join(parameter_names(fun))}), {expected}"
        )
    raise TypeError(
        f"{name}: got a function of {signature}, {expected}; write lambda {', '.join(parameters)}: "
        f"{name}({', '.join([*first, f'*{last}'])}), where the {last} is "
        f"({', '.join(needed[len(first) :])})"
    )


# Models whose class or object is no function of arrays, by the module that has their class, and
# what to write instead of the object; None where the object is a function.
_MODULES = {
    ("flax.linen", "Module"): "lambda params, x: model.apply(params, x)",
    ("flax.nnx", "Module"): None,
    ("equinox", "Module"): None,
    ("torch.nn", "Module"): "a loss in JAX; a module of torch is for clipgrad.torch.save_run",
}


def check_is_function(fun: Any, name: str = "fun") -> None:
    """Raises `TypeError` for what is not a function: a result, a model without parameters."""
    instead = _instead_of(fun)
    if instead is None:
        return
    is_plain = isinstance(fun, bool | int | float | str)
    got = repr(fun) if is_plain else described(fun)
    got = f"the class {fun.__name__}" if isinstance(fun, type) else got
    raise TypeError(f"{name}: got {got}, expected a function{instead and '; '}{instead}")


def _instead_of(fun: Any) -> str | None:
    """A hint for something that is not a function; None for a function."""
    for (home, kind), written in _MODULES.items():
        cls = getattr(sys.modules.get(home), kind, None)
        if cls and isinstance(fun, type) and issubclass(fun, cls):
            return f"write an object of it, {fun.__name__}(...), or a function of one"
        if cls and written and isinstance(fun, cls) and not getattr(fun, "scope", None):
            return f"write {written}"
    if callable(fun):
        return None
    if callable(getattr(fun, "apply", None)):  # of Haiku
        return "write lambda params, x: model.apply(params, None, x)"
    if any(map(is_array, jax.tree.leaves(fun))):
        return "write the function itself, without calling it, or for a value lambda: value"
    return ""


def _signature(fun: Any) -> inspect.Signature | None:
    """The signature that a call has to fit, of a wrapper that of the wrapper; None: not known."""
    try:
        return inspect.signature(fun, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def _needed(fun: Any) -> list[str]:
    """The names of the parameters by position that have no default."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in _BY_POSITION and p.default is p.empty]


def parameter_names(fun: Any, count: int | None = None) -> list[str]:
    """The names of the first `count` positional parameters, as far as they have names."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in _BY_POSITION][:count]


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def argument_name(which: int | str) -> str:
    """An argument as messages name it: `args[0]`, `kwargs['x']`."""
    return f"args[{which}]" if isinstance(which, int) else f"kwargs[{which!r}]"
