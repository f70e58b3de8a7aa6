"""Clip rules: functions of a tree of gradients that are optax transformations, too."""

import functools
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import jax
import optax

from clipgrad._arrays import check_is_tree, described, explain_call, is_array
from clipgrad._clip.gradient_clip import gradient_clip
from clipgrad._clip.rule_thresholds import require_numbers


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
    """A clip rule: a function from a gradient tree to a clipped tree of the same structure.

    Example:
      >>> import clipgrad as cg, jax, jax.numpy as jnp, optax
      >>> tx = optax.chain(cg.ClipByGlobalNorm(1.0), optax.sgd(1.0))
      >>> tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))[0]
      Array([-0.6, -0.8], dtype=float32)
      >>> sign = lambda grads: jax.tree.map(jnp.sign, grads)    # a rule of your own
      >>> jax.grad(lambda x: 3 * cg.clip_cotangent(x, sign))(2.0)
      Array(1., dtype=float32)

    Attributes:
      needs_params: whether the rule needs a second argument: the parameters in a gradient clip, the
        value itself in an error clip (which saves the value for the backward pass).

    clipgrad's rules are frozen dataclasses, and pytrees with the thresholds as leaves. So a
    threshold may be a number, an array or a tracer, and a new threshold does not retrace. To write
    your own rule, write a function of the tree, or a subclass with ``__call__``. Your rule must
    keep structure and shapes; clipgrad restores the dtypes. Each call reads the attributes that the
    rule has at that time.

    You can also use a rule as an optax transformation: it acts as ``gradient_clip(rule)``, with the
    same state.
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
        """The state before the first update, as from `gradient_clip`."""
        return gradient_clip(self).init(params)

    @_of_instances
    def update(
        self, updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        """The clipped updates and the next state, as from `gradient_clip`."""
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
