"""A multiple of the moving average of each leaf's clipped norm as threshold (AdaGC)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._arrays import explain_call
from clipgrad._clip.thresholds.threshold_fields import check, feeds, number, steps
from clipgrad._clip.thresholds.window import Feed, Window, counts, entering, unlimited
from clipgrad._compat import exportable


@exportable
class EMAState(NamedTuple):
    """The state of an `EMAThreshold`.

    Attributes:
      warmup: the norms of the warm-up.
      mean: the moving average.
    """

    warmup: Window
    mean: jax.Array


@explain_call()
@dataclasses.dataclass(frozen=True)
class EMAThreshold:
    r"""An adaptive threshold (AdaGC): a multiple of each leaf's average clipped norm.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> tx = cg.clip_by_norm(cg.EMAThreshold(relative=1.5, absolute=10.0, warmup=1))
      >>> state = tx.init([jnp.zeros(1), jnp.zeros(1)])
      >>> for norms in ((2.0, 4.0), (9.0, 5.0)):
      ...     updates, state = tx.update([jnp.array([n]) for n in norms], state)
      >>> updates
      [Array([3.], dtype=float32), Array([5.], dtype=float32)]

    Args:
      decay: $\beta$, in [0, 1].
      relative: $\lambda_\mathrm{rel}$, the largest ratio of a norm to the average, at least 1.
      absolute: $\lambda_\mathrm{abs}$, the limit for the global norm in the warm-up.
      warmup: the number of norms from which the average starts.
      feed: which norm enters the average: ``"clipped"``, as in the paper, or ``"raw"``.

    Raises:
      ValueError: for a number out of range, or an unknown ``feed``.
      TypeError: for an argument that is not a number.

    $$c_{t,i} = \lambda_\mathrm{rel} \gamma_i, \quad \gamma_i \leftarrow \beta \gamma_i +
    (1 - \beta) \min(n_{t,i}, c_{t,i})$$

    In the warm-up one factor scales all leaves to the global norm $\lambda_\mathrm{abs}$,
    $c_{t,i} = n_{t,i} \min(1, \lambda_\mathrm{abs} / \|n_t\|)$, and $\gamma_i$ becomes the smallest
    of these norms. Norms further than a factor of ten from their median are left out, because a
    spike in one leaf makes the common factor tiny. Use this threshold with `clip_by_norm`, which
    gives each leaf its own average; `clip_by_global_norm` has one average.

    ============================  ========================================================
    norm                          threshold
    ============================  ========================================================
    NaN, inf or 0 in the warm-up  the largest finite number
    NaN, inf or 0 after it        $\lambda_\mathrm{rel} \gamma$
    ============================  ========================================================

    Guarantees:
      * The threshold is finite at every step. Norms that are NaN, inf or 0 change nothing and do
        not count in the warm-up: an unused leaf has its warm-up later.
      * If all warm-up norms are within ten times their median, the formula above holds exactly.

    References:
      Wang, Li, Chen, Zeng, Yang, Yu, Ma and Shen, AdaGC: Improving Training Stability for Large
      Language Model Pretraining, 2025, https://arxiv.org/abs/2502.11034.
    """

    decay: float = number(0.98, 0, 1)
    relative: float = number(1.05, 1)
    absolute: float = number(1.0, 1e-30)
    warmup: int = steps(100)
    feed: Feed = feeds("clipped")

    __post_init__ = check

    def init(self, norms: jax.Array) -> EMAState:
        """An empty warm-up."""
        return EMAState(Window.empty(self.warmup, norms), jnp.zeros(norms.shape, norms.dtype))

    def update(self, state: EMAState, norms: jax.Array) -> tuple[jax.Array, EMAState]:
        """A multiple of the averages, and the averages with these norms."""
        warms_up, enters = state.warmup.seen < self.warmup, counts(norms)
        early = jnp.where(enters, self._jointly(norms), unlimited(norms))
        later = jnp.minimum(self.relative * state.mean, unlimited(norms))
        threshold = jnp.where(warms_up, early, later)
        entry = entering(self.feed, norms, threshold)
        warmup = state.warmup.push(jnp.where(warms_up, entry, 0))
        least = jnp.min(jnp.where(warmup.near(), warmup.norms, unlimited(warmup.norms)), axis=0)
        first = jnp.where(warmup.seen > 0, least, 0)
        new = self.decay * state.mean + (1 - self.decay) * entry
        new = jnp.minimum(new, unlimited(new))
        mean = jnp.where(warms_up, first, jnp.where(enters, new, state.mean))
        return threshold, EMAState(warmup, mean)

    def _jointly(self, norms: jax.Array) -> jax.Array:
        """The norms after a clip by the global norm of all leaves."""
        finite = jnp.where(jnp.isfinite(norms), norms, 0)
        # In units of the largest, since squares of the norms may be out of range.
        unit = jnp.max(finite, initial=self.absolute)
        total, limit = jnp.sqrt(jnp.sum(jnp.square(finite / unit))), self.absolute / unit
        clips = total > limit
        return jnp.where(clips, norms / unit * (self.absolute / jnp.where(clips, total, 1)), norms)
