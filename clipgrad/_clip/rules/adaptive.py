"""Adaptive gradient clipping: limits relative to the norms of the parameters."""

import dataclasses
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
    r"""Adaptive gradient clipping (AGC): limits the gradient of each unit by its weights' norm.

    A unit is, by default, the weights of one output.

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
      axis: the axes that a unit spans. ``None``: all but the last of leaves of rank 2 and
        more, a whole vector. Else an int or a tuple for all leaves, or a function ``(path,
        leaf) -> axes``. For weights that are stacked over layers or experts leave the axes of
        these out. The table of an embedding is (tokens, features): write ``-1`` for its path,
        so that a unit is the row of a token, and not one feature of all tokens.
      axis_name: the axes of `jax.shard_map`, `jax.pmap` or `jax.vmap` that units are spread
        over, a name or several, so that norms are of all devices together; ``jax.P("x")``:
        each leaf is, also one that JAX does not know to differ between devices; not needed
        under `jax.jit`. A unit is whole along the axes that you do not name; ``()`` if it is
        whole on its device.

    Raises:
      ValueError: for thresholds that are negative or NaN; when called, without ``params``, for
        parameters of another structure or shape, for a leaf that lacks an axis.
      TypeError: for a threshold that is not a number, array or schedule, or another ``axis``.

    $$g \cdot \min\left(1, \frac{\mathrm{clipping} \cdot \max(\|w\|, \mathrm{eps})}{\|g\|}\right)$$

    where $w$ and $g$ are the weights of one unit and their gradient. A unit is the weights of
    one output: all axes but the last for leaves of rank 2 and more, as JAX libraries lay out
    kernels (dense, convolution of any rank, attention output); a whole vector or scalar. So of an
    embedding, of shape (tokens, features), a unit is a feature's column over all tokens; for a
    token's row, as the rows of PyTorch are, set ``axis`` by the path, as in the second example.

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
      * Otherwise its norm becomes the limit, up to a relative 4e-7 in float32, and its direction
        is kept.
      * Where the units are the same, the result is that of ``optax.adaptive_grad_clip`` up to a
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

    def measure(self, grads: Any, params: Any = None) -> list["UnitNorms"]:
        """The norms of the units of each leaf, and the limit of each at ``clipping`` 1."""
        if params is None:
            raise ValueError(
                "params: got None with AdaptiveClip, expected the parameters; write "
                "rule(grads, params), or optimizer.update(grads, state, params)"
            )
        warn_of_parts("AdaptiveClip", clippable_leaves(grads), self.axis_name, slices=True)
        pairs = unit_norms(grads, params, self.group_axes(grads), self.axis_name)
        least = limits_of([self.eps] * len(pairs), [norm for norm, _ in pairs])
        return [
            UnitNorms(norm, at_least(weights.value.astype(norm.root.dtype), eps))
            for (norm, weights), eps in zip(pairs, least, strict=True)
        ]

    def group_axes(self, grads: Any) -> list[Axes]:
        """The axes of a unit of each leaf."""
        return unit_axes(self.axis, grads)

    def norms_and_limits(self, norms: Sequence["UnitNorms"]) -> list[Limit]:
        """The norms of the units of each leaf, and ``clipping`` times those of their weights."""
        limits = limits_by_leaf(self, [units.norm for units in norms])
        pairs = zip(norms, limits, strict=True)
        return [(units.norm, finite_product(limit, units.weights)) for units, limit in pairs]


def unit_norms(
    grads: Any, params: Any, axes: Sequence[Axes], axis_name: AxisName = None
) -> list[tuple[Norm, Norm]]:
    """For each leaf the norms of the units of its gradient, and of its weights."""
    leaves, weights = clippable_leaves(grads), parameters_like(grads, params)
    both = [*leaves, *map(jnp.asarray, weights)]
    norms = slice_norms(both, [*axes, *axes], axis_name=axis_name)
    return list(zip(norms[: len(leaves)], norms[len(leaves) :], strict=True))


class UnitNorms(NamedTuple):
    """The norms of the units of a gradient and of their weights, which are at least ``eps``."""

    norm: Norm
    weights: jax.Array

    @property
    def value(self) -> jax.Array:
        """The ratio of the norms, the least ``clipping`` that changes nothing."""
        return if_else(self.norm.root == 0, 0, self.norm.value / self.weights)
