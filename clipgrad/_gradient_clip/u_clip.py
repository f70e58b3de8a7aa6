"""U-Clip: what a clip cuts off is not lost, but added to the next gradient."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from clipgrad._compat import exportable
from clipgrad._gradient_clip.gradient_clip import gradient_clip
from clipgrad._gradient_clip.skip_spikes import as_optimizer
from clipgrad._numerics import at_least_float32
from clipgrad._trees import check_leaves, clippable_paths, combine, is_clippable, partition


@exportable
class UClipState(NamedTuple):
    """The state of `u_clip`.

    Attributes:
      carry: what was cut off so far and not yet handed on, like the parameters, in float32 or
        wider; ``None`` for leaves that are not clipped.
      clip: the state of the clip.
    """

    carry: Any
    clip: Any


def u_clip(
    clip: Callable[..., Any] | optax.GradientTransformation | None,
) -> optax.GradientTransformationExtraArgs:
    r"""Clips each gradient plus what was cut off before: unbiased on average.

    $$u_t = \mathrm{clip}(g_t + \Delta_t), \quad \Delta_{t+1} = g_t + \Delta_t - u_t, \quad
    \Delta_1 = 0$$

    So $\sum_t u_t = \sum_t g_t - \Delta_{T+1}$: a clip alone loses a part of each large gradient,
    and its updates are biased; here the part follows in later steps.

    Guarantees:
      * Each update is within the limits of the clip, and keeps structure, shapes and dtypes.
      * What is cut off is kept in float32 or wider, and includes the rounding of updates in a
        narrower dtype.
      * Where NaN or inf arrives, or the clip returns it, the carry does not change: one bad step
        is seen by what follows in the chain, and not by later steps.

    Args:
      clip: a clip rule, or a transformation that clips, such as ``clip_by_norm(1.0, where="w")``;
        ``None``: off.

    Returns:
      A gradient transformation whose state is a `UClipState`: one more copy of the parameters.
      ``update(..., grad_norm=n)`` is not passed on to the clip, which measures something else.

    Raises:
      TypeError: if ``clip`` is neither a rule, a function nor a gradient transformation.
      ValueError: by ``update``, for a state of other parameters, and each error of the clip.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> tx = cg.u_clip(cg.ClipByValue(1.0))
      >>> state = tx.init(jnp.zeros(2))
      >>> for grads in (jnp.array([2.5, 0.5]), jnp.zeros(2), jnp.zeros(2)):
      ...     updates, state = tx.update(grads, state)
      ...     print(updates, state.carry)
      [1.  0.5] [1.5 0. ]
      [1. 0.] [0.5 0. ]
      [0.5 0. ] [0. 0.]

    References:
      Elesedy and Hutter, U-Clip: On-Average Unbiased Stochastic Gradient Clipping, 2023,
      https://arxiv.org/abs/2302.02971.
    """
    is_transformation = isinstance(clip, optax.GradientTransformation | optax.MultiSteps)
    inner = as_optimizer("clip", clip if is_transformation else gradient_clip(clip))

    def init(params: Any) -> UClipState:
        zeros = jax.tree.map(
            lambda p: jnp.zeros_like(p, dtype=at_least_float32(jnp.result_type(p))),
            partition(params, is_clippable)[0],
        )
        return UClipState(zeros, inner.init(params))

    def update(
        updates: Any, state: Any, params: Any = None, *, grad_norm: Any = None, **extra: Any
    ) -> tuple[Any, UClipState]:
        del grad_norm
        check_leaves("updates", updates)
        chosen, rest = partition(updates, is_clippable)
        _check_carry(chosen, state)
        total = jax.tree.map(_plus, chosen, state.carry)
        clipped, inner_state = inner.update(combine(total, rest), state.clip, params, **extra)
        result, _ = partition(clipped, is_clippable)
        result = jax.tree.map(lambda u, g: u.astype(jnp.result_type(g)), result, chosen)
        carry = jax.tree.map(_cut_off, total, result, state.carry)
        return combine(result, rest), UClipState(carry, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _plus(gradient: Any, carry: jax.Array) -> jax.Array:
    dtype = at_least_float32(jnp.result_type(gradient))
    return jnp.asarray(gradient).astype(dtype) + carry.astype(dtype)


def _cut_off(total: jax.Array, result: jax.Array, before: jax.Array) -> jax.Array:
    rest = (total - result.astype(total.dtype)).astype(before.dtype)
    return jnp.where(jnp.isfinite(rest), rest, before)


def _check_carry(chosen: Any, state: Any) -> None:
    """Raises `ValueError` for a state that belongs to other parameters."""
    carry = state.carry if isinstance(state, UClipState) else None
    ours, theirs = ([jnp.shape(x) for x in jax.tree.leaves(tree)] for tree in (chosen, carry))
    if jax.tree.structure(chosen) != jax.tree.structure(carry) or ours != theirs:
        raise ValueError(
            f"state: got a carry for the leaves {clippable_paths(carry)} of shapes {theirs}, "
            f"expected {clippable_paths(chosen)} of shapes {ours}: the state of init(params) for "
            "the same parameters"
        )
