"""Leaving out the tokens with the largest cotangents."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from clipgrad._compat import broadcast_like, on_every_device
from clipgrad._numerics import AxisName, Norm, slice_norms, warn_of_parts
from clipgrad._rules.base import MeasuringRule, pytree_rule, scale_each, static_field
from clipgrad._rules.thresholds import check_threshold
from clipgrad._rules.units import check_axis, reduced_axes
from clipgrad._trees import clippable_leaves, clippable_paths


@pytree_rule
class DropTokens(MeasuringRule):
    r"""Sets the ``k`` tokens with the largest norms to 0, and leaves the others as they are.

    For a leaf of shape ``(..., tokens, features)`` let $n_i$ be the L2 norm of the features of each
    token $i$, over all leading axes, and $n_{(k)}$ the k-th largest of them. Token $i$ becomes 0
    where $n_i \ge n_{(k)}$. Meant as an error clip on the outputs of a block, whose cotangent is 0
    for these tokens then.

    Guarantees:
      * Tokens below the k-th largest norm come back bit-identical; the others become exact zeros.
      * The statistics count tokens: ``changed`` those that were dropped and were not 0, ``size``
        all, ``nonfinite`` those with NaN or inf. Their norms are the norms of the elements.
      * Inside `jax.vmap` the tokens are the tokens of one example, inside `jax.shard_map` of one
        device, and otherwise of the whole batch.

    ============================  ======================================================
    tokens                        result
    ============================  ======================================================
    equal norms at the k-th       all of them become 0
    NaN or inf in a token         ranks above every finite token, and becomes 0
    no tokens                     unchanged
    ``k=0``, or traced, < 0       unchanged
    ``k`` traced, too large       all become 0
    ============================  ======================================================

    Args:
      k: how many tokens to drop from each leaf: an integer, or an array of one.
      axis: the axis or axes of the features.
      axis_name: the mapped axes that the features of a token are spread over; see `global_norm`.
        A token is whole along the axes that are not named; ``()`` if it is whole on its device.

    Raises:
      ValueError: for a negative ``k``; when called, for a leaf that lacks an axis, and for a leaf
        without more than ``k`` tokens, of which nothing would be left.
      TypeError: for a ``k`` that is not an integer, an array of one or a schedule.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> print(cg.DropTokens(k=1)(jnp.array([[3.0, 4.0], [0.3, 0.4], [30.0, 40.0]])))
      [[3.  4. ]
       [0.3 0.4]
       [0.  0. ]]

    References:
      AXLearn, gradient_monitor.py, 2026, https://github.com/apple/axlearn: ``top_k_clip_fn`` with
      ``method="topk"``, whose ``k`` is 4.
    """

    k: ArrayLike = 4
    _: dataclasses.KW_ONLY
    axis: int | tuple[int, ...] = static_field(default=-1)
    axis_name: AxisName = static_field(default=None)
    limits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_threshold("k", self.k)
        try:
            if not (isinstance(self.k, Tracer) or callable(self.k)):
                operator.index(np.asarray(self.k)[()])
        except TypeError:
            raise TypeError(
                f"k: got {self.k!r}, expected an integer, a number of tokens, or an array of one"
            ) from None
        object.__setattr__(self, "axis", check_axis(self.axis))
        if isinstance(self.axis_name, list):
            object.__setattr__(self, "axis_name", tuple(self.axis_name))

    @property
    def counted_over(self) -> Any:
        """The features: statistics count tokens."""
        return self.axis

    def measure(self, grads: Any, params: Any = None) -> list[Norm]:
        """The norm of each token."""
        leaves, paths = clippable_leaves(grads), clippable_paths(grads)
        warn_of_parts("DropTokens", leaves, self.axis_name, slices=True)
        axes = [reduced_axes(self.axis, *pair) for pair in zip(paths, leaves, strict=True)]
        norms = slice_norms(leaves, axes, axis_name=self.axis_name)
        for path, leaf, norm in zip(paths, leaves, norms, strict=True):
            tokens = norm.root.size
            if tokens and not isinstance(self.k, Tracer) and np.asarray(self.k) >= tokens:
                raise ValueError(
                    f"k: got {self.k} for {path or 'the leaf'} of shape {leaf.shape}, which has "
                    f"{tokens} tokens along the axes other than {self.axis}, expected a leaf of "
                    "shape (..., tokens, features) with more tokens than k"
                )
        return norms

    def scale(self, grads: Any, norms: Sequence[Norm]) -> Any:
        """The tree without the tokens of the largest norms."""
        return scale_each(_without_largest, grads, norms, [jnp.asarray(self.k)] * len(norms))


def _without_largest(leaf: jax.Array, norm: Norm, k: jax.Array) -> jax.Array:
    """The leaf with 0 for the tokens whose norm is not below the k-th largest."""
    if not leaf.size:
        return leaf
    # Infinite where it is not finite: a sort would put NaN where nothing compares with it.
    most = jnp.finfo(norm.root.dtype).max  # in place of norms that are too large for their dtype
    finite = jnp.isfinite(norm.root)
    size = jax.lax.stop_gradient(jnp.where(finite, jnp.minimum(norm.value, most), jnp.inf))
    flat = jnp.sort(on_every_device(size).ravel())
    place = jnp.clip(len(flat) - k.astype(jnp.int32), 0, len(flat) - 1)
    drops = (size >= flat[place]) & (k > 0)
    return jnp.where(broadcast_like(drops, leaf), jnp.zeros_like(leaf), leaf)
