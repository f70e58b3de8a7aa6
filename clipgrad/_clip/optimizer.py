"""Any optimizer as one that takes any extra arguments."""

import inspect
from typing import Any

import optax

from clipgrad._clip.gradient_clip import ClipTransformation
from clipgrad._clip.rules import ClipRule, is_rule


class Wrapper(optax.GradientTransformationExtraArgs):
    """A transformation of this library around another one, which it shows."""

    inner: Any

    @classmethod
    def of(cls, inner: Any, init: Any, update: Any) -> "Wrapper":
        """The wrapper with these functions."""
        wrapper = cls(init, update)
        wrapper.inner = inner
        return wrapper


def as_optimizer(name: str, optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """The optimizer of the argument ``name``, which takes any extra arguments.

    Its own function gets those that it has parameters for. The ``gradient_transformation()`` of
    `optax.MultiSteps` takes them and does not say so.
    """
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if isinstance(optimizer, ClipRule):
        optimizer = optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)
    if not isinstance(optimizer, optax.GradientTransformation):
        is_class = isinstance(optimizer, type)
        got = f"the class {optimizer.__name__}" if is_class else type(optimizer).__name__
        raise TypeError(
            f"{name}: got {got}, expected an optax.GradientTransformation "
            "such as optax.chain(clipgrad.clip_by_global_norm(1.0), optax.adam(1e-3))"
            f"{_call_of(optimizer)}"
        )
    taken = _extra_parameters(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        chosen = {k: v for k, v in extra.items() if taken is None or k in taken}
        return optimizer.update(updates, state, params, **chosen)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def is_clip_alone(optimizer: Any) -> bool:
    """Whether this is a clip without an optimizer behind it, in any wrapper that says so."""
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.inner_opt
    # optax wraps the functions of a rule, which is no tuple of them.
    optimizer = getattr(getattr(optimizer, "init", None), "__self__", optimizer)
    if isinstance(optimizer, optax.MultiSteps):
        return is_clip_alone(optimizer)
    if isinstance(optimizer, Wrapper):
        return is_clip_alone(optimizer.inner)
    return is_rule(optimizer) or isinstance(optimizer, ClipTransformation)


def _call_of(optimizer: Any) -> str:
    """A hint for a function or a class that makes an optimizer, instead of what it makes."""
    name = getattr(optimizer, "__name__", "")
    return f"; call it, as in {name}(...)" if callable(optimizer) and name else ""


def _extra_parameters(optimizer: optax.GradientTransformation) -> set[str] | None:
    """The names of the extra arguments that an optimizer takes; ``None``: any."""
    is_multi_steps = isinstance(getattr(optimizer.update, "__self__", None), optax.MultiSteps)
    if not isinstance(optimizer, optax.GradientTransformationExtraArgs) and not is_multi_steps:
        return set()
    parameters = inspect.signature(optimizer.update).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters}
