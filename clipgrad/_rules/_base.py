"""What a clip rule is, and how any rule is applied to any tree."""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar, dataclass_transform, runtime_checkable

import jax

from clipgrad._rules._thresholds import require_numbers
from clipgrad._trees import is_none, takes_part, with_paths

C = TypeVar("C", bound=type)


@runtime_checkable
class ClipRule(Protocol):
    """A function from a tree of gradients, or cotangents, to a clipped tree like it.

    The rules of this library are frozen dataclasses and pytrees whose leaves are their
    thresholds, so that a threshold may be a number, an array or a tracer, and a new value of it
    retraces nothing. A rule of one's own is a plain function of the tree, or a class with this
    method; it keeps the structure and the shapes of the tree, and the dtypes are restored.

    Attributes:
      needs_params: whether the rule wants the second argument: the parameters for a gradient
        clip, the value itself for an error clip (which is then saved for the backward pass).

    Example:
      >>> import clipgrad as cg, jax, jax.numpy as jnp
      >>> isinstance(cg.ClipByValue(1.0), cg.ClipRule)
      True
      >>> sign = lambda grads: jax.tree.map(jnp.sign, grads)    # a rule of one's own
      >>> jax.grad(lambda x: 3 * cg.clip_cotangent(x, sign))(2.0)
      Array(1., dtype=float32)
    """

    needs_params: ClassVar[bool] = False

    def __call__(self, grads: Any, params: Any = None) -> Any:
        """The clipped tree: structure, shapes and dtypes of ``grads``."""
        ...


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def pytree_rule(cls: C) -> C:
    """Makes a frozen dataclass whose fields are pytree children, unless marked as static.

    Unlike those of `jax.tree_util.register_dataclass`, instances that JAX rebuilds don't run
    ``__post_init__``: it checks what a user writes, and a rule's gradient may be negative.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    static = [f.name for f in dataclasses.fields(cls) if f.metadata.get("static")]
    names = [f.name for f in dataclasses.fields(cls) if f.name not in static]

    def flatten_with_keys(rule: Any) -> Any:
        children = [(jax.tree_util.GetAttrKey(n), getattr(rule, n)) for n in names]
        return children, tuple(getattr(rule, n) for n in static)

    def unflatten(aux: Any, children: Any) -> Any:
        rule = object.__new__(cls)
        for name, value in [*zip(names, children, strict=True), *zip(static, aux, strict=True)]:
            object.__setattr__(rule, name, value)
        return rule

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    setattr(cls, "_fields_are_thresholds", True)  # noqa: B010
    return cls


def static_field(**kwargs: Any) -> Any:
    """A field of a rule that is part of its tree structure, not a leaf."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


def as_rule(rule: Any, schedules: bool = False) -> Callable[..., Any] | None:
    """``rule`` if it is one, or ``None``.

    Raises:
      TypeError: if it is neither a rule nor a function nor ``None``, or if a threshold is a
        schedule where ``schedules`` says that none can be resolved.
    """
    if rule is None or (callable(rule) and not isinstance(rule, type)):
        if not schedules:
            require_numbers(rule)
        return rule
    hint = ""
    if isinstance(rule, numbers.Number) or getattr(rule, "shape", None) == ():
        hint = f"; did you mean ErrorClipByValue(max={rule})?"
    elif isinstance(rule, type):
        hint = f"; did you mean an instance, {rule.__name__}(...)?"
    raise TypeError(
        f"rule: got {rule!r} of type {type(rule).__name__}, expected a ClipRule, a function of "
        f"the cotangent or None{hint}"
    )


def apply_rule(rule: Callable[..., Any], grads: Any, params: Any = None) -> Any:
    """The clipped tree; leaves that take no part are ``None`` to the rule and stay as they are.

    Raises:
      ValueError: if the rule returns another structure or other shapes.
    """
    leaves, structure = jax.tree.flatten(grads, is_leaf=is_none)
    shown = structure.unflatten([leaf if takes_part(leaf) else None for leaf in leaves])
    needs_params = getattr(rule, "needs_params", False)
    clipped = rule(shown, params) if needs_params else rule(shown)
    return _restore(clipped, grads)


def _restore(clipped: Any, grads: Any) -> Any:
    paths, leaves, structure = with_paths(grads)
    results, returned = jax.tree.flatten(clipped, is_leaf=is_none)
    if returned != structure:
        raise ValueError(f"the rule returned the structure {returned}, expected {structure}")
    for path, result, leaf in zip(paths, results, leaves, strict=True):
        if takes_part(leaf) and getattr(result, "shape", ()) != getattr(leaf, "shape", ()):
            raise ValueError(
                f"the rule returned {getattr(result, 'shape', result)} for {path or 'the leaf'}, "
                f"expected the shape {leaf.shape}"
            )
    return structure.unflatten([_like(r, g) for r, g in zip(results, leaves, strict=True)])


def _like(result: Any, leaf: Any) -> Any:
    if not takes_part(leaf):
        return leaf
    return jax.numpy.asarray(result).astype(jax.numpy.asarray(leaf).dtype)
