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
    """Limits each element of the gradient to [min, max]; ``optax.clip`` with a lower bound.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax
      >>> tx = optax.chain(cg.clip_by_value(1.0), optax.sgd(0.5))
      >>> tx.update(jnp.array([4.0, -0.5]), tx.init(jnp.zeros(2)))[0]
      Array([-0.5 ,  0.25], dtype=float32)

    Args:
      max: the upper bound: a number, an array, a schedule (a function of the step, as in
        optax), or an adaptive threshold such as `PercentileThreshold`.
      min: the lower bound, without adaptive thresholds; ``None``: ``-max``.
      nan: the number that replaces NaN before the clip; ``None`` lets NaN through.
      where: which leaves are clipped: patterns of their paths, such as ``"kernel"``,
        ``"blocks/*/kernel"`` or ``"!head"`` for all but the head; a tree of booleans; or a
        function from the tree to one. ``None``: all.
      nonfinite: what NaN and inf do: ``"propagate"``: the rule decides; ``"zero"``: become 0
        before anything is clipped; ``"error"``: raise an error that names the leaves.
      stats: ``True``: the state keeps a `ClipStats` of the last update and counts of steps;
        ``"per_leaf"``: also a `ClipStats` of each leaf.

    Returns:
      A gradient transformation for ``optax.chain``, `gradient_clip` of `ClipByValue`.

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
    """Scales each array of the gradient, or each slice of it, down to a maximal norm.

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
      axis: the axis or axes that a norm is over, such as ``-1`` for a norm of each row;
        ``None``: one norm of the whole leaf.
      axis_name: the axes of `jax.shard_map`, `jax.pmap` or `jax.vmap` that each leaf is
        spread over, a name or several, so that norms are of all devices together;
        ``jax.P("x")``: each leaf is, also one that JAX does not know to differ between
        devices; not needed under `jax.jit`. A slice is whole along the axes that you do not
        name; ``()`` if it is whole on its device.
      where: which leaves are clipped: patterns of their paths, such as ``"kernel"``,
        ``"blocks/*/kernel"`` or ``"!head"`` for all but the head; a tree of booleans; or a
        function from the tree to one. ``None``: all.
      nonfinite: what NaN and inf do: ``"propagate"``: stay, and make their group NaN;
        ``"zero"``: become 0 before anything is measured; ``"error"``: raise an error that
        names the leaves.
      stats: ``True``: the state keeps a `ClipStats` of the last update and counts of steps;
        ``"per_leaf"``: also a `ClipStats` of each leaf.

    Returns:
      A gradient transformation for ``optax.chain``, `gradient_clip` of `ClipByNorm`.

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
      axis_name: the axes of `jax.shard_map`, `jax.pmap` or `jax.vmap` that the updates are
        spread over, a name or several, so that norms are of all devices together;
        ``jax.P("x")``: each leaf is, also one that JAX does not know to differ between
        devices; not needed under `jax.jit`.
      where: which leaves are clipped: patterns of their paths, such as ``"kernel"``,
        ``"blocks/*/kernel"`` or ``"!head"`` for all but the head; a tree of booleans; or a
        function from the tree to one. ``None``: all.
      nonfinite: what NaN and inf do: ``"propagate"``: stay, and make their group NaN;
        ``"zero"``: become 0 before anything is measured; ``"error"``: raise an error that
        names the leaves.
      stats: ``True``: the state keeps a `ClipStats` of the last update and counts of steps;
        ``"per_leaf"``: also a `ClipStats` of each leaf.

    Returns:
      A gradient transformation for ``optax.chain``, `gradient_clip` of `ClipByGlobalNorm`.

    Raises:
      TypeError: for a threshold that is not a number, an array, a schedule or an adaptive
        threshold.
      ValueError: for a threshold that is negative or NaN, and for an unknown ``nonfinite`` or
        ``stats``; by ``init``, if ``where`` selects nothing.

    A drop-in replacement of ``optax.clip_by_global_norm``, with the same state. On float32 trees
    in the ordinary range the updates are bit-identical, eagerly and under `jax.jit`. So are whole
    compiled trainings with sgd, momentum, adam, adamw, rmsprop and lion; this is not promised with
    adafactor if the clip acts. In half precision the results differ, because squares are summed in
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
    """Scales each array of the gradient down to a maximal root mean square.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> tx = cg.clip_by_block_rms(1.0)
      >>> tx.update(jnp.array([3.0, 3.0]), tx.init(None))[0]
      Array([1., 1.], dtype=float32)

    Args:
      threshold: the maximal root mean square: a number, an array, a schedule (a function of
        the step, as in optax), or an adaptive threshold such as `PercentileThreshold`.
      axis_name: the axes of `jax.shard_map`, `jax.pmap` or `jax.vmap` that each leaf is
        spread over, a name or several, so that norms are of all devices together;
        ``jax.P("x")``: each leaf is, also one that JAX does not know to differ between
        devices; not needed under `jax.jit`.
      where: which leaves are clipped: patterns of their paths, such as ``"kernel"``,
        ``"blocks/*/kernel"`` or ``"!head"`` for all but the head; a tree of booleans; or a
        function from the tree to one. ``None``: all.
      nonfinite: what NaN and inf do: ``"propagate"``: stay, and make their group NaN;
        ``"zero"``: become 0 before anything is measured; ``"error"``: raise an error that
        names the leaves.
      stats: ``True``: the state keeps a `ClipStats` of the last update and counts of steps;
        ``"per_leaf"``: also a `ClipStats` of each leaf.

    Returns:
      A gradient transformation for ``optax.chain``, `gradient_clip` of `ClipByBlockRMS`.

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
    """Scales the gradient of each unit down to a part of its weights' norm (AGC).

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
      eps: the least weight norm that counts, so that weights of 0 can train.
      axis: the axes that a unit spans. ``None``: all but the last of leaves of rank 2 and
        more, the weights of one output; a whole vector. Else an axis or several for all
        leaves, or a function ``(path, leaf) -> axes``: ``-1`` for an embedding, so that a
        unit is the row of a token.
      axis_name: the axes of `jax.shard_map`, `jax.pmap` or `jax.vmap` that units are spread
        over, a name or several, so that norms are of all devices together; ``jax.P("x")``:
        each leaf is, also one that JAX does not know to differ between devices; not needed
        under `jax.jit`. A unit is whole along the axes that you do not name; ``()`` if it is
        whole on its device.
      where: which leaves are clipped: patterns of their paths, such as ``"kernel"``,
        ``"blocks/*/kernel"`` or ``"!head"`` for all but the head; a tree of booleans; or a
        function from the tree to one. ``None``: all. Brock et al. leave out the last layer.
      nonfinite: what NaN and inf do: ``"propagate"``: stay, and make their group NaN;
        ``"zero"``: become 0 before anything is measured; ``"error"``: raise an error that
        names the leaves.
      stats: ``True``: the state keeps a `ClipStats` of the last update and counts of steps;
        ``"per_leaf"``: also a `ClipStats` of each leaf.

    Returns:
      A gradient transformation for ``optax.chain``, `gradient_clip` of `AdaptiveClip`.

    Raises:
      TypeError: for a threshold that is not a number, an array, a schedule or an adaptive
        threshold, or another
        ``axis``.
      ValueError: for a threshold that is negative or NaN, and for an unknown ``nonfinite`` or
        ``stats``; by ``init``, if ``where`` selects nothing; by ``update``,
        without parameters.

    ``update`` needs the parameters. Unlike in ``optax.adaptive_grad_clip``, a unit is the weights
    of one output also in leaves of rank 3, of rank above 5 and with axes of size 1, and ``axis``
    can set the unit of each leaf.
    """
    rule = AdaptiveClip(clipping, eps, axis=axis, axis_name=axis_name)
    return gradient_clip(rule, where=where, nonfinite=nonfinite, stats=stats)
