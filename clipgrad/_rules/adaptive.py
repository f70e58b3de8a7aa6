"""Adaptive gradient clipping: limits relative to the norms of the parameters."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from clipgrad._compat import broadcast_like
from clipgrad._numerics import (
    AxisName,
    Norm,
    at_least,
    at_once,
    finite_product,
    if_else,
    slice_norms,
    times,
    warn_of_parts,
    with_real_dtype,
)
from clipgrad._rules.base import Limit, MeasuringRule, pytree_rule, scale_each, static_field
from clipgrad._rules.thresholds import check_threshold, limits_by_leaf, limits_of
from clipgrad._rules.units import UnitAxis, check_unit_axis, unit_axes
from clipgrad._trees import clippable_leaves, parameters_like


@pytree_rule
class AdaptiveClip(MeasuringRule):
    r"""Adaptive gradient clipping (AGC): limits each unit by the norm of its weights.

    $$g \cdot \min\left(1, \frac{\mathrm{clipping} \cdot \max(\|w\|, \mathrm{eps})}{\|g\|}\right)$$

    where $w$ and $g$ are the weights of one unit and their gradient. A unit is the weights of
    one output: all axes but the last for leaves of rank 2 and more, as JAX libraries lay out
    kernels (dense, convolution of any rank, attention output); a whole vector or scalar.

    Guarantees:
      * A unit whose gradient norm is within its limit comes back bit-identical.
      * Otherwise its norm becomes the limit, up to a relative 4e-7 in float32, and its direction
        is kept.
      * The gradient keeps its dtype, for every dtype of the parameters.

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

    Args:
      clipping: the maximal ratio of gradient norm to weight norm.
      eps: the smallest weight norm, so that zero weights can train.
      axis: the axes that a unit spans: ``None`` as above; an int or a tuple for all leaves; or
        a function ``(path, leaf) -> axes``. For weights that
        are stacked over layers or experts leave the axes of these out.
      axis_name: the mapped axes over which units are spread; see `global_norm`. A unit is whole
        along the axes that are not named; ``()`` if it is whole on its device.

    Raises:
      ValueError: for thresholds that are negative or NaN; when called, without ``params``, for
        parameters of another structure or shape, for a leaf that lacks an axis.
      TypeError: for a threshold that is not a number, array or schedule, or another ``axis``.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> grads = jnp.array([[3.0, 0.1], [4.0, 0.1]])
      >>> params = jnp.array([[3.0, 3.0], [4.0, 4.0]])
      >>> cg.AdaptiveClip(0.5)(grads, params)    # a column is a unit, and its limit is 2.5
      Array([[1.5, 0.1],
             [2. , 0.1]], dtype=float32)

    References:
      Brock, De, Smith and Simonyan, High-Performance Large-Scale Image Recognition Without
      Normalization, 2021, https://arxiv.org/abs/2102.06171.
    """

    clipping: ArrayLike = 0.01
    eps: ArrayLike = 1e-3
    _: dataclasses.KW_ONLY
    axis: Any = static_field(default=None)
    axis_name: AxisName = static_field(default=None)
    needs_params: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_threshold("clipping", self.clipping, adaptive=True)
        check_threshold("eps", self.eps)
        object.__setattr__(self, "axis", check_unit_axis(self.axis))
        if isinstance(self.axis_name, list):
            object.__setattr__(self, "axis_name", tuple(self.axis_name))

    def measure(self, grads: Any, params: Any = None) -> list["UnitNorms"]:
        """The norms of the units of each leaf, and the least limit of each at ``clipping`` 1."""
        if params is None:
            raise ValueError(
                "params: got None with AdaptiveClip, expected the parameters; write "
                "rule(grads, params), or optimizer.update(grads, state, params)"
            )
        warn_of_parts("AdaptiveClip", clippable_leaves(grads), self.axis_name, slices=True)
        pairs = unit_norms(grads, params, self.axis, self.axis_name)
        least = limits_of([self.eps] * len(pairs), [norm for norm, _ in pairs])
        return [UnitNorms(n, w.value, eps) for (n, w), eps in zip(pairs, least, strict=True)]

    def scale(self, grads: Any, norms: Sequence["UnitNorms"]) -> Any:
        """The tree with the norm of each unit at most ``clipping`` times its weights' norm."""
        limits = limits_by_leaf(self, [units.norm for units in norms])
        return scale_each(_scale_units, grads, at_once(_without_extremes, norms, limits))

    def l2_limits(self, grads: Any, norms: Sequence["UnitNorms"]) -> list[Limit] | None:
        """The norms of the units of each leaf, and what their weights allow, if on one device."""
        if self.axis_name:
            return None
        limits = limits_by_leaf(self, [units.norm for units in norms])
        return [(n.norm, finite_product(c, n.least)) for c, n in zip(limits, norms, strict=True)]


def unit_norms(
    grads: Any, params: Any, axis: UnitAxis, axis_name: AxisName = None
) -> list[tuple[Norm, Norm]]:
    """For each leaf the norms of the units of its gradient, and of its weights."""
    leaves, weights = clippable_leaves(grads), parameters_like(grads, params)
    both = [*leaves, *map(jnp.asarray, weights)]
    norms = slice_norms(both, unit_axes(axis, grads) * 2, axis_name=axis_name)
    return list(zip(norms[: len(leaves)], norms[len(leaves) :], strict=True))


class UnitNorms(NamedTuple):
    """The norms of the units of a gradient and of their weights, which are at least ``eps``."""

    norm: Norm
    weights: jax.Array
    eps: jax.Array

    @property
    def least(self) -> jax.Array:
        """The norms of the weights, at least ``eps``: the limits at ``clipping`` 1."""
        return at_least(self.weights.astype(self.norm.root.dtype), self.eps)

    @property
    def value(self) -> jax.Array:
        """The ratio of the norms, the least ``clipping`` that changes nothing."""
        return if_else(self.norm.root == 0, 0, self.norm.value / self.least)


def _scale_units(leaf: jax.Array, parts: tuple[jax.Array, ...]) -> jax.Array:
    # As in optax, limits are computed in the shape of the leaf: XLA rounds other shapes otherwise.
    # What is special about a unit was decided before: in that shape XLA's CPU loops may lose NaN.
    root, scale, divisor, weights, least, clipping = (broadcast_like(x, leaf) for x in parts)
    limit = clipping * jnp.maximum(weights, least)
    shrunk = times(with_real_dtype(leaf, root.dtype.name), limit / divisor * scale).astype(
        leaf.dtype
    )
    return if_else(root <= limit * scale, leaf, shrunk)


@functools.partial(jax.jit, inline=True)
def _without_extremes(norms: UnitNorms, clipping: jax.Array) -> tuple[jax.Array, ...]:
    """Numbers with which the formula of a unit has no infinite part, also where it is not used."""
    root, scale, divisor = norms.norm
    weights = norms.weights.astype(root.dtype)
    limit = clipping * norms.least
    within = ~norms.norm.exceeds(limit) & (limit > 0)
    most = 2.0**40  # times scale and any weight that trains this is finite
    root = if_else(limit > 0, if_else(within & (clipping > most), 0, root), jnp.inf)
    # The factor of a unit within its limit is about 1, should it round to just above in a leaf.
    divisor = if_else(within, jnp.minimum(jnp.maximum(limit * scale, 2.0**-100), 2.0**100), divisor)
    divisor = if_else(jnp.isnan(weights), jnp.nan, divisor)
    return root, scale, divisor, weights, norms.eps, jnp.minimum(clipping, most)
