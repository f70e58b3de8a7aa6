"""Scaling each leaf to a maximal root mean square."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._arrays import (
    AxisName,
    Norm,
    clippable_leaves,
    finite_product,
    slice_norms,
    warn_of_parts,
)
from clipgrad._clip.limits import limits_by_leaf
from clipgrad._clip.rules.measuring_rule import Limit, MeasuringRule
from clipgrad._clip.rules.rule_fields import pytree_rule, static, threshold
from clipgrad._clip.thresholds import Threshold

# An element is less than 2 ** 32 times the rms of its leaf; that times a larger limit may be inf.
_LARGE = 2.0**90


@pytree_rule
class ClipByBlockRMS(MeasuringRule):
    r"""Scales each array of a gradient down to a maximal root mean square.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> cg.ClipByBlockRMS(1.0)([jnp.array([3.0, 3.0]), jnp.array([0.5, 0.5])])
      [Array([1., 1.], dtype=float32), Array([0.5, 0.5], dtype=float32)]

    Args:
      threshold: the maximal root mean square: a number; before the optimizer also a schedule
        or an adaptive threshold.
      axis_name: the name or names of the `jax.shard_map`, `jax.pmap` or `jax.vmap` axes over which
        each leaf is spread, so that norms cover all devices. ``jax.P("x")`` says that every leaf is
        spread, even if JAX does not know this. You do not need this under `jax.jit`.

    Raises:
      ValueError: for a threshold that is negative or NaN.
      TypeError: for a threshold that is not a number, array or schedule.

    A leaf becomes $g / \max(1, \mathrm{rms}(g) / \mathrm{threshold})$.

    ==========================  ==========================================================
    rms or threshold            result
    ==========================  ==========================================================
    rms 0, empty leaf           unchanged, with finite derivatives
    ``threshold=0``             exact zeros
    ``threshold`` traced, < 0   acts as 0
    NaN or inf in a leaf        NaN throughout that leaf
    ==========================  ==========================================================

    Guarantees:
      * A leaf whose root mean square is at most ``threshold`` comes back bit-identical.
      * Otherwise the root mean square becomes ``threshold``, up to a relative 4e-7 in float32, and
        the direction is kept.
      * On float32 leaves you get the result of ``optax.clip_by_block_rms`` up to a relative 1e-6.
        In half precision results differ: optax rounds the squares and the mean to half precision,
        and this rule keeps both in float32.

    References:
      Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018,
      https://arxiv.org/abs/1804.04235.
    """

    threshold: Threshold = dataclasses.field(metadata=threshold(main=True, adaptive=True))
    _: dataclasses.KW_ONLY
    axis_name: AxisName = dataclasses.field(default=None, metadata=static())
    ord = 2  # of the mean, see `l2_limits`

    def measure(self, grads: Any, params: Any = None) -> list[Norm]:
        """The root mean square of each leaf."""
        leaves = clippable_leaves(grads)
        warn_of_parts("ClipByBlockRMS", leaves, self.axis_name)
        return slice_norms(leaves, [None] * len(leaves), axis_name=self.axis_name, mean=True)

    def norms_and_limits(self, norms: Sequence[Norm]) -> list[Limit]:
        """The rms of each leaf, and ``threshold``, or the rms if that is less."""
        pairs = list(zip(norms, limits_by_leaf(self, norms), strict=True))
        if isinstance(self.threshold, int | float) and self.threshold < _LARGE:
            return pairs
        return [(norm, jnp.minimum(limit, norm.divisor / norm.scale)) for norm, limit in pairs]

    def l2_limits(self, grads: Any, norms: Sequence[Norm]) -> list[Limit] | None:
        """The norm of each leaf, its rms times the root of its size, and that of its limit."""
        if self.axis_name:
            return None
        pairs = zip(self.norms_and_limits(norms), clippable_leaves(grads), strict=True)
        return [_of_sum(*pair, leaf.size) for pair, leaf in pairs]


def _of_sum(norm: Norm, limit: jax.Array, size: int) -> Limit:
    root = jnp.asarray(max(size, 1) ** 0.5, limit.dtype)
    return norm._replace(root=norm.root * root), finite_product(limit, root)
