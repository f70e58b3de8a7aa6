"""Adaptive gradient clipping: limits relative to the norms of the parameters."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._arrays import (
    Axes,
    AxisName,
    Norm,
    at_least,
    clippable_leaves,
    finite_product,
    for_each,
    if_else,
    parameters_like,
    slice_norms,
    warn_of_parts,
)
from clipgrad._clip.limits import limits_by_leaf, limits_of
from clipgrad._clip.rules.axes import UnitAxis, check_unit_axis, unit_axes
from clipgrad._clip.rules.measuring_rule import Limit, MeasuringRule
from clipgrad._clip.rules.rule_fields import pytree_rule, static, threshold
from clipgrad._clip.thresholds import Number, Threshold


@pytree_rule
class AdaptiveClip(MeasuringRule):
    r"""Limits each unit's gradient norm relative to the unit's weight norm (adaptive clipping,
    AGC).

    By default, a unit is all weights of one output.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> grads = jnp.array([[3.0, 0.1], [4.0, 0.1]])
      >>> params = jnp.array([[3.0, 3.0], [4.0, 4.0]])
      >>> cg.AdaptiveClip(0.5)(grads, params)    # a column is a unit, and its limit is 2.5
      Array([[1.5, 0.1],
             [2. , 0.1]], dtype=float32)
      >>> def axes(path, w):    # of embeddings a token's row, of all else as by default
      ...     if path.endswith("embedding"):
      ...         return -1
      ...     return tuple(range(w.ndim - 1)) if w.ndim > 1 else None
      >>> rule = cg.AdaptiveClip(0.5, axis=axes)
      >>> rule({"embedding": grads}, {"embedding": params})["embedding"]
      Array([[2.1201427 , 0.07067142],
             [2.8275437 , 0.07068859]], dtype=float32)

    Args:
      clipping: the maximal ratio of gradient norm to weight norm.
      eps: the smallest weight norm, so that zero weights can train.
      axis: the axes that a unit spans. ``None``: all axes but the last if a leaf has rank 2 or
        more, otherwise the whole leaf. Or an int or a tuple for all leaves, or a function
        ``(path, leaf) -> axes``. If weights are stacked over layers or experts, leave out the
        stacking axis. An embedding table has the shape (tokens, features): return ``-1`` for that
        path, so that a unit is one token's row, and not one feature over all tokens.
      axis_name: the name or names of the `jax.shard_map`, `jax.pmap` or `jax.vmap` axes over which
        units are spread, so that norms cover all devices. ``jax.P("x")`` says that every leaf is
        spread, even if JAX does not know this. You do not need this under `jax.jit`. Along axes
        that you do not name, a unit is whole; ``()`` says that each unit is whole on one device.

    Raises:
      ValueError: for thresholds that are negative or NaN; when called, if ``params`` is missing or
        has another structure or shape, or if a leaf lacks an axis.
      TypeError: for a threshold that is not a number, array or schedule, or another ``axis``.

    $$g \cdot \min\left(1, \frac{\mathrm{clipping} \cdot \max(\|w\|, \mathrm{eps})}{\|g\|}\right)$$

    where $w$ is the weights of one unit and $g$ their gradient. By default a unit is all weights of
    one output, for kernels as JAX libraries lay them out (dense, convolution of any rank, attention
    output): all axes but the last. Vectors and scalars are one unit. For an embedding the default
    unit is one feature over all tokens; to get one token's row, as in PyTorch, set ``axis`` by the
    path, as in the second example.

    ============================  ======================================================
    unit or threshold             result
    ============================  ======================================================
    weights 0                     limit ``clipping * eps``
    gradient 0                    unchanged, with finite derivatives
    ``clipping=0``                exact zeros
    ``clipping`` traced, < 0      acts as 0
    NaN or inf in the gradient    NaN throughout the unit
    NaN in the weights            NaN throughout the unit
    ============================  ======================================================

    Guarantees:
      * A unit whose gradient norm is within its limit comes back bit-identical.
      * Otherwise the norm becomes the limit, up to a relative 4e-7 in float32, and the direction is
        kept.
      * If the units are the same, you get the result of ``optax.adaptive_grad_clip`` up to a
        relative 1e-6.
      * The gradient keeps its dtype, for every dtype of the parameters.

    References:
      Brock, De, Smith and Simonyan, High-Performance Large-Scale Image Recognition Without
      Normalization, 2021, https://arxiv.org/abs/2102.06171.
    """

    clipping: Threshold = dataclasses.field(
        default=0.01, metadata=threshold(main=True, adaptive=True)
    )
    eps: Number = dataclasses.field(default=1e-3, metadata=threshold())
    _: dataclasses.KW_ONLY
    axis: UnitAxis = dataclasses.field(default=None, metadata=static(check_unit_axis))
    axis_name: AxisName = dataclasses.field(default=None, metadata=static())
    needs_params: ClassVar[bool] = True
    ord = 2

    def measure(self, grads: Any, params: Any = None) -> list["UnitNorms"]:
        """The norms of the units of each leaf, and the limit of each at ``clipping`` 1."""
        if params is None:
            raise ValueError(
                "params: got None with AdaptiveClip, expected the parameters; write "
                "rule(grads, params), or optimizer.update(grads, state, params)"
            )
        warn_of_parts("AdaptiveClip", clippable_leaves(grads), self.axis_name, slices=True)
        pairs = unit_norms(grads, params, self.group_axes(grads), self.axis_name)
        norms, weights = zip(*pairs, strict=True) if pairs else ((), ())
        least = limits_of([self.eps] * len(pairs), norms)
        return for_each(_with_weights, [()] * len(pairs), norms, weights, least)

    def group_axes(self, grads: Any) -> list[Axes]:
        """The axes of a unit of each leaf."""
        return unit_axes(self.axis, grads)

    def norms_and_limits(self, norms: Sequence["UnitNorms"]) -> list[Limit]:
        """The norms of the units of each leaf, and ``clipping`` times those of their weights."""
        of_units = [units.norm for units in norms]
        weights = [units.weights for units in norms]
        thresholds = limits_by_leaf(self, of_units)
        # Of a number that does not enlarge, a product cannot leave the range.
        is_small = isinstance(self.clipping, int | float) and self.clipping <= 1
        product = operator.mul if is_small else finite_product
        limits = for_each(product, [()] * len(norms), thresholds, weights)
        return list(zip(of_units, limits, strict=True))


def unit_norms(
    grads: Any, params: Any, axes: Sequence[Axes], axis_name: AxisName = None
) -> list[tuple[Norm, Norm]]:
    """For each leaf the norms of the units of its gradient, and of its weights."""
    leaves, weights = clippable_leaves(grads), parameters_like(grads, params)
    both = [*leaves, *map(jnp.asarray, weights)]
    norms = slice_norms(both, [*axes, *axes], axis_name=axis_name, values_from=len(leaves))
    return list(zip(norms[: len(leaves)], norms[len(leaves) :], strict=True))


def _with_weights(norm: Norm, weights: Norm, eps: jax.Array) -> "UnitNorms":
    value, most = weights.value.astype(norm.root.dtype), float(jnp.finfo(norm.root.dtype).max)
    # Finite weights may have a norm that is larger than its dtype can hold.
    return UnitNorms(norm, at_least(if_else(value > most, most, value), eps))


class UnitNorms(NamedTuple):
    """The norms of the units of a gradient and of their weights, which are at least ``eps``."""

    norm: Norm
    weights: jax.Array

    @property
    def value(self) -> jax.Array:
        """The ratio of the norms, the least ``clipping`` that changes nothing."""
        return if_else(self.norm.root == 0, 0, self.norm.value / self.weights)
