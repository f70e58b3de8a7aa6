"""Normalizing a whole tree, without a threshold to tune."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from clipgrad._arrays import (
    AxisName,
    Norm,
    clippable_leaves,
    scaled_to,
    times,
    tree_norm,
    warn_of_parts,
    with_real_dtype,
)
from clipgrad._clip.limits import limit_of
from clipgrad._clip.rules.measuring_rule import Limit, MeasuringRule, scale_each
from clipgrad._clip.rules.rule_fields import pytree_rule, static, threshold
from clipgrad._clip.thresholds import Number


@pytree_rule
class AutoNorm(MeasuringRule):
    r"""Scales a whole gradient to about one norm, without a threshold to tune.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> rule = cg.AutoNorm(max_norm=1.0, gamma=5.0)
      >>> rule(jnp.array([3.0, 4.0])), rule(jnp.array([12.0, 16.0]))    # norms 5 and 20
      (Array([0.3, 0.4], dtype=float32), Array([0.48, 0.64], dtype=float32))

    Args:
      max_norm: the norm that results are below, a number.
      gamma: the norm whose result is ``max_norm / 2``, a number.
      axis_name: the name or names of the `jax.shard_map`, `jax.pmap` or `jax.vmap` axes over which
        the tree is spread, so that norms cover all devices. ``jax.P("x")`` says that every leaf is
        spread, even if JAX does not know this. You do not need this under `jax.jit`.

    Raises:
      ValueError: for a number that is negative or NaN, or an infinite ``max_norm``; when called,
        for an ``axis_name`` that is not a mapped axis.
      TypeError: for anything but a number, array or schedule.

    Each leaf becomes $g \cdot \mathrm{max\_norm} / (n + \mathrm{gamma})$, where $n$ is the
    `global_norm` of the tree. If $n$ is far above ``gamma``, the result has about the norm
    ``max_norm``; if $n$ is far below, the factor is ``max_norm / gamma``. So ``max_norm`` only
    multiplies the learning rate. With `clip_per_example` you get the automatic clipping (AUTO-S) of
    differentially private training.

    ============================  ======================================================
    norm or threshold             result
    ============================  ======================================================
    norm 0, empty tree            unchanged, with finite derivatives
    ``max_norm=0``                exact zeros
    a traced number < 0           acts as 0
    NaN or inf in any leaf        NaN throughout the tree
    ============================  ======================================================

    Guarantees:
      * The norm of the result is less than ``max_norm``, up to a relative 4e-7 in float32, and the
        direction is kept.
      * The norm of the result grows with the norm of the gradient.

    References:
      Bu, Wang, Zha and Karypis, Automatic Clipping: Differentially Private Deep Learning Made
      Easier and Stronger, 2023, https://arxiv.org/abs/2206.07136: AUTO-S, with ``gamma`` 0.01.
    """

    max_norm: Number = dataclasses.field(default=1.0, metadata=threshold(main=True, infinite=False))
    gamma: Number = dataclasses.field(default=0.01, metadata=threshold())
    _: dataclasses.KW_ONLY
    axis_name: AxisName = dataclasses.field(default=None, metadata=static())
    acts_on = "tree"
    limits: ClassVar[bool] = False
    ord = 2

    def measure(self, grads: Any, params: Any = None) -> list[Norm]:
        """The norm of the whole tree."""
        return self._norms(grads)

    def _measure_and_count(self, grads: Any, params: Any = None) -> list[Norm]:
        return self._norms(grads, counts=True)

    def _norms(self, grads: Any, counts: bool = False) -> list[Norm]:
        warn_of_parts("AutoNorm", clippable_leaves(grads), self.axis_name)
        return [tree_norm(grads, self.ord, self.axis_name, counts)]

    def norms_and_limits(self, norms: Sequence[Norm]) -> list[Limit]:
        """The norm of the tree, and what it becomes."""
        (norm,) = norms
        limit, gamma = self._numbers(norm)
        return [(norm, norm.root / _divisor(norm, gamma) * limit)]

    def scale(self, grads: Any, norms: Sequence[Norm]) -> Any:
        """The tree with a norm below ``max_norm``."""
        (norm,) = norms
        each = [[x] * len(clippable_leaves(grads)) for x in (norm, *self._numbers(norm))]
        return scale_each(_normalized, grads, *each)

    def changes(self, norm: Norm, limit: jax.Array) -> jax.Array:
        """Wherever there is something to scale."""
        return norm.root != 0

    def _numbers(self, norm: Norm) -> tuple[jax.Array, jax.Array]:
        return limit_of(self.max_norm, norm), limit_of(self.gamma, norm)


def _normalized(leaf: jax.Array, norm: Norm, limit: jax.Array, gamma: jax.Array) -> jax.Array:
    wide = times(with_real_dtype(leaf, norm.root.dtype.name), norm.scale)
    return scaled_to(wide, _divisor(norm, gamma), limit).astype(leaf.dtype)


def _divisor(norm: Norm, gamma: jax.Array) -> jax.Array:
    """The norm plus gamma, in the units of the norm's root."""
    return norm.divisor + gamma * norm.scale
