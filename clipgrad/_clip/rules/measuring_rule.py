"""The base of the rules of this library: measure each group, set a limit, scale."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from clipgrad._arrays import (
    Axes,
    Norm,
    clippable_leaves,
    for_each,
    if_else,
    is_array,
    one_program_if_eager,
    scaled_to,
    with_clippable,
    with_real_dtype,
)
from clipgrad._clip.rules.clip_rule import ClipRule, check_direct_call
from clipgrad._sharding import broadcast_like

# The norm of a group of elements, and its limit.
Limit = tuple[Norm, jax.Array]


class MeasuringRule(ClipRule):
    """A rule of this library: it measures groups of elements, and scales each from norm to limit.

    A rule, step by step: `ClipByNorm`, whose groups are leaves, with the limit 1.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> rule = cg.ClipByNorm(1.0)
      >>> grads = {"b": jnp.array([0.3, 0.4]), "w": jnp.array([3.0, 4.0])}
      >>> norms = rule.measure(grads)    # 1. the norm of each group
      >>> print([float(norm.value) for norm in norms])
      [0.5, 5.0]
      >>> pairs = rule.norms_and_limits(norms)    # 2. each norm with its limit
      >>> print([(float(norm.value), float(limit)) for norm, limit in pairs])
      [(0.5, 1.0), (5.0, 1.0)]
      >>> rule.scale(grads, norms)    # 3. the first is within its limit, the second times 1 / 5
      {'b': Array([0.3, 0.4], dtype=float32), 'w': Array([0.6, 0.8], dtype=float32)}

    A call of the rule takes steps 1 and 3, and 3 takes 2. `gradient_clip` does the same, and more
    between them: before 1 it selects leaves; a threshold that adapts gets the numbers 0.5 and 5.0,
    and is replaced by what it returns before 2; statistics follow from the pairs of 2.

    A rule is a dataclass of `pytree_rule` whose thresholds are fields, one of them with
    ``metadata=threshold(main=True)``. It has `measure` and `norms_and_limits`, and if it measures
    L2 norms ``ord = 2``: statistics follow from these. All else has a default. What ``measure``
    returns for a group needs ``value``, the least threshold that changes nothing.

    Attributes:
      acts_on: what a group is: an ``"element"``, a ``"leaf"`` (or slices or units of it), or the
        whole ``"tree"``, which has one norm.
      limits: whether the threshold is a limit: what is within it stays as it is.
      ord: the order of the norm; ``None``: it is another measure, and statistics need another read
        of the elements.
      axis: the axes of a leaf that a group spans, as the rule takes them.
      axis_name: the mapped axes that a group is spread over.
    """

    acts_on: ClassVar[Literal["element", "leaf", "tree"]] = "leaf"
    limits: ClassVar[bool] = True
    # A rule that lets its user choose has a field of this name.
    ord: Any = None
    axis: Any = None
    axis_name: Any = None

    def __eq__(self, other: Any) -> bool:
        """Whether the other is of the same class, with equal thresholds and options."""
        if type(other) is not type(self):
            return False
        names = {**vars(self), **vars(other)}  # a subclass may keep more than the fields
        return all(hasattr(rule, name) for rule in (self, other) for name in names) and all(
            _is_equal_field(getattr(self, name), getattr(other, name)) for name in names
        )

    def __hash__(self) -> int:
        return _hash_of_numbers(self)

    def __post_init__(self) -> None:
        """Checks each field as it says, and makes lists tuples, which can be hashed."""
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            check, value = field.metadata.get("check"), getattr(self, field.name)
            value = value if check is None else check(field.name, value)
            object.__setattr__(self, field.name, tuple(value) if type(value) is list else value)

    def __call__(self, grads: Any, params: Any = None) -> Any:
        """The clipped tree."""
        check_direct_call(self, grads)
        return self.scale(grads, self.measure(grads, params))

    def measure(self, grads: Any, params: Any = None) -> list[Any]:
        """For each group the least threshold that changes nothing, as ``value``, and its parts."""
        raise NotImplementedError

    def _measure_and_count(self, grads: Any, params: Any = None) -> list[Any]:
        """`measure` for statistics: an L2 norm of the whole tree has the count of NaN and inf."""
        return self.measure(grads, params)

    def group_axes(self, grads: Any) -> list[Axes]:
        """For each leaf the axes that a group of it spans; ``None``: the whole leaf."""
        return [None] * len(clippable_leaves(grads))

    def norms_and_limits(self, norms: Sequence[Any]) -> list[Limit]:
        """For each group its norm and its limit, from what `measure` found."""
        raise NotImplementedError

    def scale(self, grads: Any, norms: Sequence[Any]) -> Any:
        """The tree clipped, as one whose groups have these norms."""
        leaves = clippable_leaves(grads)
        pairs = self.norms_and_limits(norms)
        pairs = pairs * len(leaves) if self.acts_on == "tree" else pairs
        norms, limits = zip(*pairs, strict=True) if pairs else ((), ())
        return scale_each(scaled_down, grads, norms, limits)

    def l2_limits(self, grads: Any, norms: Sequence[Any]) -> list[Limit] | None:
        """For each group its L2 norm and the limit of that, if one device knows both."""
        is_spread = self.acts_on != "tree" and bool(self.axis_name)
        return None if is_spread or self.ord != 2 else self.norms_and_limits(norms)

    def changes(self, norm: Norm, limit: jax.Array) -> jax.Array:
        """Whether a group of this norm is scaled to the limit of `l2_limits`."""
        return norm.exceeds(limit)


def scaled_down(leaf: jax.Array, norm: Norm, limit: jax.Array) -> jax.Array:
    """The leaf itself where its group is within the limit, bit for bit; scaled to it elsewhere.

    A group whose norm is not finite becomes NaN. Derivatives are finite, at zero too, since no
    divisor is 0. The scale multiplies the limit, and not each element: what is computed for an
    element is what optax computes, so that XLA makes the same program of it and the optimizer
    behind it, and compiles it in the same time.
    """
    if norm.root.ndim:
        return _slices_scaled_down(leaf, norm, limit)
    wide = with_real_dtype(leaf, norm.root.dtype.name)
    limit = norm.scaled(limit)
    shrunk = scaled_to(wide, norm.divisor, limit).astype(leaf.dtype)
    return if_else(norm.divisor <= limit, leaf, shrunk)


def _slices_scaled_down(leaf: jax.Array, norm: Norm, limit: jax.Array) -> jax.Array:
    """`scaled_down` by many norms: for an element there are two products and a choice.

    The numbers of a slice end in a quotient, which XLA computes once for the slice, and not for
    each element in the loop of the leaf: the scaled limit, or a negative number within the limit.
    """
    wide = with_real_dtype(leaf, norm.root.dtype.name)
    scaled = _limits_of_slices(norm.divisor, norm.scale, limit)
    shrunk = scaled_to(wide, norm.divisor, scaled).astype(leaf.dtype)
    return if_else(broadcast_like(scaled < 0, leaf), leaf, shrunk)


@one_program_if_eager  # inf of a limit times a scale is no error
def _limits_of_slices(divisor: jax.Array, scale: jax.Array, limit: jax.Array) -> jax.Array:
    """The scaled limits of slices that are above them; a negative number for the others."""
    # XLA would make a product of a quotient by a quotient.
    down = jax.lax.reduce_precision(1 / scale, jnp.finfo(scale.dtype).nexp, 0)
    return if_else(divisor <= limit * scale, -1, limit) / down


def scale_each(function: Callable[..., Any], tree: Any, *lists: Sequence[Any]) -> Any:
    """The tree with a function of each leaf that is clipped and of an item of each list."""
    leaves = clippable_leaves(tree)
    return with_clippable(tree, for_each(function, [()] * len(leaves), leaves, *lists))


def _is_equal_field(a: Any, b: Any) -> bool:
    """Whether two fields of rules are equal; traced arrays are only if they are the same."""
    if a is b:
        return True
    if isinstance(a, Tracer) or isinstance(b, Tracer):
        return False
    if isinstance(a, np.ndarray | jax.Array) or isinstance(b, np.ndarray | jax.Array):
        is_number = all(isinstance(x, int | float | np.generic) or is_array(x) for x in (a, b))
        return is_number and np.array_equal(np.asarray(a), np.asarray(b))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_equal_field, a, b))
    return bool(a == b)


def _hash_of_numbers(rule: Any) -> int:
    """The hash of a rule; `TypeError` for an array, which has none."""
    values = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    for name, value in values.items():
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"{name}: got an array in a rule that is to be hashed, as for jax.jit(rule), "
                "expected a number; or write jax.jit(lambda rule, grads: rule(grads))(rule, "
                "grads), which is not traced again for another value"
            ) from None
    return hash((type(rule), *values.values()))
