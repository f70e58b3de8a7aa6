"""A percentile of the past norms as threshold (AutoClip)."""

import dataclasses

import jax
import jax.numpy as jnp

from clipgrad._arrays import explain_call
from clipgrad._clip.thresholds.threshold_fields import check, feeds, number, steps, warn_of_share
from clipgrad._clip.thresholds.window import Feed, Window, entering, unlimited


@explain_call()
@dataclasses.dataclass(frozen=True)
class PercentileThreshold:
    r"""An adaptive threshold (AutoClip): a percentile of the last norms, this step's norm included.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax
      >>> tx = cg.clip_by_global_norm(cg.PercentileThreshold(50))
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 2.0, jnp.nan, 90.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(updates, optax.tree.get(state, "threshold"))    # the median of 1, 2 and 90
      [2.] 2.0

    Args:
      percentile: $p$, in [0, 100]: write 90 for the 90th percentile; a warning asks whether you
        meant 0.9, which is the 0.9th. The paper's 10 clips nine of ten steps, and acts like
        gradient normalization.
      window: $w$, the number of norms to keep; the paper keeps all.
      feed: which norms enter the history: ``"raw"``, as in the paper, or ``"clipped"``, with which
        the threshold tends to fall.

    Raises:
      ValueError: for a percentile out of range, a window below 1, an unknown ``feed``.
      TypeError: for a percentile that is not a number.

    $$c_t = \mathrm{percentile}_p(n_{t-w+1}, \ldots, n_t)$$

    with linear interpolation.

    ==========================  ==========================================================
    history                     threshold
    ==========================  ==========================================================
    no norm yet                 the largest finite number: nothing is clipped
    the first norm              that norm: the first gradient is never clipped
    this norm NaN, inf or 0     the percentile of those before
    ==========================  ==========================================================

    Guarantees:
      * The threshold is finite at every step. NaN, inf and 0 do not enter the history.
      * One norm, however large, moves the threshold by one place in the sorted norms.

    References:
      Seetharaman, Wichern, Pardo and Le Roux, AutoClip: Adaptive Gradient Clipping for Source
      Separation Networks, 2020, https://arxiv.org/abs/2007.14469.
    """

    percentile: float = number(dataclasses.MISSING, 0, 100)
    window: int = steps(1024)
    feed: Feed = feeds("raw")

    def __post_init__(self) -> None:
        check(self)
        warn_of_share(self.percentile)

    def init(self, norms: jax.Array) -> Window:
        """An empty history."""
        return Window.empty(self.window, norms)

    def update(self, state: Window, norms: jax.Array) -> tuple[jax.Array, Window]:
        """The percentile with this norm, and the history with it."""
        window = state.push(norms)
        known = window.percentile(self.percentile)
        threshold = jnp.where(window.seen > 0, known, unlimited(norms))
        return threshold, state.push(entering(self.feed, norms, threshold))
