"""Scaling a whole tree to a maximal norm."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from clipgrad._arrays import (
    AxisName,
    Norm,
    check_order,
    clippable_leaves,
    tree_norm,
    warn_of_parts,
)
from clipgrad._clip.limits import limit_of
from clipgrad._clip.rules.measuring_rule import Limit, MeasuringRule
from clipgrad._clip.rules.rule_fields import pytree_rule, static, threshold
from clipgrad._clip.thresholds import Threshold


@pytree_rule
class ClipByGlobalNorm(MeasuringRule):
    r"""Scales a whole gradient down to a maximal norm.

    The norm is `global_norm`, in which all leaves count as one vector.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> cg.ClipByGlobalNorm(1.0)({"b": jnp.array([3.0]), "w": jnp.array([4.0])})
      {'b': Array([0.6], dtype=float32), 'w': Array([0.8], dtype=float32)}

    Args:
      max_norm: the maximal norm: a number; before the optimizer also a schedule or an
        adaptive threshold.
      ord: the order $p$ of the norm, a number in (0, inf]; by default 2, the Euclidean norm.
      axis_name: the name or names of the `jax.shard_map`, `jax.pmap` or `jax.vmap` axes over which
        the tree is spread, so that norms cover all devices. ``jax.P("x")`` says that every leaf is
        spread, even if JAX does not know this. You do not need this under `jax.jit`.

    Raises:
      ValueError: for a threshold that is negative or NaN, for an ``ord`` out of range; when
        called, for an ``axis_name`` that is not a mapped axis.
      TypeError: for a threshold that is not a number, array or schedule.

    Each leaf becomes $g \cdot \min(1, \mathrm{max\_norm} / n)$, where $n$ is the norm of the tree.

    ==========================  ==========================================================
    norm or threshold           result
    ==========================  ==========================================================
    norm 0, empty tree          unchanged, with finite derivatives
    ``max_norm=0``              exact zeros
    ``max_norm`` traced, < 0    acts as 0
    NaN or inf in any leaf      NaN throughout the tree
    ==========================  ==========================================================

    Guarantees:
      * A tree whose norm is at most ``max_norm`` comes back bit-identical.
      * Otherwise the norm becomes ``max_norm``, up to a relative 4e-7 in float32, and the direction
        is kept.
      * On float32 trees in the ordinary range the result is bit-identical to
        ``optax.clip_by_global_norm``, eagerly and under `jax.jit`. In half precision results
        differ: optax rounds squares and sums to half precision, and this rule keeps both in
        float32.
      * Under `jax.jit` with sharded leaves the compiled program has one all-reduce; more only if
        leaves are spread over different mesh axes.

    References:
      Pascanu, Mikolov and Bengio, On the Difficulty of Training Recurrent Neural Networks, 2013,
      https://arxiv.org/abs/1211.5063.
    """

    max_norm: Threshold = dataclasses.field(metadata=threshold(main=True, adaptive=True))
    _: dataclasses.KW_ONLY
    ord: float = dataclasses.field(default=2, metadata=static(check_order))
    axis_name: AxisName = dataclasses.field(default=None, metadata=static())
    acts_on = "tree"

    def measure(self, grads: Any, params: Any = None) -> list[Norm]:
        """The norm of the whole tree."""
        return self._norms(grads)

    def _measure_and_count(self, grads: Any, params: Any = None) -> list[Norm]:
        return self._norms(grads, counts=True)

    def _norms(self, grads: Any, counts: bool = False) -> list[Norm]:
        warn_of_parts("ClipByGlobalNorm", clippable_leaves(grads), self.axis_name)
        return [tree_norm(grads, self.ord, self.axis_name, counts)]

    def norms_and_limits(self, norms: Sequence[Norm]) -> list[Limit]:
        """The norm of the tree, and ``max_norm``."""
        return [(norm, limit_of(self.max_norm, norm)) for norm in norms]
