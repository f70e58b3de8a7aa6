"""Clip rules: functions of a tree of gradients that are optax transformations, too."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, dataclass_transform

import jax
import numpy as np
import optax
from jax.core import Tracer

from clipgrad._arrays import (
    Axes,
    Norm,
    check_is_tree,
    clippable_leaves,
    described,
    explain_call,
    for_each,
    if_else,
    is_array,
    over,
    times,
    with_clippable,
    with_real_dtype,
)
from clipgrad._clip.gradient_clip import gradient_clip
from clipgrad._clip.limits import RULES, check_threshold, leaf_fields, require_numbers
from clipgrad._sharding import broadcast_like

C = TypeVar("C", bound=type)
# The norm of a group of elements, and its limit.
Limit = tuple[Norm, jax.Array]


def _of_instances(method: Any) -> Any:
    """A method that says what to write where a class is used as a transformation of optax."""

    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], ClipRule):
            return method(*args, **kwargs)
        raise TypeError(
            "rule: got the class of a rule instead of a rule, expected one with its threshold; "
            "write optax.chain(clipgrad.ClipByGlobalNorm(1.0), optax.sgd(1e-3))"
        )

    return checked


# mypy takes this for true. It knows no types of optax, and would know none of a rule.
MYPY: Literal[False] = False

if TYPE_CHECKING and not MYPY:

    class _Transformation(optax.GradientTransformationExtraArgs):
        """What optax asks type checkers for: a rule has its methods, and is no tuple."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Self: ...

else:
    _Transformation = object


class ClipRule(_Transformation):
    """A clip rule: a function from a tree of gradients to a clipped tree like it.

    Example:
      >>> import clipgrad as cg, jax, jax.numpy as jnp, optax
      >>> tx = optax.chain(cg.ClipByGlobalNorm(1.0), optax.sgd(1.0))
      >>> tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))[0]
      Array([-0.6, -0.8], dtype=float32)
      >>> sign = lambda grads: jax.tree.map(jnp.sign, grads)    # a rule of your own
      >>> jax.grad(lambda x: 3 * cg.clip_cotangent(x, sign))(2.0)
      Array(1., dtype=float32)

    Attributes:
      needs_params: whether the rule wants the second argument: the parameters for a gradient
        clip, the value itself for an error clip (which is then saved for the backward pass).

    The rules of this library are frozen dataclasses and pytrees whose leaves are their
    thresholds. So a threshold may be a number, an array or a tracer, and a new value of it does
    not retrace. A custom rule is a plain function of the tree, or a subclass with ``__call__``. It
    keeps the structure and the shapes of the tree; the dtypes are restored. Each call uses the
    attributes that the rule has at that time.

    A rule is an optax transformation, too: `gradient_clip` of it, with the same state.
    """

    needs_params: ClassVar[bool] = False

    def __call__(self, grads: Any, params: Any = None) -> Any:
        """The clipped tree: structure, shapes and dtypes of ``grads``."""
        raise NotImplementedError(
            f"{type(self).__name__}: got a rule without __call__, expected the method "
            "__call__(self, grads, params=None), which returns the clipped tree"
        )

    @_of_instances
    @explain_call()
    def init(self, params: Any) -> Any:
        """The state before the first update, as of `gradient_clip`."""
        return gradient_clip(self).init(params)

    @_of_instances
    def update(
        self, updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        """The clipped updates and the next state, as of `gradient_clip`."""
        return gradient_clip(self).update(updates, state, params, **extra_args)


def is_rule(value: Any) -> bool:
    """Whether this is of a class of rules, and not only a function."""
    return isinstance(value, ClipRule)


def check_is_no_rule(name: str, value: Any, rule: Any, expected: str, call: str) -> None:
    """Raises `TypeError` for a rule in the place of what it clips; ``call`` is what to write."""
    is_tree = not callable(rule) and any(map(is_array, jax.tree.leaves(rule)))
    if is_rule(value) or (is_tree and callable(value)):
        raise TypeError(f"{name}: got {described(value)}, expected {expected}; write {call}")


def check_direct_call(rule: ClipRule, grads: Any) -> None:
    """Raises an error for a call of a rule itself that counts no steps, or gets no tree."""
    require_numbers(rule)
    check_is_tree("grads", grads, "clip_grads(jax.grad(loss)(params, x), rule)")


class MeasuringRule(ClipRule):
    """A rule of this library: it measures groups of elements, and scales each from norm to limit.

    Attributes:
      acts_on: what a group is: an ``"element"``, a ``"leaf"`` (or slices or units of it), or the
        whole ``"tree"``, which has one norm.
      limits: whether the threshold is a limit: what is within it stays as it is.
    """

    acts_on: ClassVar[Literal["element", "leaf", "tree"]] = "leaf"
    limits: ClassVar[bool] = True
    # What a rule without such a field has.
    ord: Any = 2
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
    divisor is 0. In the ordinary range the scale is 1, and what is computed for each element is
    what optax computes, so that XLA makes the same program of it and the optimizer behind it.
    """
    wide = times(with_real_dtype(leaf, norm.root.dtype.name), norm.scale)
    shrunk = times(over(wide, norm.divisor), limit).astype(leaf.dtype)
    within = norm.is_within(limit)
    return if_else(broadcast_like(within, leaf) if within.ndim else within, leaf, shrunk)


def scale_each(function: Callable[..., Any], tree: Any, *lists: Sequence[Any]) -> Any:
    """The tree with a function of each leaf that is clipped and of an item of each list."""
    leaves = clippable_leaves(tree)
    return with_clippable(tree, for_each(function, [()] * len(leaves), leaves, *lists))


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def pytree_rule(cls: C) -> C:
    """Makes a frozen dataclass whose fields are pytree children, unless marked as static.

    Unlike with `jax.tree_util.register_dataclass`, instances that JAX rebuilds don't run
    ``__post_init__``: it checks what a user writes, and a rule's gradient may be negative.
    """
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    names = leaf_fields(cls)
    static = [f.name for f in dataclasses.fields(cls) if f.name not in names]

    def flatten_with_keys(rule: Any) -> Any:
        written = vars(rule)
        children = [(jax.tree_util.GetAttrKey(n), written[n]) for n in names]
        return children, tuple(written[n] for n in static)

    def unflatten(aux: Any, children: Any) -> Any:
        rule = object.__new__(cls)
        for name, value in [*zip(names, children, strict=True), *zip(static, aux, strict=True)]:
            object.__setattr__(rule, name, value)
        return rule

    explain_call()(cls)
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    RULES.append(cls)
    return cls


def threshold(**checks: bool) -> Any:
    """The metadata of a field for a threshold, which is a leaf; ``checks``: `check_threshold`'s."""

    def check(name: str, value: Any) -> Any:
        check_threshold(name, value, **checks)
        return value

    return {"check": check}


def static(check: Callable[[str, Any], Any] | None = None) -> Any:
    """The metadata of a field that is part of a rule's tree structure, not a leaf."""
    return {"static": True, "check": check}


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
