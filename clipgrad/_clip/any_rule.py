"""Rules of any kind: checked where they are given, and applied to any tree."""

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from clipgrad._arrays import (
    check_gradients,
    combine,
    described,
    is_array,
    is_clippable,
    partition,
    path_string,
)
from clipgrad._clip.known_rules import is_known
from clipgrad._clip.rule_thresholds import require_numbers

# What a number instead of a rule probably means, by what the rule would be applied to.
_MEANT = {"cotangent": "ErrorClipByValue(max={})", "gradients": "ClipByGlobalNorm({})"}


# What rules by names probably mean, by the same.
_BY_NAME = {
    "cotangent": "for a rule of each name write error_clip_by_name(fun, rules)",
    "gradients": 'for a rule of each part write optax.chain(clip_by_norm(1.0, where="name"), ...)',
}


def as_rule(rule: Any, schedules: bool = False, of: str = "cotangent") -> Callable[..., Any] | None:
    """``rule``, if it is a rule, a function or ``None``; with numbers unless ``schedules``.

    ``of`` is what it is applied to, the ``"cotangent"`` or the ``"gradients"``, for errors.
    """
    is_other = isinstance(rule, type | optax.GradientTransformation)
    if rule is None or (callable(rule) and not is_other):
        if not schedules:
            require_numbers(rule)
        return rule
    got, meant = described(rule), ""
    if not any(map(is_array, jax.tree.leaves(rule))):
        got = f"{rule!r:.60} of type {type(rule).__name__}"
    if isinstance(rule, optax.GradientTransformation):
        got = "an optax.GradientTransformation"
        meant = (
            "; write the rule, such as ClipByGlobalNorm(1.0), or call the update of the "
            "transformation: updates, state = tx.update(grads, state, params)"
        )
    elif isinstance(rule, numbers.Number) or getattr(rule, "shape", None) == ():
        meant = f"; did you mean {_MEANT[of].format(rule)}?"
    elif isinstance(rule, str):
        meant = (
            f"; write the rule, such as ClipByGlobalNorm(1.0), and for the types of Composer "
            f"clipgrad.published.gradient_clipping({rule!r}, threshold), or of one call "
            "clipgrad.published.apply_gradient_clipping"
        )
    elif isinstance(rule, type):
        meant = f"; did you mean an instance, {rule.__name__}(...)?"
    elif isinstance(rule, str | list | tuple) and of == "cotangent":
        meant = '; for names write a dictionary: {"name": rule}'
    elif isinstance(rule, Mapping) and any(map(callable, rule.values())):
        meant = "; " + _BY_NAME[of]
    elif of == "gradients" and any(map(is_array, jax.tree.leaves(rule))):
        meant = "; to clip gradients write clip_grads(grads, rule)"
    raise TypeError(f"rule: got {got}, expected a ClipRule, a function of the {of} or None{meant}")


def asks(rule: Any) -> list[str]:
    """The facts of a value, its name and its operation, that a function has parameters for.

    They are keyword-only; one that `functools.partial` has set already is not asked for.
    """
    if rule is None or is_known(rule):
        return []
    try:
        parameters = inspect.signature(rule).parameters.values()
    except (TypeError, ValueError):  # a function that is not written in Python
        return []
    known = getattr(rule, "keywords", {}) if isinstance(rule, functools.partial) else {}
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    return [name for name in names if name in ("name", "operation") and name not in known]


def for_value(rule: Any, name: str = "", operation: str = "") -> Any:
    """The rule for a value with this name, which this primitive has made, if it asks for these."""
    facts = {"name": name, "operation": operation}
    if not (asked := asks(rule)):
        return rule
    bound: Any = functools.partial(rule, **{fact: facts[fact] for fact in asked})
    bound.needs_params = getattr(rule, "needs_params", False)
    return bound


def apply_rule(rule: Callable[..., Any], grads: Any, params: Any = None) -> Any:
    """The clipped tree; for leaves that are not clipped the rule sees ``None``."""
    check_gradients("grads", grads)
    chosen, rest = partition(grads, is_clippable)
    needs_params, rule = getattr(rule, "needs_params", False), for_value(rule)
    clipped = rule(chosen, params) if needs_params else rule(chosen)
    if (returned := jax.tree.structure(clipped)) != jax.tree.structure(chosen):
        raise ValueError(
            f"rule: got the structure {returned} back, expected {jax.tree.structure(chosen)}"
        )
    return combine(jax.tree_util.tree_map_with_path(_like, clipped, chosen), rest)


def check_no_pairs(grads: Any, params: Any) -> None:
    """Raises `TypeError` for a list of pairs of parameter and gradient, as PaddlePaddle has them.

    Parameters of the same form say that both of a pair are gradients.
    """
    if params is not None or type(grads) not in (list, tuple) or not grads:
        return
    if all(type(pair) is tuple and _are_alike(pair) for pair in grads):
        raise TypeError(
            "grads: got pairs of arrays of one shape, such as of a parameter and its gradient, "
            "expected a tree of gradients, since all leaves are clipped; pass the gradients: "
            "[g for _, g in pairs]; if both are gradients, pass params too"
        )


def _are_alike(pair: tuple[Any, ...]) -> bool:
    shapes = [x.shape for x in pair if hasattr(x, "shape")]
    return len(pair) == len(shapes) == 2 and shapes[0] == shapes[1]


def _like(path: Any, result: Any, leaf: Any) -> jax.Array:
    array, leaf = jnp.asarray(result), jnp.asarray(leaf)
    if array.shape != leaf.shape:
        place = path_string(path) or "the leaf"
        raise ValueError(
            f"rule: got the shape {array.shape} back for {place}, expected the leaf's shape "
            f"{leaf.shape}"
        )
    return array.astype(leaf.dtype)
