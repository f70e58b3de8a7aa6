"""A rule of an error clip with an adaptive threshold, and the history that it computes from."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._clip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipStats,
    adaptive_threshold,
    with_threshold,
)
from clipgrad._compat import exportable


@exportable
class ErrorClipHistory(NamedTuple):
    """The history of an error clip with an adaptive threshold, for one name.

    All arrays begin with the axes of the name's statistics, one for each scan around it.

    Attributes:
      threshold: the limit of the next step; at first the largest finite number.
      history: the state of the adaptive threshold, of each scan step.
    """

    threshold: jax.Array
    history: Any

    @classmethod
    def empty(cls, rule: Any, stats: Any) -> "ErrorClipHistory":
        """The history before the first step of a name with such statistics."""
        norms = jnp.zeros(stats.size.shape, stats.size.dtype)
        history = _each(adaptive_threshold(rule).init, norms.ndim)(norms)
        # Each array has a buffer of its own, so that the state can be donated.
        return cls._of(rule, jax.tree.map(lambda x: x + jnp.zeros_like(x), history), norms)

    def after(self, rule: Any, stats: ClipStats, parts: int) -> "ErrorClipHistory":
        """The history after a step whose statistics add up so many microbatches."""
        norms = jax.lax.stop_gradient(stats.norm.astype(self.threshold.dtype) / parts**0.5)
        _, history = _each(adaptive_threshold(rule).update, norms.ndim)(self.history, norms)
        return self._of(rule, history, norms)

    @classmethod
    def _of(cls, rule: Any, history: Any, like: jax.Array) -> "ErrorClipHistory":
        """A history, and the limit that it sets for a norm that counts nowhere, 0."""
        limit, _ = _each(adaptive_threshold(rule).update, like.ndim)(history, jnp.zeros_like(like))
        return cls(limit, history)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rule", "limits"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Stepwise:
    """A rule of one name with a limit for each step of the scans around it."""

    rule: Any
    limits: jax.Array

    def __call__(self, cotangents: Any) -> Any:
        return self.now(cotangents)

    @property
    def now(self) -> Any:
        return with_threshold(self.rule, self.limits)

    def check_length(self, name: str, length: int) -> None:
        if (kept := len(self.limits)) != length:
            raise ValueError(
                f"error_clip: got {length} steps of the scan around {name!r}, but the state has "
                f"the histories of {kept}; expected the state of init with such arguments"
            )


def check_adaptive(name: str, rule: Any) -> None:
    """Raises `TypeError` for a rule whose adaptive threshold an error clip can't have."""
    if type(rule) is ClipByGlobalNorm and rule.ord == 2 and not rule.axis_name:
        return
    if type(rule) is ClipByNorm and rule.ord == 2 and rule.axis is None:
        return
    raise TypeError(
        f"error_clip: got {rule!r} for {name!r}, expected ClipByNorm(threshold) or "
        "ClipByGlobalNorm(threshold): the history of an error clip has the L2 norms of whole "
        "cotangents"
    )


def _each(function: Any, axes: int) -> Any:
    """The function of one history, of arrays of them."""
    return functools.reduce(lambda f, _: jax.vmap(f), range(axes), function)
