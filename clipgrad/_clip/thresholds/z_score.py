"""Moving mean and deviation of the norms, and a limit for what stands out (ZClip)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._arrays import explain_call
from clipgrad._clip.thresholds.threshold_fields import check, feeds, number, steps
from clipgrad._clip.thresholds.window import Feed, Window, counts, entering, unlimited
from clipgrad._compat import exportable


@exportable
class ZScoreState(NamedTuple):
    """The state of a `ZScoreThreshold`.

    Attributes:
      warmup: the norms of the warm-up.
      mean: the moving mean of the norms.
      deviation: the root of their moving variance.
    """

    warmup: Window
    mean: jax.Array
    deviation: jax.Array


@explain_call()
@dataclasses.dataclass(frozen=True)
class ZScoreThreshold:
    r"""An adaptive threshold (ZClip): limits norms that stand out from their moving average.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> tx = cg.clip_by_global_norm(cg.ZScoreThreshold(z=2.0, warmup=2, eps=0.0))
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 3.0, 6.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> print(updates)    # the mean is 2, the deviation 1, and 6 has the z-score 4: 2 + 4 / 4
      [3.]

    Args:
      z: how many deviations a norm may be above the mean.
      decay: $\alpha$, in [0, 1].
      warmup: the number of norms from which the averages start.
      eps: a number that is added to the deviation in $z_t$.
      max_norm: a fixed limit for every step, the warm-up included, which does not affect the
        averages; ``None``: no limit. The authors' code has 1.0.
      feed: which norm enters the averages: ``"clipped"``, $n^*_t$, as in the paper, or ``"raw"``.
        If the norms jump far up and stay there, only raw averages follow.

    Raises:
      ValueError: for a number out of range, an unknown ``feed``.
      TypeError: for an argument that is not a number.

    $$z_t = \frac{n_t - \mu}{s + \mathrm{eps}}, \quad
    c_t = \mu + \frac{z^2 s}{z_t} \text{ where } z_t > z, \text{ else } \mu + z (s + \mathrm{eps})$$

    so the further out a norm is, the closer to the mean $\mu$ the limit is. Then, with
    $n^*_t = \min(n_t, c_t)$ and the decay $\alpha$,
    $\mu \leftarrow \alpha \mu + (1 - \alpha) n^*_t$ and
    $s^2 \leftarrow \alpha s^2 + (1 - \alpha) (n^*_t - \mu)^2$. Both start as mean and deviation of
    the warm-up norms; in the warm-up nothing is clipped. Norms above ten times the warm-up median
    are left out, so that a spike does not make the limit useless.

    ==========================  ==========================================================
    history                     threshold
    ==========================  ==========================================================
    in the warm-up              ``max_norm``, or the largest finite number
    equal norms                 that norm, plus ``z * eps``
    ==========================  ==========================================================

    Guarantees:
      * The threshold is finite at every step. Norms that are NaN, inf or 0 change nothing and do
        not count in the warm-up.
      * If all warm-up norms are within ten times their median, the formula above holds exactly.

    References:
      Kumar, Owen, Chowdhury and Güra, ZClip: Adaptive Spike Mitigation for LLM Pre-Training, 2025,
      https://arxiv.org/abs/2504.02507.
    """

    z: float = number(2.5, 0)
    decay: float = number(0.97, 0, 1)
    warmup: int = steps(25)
    eps: float = number(1e-6, 0)
    max_norm: float | None = number(None, 0)
    feed: Feed = feeds("clipped")

    __post_init__ = check

    def init(self, norms: jax.Array) -> ZScoreState:
        """An empty warm-up."""
        zeros = [jnp.zeros(norms.shape, norms.dtype) for _ in range(2)]
        return ZScoreState(Window.empty(self.warmup, norms), *zeros)

    def update(self, state: ZScoreState, norms: jax.Array) -> tuple[jax.Array, ZScoreState]:
        """The limit that the averages set, and the averages with this norm."""
        warms_up = state.warmup.seen < self.warmup
        threshold = jnp.where(warms_up, unlimited(norms), self._limit(state, norms))
        entry = entering(self.feed, norms, threshold)
        warmup = state.warmup.push(jnp.where(warms_up, norms, 0))
        first = warmup.mean_and_deviation()
        mean, deviation = (
            jnp.where(warms_up, start, jnp.where(counts(norms), new, old))
            for start, new, old in zip(first, self._averages(state, entry), state[1:], strict=True)
        )
        most = threshold if self.max_norm is None else jnp.minimum(threshold, self.max_norm)
        return most, ZScoreState(warmup, mean, deviation)

    def _limit(self, state: ZScoreState, norms: jax.Array) -> jax.Array:
        spread = state.deviation + self.eps
        bound = state.mean + self.z * spread
        beyond = norms > bound
        # z / z_t, which is 1 at the bound.
        part = jnp.where(beyond, self.z * spread, 1) / jnp.where(beyond, norms - state.mean, 1)
        limit = jnp.where(beyond, state.mean + self.z * state.deviation * part, bound)
        return jnp.minimum(limit, unlimited(norms))

    def _averages(self, state: ZScoreState, norms: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean = self.decay * state.mean + (1 - self.decay) * norms
        mean = jnp.minimum(mean, unlimited(mean))
        # The root of a sum of squares that may be out of range.
        old, new = self.decay**0.5 * state.deviation, (1 - self.decay) ** 0.5 * (norms - mean)
        return mean, jnp.hypot(old, new)
