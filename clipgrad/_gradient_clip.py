"""Gradient clip: clip rules as optax gradient transformations."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from clipgrad._clip_grads import clip_and_watch
from clipgrad._nonfinite import check_policy
from clipgrad._rules import (
    ClipByGlobalNorm,
    as_array,
    as_rule,
    main_threshold,
    resolve_schedules,
    schedules_of,
)
from clipgrad._stats import ClipStats, stats_dtype
from clipgrad._where import Where, selected

_KEEP_STATISTICS = contextvars.ContextVar("keep_statistics", default=False)


class GradientClipState(NamedTuple):
    """What a gradient clip keeps, if it has a schedule or statistics to keep.

    The tree structure and the dtypes are the same at initialisation and after every update, so
    that it can be carried by `jax.lax.scan` and saved. ``optax.tree.get(state, "stats")`` finds
    a field of it in the state of a whole optimizer.

    Attributes:
      count: the number of updates so far, at which schedules are evaluated.
      stats: the `ClipStats` of the last update; ``None`` without ``stats=True``.
      clipped_count: the number of updates at which something was clipped; likewise.
      nonfinite_count: the number of updates with NaN or inf in the gradients; likewise.
      threshold: the first threshold of the rule at the last update; ``None`` if it has none.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    stats: ClipStats | None
    clipped_count: jax.Array | None
    nonfinite_count: jax.Array | None
    threshold: jax.Array | None


def gradient_clip(
    rule: Callable[..., Any] | None,
    *,
    where: Where = None,
    nonfinite: str = "propagate",
    stats: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Makes a gradient transformation of any clip rule.

    Guarantees:
      * With thresholds that are numbers and ``stats=False`` the state is `optax.EmptyState`, as
        that of the optax functions: checkpoints of theirs can be restored.
      * Otherwise it is a `GradientClipState`, whose structure never changes.
      * A schedule is evaluated at the number of updates made so far: 0 at the first.
      * ``update(..., grad_norm=n)`` hands `ClipByGlobalNorm` a norm that is known already, and
        nothing is summed again. Every such clip in a chain takes it, so pass it only if that is
        the norm which each of them would measure: of the leaves that ``where`` selects, and
        after ``nonfinite="zero"`` has replaced what is not finite.

    Args:
      rule: a `ClipRule`, whose thresholds may be schedules here (functions of the step, such
        as ``optax.linear_schedule(...)``), or a function of the tree; ``None``: off.
      where: which leaves take part; see `clip_grads`.
      nonfinite: ``"propagate"``, ``"zero"`` or ``"error"``; see `clip_grads`.
      stats: whether the state keeps what the clip did.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      TypeError: if ``rule`` is none.
      ValueError: for an unknown ``nonfinite``; by ``init``, if ``where`` selects nothing.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax
      >>> rule = cg.ClipByNorm(optax.linear_schedule(1.0, 0.5, transition_steps=10))
      >>> tx = optax.chain(cg.gradient_clip(rule, where="kernel", stats=True), optax.sgd(1.0))
      >>> params = {"bias": jnp.array([3.0]), "kernel": jnp.array([3.0, 4.0])}
      >>> updates, state = tx.update(params, tx.init(params))
      >>> updates
      {'bias': Array([-3.], dtype=float32), 'kernel': Array([-0.6, -0.8], dtype=float32)}
      >>> print(optax.tree.get(state, "stats").norm, optax.tree.get(state, "threshold"))
      5.0 1.0
    """
    rule = as_rule(rule, schedules=True)
    check_policy(nonfinite)
    scheduled = bool(schedules_of(rule))

    def init(params: Any) -> Any:
        selected(where, params)
        keep = stats or _KEEP_STATISTICS.get()
        return _first_state(rule, params, keep) if keep or scheduled else optax.EmptyState()

    def update(
        updates: Any, state: Any, params: Any = None, *, grad_norm: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        del extra_args
        keeps = isinstance(state, GradientClipState)
        active = resolve_schedules(rule, state.count) if keeps else rule
        norm = grad_norm if isinstance(active, ClipByGlobalNorm) else None
        clipped, watch = clip_and_watch(
            updates, active, params, where=where, nonfinite=nonfinite, norm=norm
        )
        return clipped, _next_state(state, active, watch) if keeps else state

    return optax.GradientTransformationExtraArgs(init, update)


@contextlib.contextmanager
def keeping_statistics() -> Iterator[None]:
    """Inside of this, ``init`` of every gradient clip makes a state that keeps statistics.

    The state decides what an update does, so nothing else depends on it.
    """
    token = _KEEP_STATISTICS.set(True)
    try:
        yield
    finally:
        _KEEP_STATISTICS.reset(token)


def _first_state(rule: Any, params: Any, keep: bool) -> GradientClipState:
    dtype, zero = stats_dtype(params), functools.partial(jnp.zeros, (), jnp.int32)
    threshold = main_threshold(resolve_schedules(rule, zero()))
    # Each field has a buffer of its own, so that the state can be donated.
    return GradientClipState(
        zero(),
        ClipStats.zero(dtype=dtype) if keep else None,
        zero() if keep else None,
        zero() if keep else None,
        None if threshold is None else as_array(threshold, dtype) + 0,
    )


def _next_state(
    state: GradientClipState, rule: Any, watch: Callable[[], ClipStats]
) -> GradientClipState:
    state = state._replace(count=optax.safe_increment(state.count))
    if state.threshold is not None:
        threshold = as_array(main_threshold(rule), state.threshold.dtype)
        state = state._replace(threshold=jnp.broadcast_to(threshold, state.threshold.shape))
    if state.stats is None:
        return state
    stats = jax.tree.map(lambda new, old: new.astype(old.dtype), watch(), state.stats)
    return state._replace(
        stats=stats,
        clipped_count=_increment_if(stats.clipped, state.clipped_count),
        nonfinite_count=_increment_if(stats.nonfinite > 0, state.nonfinite_count),
    )


def _increment_if(condition: jax.Array, count: Any) -> jax.Array:
    return jnp.where(condition, optax.safe_increment(count), count)
