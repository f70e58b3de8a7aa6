"""Gradient clipping with the arguments and the adaptive rule of MosaicML Composer."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from clipgrad._norms import slice_norms
from clipgrad._numbers import times, widen
from clipgrad._rules import ClipByGlobalNorm, ClipByValue, apply_rule
from clipgrad._rules._thresholds import check_threshold, nonnegative
from clipgrad._trees import leaves_taking_part, map_taking_part, parameters_of

TYPES = ("norm", "value", "adaptive")


def apply_gradient_clipping(
    grads: Any, params: Any = None, *, clipping_type: str, clipping_threshold: ArrayLike
) -> Any:
    r"""Clips gradients as Composer's function of this name does.

    ==============  ======================================================================
    clipping_type   rule
    ==============  ======================================================================
    ``"norm"``      `ClipByGlobalNorm`
    ``"value"``     `ClipByValue` with [-threshold, threshold]
    ``"adaptive"``  $g \cdot \min(1, \mathrm{threshold} \cdot \|w\| / \|g\|)$ by unit
    ==============  ======================================================================

    The adaptive rule is Composer's, not that of `AdaptiveClip`. Its units are those of
    PyTorch's layouts: one for each index of the first axis, whole vectors. There is no least
    weight norm: zero weights get zero gradients. A ratio that is NaN counts as 1, so that a NaN
    in a unit leaves the rest of it as it is.

    Args:
      grads: a pytree of gradients.
      params: the parameters, for ``"adaptive"``.
      clipping_type: ``"norm"``, ``"value"`` or ``"adaptive"``.
      clipping_threshold: the threshold, not negative.

    Returns:
      The clipped gradients: structure, shapes and dtypes of ``grads``.

    Raises:
      ValueError: for another ``clipping_type``, a threshold that is negative or NaN, and
        ``"adaptive"`` without ``params`` or with parameters of another structure or shape.
      TypeError: for a threshold that is no number.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> grads, params = jnp.array([7.0, 24.0]), jnp.array([3.0, 4.0])
      >>> cg.apply_gradient_clipping(
      ...     grads, params, clipping_type="adaptive", clipping_threshold=0.5)
      Array([0.7, 2.4], dtype=float32)

    References:
      Brock, De, Smith and Simonyan, High-Performance Large-Scale Image Recognition Without
      Normalization, 2021; MosaicML, Composer: Gradient Clipping.
    """
    check_threshold("clipping_threshold", clipping_threshold)
    if clipping_type == "norm":
        return apply_rule(ClipByGlobalNorm(clipping_threshold), grads)
    if clipping_type == "value":
        return apply_rule(ClipByValue(clipping_threshold), grads)
    if clipping_type == "adaptive":
        return _adaptive(grads, params, clipping_threshold)
    raise ValueError(f"clipping_type: got {clipping_type!r}, expected one of {', '.join(TYPES)}")


def _adaptive(grads: Any, params: Any, threshold: ArrayLike) -> Any:
    if params is None:
        raise ValueError("clipping_type 'adaptive' needs the parameters: got params=None")

    leaves, weights = leaves_taking_part(grads), parameters_of(grads, params)
    arrays = [*leaves, *map(jnp.asarray, weights)]
    axes = [tuple(range(1, leaf.ndim)) if leaf.ndim > 1 else None for leaf in arrays]
    norms = [norm.value for norm in slice_norms(arrays, axes)]
    pairs = (norms[: len(leaves)], norms[len(leaves) :])
    return map_taking_part(lambda g, n, w: _scale(g, n, w, threshold), grads, *pairs)


def _scale(leaf: jax.Array, norm: jax.Array, weight: jax.Array, threshold: Any) -> jax.Array:
    limit = nonnegative(threshold, norm.dtype) * weight.astype(norm.dtype)
    ratio = limit / jnp.where(norm == 0, 1, norm)
    factor = jnp.minimum(jnp.where(jnp.isnan(ratio) | (norm == 0), 1, ratio), 1)
    return times(widen(leaf, norm.dtype.name), factor).astype(leaf.dtype)
