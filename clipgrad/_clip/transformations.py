"""Gradient clips by name: each rule as an optax gradient transformation."""

import optax

from clipgrad._arrays import AxisName, Where, explain_call
from clipgrad._clip.adaptive import AdaptiveClip
from clipgrad._clip.block_rms import ClipByBlockRMS
from clipgrad._clip.global_norm import ClipByGlobalNorm
from clipgrad._clip.gradient_clip import gradient_clip
from clipgrad._clip.nonfinite import NonFinite
from clipgrad._clip.norm import ClipByNorm
from clipgrad._clip.state import KeptStats
from clipgrad._clip.thresholds import Number, Threshold
from clipgrad._clip.units import ReducedAxes, UnitAxis
from clipgrad._clip.value import ClipByValue

Transformation = optax.GradientTransformationExtraArgs


@explain_call()
def clip_by_value(
    max: Threshold,
    min: Number | None = None,
    *,
    nan: Number | None = None,
    where: Where = None,
    nonfinite: NonFinite = "propagate",
    stats: KeptStats = False,
) -> Transformation:
    """`gradient_clip` of `ClipByValue`: each element into [min, max]; ``optax.clip`` has -max.

    Args:
      max: the upper bound.
      min: the lower bound; ``None`` means ``-max``.
      nan: the number that replaces NaN before the clip; ``None`` lets NaN through.
      where: which leaves are clipped; see `gradient_clip`.
      nonfinite: the policy for NaN and inf; see `gradient_clip`.
      stats: the statistics that the state keeps; see `gradient_clip`.

    Returns:
      A gradient transformation.

    Raises:
      TypeError, ValueError: as `ClipByValue` and `gradient_clip`.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax
      >>> tx = optax.chain(cg.clip_by_value(1.0), optax.sgd(0.5))
      >>> tx.update(jnp.array([4.0, -0.5]), tx.init(jnp.zeros(2)))[0]
      Array([-0.5 ,  0.25], dtype=float32)
    """
    rule = ClipByValue(max, min, nan=nan)
    return gradient_clip(rule, where=where, nonfinite=nonfinite, stats=stats)


@explain_call()
def clip_by_norm(
    max_norm: Threshold,
    ord: float | None = None,
    axis: ReducedAxes = None,
    *,
    axis_name: AxisName = None,
    where: Where = None,
    nonfinite: NonFinite = "propagate",
    stats: KeptStats = False,
) -> Transformation:
    """`gradient_clip` of `ClipByNorm`: each leaf, or slice, down to a maximal norm.

    Args:
      max_norm: the maximal norm.
      ord: the order of the norm, by default 2. A number that you give must be named in the
        ``static_args`` of ``optax.inject_hyperparams``, which traces every other number.
      axis: the axis or axes that norms are over; ``None``: all.
      axis_name: the mapped axes that each leaf is spread over; see `global_norm`.
      where: which leaves are clipped; see `gradient_clip`.
      nonfinite: the policy for NaN and inf; see `gradient_clip`.
      stats: the statistics that the state keeps; see `gradient_clip`.

    Returns:
      A gradient transformation.

    Raises:
      TypeError, ValueError: as `ClipByNorm` and `gradient_clip`.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> tx = cg.clip_by_norm(1.0)
      >>> tx.update([jnp.array([3.0, 4.0]), jnp.array([0.5])], tx.init(None))[0]
      [Array([0.6, 0.8], dtype=float32), Array([0.5], dtype=float32)]
    """
    order = 2 if ord is None else ord
    rule = ClipByNorm(max_norm, ord=order, axis=axis, axis_name=axis_name)
    return gradient_clip(rule, where=where, nonfinite=nonfinite, stats=stats)


