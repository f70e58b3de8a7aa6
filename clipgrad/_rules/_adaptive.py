"""Adaptive gradient clipping: limits that follow the parameters."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from clipgrad._compat import broadcast_like
from clipgrad._norms import AxisName, Norm, slice_norms
from clipgrad._numbers import at_least, largest, times
from clipgrad._rules._base import ClipRule, pytree_rule, static_field
from clipgrad._rules._scaling import scale_down
from clipgrad._rules._thresholds import (
    check_threshold,
    for_each_leaf,
    nonnegative,
    require_numbers,
)
from clipgrad._rules._units import UnitAxis, check_unit_axis, unit_axes, unmatched
from clipgrad._trees import map_groups, takes_part, with_paths


@pytree_rule
class AdaptiveClip(ClipRule):
    r"""Adaptive gradient clipping (AGC): limits each unit by the norm of its weights.

    $$g \cdot \min\left(1, \frac{\mathrm{clipping} \cdot \max(\|w\|, \mathrm{eps})}{\|g\|}\right)$$

    where $w$ and $g$ are the weights of one unit and their gradient. A unit is the weights that
    make one output: all axes but the last for leaves of rank 2 and more, as JAX libraries lay
    out kernels (dense, convolution of any rank, attention output); a whole vector or scalar.

    Guarantees:
      * A unit whose gradient norm is within its limit is unchanged, bit for bit.
      * Otherwise its norm becomes the limit, up to a relative 4e-7 in float32, and its direction
        is kept.
      * The dtype of the gradient is kept, whatever that of the parameters.

    ============================  ======================================================
    unit or threshold             result
    ============================  ======================================================
    weights 0                     limit ``clipping * eps``
    gradient 0                    unchanged, with finite derivatives
    ``clipping=0``                exact zeros
    ``clipping`` traced, < 0      acts as 0
    NaN or inf in the gradient    NaN throughout the unit
    NaN in the weights            NaN throughout the unit
    ============================  ======================================================

    Args:
      clipping: the maximal ratio of gradient norm to weight norm.
      eps: the least weight norm that is reckoned with, so that zero weights can train.
      axis: the axes that a unit spans: ``None`` as above; an int or a tuple for all leaves; a
        mapping from regular expressions on paths such as ``"layers/0/kernel"`` to axes, of which
        the first that matches holds, ``None`` in it being the whole leaf, and leaves without a
        match following the default; or a function ``(path, leaf) -> axes``. Weights that are
        stacked over layers or experts keep their units apart by axes that leave theirs out.
      axis_name: the mapped axes over which units are spread; see `global_norm`.

    Raises:
      ValueError: for thresholds that are negative or NaN; when called, without ``params``, for
        parameters of another structure or shape, for a leaf that lacks an axis and for an
        expression that matches no path.
      TypeError: for a threshold that is no number, array or schedule, or another ``axis``.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> grads = jnp.array([[3.0, 0.1], [4.0, 0.1]])
      >>> params = jnp.array([[3.0, 3.0], [4.0, 4.0]])
      >>> cg.AdaptiveClip(0.5)(grads, params)    # a column is a unit, and its limit is 2.5
      Array([[1.5, 0.1],
             [2. , 0.1]], dtype=float32)
      >>> stacked = cg.AdaptiveClip(0.01, axis={"layers/.*kernel": -2, "embedding": -1})

    References:
      Brock, De, Smith and Simonyan, High-Performance Large-Scale Image Recognition Without
      Normalization, 2021.
    """

    clipping: ArrayLike = 0.01
    eps: ArrayLike = 1e-3
    _: dataclasses.KW_ONLY
    axis: Any = static_field(default=None)
    axis_name: AxisName = static_field(default=None)
    needs_params: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuses thresholds and axes that are none."""
        check_threshold("clipping", self.clipping, adaptive=True)
        check_threshold("eps", self.eps)
        object.__setattr__(self, "axis", check_unit_axis(self.axis))
        if isinstance(self.axis_name, list):
            object.__setattr__(self, "axis_name", tuple(self.axis_name))

    def __call__(self, grads: Any, params: Any = None) -> Any:
        """The tree with the norm of each unit at most ``clipping`` times that of its weights."""
        require_numbers(self)
        self._check(grads, params)
        return map_groups(self._clip, grads, params)

    def follow(self, grads: Any, params: Any = None) -> list[jax.Array]:
        """For each leaf the least threshold that changes nothing."""
        self._check(grads, params)
        ratios: list[jax.Array] = []

        def collect(paths: list[str], grads: list[jax.Array], params: list[Any]) -> list[Any]:
            for norm, weight in self._norms(paths, grads, params):
                dtype = norm.root.dtype
                limit = at_least(weight.value.astype(dtype), nonnegative(self.eps, dtype))
                ratio = jnp.where(norm.root == 0, 0, norm.value / limit)
                ratios.append(largest(ratio))
            return grads

        map_groups(collect, grads, params)
        return ratios

    def _check(self, grads: Any, params: Any) -> None:
        if params is None:
            raise ValueError(
                "AdaptiveClip needs the parameters: got params=None, expected "
                "rule(grads, params), or optimizer.update(grads, state, params)"
            )
        if missing := unmatched(self.axis, with_paths(grads)[0]):
            raise ValueError(
                f"axis: {missing[0]!r} matches no leaf; the paths are {with_paths(grads)[0]}"
            )

    def _clip(self, paths: list[str], grads: list[jax.Array], params: list[Any]) -> list[jax.Array]:
        rules, norms = for_each_leaf(self, len(grads)), self._norms(paths, grads, params)
        triples = zip(rules, grads, norms, strict=True)
        return [rule._clip_leaf(g, n, w.value) for rule, g, (n, w) in triples]

    def _norms(
        self, paths: list[str], grads: list[jax.Array], params: list[Any]
    ) -> list[tuple[Norm, Norm]]:
        """For each leaf the norms of the units of its gradient, and of its weights."""
        axes = [
            _axes(self.axis, path, g, w) for path, g, w in zip(paths, grads, params, strict=True)
        ]
        norms = slice_norms([*grads, *map(jnp.asarray, params)], axes * 2, axis_name=self.axis_name)
        return list(zip(norms[: len(grads)], norms[len(grads) :], strict=True))

    def _clip_leaf(self, grad: jax.Array, norm: Norm, weight: jax.Array) -> jax.Array:
        root, scale, weight = (broadcast_like(x, grad) for x in (*norm, weight))
        limit = self._limit(weight, root.dtype)
        return scale_down(grad, Norm(root, scale), limit, _shrink)

    def _limit(self, weight: jax.Array, dtype: Any) -> jax.Array:
        least = nonnegative(self.eps, dtype)
        return nonnegative(self.clipping, dtype) * at_least(weight.astype(dtype), least)


def _axes(axis: UnitAxis, path: str, grad: Any, param: Any) -> Any:
    if not takes_part(param) or jnp.shape(param) != grad.shape:
        raise ValueError(
            f"params: got {getattr(param, 'shape', param)} for {path or 'the leaf'}, whose "
            f"gradient has the shape {grad.shape}"
        )
    return unit_axes(axis, path, grad)


def _shrink(leaf: jax.Array, root: jax.Array, limit: jax.Array) -> jax.Array:
    # The maximum changes nothing, but XLA rounds a quotient differently if it is written
    # differently, and so it is in optax; likewise that norms have the shape of the leaf.
    return times(leaf, limit / jnp.maximum(root, 2.0**-100))
