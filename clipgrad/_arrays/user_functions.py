"""Functions that users give, and their arguments: read, and refused with what to write."""

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from clipgrad._arrays.trees import described, is_array, shown


def fits(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call fits a signature."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _tuple_of(fun: Any, values: Sequence[Any]) -> str:
    """The tuple of some arguments as somebody would write it, by the names of fun's parameters."""
    names = parameter_names(fun, len(values))
    return _tuple([*names, *(f"x{i}" for i in range(len(names), len(values)))])


def whole_tuple_of(fun: Any, values: Sequence[Any]) -> str:
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
    if "params" in getattr(args, "_fields", ()):
        raise TypeError(
            f"args: got the state {type(args).__name__}, expected the tuple of arguments; write "
            "(state.params, batch)"
        )
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
    if isinstance(getattr(type(args), "args", None), property):  # a capture
        raise TypeError(
            f"args: got {described(args)}, expected a tuple; write its arguments, "
            f"{type(args).__name__.lower()}.args"
        )
    values, one = (args, "") if isinstance(args, list) else ([args], "for one argument ")
    written, whole = _tuple_of(fun, values), whole_tuple_of(fun, values)
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
    got = f"the class {fun.__name__}" if isinstance(fun, type) else shown(fun)
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
    if isinstance(fun, tuple) and callable(getattr(fun, "apply", None)):  # of Haiku
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