@explain_call()
def clip_by_global_norm(
    max_norm: Threshold,
    ord: float | None = None,
    axis_name: AxisName = None,
    *,
    where: Where = None,
    nonfinite: NonFinite = "propagate",
    stats: KeptStats = False,
) -> Transformation:
    """`gradient_clip` of `ClipByGlobalNorm`: all leaves by one factor, down to a maximal norm.

    A drop-in replacement of ``optax.clip_by_global_norm``, with the same state. On float32 trees
    in the ordinary range the updates are bit-identical, eagerly and under `jax.jit`. So are whole
    compiled trainings with sgd, momentum, adam, adamw, rmsprop and lion; this is not promised with
    adafactor if the clip acts. In half precision the results differ, because squares are summed in
    float32.

    Args:
      max_norm: the maximal norm.
      ord: the order of the norm, by default 2; see `clip_by_norm`.
      axis_name: the mapped axes that the updates are spread over; see `global_norm`.
      where: which leaves are clipped; see `gradient_clip`.
      nonfinite: the policy for NaN and inf; see `gradient_clip`.
      stats: the statistics that the state keeps; see `gradient_clip`.

    Returns:
      A gradient transformation.

    Raises:
      TypeError, ValueError: as `ClipByGlobalNorm` and `gradient_clip`.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax
      >>> tx = optax.chain(cg.clip_by_global_norm(1.0), optax.sgd(1.0))
      >>> tx.update([jnp.array([3.0]), jnp.array([4.0])], tx.init(None))[0]
      [Array([-0.6], dtype=float32), Array([-0.8], dtype=float32)]
    """
    order = 2 if ord is None else ord
    rule = ClipByGlobalNorm(max_norm, ord=order, axis_name=axis_name)
    return gradient_clip(rule, where=where, nonfinite=nonfinite, stats=stats)


@explain_call()
def clip_by_block_rms(
    threshold: Threshold,
    *,
    axis_name: AxisName = None,
    where: Where = None,
    nonfinite: NonFinite = "propagate",
    stats: KeptStats = False,
) -> Transformation:
    """`gradient_clip` of `ClipByBlockRMS`: each leaf down to a maximal root mean square.

    Args:
      threshold: the maximal root mean square.
      axis_name: the mapped axes that each leaf is spread over; see `global_norm`.
      where: which leaves are clipped; see `gradient_clip`.
      nonfinite: the policy for NaN and inf; see `gradient_clip`.
      stats: the statistics that the state keeps; see `gradient_clip`.

    Returns:
      A gradient transformation.

    Raises:
      TypeError, ValueError: as `ClipByBlockRMS` and `gradient_clip`.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> tx = cg.clip_by_block_rms(1.0)
      >>> tx.update(jnp.array([3.0, 3.0]), tx.init(None))[0]
      Array([1., 1.], dtype=float32)
    """
    rule = ClipByBlockRMS(threshold, axis_name=axis_name)
    return gradient_clip(rule, where=where, nonfinite=nonfinite, stats=stats)


@explain_call()
def adaptive_grad_clip(
    clipping: Threshold = 0.01,
    eps: Number = 1e-3,
    axis: UnitAxis = None,
    *,
    axis_name: AxisName = None,
    where: Where = None,
    nonfinite: NonFinite = "propagate",
    stats: KeptStats = False,
) -> Transformation:
    """`gradient_clip` of `AdaptiveClip` (AGC): each unit down to a part of its weights' norm.

    ``update`` needs the parameters. Unlike in ``optax.adaptive_grad_clip``, a unit is the weights
    of one output also in leaves of rank 3, of rank above 5 and with axes of size 1, and ``axis``
    can set the unit of each leaf.

    Args:
      clipping: the maximal ratio of gradient norm to weight norm.
      eps: the least weight norm.
      axis: the axes that a unit spans; see `AdaptiveClip`.
      axis_name: the mapped axes over which units are spread; see `global_norm`.
      where: which leaves are clipped; see `gradient_clip`. Brock et al. leave
        out the last layer.
      nonfinite: the policy for NaN and inf; see `gradient_clip`.
      stats: the statistics that the state keeps; see `gradient_clip`.

    Returns:
      A gradient transformation.

    Raises:
      TypeError, ValueError: as `AdaptiveClip` and `gradient_clip`.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> tx = cg.adaptive_grad_clip(0.5)
      >>> params = jnp.array([[3.0], [4.0]])
      >>> tx.update(2 * params, tx.init(params), params)[0]
      Array([[1.5],
             [2. ]], dtype=float32)
    """
    rule = AdaptiveClip(clipping, eps, axis=axis, axis_name=axis_name)
    return gradient_clip(rule, where=where, nonfinite=nonfinite, stats=stats)
