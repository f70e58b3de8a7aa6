"""Gradient clips by name: each rule as an optax gradient transformation."""

import optax

from clipgrad._arrays import AxisName, Where, explain_call
from clipgrad._clip.gradient_clip import gradient_clip
from clipgrad._clip.nonfinite import NonFinite
from clipgrad._clip.rules import (
    AdaptiveClip,
    ClipByBlockRMS,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    ReducedAxes,
    UnitAxis,
)
from clipgrad._clip.state import KeptStats
from clipgrad._clip.thresholds import Number, Threshold

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
    """Limits each gradient element to [min, max]; ``optax.clip`` with a lower bound.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax
      >>> tx = optax.chain(cg.clip_by_value(1.0), optax.sgd(0.5))
      >>> tx.update(jnp.array([4.0, -0.5]), tx.init(jnp.zeros(2)))[0]
      Array([-0.5 ,  0.25], dtype=float32)

    Args:
      max: the upper bound: a number, an array, a schedule (a function of the step, as in
        optax), or an adaptive threshold such as `PercentileThreshold`.
      min: the lower bound, a number, an array or a schedule; ``None``: ``-max``.
      nan: the number that replaces NaN before the clip; ``None``: NaN stays.
      where: the leaves to clip: path patterns such as ``"kernel"``, ``"blocks/*/kernel"`` or
        ``"!head"`` (all but the head), a tree of booleans, or a function from the tree to such a
        tree; ``None``: all.
      nonfinite: the policy for NaN and inf. ``"propagate"``: the rule decides. ``"zero"``: they
        become 0 before the clip. ``"error"``: you get an error that names the leaves.
      stats: ``True``: the state has the last update's `ClipStats`, and counts steps.
        ``"per_leaf"``: the state also has a `ClipStats` for each leaf.

    Returns:
      A gradient transformation for ``optax.chain``: `gradient_clip` with `ClipByValue`.

    Raises:
      TypeError: for a bound that is not a number, an array, a schedule or, as ``max``, an adaptive
        threshold.
      ValueError: for a bound that is NaN, ``min`` above ``max``, a negative ``max`` without
        ``min``, and an unknown ``nonfinite`` or ``stats``; by ``init``, if ``where`` selects
        nothing; by ``update``, for a bound that would enlarge a leaf.
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
    """Scales each array in the gradient, or each slice of an array, down to a maximal norm.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> tx = cg.clip_by_norm(1.0)
      >>> tx.update([jnp.array([3.0, 4.0]), jnp.array([0.5])], tx.init(None))[0]
      [Array([0.6, 0.8], dtype=float32), Array([0.5], dtype=float32)]

    Args:
      max_norm: the maximal norm: a number, an array, a schedule (a function of the step, as
        in optax), or an adaptive threshold such as `PercentileThreshold`.
      ord: the order of the norm, a number in (0, inf]; by default 2. With
        ``optax.inject_hyperparams``, which traces every other number, name it in
        ``static_args``.
      axis: the axis or axes to sum over, such as ``-1`` for one norm per row; ``None``: one norm
        for the whole leaf.
      axis_name: the name or names of the `jax.shard_map`, `jax.pmap` or `jax.vmap` axes over which
        each leaf is spread, so that norms cover all devices. ``jax.P("x")`` says that every leaf is
        spread, even if JAX does not know this. You do not need this under `jax.jit`. Along axes
        that you do not name, a slice is whole; ``()`` says that each slice is whole on one device.
      where: the leaves to clip: path patterns such as ``"kernel"``, ``"blocks/*/kernel"`` or
        ``"!head"`` (all but the head), a tree of booleans, or a function from the tree to such a
        tree; ``None``: all.
      nonfinite: the policy for NaN and inf. ``"propagate"``: they stay, and make their group NaN.
        ``"zero"``: they become 0 before anything is measured. ``"error"``: you get an error that
        names the leaves.
      stats: ``True``: the state has the last update's `ClipStats`, and counts steps.
        ``"per_leaf"``: the state also has a `ClipStats` for each leaf.

    Returns:
      A gradient transformation for ``optax.chain``: `gradient_clip` with `ClipByNorm`.

    Raises:
      TypeError: for a threshold that is not a number, an array, a schedule or an adaptive
        threshold.
      ValueError: for a threshold that is negative or NaN, and for an unknown ``nonfinite`` or
        ``stats``; by ``init``, if ``where`` selects nothing.
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
    """Scales the whole gradient down to a maximal norm.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax
      >>> tx = optax.chain(cg.clip_by_global_norm(1.0), optax.sgd(1.0))
      >>> tx.update([jnp.array([3.0]), jnp.array([4.0])], tx.init(None))[0]
      [Array([-0.6], dtype=float32), Array([-0.8], dtype=float32)]

    Args:
      max_norm: the maximal norm: a number, an array, a schedule (a function of the step, as
        in optax), or an adaptive threshold such as `PercentileThreshold`.
      ord: the order of the norm, a number in (0, inf]; by default 2. With
        ``optax.inject_hyperparams``, which traces every other number, name it in
        ``static_args``.
      axis_name: the name or names of the `jax.shard_map`, `jax.pmap` or `jax.vmap` axes over which
        the updates are spread, so that norms cover all devices. ``jax.P("x")`` says that every leaf
        is spread, even if JAX does not know this. You do not need this under `jax.jit`.
      where: the leaves to clip: path patterns such as ``"kernel"``, ``"blocks/*/kernel"`` or
        ``"!head"`` (all but the head), a tree of booleans, or a function from the tree to such a
        tree; ``None``: all.
      nonfinite: the policy for NaN and inf. ``"propagate"``: they stay, and make their group NaN.
        ``"zero"``: they become 0 before anything is measured. ``"error"``: you get an error that
        names the leaves.
      stats: ``True``: the state has the last update's `ClipStats`, and counts steps.
        ``"per_leaf"``: the state also has a `ClipStats` for each leaf.

    Returns:
      A gradient transformation for ``optax.chain``: `gradient_clip` with `ClipByGlobalNorm`.

    Raises:
      TypeError: for a threshold that is not a number, an array, a schedule or an adaptive
        threshold.
      ValueError: for a threshold that is negative or NaN, and for an unknown ``nonfinite`` or
        ``stats``; by ``init``, if ``where`` selects nothing.

    A drop-in replacement for ``optax.clip_by_global_norm``, with the same state. On float32 trees
    in the ordinary range the updates are bit-identical, eagerly and under `jax.jit`. So is your
    whole compiled training with sgd, momentum, adam, adamw, rmsprop and lion, but not necessarily
    with adafactor if the clip acts. In half precision results differ, because squares are summed in
    float32.
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
    """Scales each array in the gradient down to a maximal root mean square.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> tx = cg.clip_by_block_rms(1.0)
      >>> tx.update(jnp.array([3.0, 3.0]), tx.init(None))[0]
      Array([1., 1.], dtype=float32)

    Args:
      threshold: the maximal root mean square: a number, an array, a schedule (a function of
        the step, as in optax), or an adaptive threshold such as `PercentileThreshold`.
      axis_name: the name or names of the `jax.shard_map`, `jax.pmap` or `jax.vmap` axes over which
        each leaf is spread, so that norms cover all devices. ``jax.P("x")`` says that every leaf is
        spread, even if JAX does not know this. You do not need this under `jax.jit`.
      where: the leaves to clip: path patterns such as ``"kernel"``, ``"blocks/*/kernel"`` or
        ``"!head"`` (all but the head), a tree of booleans, or a function from the tree to such a
        tree; ``None``: all.
      nonfinite: the policy for NaN and inf. ``"propagate"``: they stay, and make their group NaN.
        ``"zero"``: they become 0 before anything is measured. ``"error"``: you get an error that
        names the leaves.
      stats: ``True``: the state has the last update's `ClipStats`, and counts steps.
        ``"per_leaf"``: the state also has a `ClipStats` for each leaf.

    Returns:
      A gradient transformation for ``optax.chain``: `gradient_clip` with `ClipByBlockRMS`.

    Raises:
      TypeError: for a threshold that is not a number, an array, a schedule or an adaptive
        threshold.
      ValueError: for a threshold that is negative or NaN, and for an unknown ``nonfinite`` or
        ``stats``; by ``init``, if ``where`` selects nothing.
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
    """Scales each unit's gradient down, relative to the unit's weight norm (AGC).

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> tx = cg.adaptive_grad_clip(0.5)
      >>> params = jnp.array([[3.0], [4.0]])
      >>> tx.update(2 * params, tx.init(params), params)[0]
      Array([[1.5],
             [2. ]], dtype=float32)

    Args:
      clipping: the maximal ratio of gradient norm to weight norm: a number, an array, a
        schedule (a function of the step, as in optax), or an adaptive threshold such as
        `PercentileThreshold`.
      eps: the smallest weight norm, so that zero weights can train.
      axis: the axes that a unit spans. ``None``: all axes but the last if a leaf has rank 2 or more
        (a unit is all weights of one output), otherwise the whole leaf. Or an axis or several for
        all leaves, or a function ``(path, leaf) -> axes``: return ``-1`` for an embedding, so that
        a unit is one token's row.
      axis_name: the name or names of the `jax.shard_map`, `jax.pmap` or `jax.vmap` axes over which
        units are spread, so that norms cover all devices. ``jax.P("x")`` says that every leaf is
        spread, even if JAX does not know this. You do not need this under `jax.jit`. Along axes
        that you do not name, a unit is whole; ``()`` says that each unit is whole on one device.
      where: the leaves to clip: path patterns such as ``"kernel"``, ``"blocks/*/kernel"`` or
        ``"!head"`` (all but the head), a tree of booleans, or a function from the tree to such a
        tree; ``None``: all. Brock et al. leave out the last layer.
      nonfinite: the policy for NaN and inf. ``"propagate"``: they stay, and make their group NaN.
        ``"zero"``: they become 0 before anything is measured. ``"error"``: you get an error that
        names the leaves.
      stats: ``True``: the state has the last update's `ClipStats`, and counts steps.
        ``"per_leaf"``: the state also has a `ClipStats` for each leaf.

    Returns:
      A gradient transformation for ``optax.chain``: `gradient_clip` with `AdaptiveClip`.

    Raises:
      TypeError: for a threshold that is not a number, an array, a schedule or an adaptive
        threshold, or for another ``axis``.
      ValueError: for a threshold that is negative or NaN, and for an unknown ``nonfinite`` or
        ``stats``; by ``init``, if ``where`` selects nothing; by ``update``,
        without parameters.

    You must pass the parameters to ``update``. Unlike in ``optax.adaptive_grad_clip``, a unit is
    all weights of one output even in leaves of rank 3 or above 5, or with axes of size 1, and you
    can set the unit for each leaf by ``axis``.
    """
    rule = AdaptiveClip(clipping, eps, axis=axis, axis_name=axis_name)
    return gradient_clip(rule, where=where, nonfinite=nonfinite, stats=stats)
