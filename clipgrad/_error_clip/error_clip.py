"""Error clip as a decorator, for the inputs and the outputs of a function."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from clipgrad._arrays import described, explain_call
from clipgrad._clip import as_rule
from clipgrad._error_clip.cotangent import clip_argument
from clipgrad._error_clip.rule_trees import RuleTree

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
_ALL = object()  # instead of a parameter's name: each of them
_OFF = RuleTree.of("inputs", None)


@explain_call("write error_clip(inputs, outputs=rule)")
def error_clip(inputs: Any = None, *, outputs: Any = None) -> Callable[[Decorated], Decorated]:
    r"""Decorates a function: the gradients of the inputs, or of the outputs, are clipped.

    Example:
      >>> import clipgrad as cg, jax
      >>> @cg.error_clip({"h": cg.ErrorClipByValue(max=5.0)})
      ... def cell(w, h):
      ...     return w * h
      >>> print(*jax.grad(cell, argnums=(0, 1))(7.0, 2.0))
      2.0 5.0
      >>> @cg.error_clip(outputs=cg.ErrorClipByValue(max=0.1))
      ... def double(x):
      ...     return 2 * x
      >>> print(jax.grad(double)(1.0))
      0.2

    Args:
      inputs: a rule for all inputs, or a mapping from parameter names to rules, whether you pass
        these arguments by position or by name; ``None`` as a rule: off. The name of ``*args``
        or ``**kwargs`` stands for each argument among them. In the place of a rule you may write
        a tree that holds rules and is a prefix of the argument's tree, as in
        ``{"params": {"w": rule, "b": None}}``.
      outputs: a rule for the whole result's cotangent, or a tree that holds rules and is a prefix
        of the result's tree. A function as a rule may have the keyword-only parameters ``name``,
        here the path of the input, such as ``"params/w"``, or of the result's part, and
        ``operation``, here ``""``.

    Returns:
      The decorator.

    Raises:
      TypeError: for a rule that is not one, or if the decorated object is not a function.
      ValueError: when decorated, for a name that is not a parameter of the function; when called,
        for rules that are not a prefix of an input or of the result.

    For $y = f(x_1, \ldots, x_n)$ with the pull-back $f^*$ the input $x_i$ receives the cotangent
    $\mathrm{rule}_i(f^*(\mathrm{rule}(\bar y))_i)$. The inner rule is that for ``outputs``.

    Guarantees:
      * The result is bit-identical to that of the plain function. Signature, name and docstring are
        kept; ``__wrapped__`` is the plain function.
      * One rule for all inputs clips each input separately: a norm rule sees the tree of one input.
        ``self`` and ``cls`` are inputs only if you name them.
      * If you decorate a function twice, the outer decorator clips the cotangent of a result first,
        and the inner decorator clips the cotangent of an input first.
      * Everything that `clip_cotangent` guarantees.

    References:
      Graves, Generating Sequences With Recurrent Neural Networks, 2013,
      https://arxiv.org/abs/1308.0850: the derivatives with respect to the inputs of LSTM
      layers are clipped.
    """
    by_name = inputs if isinstance(inputs, Mapping) else {_ALL: as_rule(inputs)}
    rules = {name: RuleTree.of("inputs", rule) for name, rule in by_name.items()}
    of_outputs = RuleTree.of("outputs", outputs)

    def decorate(function: Decorated) -> Decorated:
        if isinstance(function, staticmethod | classmethod):
            return type(function)(decorate(function.__func__))  # type: ignore[return-value]
        signature = _signature_of_inputs(function)
        chosen = _rules_by_parameter(function, signature, rules)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                function(*args, **kwargs)  # says what is wrong in its own words
                raise TypeError(
                    f"error_clip: got a call that does not fit the signature {signature} of the "
                    "function, expected one that does; decorate the function that it wraps"
                ) from None
            _clip_inputs(bound, chosen, _ALL in rules and _has_receiver(bound, wrapped))
            return of_outputs.clip(clip_argument, function(*bound.args, **bound.kwargs))

        return wrapped  # type: ignore[return-value]

    return decorate


def _signature_of_inputs(function: Any) -> inspect.Signature:
    if not callable(function) or isinstance(function, type):
        raise TypeError(
            f"error_clip: got {described(function)} to decorate, expected a function or a method; "
            "write @error_clip(rule), with a rule in the parentheses, or for a value "
            "clip_cotangent(x, rule)"
        )
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise TypeError(f"error_clip: got {function!r}, expected a function that returns a result")
    return inspect.signature(function)


def _rules_by_parameter(
    function: Any, signature: inspect.Signature, rules: Mapping[Any, RuleTree]
) -> dict[Any, RuleTree]:
    names = list(signature.parameters)
    if _ALL in rules:
        return dict.fromkeys(names, rules[_ALL])
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in rules:
        if name not in names and not (takes_any and isinstance(name, str)):
            raise ValueError(
                f"inputs: got {name!r}, expected a parameter of "
                f"{getattr(function, '__name__', function)}; there are {names}"
            )
    return dict(rules)


def _has_receiver(bound: inspect.BoundArguments, wrapped: Any) -> bool:
    """Whether the first argument of a call is the object of a method, ``self`` or ``cls``.

    The name does not decide this. A function is a method of an object if the object's class has the
    function, or has what another decorator made from it, or if the function was written in that
    class.
    """
    first = next(iter(bound.arguments), None)
    if first is None or not bound.args:
        return False
    classes = type(bound.args[0]).__mro__
    for value in (value for cls in classes for value in vars(cls).values()):
        if _unwrapped(value, wrapped) is wrapped:
            return not isinstance(value, staticmethod)
    around, _, name = getattr(wrapped, "__qualname__", "").rpartition(".")
    homes = [c for c in classes if (c.__module__, c.__qualname__) == (wrapped.__module__, around)]
    return any(not isinstance(vars(cls).get(name), staticmethod) for cls in homes)


def _unwrapped(value: Any, wrapped: Any) -> Any:
    """The function that an attribute of a class leads to, as far as ``wrapped``."""
    is_function = callable(value) or isinstance(value, staticmethod | classmethod)
    attribute: Any = value
    return inspect.unwrap(attribute, stop=lambda f: f is wrapped) if is_function else None


def _clip_inputs(
    bound: inspect.BoundArguments, rules: dict[Any, RuleTree], has_receiver: bool
) -> None:
    """Clips the arguments that have rules; arguments in ``**kwargs`` have their own names.

    ``self`` and ``cls`` are not clipped.
    """
    parameters, left = bound.signature.parameters, dict(rules)
    for name, value in bound.arguments.items():
        kind, rule = parameters[name].kind, left.pop(name, _OFF)
        is_first, has_receiver = has_receiver, False
        if kind is inspect.Parameter.VAR_POSITIONAL:
            pairs = enumerate(value[is_first:], start=is_first)
            clipped = [rule.clip(clip_argument, x, f"{name}/{i}") for i, x in pairs]
            bound.arguments[name] = (*value[:is_first], *clipped)
        elif is_first:
            continue
        elif kind is inspect.Parameter.VAR_KEYWORD:
            rules_of_keys = {key: left.pop(key, rule) for key in value}
            pairs = [(k, rules_of_keys[k].clip(clip_argument, x, k)) for k, x in value.items()]
            bound.arguments[name] = dict(pairs)
        else:
            bound.arguments[name] = rule.clip(clip_argument, value, name)
    if missed := [name for name in left if name not in parameters]:
        raise ValueError(
            f"error_clip: got a call without {missed}, expected an argument of that name, since it "
            "has a rule"
        )
