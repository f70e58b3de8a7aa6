"""Scaling each leaf, or each slice of it, to a maximal norm."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from clipgrad._arrays import (
    Axes,
    AxisName,
    Norm,
    check_order,
    clippable_leaves,
    clippable_paths,
    slice_norms,
    warn_of_parts,
)
from clipgrad._clip.limits import limits_by_leaf
from clipgrad._clip.rules.axes import ReducedAxes, check_axis, reduced_axes
from clipgrad._clip.rules.measuring_rule import Limit, MeasuringRule
from clipgrad._clip.rules.rule_fields import pytree_rule, static, threshold
from clipgrad._clip.thresholds import Threshold


@pytree_rule
class ClipByNorm(MeasuringRule):
    r"""Scales each array in a gradient, or each slice of an array, down to a maximal norm.

    With ``axis`` each slice has its own norm: one for each index along the axes that you do not
    name. ``axis=-1`` clips rows, ``axis=(1, 2, 3)`` each example in a batch of images.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> cg.ClipByNorm(1.0)([jnp.array([3.0, 4.0]), jnp.array([0.3, 0.4])])
      [Array([0.6, 0.8], dtype=float32), Array([0.3, 0.4], dtype=float32)]
      >>> cg.ClipByNorm(1.0, axis=-1)(jnp.array([[3.0, 4.0], [0.3, 0.4]]))
      Array([[0.6, 0.8],
             [0.3, 0.4]], dtype=float32)

    Args:
      max_norm: the maximal norm: a number, or with ``axis`` an array that broadcasts to the slice
        norms, which keep the reduced axes with size 1.
      ord: the order $p$ of the norm, a number in (0, inf]; by default 2, the Euclidean norm.
      axis: the axis or axes to sum over, such as ``-1`` for one norm per row; ``None``: one norm
        for the whole leaf.
      axis_name: the name or names of the `jax.shard_map`, `jax.pmap` or `jax.vmap` axes over which
        each leaf, or slice, is spread, so that norms cover all devices. ``jax.P("x")`` says that
        every leaf is spread, even if JAX does not know this. You do not need this under `jax.jit`.
        Along axes that you do not name, a slice is whole; ``()`` says that each slice is whole on
        one device.

    Raises:
      ValueError: for a threshold that is negative or NaN, for an ``ord`` out of range; when
        called, for a leaf that lacks an axis.
      TypeError: for a threshold that is not a number, array or schedule.

    A leaf (slice) becomes $g \cdot \min(1, \mathrm{max\_norm} / \|g\|_p)$.

    ============================  ======================================================
    norm or threshold             result
    ============================  ======================================================
    norm 0                        unchanged, with finite derivatives
    ``max_norm=0``                exact zeros
    ``max_norm`` traced, < 0      acts as 0
    NaN or inf in a leaf (slice)  NaN throughout that leaf (slice)
    ============================  ======================================================

    Guarantees:
      * A leaf (slice) whose norm is at most ``max_norm`` comes back bit-identical.
      * Otherwise the norm becomes ``max_norm``, up to a relative 4e-7 in float32, and the direction
        is kept.
      * Norms are computed in float32 or wider, without over- or underflow.

    References:
      Pascanu, Mikolov and Bengio, On the Difficulty of Training Recurrent Neural Networks, 2013,
      https://arxiv.org/abs/1211.5063.
    """

    max_norm: Threshold = dataclasses.field(metadata=threshold(main=True, adaptive=True))
    _: dataclasses.KW_ONLY
    ord: float = dataclasses.field(default=2, metadata=static(check_order))
    axis: ReducedAxes = dataclasses.field(default=None, metadata=static(check_axis))
    axis_name: AxisName = dataclasses.field(default=None, metadata=static())

    def measure(self, grads: Any, params: Any = None) -> list[Norm]:
        """The norms of each leaf, or of its slices."""
        leaves = clippable_leaves(grads)
        warn_of_parts("ClipByNorm", leaves, self.axis_name, slices=self.axis is not None)
        as_optax = self.axis is None
        axes = self.group_axes(grads)
        return slice_norms(leaves, axes, self.ord, self.axis_name, as_optax=as_optax)

    def group_axes(self, grads: Any) -> list[Axes]:
        """The axes of a slice of each leaf."""
        pairs = zip(clippable_paths(grads), clippable_leaves(grads), strict=True)
        return [reduced_axes(self.axis, *pair) for pair in pairs]

    def norms_and_limits(self, norms: Sequence[Norm]) -> list[Limit]:
        """The norm of each leaf, or the norms of its slices, and ``max_norm``."""
        return list(zip(norms, limits_by_leaf(self, norms), strict=True))
