"""Gradient clipping with the arguments and the adaptive rule of MosaicML Composer."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from clipgrad._arrays import (
    check_leaves,
    check_tree,
    explain_call,
    map_clippable,
    shown,
    times,
    with_real_dtype,
)
from clipgrad._clip.any_rule import apply_rule, check_no_pairs
from clipgrad._clip.limits import limit_of
from clipgrad._clip.rules import (
    ClipByGlobalNorm,
    ClipByValue,
    UnitAxis,
    check_unit_axis,
    unit_axes,
    unit_norms,
)
from clipgrad._clip.thresholds import check_threshold, is_adaptive

ClippingType = Literal["norm", "value", "adaptive"]


@explain_call(
    "write the others by name, as in apply_gradient_clipping(grads, params, "
    'clipping_type="norm", clipping_threshold=0.1); the parameters are for "adaptive"'
)
def apply_gradient_clipping(
    grads: Any,
    params: Any = None,
    *,
    clipping_type: ClippingType,
    clipping_threshold: ArrayLike,
    axis: UnitAxis = None,
) -> Any:
    r"""Clips gradients as Composer's function of this name does.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> grads, params = jnp.array([7.0, 24.0]), jnp.array([3.0, 4.0])
      >>> cg.published.apply_gradient_clipping(
      ...     grads, params, clipping_type="adaptive", clipping_threshold=0.5)
      Array([0.7, 2.4], dtype=float32)
      >>> composers = lambda path, w: tuple(range(1, w.ndim)) if w.ndim > 1 else None
      >>> grads, params = jnp.array([[7.0, 24.0], [5.0, 12.0]]), jnp.array([[3.0, 4], [9, 40]])
      >>> cg.published.apply_gradient_clipping(    # a row is a unit
      ...     grads, params, clipping_type="adaptive", clipping_threshold=0.5, axis=composers)
      Array([[ 0.7,  2.4],
             [ 5. , 12. ]], dtype=float32)

    Args:
      grads: a pytree of gradients.
      params: the parameters, for ``"adaptive"``.
      clipping_type: ``"norm"``, ``"value"`` or ``"adaptive"``.
      clipping_threshold: the threshold, not negative.
      axis: the axes that a unit spans, for ``"adaptive"``. ``None``: all axes but the last if a
        leaf has rank 2 or more, as JAX lays out weights. Or an axis or several for all leaves, or a
        function ``(path, leaf) -> axes``: for weights in PyTorch's layout return all axes but the
        first.

    Returns:
      The clipped gradients, with the structure, shapes and dtypes of ``grads``.

    Raises:
      ValueError: for an unknown ``clipping_type``, a threshold that is negative or NaN, ``axis``
        without ``"adaptive"``, and ``"adaptive"`` without ``params``, with parameters of another
        structure or shape, or an ``axis`` that a leaf does not have or that selects no leaf.
      TypeError: for a threshold that is not a number, or another ``axis``.

    ==============  ======================================================================
    clipping_type   rule
    ==============  ======================================================================
    ``"norm"``      `ClipByGlobalNorm`
    ``"value"``     `ClipByValue` with [-threshold, threshold]
    ``"adaptive"``  $g \cdot \min(1, \mathrm{threshold} \cdot \|w\| / \|g\|)$ by unit
    ==============  ======================================================================

    The adaptive formula is Composer's, not `AdaptiveClip`'s. There is no smallest weight norm, so
    zero weights get zero gradients. A NaN ratio counts as 1, so one NaN does not change the other
    elements of the unit. By default units are those of `AdaptiveClip`, for JAX layouts, in which
    outputs are the last axis. In PyTorch's layout, which Composer's weights have, outputs are the
    first axis: set ``axis`` then, as in the second example.

    References:
      Brock, De, Smith and Simonyan, High-Performance Large-Scale Image Recognition Without
      Normalization, 2021, https://arxiv.org/abs/2102.06171; MosaicML, Composer: Gradient Clipping,
      2022,
      https://github.com/mosaicml/composer/blob/1a02ed120f2b90e58a4ba6a208f05901e8294cfb/composer/algorithms/gradient_clipping/README.md.
    """
    _check_composers(clipping_type, clipping_threshold, axis)
    if isinstance(params, str):
        raise TypeError(f"params: got {params!r}, expected the parameters; write clipping_type=")
    check_tree("grads", grads)
    check_leaves("grads", grads)
    check_no_pairs(grads, params)
    if clipping_type == "adaptive":
        return _adaptive(grads, params, clipping_threshold, axis)
    rule = ClipByGlobalNorm if clipping_type == "norm" else ClipByValue
    return apply_rule(rule(clipping_threshold), grads)


@explain_call()
def gradient_clipping(
    clipping_type: ClippingType, clipping_threshold: ArrayLike, *, axis: UnitAxis = None
) -> optax.GradientTransformationExtraArgs:
    """Composer's algorithm of this name, as a gradient transformation.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax
      >>> tx = optax.chain(cg.published.gradient_clipping("norm", 0.5), optax.sgd(1.0))
      >>> params = jnp.zeros(2)
      >>> tx.update(jnp.array([3.0, 4.0]), tx.init(params), params)[0]
      Array([-0.3, -0.4], dtype=float32)

    Args:
      clipping_type: ``"norm"``, ``"value"`` or ``"adaptive"``, whose ``update`` needs the
        parameters.
      clipping_threshold: the threshold, not negative.
      axis: the axes that a unit spans, for ``"adaptive"``. ``None``: all axes but the last if a
        leaf has rank 2 or more, as JAX lays out weights. Or an axis or several for all leaves, or a
        function ``(path, leaf) -> axes``: for weights in PyTorch's layout return all axes but the
        first.

    Returns:
      A gradient transformation.

    Raises:
      TypeError, ValueError: as `apply_gradient_clipping`.

    Each update is clipped by `apply_gradient_clipping`. In Composer you pass the algorithm to the
    trainer, which clips before the optimizer step; here you put the clip before the optimizer in
    ``optax.chain``.

    Guarantees:
      * The state is `optax.EmptyState`, as for optax's clips.
      * Structure, shapes and dtypes of the updates are kept.

    References:
      MosaicML, Composer: Gradient Clipping, 2022,
      https://github.com/mosaicml/composer/blob/1a02ed120f2b90e58a4ba6a208f05901e8294cfb/composer/algorithms/gradient_clipping/README.md.
    """
    _check_composers(clipping_type, clipping_threshold, axis)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        del extra_args
        clipped = apply_gradient_clipping(
            updates,
            params,
            clipping_type=clipping_type,
            clipping_threshold=clipping_threshold,
            axis=axis,
        )
        return clipped, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _check_composers(clipping_type: Any, clipping_threshold: Any, axis: Any) -> None:
    """Raises an error for arguments that no clip of Composer has."""
    if callable(clipping_threshold) or is_adaptive(clipping_threshold):
        raise TypeError(
            f"clipping_threshold: got {clipping_threshold!r}, expected a number or an array, such "
            "as schedule(step); for schedules and adaptive thresholds write clipgrad.gradient_clip"
        )
    types = get_args(ClippingType)
    if not isinstance(clipping_type, str) or clipping_type not in types:
        raise ValueError(
            f"clipping_type: got {shown(clipping_type)}, expected one of {', '.join(types)}"
        )
    check_threshold("clipping_threshold", clipping_threshold)
    if axis is not None and clipping_type != "adaptive":
        raise ValueError(
            f"axis: got {axis!r} with clipping_type={clipping_type!r}, which has no units; "
            "expected axis to be left out, or clipping_type='adaptive'"
        )
    check_unit_axis("axis", axis)


def _adaptive(grads: Any, params: Any, threshold: ArrayLike, axis: Any) -> Any:
    if params is None:
        raise ValueError(
            "params: got None, expected the parameters for clipping_type='adaptive'; of a "
            "transformation write update(grads, state, params)"
        )
    parts = [
        (norm.value, limit_of(threshold, norm) * weight.value.astype(norm.root.dtype))
        for norm, weight in unit_norms(grads, params, unit_axes(axis, grads))
    ]

    def scaled(leaf: jax.Array, part: tuple[jax.Array, jax.Array]) -> jax.Array:
        norm, limit = part
        ratio = limit / jnp.where(norm == 0, 1, norm)
        factor = jnp.minimum(jnp.where(jnp.isnan(ratio) | (norm == 0), 1, ratio), 1)
        return times(with_real_dtype(leaf, norm.dtype.name), factor).astype(leaf.dtype)

    return map_clippable(scaled, grads, parts)
