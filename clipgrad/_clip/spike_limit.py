"""The limit above which a step is an outlier: of a norm, or of a loss, which may be negative."""

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from clipgrad._arrays import described
from clipgrad._clip.thresholds import (
    FAR_ABOVE_MEDIAN,
    HistoryThreshold,
    Window,
    check_between,
    unlimited,
)

Judged = Literal["gradient", "update", "loss"]

# The deviation counts as at least this part of the mean, so that equal norms, as of a full batch,
# don't make an outlier of the next one.
_LEAST_DEVIATION = 0.01


@dataclasses.dataclass(frozen=True)
class SpikeLimit:
    """An absolute limit, and one that the last numbers set."""

    judge: Judged
    largest: float | None
    history: HistoryThreshold | None

    @classmethod
    def of(
        cls,
        judge: Judged,
        max_norm: float | None,
        window: int | None,
        sigma: float | None,
        min_history: int | None,
    ) -> "SpikeLimit":
        """The limit of the arguments of `skip_spikes`, which are checked."""
        history = _history(window, sigma, min_history)
        if judge not in get_args(Judged):
            expected = ", ".join(map(repr, get_args(Judged)))
            raise ValueError(f"judge: got {judge!r}, expected one of {expected}")
        if max_norm is not None:
            check_between("max_norm", max_norm, -math.inf if judge == "loss" else 0)
        return cls(judge, max_norm, history)

    def init(self, number: jax.Array) -> Window | None:
        """An empty history."""
        return None if self.history is None else self.history.init(number)

    def limit(self, window: Window | None, like: jax.Array) -> jax.Array:
        """The limit of the next step, in the dtype of ``like``."""
        most = unlimited(like)
        if self.largest is not None:
            most = jnp.minimum(jnp.asarray(self.largest, like.dtype), most)
        if self.history is None:
            return most
        if window is None:
            raise ValueError(
                f"state: got a state without the history that sigma={self.history.sigma} needs, "
                "expected the state of init(params)"
            )
        if self.judge == "loss":
            return jnp.minimum(_limit_of_losses(self.history, window), most)
        return jnp.minimum(self.history.limit(window, _LEAST_DEVIATION), most)

    def pushed(self, window: Window | None, number: jax.Array, skip: jax.Array) -> Window | None:
        """The history after a step, which a skipped one does not enter."""
        if window is None:
            return None
        if self.judge != "loss":
            return window.push(jnp.where(skip, 0, number))
        after = Window(
            jnp.concatenate([window.norms[1:], number[None]]),
            jnp.minimum(window.seen + 1, len(window.norms)),
        )
        return jax.tree.map(lambda new, old: jnp.where(skip, old, new), after, window)

    def loss_in(self, extra_args: dict[str, Any], like: jax.Array) -> jax.Array:
        """The loss that `update` got as ``value=``, or 0 if it does not matter."""
        if self.judge != "loss":
            return jnp.zeros_like(like)
        value = extra_args.get("value")
        if value is None or jnp.shape(value) or jnp.iscomplexobj(value):
            got = "none" if value is None else described(jnp.asarray(value))
            raise ValueError(
                f'value: got {got} with judge="loss", expected the loss, a real scalar; write '
                "update(grads, state, params, value=loss), or use clipgrad.train_step, which "
                "passes it"
            )
        return jnp.asarray(value).astype(like.dtype)


def _history(
    window: int | None, sigma: float | None, min_history: int | None
) -> HistoryThreshold | None:
    """The rule of outliers; ``None`` with ``sigma=None``, where nothing else may be given."""
    if sigma is not None:
        return HistoryThreshold(128 if window is None else window, sigma, min_history)
    for name, value in {"window": window, "min_history": min_history}.items():
        if value is not None:
            raise ValueError(
                f"{name}: got {value!r} with sigma=None, expected a number as sigma, because "
                f"{name} needs a history; or leave {name} out"
            )
    return None


def _limit_of_losses(history: HistoryThreshold, window: Window) -> jax.Array:
    """As `HistoryThreshold.limit`, of numbers of any sign.

    The size of a typical one takes the place of the median: for positive numbers it is the median.
    """
    typical = Window(jnp.abs(window.norms), window.seen).percentile(50)
    unit = jnp.where((window.seen > 0) & (typical > 0), typical, 1)
    median, x = window.percentile(50) / unit, window.norms / unit[None]
    near = window.filled & (x - median[None] <= FAR_ABOVE_MEDIAN - 1)
    number = jnp.maximum(jnp.sum(near, axis=0), 1).astype(x.dtype)
    mean = jnp.sum(jnp.where(near, x, 0), axis=0) / number
    squares = jnp.square(jnp.where(near, x - mean[None], 0))
    deviation = jnp.sqrt(jnp.sum(squares, axis=0) / number)
    least = _LEAST_DEVIATION * jnp.abs(mean)
    known = (mean + history.sigma * jnp.maximum(deviation, least)) * unit
    most = unlimited(known)
    return jnp.where(history.is_enough(window.seen), jnp.minimum(known, most), most)
