"""Scaling each leaf to a maximal root mean square."""

from typing import Any, ClassVar

import jax
from jax.typing import ArrayLike

from clipgrad._norms import Norm, slice_norms
from clipgrad._numbers import over
from clipgrad._rules._base import ClipRule, pytree_rule
from clipgrad._rules._scaling import scale_down
from clipgrad._rules._thresholds import check_threshold, for_each_leaf, require_numbers
from clipgrad._trees import leaves_taking_part, map_groups


@pytree_rule
class ClipByBlockRMS(ClipRule):
    r"""Scales each leaf to a maximal rms: $g / \max(1, \mathrm{rms}(g) / \mathrm{threshold})$.

    Guarantees:
      * A leaf whose root mean square is at most ``threshold`` is unchanged, bit for bit.
      * Otherwise its rms becomes ``threshold``, up to a relative 4e-7 in float32, and its
        direction is kept.
      * On float32 leaves in the ordinary range the result is that of
        ``optax.clip_by_block_rms`` under `jax.jit`, bit for bit.

    ==========================  ==========================================================
    rms or threshold            result
    ==========================  ==========================================================
    rms 0, empty leaf           unchanged, with finite derivatives
    ``threshold=0``             exact zeros
    ``threshold`` traced, < 0   acts as 0
    NaN or inf in a leaf        NaN throughout that leaf
    ==========================  ==========================================================

    Args:
      threshold: the maximal root mean square, a number.

    Raises:
      ValueError: for a threshold that is negative or NaN.
      TypeError: for a threshold that is no number, array or schedule.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> cg.ClipByBlockRMS(1.0)([jnp.array([3.0, 3.0]), jnp.array([0.5, 0.5])])
      [Array([1., 1.], dtype=float32), Array([0.5, 0.5], dtype=float32)]

    References:
      Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018.
    """

    threshold: ArrayLike
    needs_params: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuses thresholds that are none."""
        check_threshold("threshold", self.threshold, adaptive=True)

    def __call__(self, grads: Any, params: Any = None) -> Any:
        """The tree with the rms of each leaf at most ``threshold``."""
        require_numbers(self)
        return map_groups(self._clip, grads)

    def follow(self, grads: Any, params: Any = None) -> list[jax.Array]:
        """For each leaf the least threshold that changes nothing."""
        return [norm.value for norm in _norms(leaves_taking_part(grads))]

    def _clip(self, paths: list[str], leaves: list[jax.Array]) -> list[jax.Array]:
        del paths
        triples = zip(leaves, _norms(leaves), for_each_leaf(self, len(leaves)), strict=True)
        return [scale_down(g, n, rule.threshold, _shrink) for g, n, rule in triples]


def _norms(leaves: list[jax.Array]) -> list[Norm]:
    return slice_norms(leaves, [None] * len(leaves), mean=True)


def _shrink(leaf: jax.Array, root: jax.Array, limit: jax.Array) -> jax.Array:
    return over(leaf, root / limit)
