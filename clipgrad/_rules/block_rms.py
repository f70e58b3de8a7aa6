"""Scaling each leaf to a maximal root mean square."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from clipgrad._numerics import (
    AxisName,
    Norm,
    at_once,
    finite_product,
    if_else,
    nan_unless,
    over,
    slice_norms,
    warn_of_parts,
    with_real_dtype,
)
from clipgrad._rules.base import Limit, MeasuringRule, pytree_rule, scale_each, static_field
from clipgrad._rules.thresholds import check_threshold, limits_by_leaf
from clipgrad._trees import clippable_leaves


@pytree_rule
class ClipByBlockRMS(MeasuringRule):
    r"""Scales each leaf to a maximal rms: $g / \max(1, \mathrm{rms}(g) / \mathrm{threshold})$.

    Guarantees:
      * A leaf whose root mean square is at most ``threshold`` comes back bit-identical, except
        subnormal numbers, which act as 0 in XLA's arithmetic on the CPU.
      * Otherwise its rms becomes ``threshold``, up to a relative 4e-7 in float32, and its
        direction is kept.
      * On float32 leaves in the ordinary range the result is bit-identical to
        ``optax.clip_by_block_rms``, eagerly and under `jax.jit`. In half precision it differs:
        optax rounds squares and their mean to it, and this rule keeps them in float32.

    ==========================  ==========================================================
    rms or threshold            result
    ==========================  ==========================================================
    rms 0, empty leaf           unchanged, with finite derivatives
    ``threshold=0``             exact zeros
    ``threshold`` traced, < 0   acts as 0
    NaN or inf in a leaf        NaN throughout that leaf
    ratio to it above 3.4e38    zeros
    ==========================  ==========================================================

    Args:
      threshold: the maximal root mean square, a number.
      axis_name: the mapped axes that each leaf is spread over; see `global_norm`.

    Raises:
      ValueError: for a threshold that is negative or NaN.
      TypeError: for a threshold that is not a number, array or schedule.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> cg.ClipByBlockRMS(1.0)([jnp.array([3.0, 3.0]), jnp.array([0.5, 0.5])])
      [Array([1., 1.], dtype=float32), Array([0.5, 0.5], dtype=float32)]

    References:
      Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018,
      https://arxiv.org/abs/1804.04235.
    """

    threshold: ArrayLike
    _: dataclasses.KW_ONLY
    axis_name: AxisName = static_field(default=None)

    def __post_init__(self) -> None:
        check_threshold("threshold", self.threshold, adaptive=True)
        if isinstance(self.axis_name, list):
            object.__setattr__(self, "axis_name", tuple(self.axis_name))

    def measure(self, grads: Any, params: Any = None) -> list[Norm]:
        """The root mean square of each leaf."""
        leaves = clippable_leaves(grads)
        warn_of_parts("ClipByBlockRMS", leaves, self.axis_name)
        return slice_norms(leaves, [None] * len(leaves), axis_name=self.axis_name, mean=True)

    def scale(self, grads: Any, norms: Sequence[Norm]) -> Any:
        """The tree with the rms of each leaf at most ``threshold``."""
        limits = limits_by_leaf(self, norms)
        distinct = {id(limit): limit for limit in limits}
        bounds = {key: _bounds(limit) for key, limit in distinct.items()}
        divisors = at_once(_divisor_of_rms, norms, [bounds[id(limit)] for limit in limits])
        return scale_each(_over_divisor, grads, divisors)

    def l2_limits(self, grads: Any, norms: Sequence[Norm]) -> list[Limit] | None:
        """The norm of each leaf, its rms times the root of its size, and that of its limit."""
        if self.axis_name:
            return None
        rows = zip(norms, limits_by_leaf(self, norms), clippable_leaves(grads), strict=True)
        return [_l2_limit(norm, limit, max(leaf.size, 1) ** 0.5) for norm, limit, leaf in rows]


def _l2_limit(norm: Norm, limit: jax.Array, root_of_size: float) -> Limit:
    root = jnp.asarray(root_of_size, limit.dtype)
    return norm._replace(root=norm.root * root), finite_product(limit, root)


def _bounds(limit: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The divisor of an rms, and the least divisor of a leaf; inf for a limit of 0."""
    return if_else(limit > 0, limit, 1), if_else(limit > 0, 1, jnp.inf)


def _divisor_of_rms(norm: Norm, bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The divisor of a leaf, 1 within the limit: behind a selection XLA rounds otherwise.

    Each root is used once, so that XLA computes the divisor in one kernel.
    """
    limit, least = bounds
    ratio, least = norm.divisor / limit / norm.scale, least.astype(norm.root.dtype)
    most = jax.lax.stop_gradient(2 * ratio + least)  # not inf, which jax_debug_infs refuses
    divisor = jax.lax.clamp(least, ratio, most)  # of slope 1 at the limit
    return nan_unless(jnp.isfinite(norm.root), divisor)


def _over_divisor(leaf: jax.Array, divisor: jax.Array) -> jax.Array:
    return over(with_real_dtype(leaf, divisor.dtype.name), divisor).astype(leaf.dtype)
