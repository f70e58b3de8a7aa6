"""Clip rules, and the application of any rule to any tree."""

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, dataclass_transform, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from clipgrad._numerics import Norm, for_each
from clipgrad._rules.thresholds import RULES, leaf_fields, require_numbers
from clipgrad._trees import (
    clippable_leaves,
    combine,
    is_clippable,
    partition,
    path_string,
    with_clippable,
)

C = TypeVar("C", bound=type)
Limit = tuple[Norm, jax.Array]


@runtime_checkable
class ClipRule(Protocol):
    """A function from a tree of gradients, or cotangents, to a clipped tree like it.

    The rules of this library are frozen dataclasses and pytrees whose leaves are their
    thresholds. So a threshold may be a number, an array or a tracer, and a new value of it does
    not retrace. A custom rule is a plain function of the tree, or a class with this method. It
    keeps the structure and the shapes of the tree; the dtypes are restored. Each call uses the
    attributes that the rule has at that time.

    Attributes:
      needs_params: whether the rule wants the second argument: the parameters for a gradient
        clip, the value itself for an error clip (which is then saved for the backward pass).

    Example:
      >>> import clipgrad as cg, jax, jax.numpy as jnp
      >>> isinstance(cg.ClipByValue(1.0), cg.ClipRule)
      True
      >>> sign = lambda grads: jax.tree.map(jnp.sign, grads)    # a rule of your own
      >>> jax.grad(lambda x: 3 * cg.clip_cotangent(x, sign))(2.0)
      Array(1., dtype=float32)
    """

    needs_params: ClassVar[bool] = False

    def __call__(self, grads: Any, params: Any = None) -> Any:
        """The clipped tree: structure, shapes and dtypes of ``grads``."""
        ...


def is_rule(value: Any) -> bool:
    """Whether this is of a class of rules: for `isinstance` each callable is, as for a protocol."""
    return ClipRule in type(value).__mro__


class MeasuringRule(ClipRule, Protocol):
    """A rule of this library: it measures norms of groups of elements, and scales by these.

    Attributes:
      acts_on: what a group is: an ``"element"``, a ``"leaf"`` (or slices or units of it), or the
        whole ``"tree"``, which has one norm.
      limits: whether the threshold is a limit: what is within it stays as it is.
    """

    acts_on: ClassVar[str] = "leaf"
    limits: ClassVar[bool] = True

    def __call__(self, grads: Any, params: Any = None) -> Any:
        """The clipped tree."""
        require_numbers(self)
        return self.scale(grads, self.measure(grads, params))

    def measure(self, grads: Any, params: Any = None) -> list[Any]:
        """For each group the least threshold that changes nothing, as ``value``, and its parts."""
        ...

    def scale(self, grads: Any, norms: Sequence[Any]) -> Any:
        """The tree clipped, as one whose groups have these norms."""
        ...

    def l2_limits(self, grads: Any, norms: Sequence[Any]) -> list[Limit] | None:
        """For each group the L2 norm of the gradient and its limit, if that is what is clipped."""
        return None

    def changes(self, norm: Norm, limit: jax.Array) -> jax.Array:
        """Whether a group of this norm is scaled to the limit of `l2_limits`."""
        return norm.exceeds(limit)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def pytree_rule(cls: C) -> C:
    """Makes a frozen dataclass whose fields are pytree children, unless marked as static.

    Unlike with `jax.tree_util.register_dataclass`, instances that JAX rebuilds don't run
    ``__post_init__``: it checks what a user writes, and a rule's gradient may be negative.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = leaf_fields(cls)
    static = [f.name for f in dataclasses.fields(cls) if f.name not in names]

    def flatten_with_keys(rule: Any) -> Any:
        children = [(jax.tree_util.GetAttrKey(n), getattr(rule, n)) for n in names]
        return children, tuple(getattr(rule, n) for n in static)

    def unflatten(aux: Any, children: Any) -> Any:
        rule = object.__new__(cls)
        for name, value in [*zip(names, children, strict=True), *zip(static, aux, strict=True)]:
            object.__setattr__(rule, name, value)
        return rule

    cls.__hash__ = _hash_of_numbers  # pyright: ignore[reportAttributeAccessIssue]
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    RULES.append(cls)
    return cls


def _hash_of_numbers(rule: Any) -> int:
    """The hash of a rule; `TypeError` for an array, which has none."""
    values = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    for name, value in values.items():
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"{name}: got {value!r} in a rule that is to be hashed, as for "
                "jax.jit(rule), expected a number; where it is an array write "
                "jax.jit(lambda rule, grads: rule(grads))(rule, grads), which is not traced again "
                "for another value"
            ) from None
    return hash((type(rule), *values.values()))


def static_field(**kwargs: Any) -> Any:
    """A field of a rule that is part of its tree structure, not a leaf."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


def as_rule(rule: Any, schedules: bool = False) -> Callable[..., Any] | None:
    """``rule``, if it is a rule, a function or ``None``; with numbers unless ``schedules``."""
    if rule is None or (callable(rule) and not isinstance(rule, type)):
        if not schedules:
            require_numbers(rule)
        return rule
    got, meant = f"{rule!r} of type {type(rule).__name__}", ""
    if isinstance(rule, optax.GradientTransformation):
        got = "an optax.GradientTransformation"
        meant = (
            "; write the rule, such as ClipByGlobalNorm(1.0), or call the update of the "
            "transformation: updates, state = tx.update(grads, state, params)"
        )
    elif isinstance(rule, numbers.Number) or getattr(rule, "shape", None) == ():
        meant = f"; did you mean ErrorClipByValue(max={rule})?"
    elif isinstance(rule, type):
        meant = f"; did you mean an instance, {rule.__name__}(...)?"
    raise TypeError(
        f"rule: got {got}, expected a ClipRule, a function of the cotangent or None{meant}"
    )


def scale_each(
    function: Callable[..., Any], tree: Any, *lists: Sequence[Any], written_out: bool = True
) -> Any:
    """The tree with a function of each leaf that is clipped and of an item of each list.

    With ``written_out`` XLA gets no calls, and rounds as it does in optax; see `for_each`.
    """
    leaves = clippable_leaves(tree)
    scaled = for_each(function, [()] * len(leaves), leaves, *lists, written_out=written_out)
    return with_clippable(tree, scaled)


def apply_rule(rule: Callable[..., Any], grads: Any, params: Any = None) -> Any:
    """The clipped tree; for leaves that are not clipped the rule sees ``None``."""
    chosen, rest = partition(grads, is_clippable)
    needs_params = getattr(rule, "needs_params", False)
    clipped = rule(chosen, params) if needs_params else rule(chosen)
    if (returned := jax.tree.structure(clipped)) != jax.tree.structure(chosen):
        raise ValueError(
            f"rule: got the structure {returned} back, expected {jax.tree.structure(chosen)}"
        )
    return combine(jax.tree_util.tree_map_with_path(_like, clipped, chosen), rest)


def _like(path: Any, result: Any, leaf: Any) -> jax.Array:
    array, leaf = jnp.asarray(result), jnp.asarray(leaf)
    if array.shape != leaf.shape:
        place = path_string(path) or "the leaf"
        raise ValueError(
            f"rule: got the shape {array.shape} back for {place}, expected the leaf's shape "
            f"{leaf.shape}"
        )
    return array.astype(leaf.dtype)
