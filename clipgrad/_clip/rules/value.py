"""Clipping each element to an interval."""

import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from clipgrad._arrays import (
    Norm,
    at_least_float32,
    clippable_leaves,
    over,
    slice_norms,
    times,
    with_clippable,
)
from clipgrad._clip.limits import broadcasts_into, nonnegative, threshold_array
from clipgrad._clip.rule_thresholds import MAIN, thresholds_by_leaf
from clipgrad._clip.rules.clip_rule import check_direct_call
from clipgrad._clip.rules.measuring_rule import MeasuringRule
from clipgrad._clip.rules.rule_fields import pytree_rule
from clipgrad._clip.thresholds import Number, Threshold, check_threshold, is_adaptive, is_real
from clipgrad._sharding import broadcast_like


class _LowerBound:
    """The field ``min`` of a rule: ``-max`` where it was left out and ``max`` is a number.

    The rule keeps ``None``. That is what `dataclasses.replace` reads, so that a rule with another
    ``max`` has another ``min``, and what the rule clips by: then ``max`` is its only threshold.
    """

    def __get__(self, rule: Any, owner: Any = None) -> Any:
        reader = inspect.currentframe()
        if rule is None:
            return None  # the default of the field
        written, maximum = _written_min(rule), rule.max
        assert reader is not None and reader.f_back is not None
        is_copied = reader.f_back.f_globals.get("__name__") == dataclasses.__name__
        if written is not None or is_copied or not is_real(maximum):
            return written
        return -maximum if hasattr(maximum, "dtype") else -float(maximum)

    def __set__(self, rule: Any, value: Any) -> None:
        vars(rule)["min"] = value


def _written_min(rule: Any) -> Any:
    """The lower bound as it was written, ``None`` for ``-max``."""
    return vars(rule)["min"]


@pytree_rule
class ClipByValue(MeasuringRule):
    r"""Limits each gradient element to an interval.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> cg.ClipByValue(1.0)({"w": jnp.array([-3.0, 0.5, 3.0])})
      {'w': Array([-1. ,  0.5,  1. ], dtype=float32)}
      >>> cg.ClipByValue(max=2.0, min=-1.0, nan=0.0)(jnp.array([-3.0, jnp.nan, 3.0]))
      Array([-1.,  0.,  2.], dtype=float32)

    Args:
      max: the upper bound: a number, or an array that broadcasts into each leaf.
      min: the lower bound, a number or an array; ``None`` means ``-max``, and the attribute ``min``
        then is ``-max``: ``ErrorClipByValue(5.0).min == -5.0``. With a schedule or an adaptive
        threshold the attribute stays ``None``.
      nan: the number that replaces NaN before the clip; ``None``: NaN stays.

    Raises:
      ValueError: for a bound that is NaN, for ``min`` above ``max``, for a negative ``max``
        without ``min``; when called, for a bound that would enlarge a leaf, and for complex
        leaves with a ``min`` other than ``-max``.
      TypeError: for a bound that is not a number, array or schedule.

    An element becomes $\min(\max(g, \mathrm{min}), \mathrm{max})$.

    `ErrorClipByValue` is the same class under PaddlePaddle's name, and prints as ``ClipByValue``. A
    complex element keeps the phase: the absolute value is clipped to ``max``.

    ==========================  ==========================================================
    element or bound            result
    ==========================  ==========================================================
    ``min=None``                the interval is [-max, max]
    +-inf                       the bounds
    NaN                         NaN, or ``nan`` clipped to the interval
    ``max=0``                   exact zeros
    ``max`` traced, negative    acts as 0, if ``min=None``
    ==========================  ==========================================================

    Guarantees:
      * Every element that is not NaN ends up in [min, max], with bounds rounded to the leaf's
        dtype; elements inside this interval do not change. The absolute value of a complex element
        is at most ``max``, up to a relative 4e-7 in complex64; elements at ``max`` stay.
      * Structure, shapes and dtypes are kept, for every dtype of the bounds.
      * Leaves that are not floating or complex are unchanged.

    References:
      In the backward pass: Mikolov, Statistical Language Models Based on Neural Networks, 2012,
      https://www.fit.vut.cz/study/phd-thesis/283/.en; Graves, Generating Sequences With Recurrent
      Neural Networks, 2013, https://arxiv.org/abs/1308.0850.
    """

    max: Threshold = dataclasses.field(metadata={MAIN: True})  # checked together with `min`
    min: Number | None = _LowerBound()  # type: ignore[assignment]
    _: dataclasses.KW_ONLY
    nan: Number | None = None
    acts_on = "element"

    def __post_init__(self) -> None:
        for name, bound in (("max", self.max), ("min", _written_min(self))):
            object.__setattr__(self, name, _number_of_text(name, bound))
        lower = _written_min(self)
        check_threshold("max", self.max, negative=lower is not None, adaptive=True)
        for name, number in (("min", lower), ("nan", self.nan)):
            if number is not None:
                check_threshold(name, number, negative=True)
        if lower is not None:
            if is_adaptive(self.max):
                raise ValueError(f"min: got {lower!r} with an adaptive max, expected None")
            if self._are_known() and np.any(np.asarray(lower) > np.asarray(self.max)):
                raise ValueError(f"min: got {lower!r}, expected at most max, {self.max!r}")

    def __call__(self, grads: Any, params: Any = None) -> Any:
        """The tree with each element in [min, max]; nothing need be measured."""
        check_direct_call(self, grads)
        return self.scale(grads)

    def measure(self, grads: Any, params: Any = None) -> list[Norm]:
        """The largest absolute value of each leaf."""
        leaves = clippable_leaves(grads)
        return slice_norms(leaves, [None] * len(leaves), ord=math.inf)

    def scale(self, grads: Any, norms: Sequence[Norm] = ()) -> Any:
        """The tree with each element in [min, max]."""
        leaves, clipped = clippable_leaves(grads), []
        known: dict[Any, tuple[Any, Any]] = {}
        for leaf, maximum in zip(leaves, thresholds_by_leaf(self, len(leaves)), strict=True):
            key = id(maximum), leaf.dtype
            if key not in known:
                known[key] = self._bounds(maximum, leaf.real.dtype)
            clipped.append(self._clip(leaf, *known[key]))
        return with_clippable(grads, clipped)

    def _bounds(self, maximum: Any, dtype: Any) -> tuple[Any, Any]:
        if (lower := _written_min(self)) is not None:
            return _bound(lower, dtype), _bound(maximum, dtype)
        if isinstance(maximum, jax.Array):
            upper = _bound(nonnegative(maximum, at_least_float32(dtype)), dtype)
        else:
            upper = _bound(np.maximum(np.asarray(maximum, np.float64), 0), dtype)
        return -upper, upper

    def _clip(self, leaf: jax.Array, lower: Any, upper: Any) -> jax.Array:
        if self.nan is not None:
            leaf = jnp.where(jnp.isnan(leaf), threshold_array(self.nan, leaf.dtype), leaf)
        if jnp.iscomplexobj(leaf):
            return self._clip_complex(leaf, upper)
        # XLA's CPU loops keep NaN in a clamp, and lose it in a minimum behind which there is a sum.
        upper, lower = _into(upper, leaf, "max"), _into(lower, leaf, "min")
        return jax.lax.clamp(lower, leaf, upper)

    def _clip_complex(self, leaf: jax.Array, upper: Any) -> jax.Array:
        lower = _written_min(self)
        if lower is not None and not (
            self._are_known() and np.all(np.asarray(lower) == -np.asarray(self.max))
        ):
            raise ValueError(
                f"min: got {lower!r} with a complex leaf, whose absolute value is clipped to "
                "max; expected None"
            )
        upper = _into(upper, leaf, "max")
        infinite = jnp.isinf(leaf.real) | jnp.isinf(leaf.imag)
        leaf = jnp.where(infinite, jax.lax.complex(_sign(leaf.real), _sign(leaf.imag)), leaf)
        # Halved, since the absolute value of the largest numbers is out of range.
        half = times(leaf, jnp.array(0.5, upper.dtype))
        size = jnp.abs(jnp.where(half == 0, jnp.ones_like(leaf), half))
        clipped = times(over(half, size), upper)
        # An absolute value is rounded: what is at the limit, as each result is, stays.
        most = (0.5 + jnp.finfo(upper.dtype).eps) * upper
        return jnp.where((size <= most) & ~infinite | (half == 0), leaf, clipped)

    def _are_known(self) -> bool:
        """Whether both bounds are numbers or arrays, no schedules and not traced."""
        bounds = _written_min(self), self.max
        return not any(callable(x) or isinstance(x, Tracer) for x in bounds)


