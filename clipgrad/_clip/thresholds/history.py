"""Mean and deviation of a window of past norms as threshold."""

import dataclasses

import jax
import jax.numpy as jnp

from clipgrad._arrays import explain_call
from clipgrad._clip.thresholds.threshold_fields import check, feeds, number, steps
from clipgrad._clip.thresholds.window import Feed, Window, entering, unlimited


@explain_call()
@dataclasses.dataclass(frozen=True)
class HistoryThreshold:
    r"""An adaptive threshold: mean plus some deviations of the norms before this step.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax
      >>> tx = cg.clip_by_global_norm(cg.HistoryThreshold(window=4, sigma=3.0))
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 3.0, 90.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(updates)    # the mean of 1 and 3 is 2, their deviation 1
      [5.]

    Args:
      window: $w$, the number of norms to keep.
      sigma: how many deviations a norm may be above the mean.
      min_history: the number of norms before the first clip; by default half a window, and at
        least 2.
      feed: which norms enter the history: ``"raw"``, or ``"clipped"``, with which the threshold
        tends to fall.

    Raises:
      ValueError: for a number out of range, or an unknown ``feed``.
      TypeError: for a ``sigma`` that is not a number.

    $$c_t = \mu + \sigma \cdot s, \quad \mu, s = \mathrm{mean, std}(n_{t-w}, \ldots, n_{t-1})$$

    Norms above ten times the window's median are left out of mean and deviation, so that a spike
    does not make the limit useless.

    ============================  ========================================================
    history                       threshold
    ============================  ========================================================
    fewer norms than min_history  the largest finite number: nothing is clipped
    equal norms                   that norm
    ============================  ========================================================

    Guarantees:
      * The threshold is finite at every step. NaN, inf and 0 do not enter the history.
      * If all norms in the window are within ten times their median, the formula above holds
        exactly.
      * If the norms grow tenfold for good, so does the threshold, within half a window.

    References:
      The Levanter Authors, Levanter: clip_update_norm, 2025,
      https://github.com/stanford-crfm/levanter.
    """

    window: int = steps(128)
    sigma: float = number(3.0, 0)
    min_history: int | None = steps(None)
    feed: Feed = feeds("raw")

    def __post_init__(self) -> None:
        check(self)
        if self.min_history is not None and self.min_history > self.window:
            raise ValueError(
                f"min_history: got {self.min_history}, expected at most window, {self.window}"
            )

    def init(self, norms: jax.Array) -> Window:
        """An empty history."""
        return Window.empty(self.window, norms)

    def update(self, state: Window, norms: jax.Array) -> tuple[jax.Array, Window]:
        """The limit that the past sets, and the history with this norm."""
        threshold = self.limit(state)
        return threshold, state.push(entering(self.feed, norms, threshold))

    def limit(self, state: Window, least_deviation: float = 0.0) -> jax.Array:
        """The threshold that this history sets, with a deviation of at least a part of the mean."""
        mean, deviation = state.mean_and_deviation()
        known = mean + self.sigma * jnp.maximum(deviation, least_deviation * mean)
        most = unlimited(known)
        return jnp.where(self.is_enough(state.seen), jnp.minimum(known, most), most)

    def is_enough(self, seen: jax.Array) -> jax.Array:
        """Whether so many norms set a limit."""
        least = min(max(2, self.window // 2), self.window)
        return seen >= (least if self.min_history is None else self.min_history)