ErrorClipByValue = ClipByValue


def _number_of_text(name: str, bound: Any) -> Any:
    """The number that a text such as "5.0" is, as for PaddlePaddle; other bounds as they are."""
    if not isinstance(bound, str):
        return bound
    try:
        return float(bound)
    except ValueError:
        raise TypeError(
            f"{name}: got {bound!r} of type str, expected a number, an array or a schedule (a "
            "function of the step)"
        ) from None


def _sign(x: jax.Array) -> jax.Array:
    """The direction of an infinite number: +-1 for an infinite part, 0 for a finite one."""
    return jnp.where(jnp.isinf(x), jnp.sign(x), jnp.where(jnp.isnan(x), x, 0))


def _bound(bound: Any, dtype: Any) -> Any:
    """The bound in the dtype of a leaf; one of NumPy where it is no array of JAX.

    Of a dtype that has no inf it is the largest number at most.
    """
    wide, info = at_least_float32(dtype), jnp.finfo(dtype)
    largest = float(info.max) if info.bits < 16 else math.inf
    if isinstance(bound, jax.Array):
        return jnp.minimum(jnp.maximum(bound.astype(wide), -largest), largest).astype(dtype)
    with np.errstate(over="ignore"):
        clipped = np.asarray(np.clip(np.asarray(bound, np.float64), -largest, largest))
        return clipped.astype(wide).astype(dtype)


def _into(bound: Any, leaf: jax.Array, name: str) -> Any:
    """``bound`` broadcast into the shape of the leaf; a clamp takes one of NumPy as it is."""
    if isinstance(bound, np.ndarray | np.generic) and not (bound.ndim or jnp.iscomplexobj(leaf)):
        return bound
    if not broadcasts_into(bound.shape, leaf.shape):
        raise ValueError(
            f"{name}: got an array of shape {bound.shape}, expected one that broadcasts into the "
            f"leaf's shape {leaf.shape}"
        )
    return broadcast_like(jnp.asarray(bound), leaf)
