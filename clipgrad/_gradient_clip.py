"""Gradient clip: clip rules as optax gradient transformations."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from clipgrad._clip_grads import (
    Selection,
    check_measure,
    clip_selection,
    has_one_norm,
    norms_of,
    select,
)
from clipgrad._compat import exportable
from clipgrad._nonfinite import check_policy
from clipgrad._numbers import increment_if, largest
from clipgrad._rules import (
    PerLeaf,
    adaptive_threshold,
    as_array,
    as_rule,
    main_threshold,
    resolve_schedules,
    schedules_of,
    with_threshold,
)
from clipgrad._selectors import unboxed
from clipgrad._stats import ClipStats, LazyStats, stats_dtype
from clipgrad._thresholds import unlimited
from clipgrad._trees import clippable_paths, partition
from clipgrad._where import Where, selected


@exportable
class GradientClipState(NamedTuple):
    """The state of a gradient clip with a schedule, an adaptive threshold or statistics.

    The tree structure and the dtypes are the same at initialization and after every update, so
    that it can be carried by `jax.lax.scan` and saved. ``optax.tree.get(state, "stats")`` finds
    a field of it in the state of a whole optimizer.

    Attributes:
      count: the number of updates so far, at which schedules are evaluated.
      stats: the `ClipStats` of the last update; ``None`` without ``stats=True``.
      clipped_count: the number of updates at which something was clipped; likewise.
      nonfinite_count: the number of updates with NaN or inf in the gradients; likewise.
      threshold: the first threshold of the rule at the last update; ``None`` if it has none. An
        adaptive threshold of a rule that acts on leaves is an array, in the order of
        ``jax.tree.leaves``.
      history: the state of an adaptive threshold; ``None`` without.
      leaf_stats: the `ClipStats` of the last update for each leaf by path, such as
        ``"layers/0/kernel"``; ``None`` without ``stats="per_leaf"``.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    stats: ClipStats | None
    clipped_count: jax.Array | None
    nonfinite_count: jax.Array | None
    threshold: jax.Array | None
    history: Any = None
    leaf_stats: dict[str, ClipStats] | None = None


def gradient_clip(
    rule: Callable[..., Any] | None,
    *,
    where: Where = None,
    measure: Where = None,
    nonfinite: str = "propagate",
    stats: bool | str = False,
) -> optax.GradientTransformationExtraArgs:
    """Makes a gradient transformation of any clip rule.

    Guarantees:
      * With thresholds that are numbers and ``stats=False`` the state is `optax.EmptyState`, as
        that of the optax functions: checkpoints of theirs can be restored.
      * Otherwise it is a `GradientClipState`, whose structure never changes.
      * A schedule is evaluated at the number of updates made so far: 0 at the first.
      * An adaptive threshold sees the norm of each step once, before the clip.
      * ``update(..., grad_norm=n)`` gives `ClipByGlobalNorm` a norm that is known already, and
        nothing is summed again. Every such clip in a chain uses it, so pass it only if that is
        the norm which each of them would measure: of the leaves that ``where`` selects, and
        after ``nonfinite="zero"`` has replaced what is not finite.
      * ``update(..., clip_stats=f)`` calls ``f`` with the `ClipStats` of this update, whether or
        not the state keeps any, as `train_step` does. They can't leave `jax.lax.cond`, which
        ``optax.MultiSteps`` uses: write ``stats=True`` there.

    Args:
      rule: a `ClipRule`, whose thresholds may be schedules here (functions of the step, such
        as ``optax.linear_schedule(...)``) and whose first one may be an `AdaptiveThreshold`, or a
        function of the tree; ``None``: off.
      where: which leaves are clipped; see `clip_grads`.
      measure: which leaves make up the norm of `ClipByGlobalNorm`; see `clip_grads`.
      nonfinite: ``"propagate"``, ``"zero"`` or ``"error"``; see `clip_grads`.
      stats: whether the state keeps what the clip did; ``"per_leaf"``: for each leaf, too.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      TypeError: if ``rule`` is not a rule.
      ValueError: for an unknown ``nonfinite`` or ``stats``, for ``measure`` with another rule; by
        ``init``, if ``where`` selects nothing.

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
    check_measure(rule, measure)
    if stats not in (True, False, "per_leaf"):
        raise ValueError(f"stats: got {stats!r}, expected True, False or 'per_leaf'")
    adaptive = adaptive_threshold(rule)
    has_state = bool(schedules_of(rule)) or adaptive is not None

    def init(params: Any) -> Any:
        tree, _ = partition(params, selected(where, params))
        selected(measure, params, "measure")
        return _first_state(rule, tree, stats) if stats or has_state else optax.EmptyState()

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        grad_norm: Any = None,
        clip_stats: Callable[[ClipStats], Any] | None = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        del extra_args
        keeps = _keeps_state(state, has_state)
        selection = select(updates, where, nonfinite, measure)
        active = resolve_schedules(rule, state.count) if keeps else rule
        norms = _norms(active, selection, params, grad_norm)
        if keeps and adaptive is not None:
            threshold, state = _next_threshold(adaptive, state, norms)
            active = with_threshold(active, threshold if _is_joint(rule) else PerLeaf(threshold))
        clipped, lazy = clip_selection(selection, active, params, norms)
        if clip_stats is not None:
            clip_stats(lazy.total())
        return clipped, _next_state(state, active, lazy) if keeps else state

    return optax.GradientTransformationExtraArgs(init, update)


def _keeps_state(state: Any, needed: bool) -> bool:
    if needed and not isinstance(state, GradientClipState):
        raise ValueError(
            f"state: got {type(state).__name__} with a schedule or an adaptive threshold, "
            "expected the GradientClipState of init(params)"
        )
    return isinstance(state, GradientClipState)


def _norms(rule: Any, selection: Selection, params: Any, grad_norm: Any) -> list[Any]:
    """The norms of the groups of a rule; those of a value clip only for an adaptive threshold."""
    known = grad_norm if has_one_norm(rule) else None
    if adaptive_threshold(rule) is not None and known is None:
        return rule.measure(selection.measured, params)
    return norms_of(rule, selection, params, known)


def _is_joint(rule: Any) -> bool:
    """Whether an adaptive threshold of this rule, or of a subclass, is one for the whole tree."""
    return rule.acts_on == "tree"


def _first_state(rule: Any, tree: Any, kept: bool | str) -> GradientClipState:
    dtype, zero = stats_dtype(tree), functools.partial(jnp.zeros, (), jnp.int32)
    rule = resolve_schedules(rule, zero())
    threshold, history, paths = main_threshold(rule), None, clippable_paths(tree)
    if (adaptive := adaptive_threshold(rule)) is not None:
        norms = jnp.zeros(() if _is_joint(rule) else len(paths), dtype)
        threshold, history = unlimited(norms), adaptive.init(norms)
    # Each field has a buffer of its own, so that the state can be donated.
    return GradientClipState(
        zero(),
        ClipStats.zero(dtype=dtype) if kept else None,
        zero() if kept else None,
        zero() if kept else None,
        None if threshold is None else as_array(threshold, dtype) + 0,
        history,
        {path: ClipStats.zero(dtype=dtype) for path in paths} if kept == "per_leaf" else None,
    )


def _next_threshold(
    adaptive: Any, state: GradientClipState, norms: list[Any]
) -> tuple[jax.Array, GradientClipState]:
    """The adaptive threshold of this step, and the state with its history."""
    assert state.threshold is not None
    dtype, shape = state.threshold.dtype, state.threshold.shape
    each = [largest(norm.value).astype(dtype) for norm in norms]
    if len(each) != state.threshold.size:
        raise ValueError(
            f"updates: got {len(each)} leaves to clip, but the state has {state.threshold.size} "
            "thresholds; expected init(params) with the parameters that the updates are for"
        )
    values = jnp.stack(each).reshape(shape) if each else jnp.zeros(shape, dtype)
    threshold, history = adaptive.update(state.history, jax.lax.stop_gradient(values))
    return threshold, state._replace(history=history)


def _next_state(state: GradientClipState, rule: Any, stats: LazyStats) -> GradientClipState:
    state = state._replace(count=optax.safe_increment(state.count))
    if state.threshold is not None:
        value = main_threshold(rule)
        threshold = value.values if isinstance(value, PerLeaf) else value
        threshold = as_array(threshold, state.threshold.dtype)
        state = state._replace(threshold=jnp.broadcast_to(threshold, state.threshold.shape))
    if state.stats is None:
        return state
    if state.leaf_stats is not None:
        leaves = _under_first_paths(stats.leaves(), state.leaf_stats)
        state = state._replace(leaf_stats=_as_before(leaves, state.leaf_stats))
    total = _as_before(stats.total(), state.stats)
    return state._replace(
        stats=total,
        clipped_count=increment_if(total.clipped, state.clipped_count),
        nonfinite_count=increment_if(total.nonfinite > 0, state.nonfinite_count),
    )


def _under_first_paths(stats: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Statistics under the paths that the parameters had in ``init``.

    Variables of flax are boxes in some trees and not in others; see `unboxed`.
    """
    inner = {unboxed(path): leaf for path, leaf in stats.items()}
    pairs = {path: stats.get(path, inner.get(unboxed(path))) for path in first}
    if len(stats) != len(first) or None in pairs.values():
        raise ValueError(
            f"updates: got the leaves {list(stats)}, but the state has {list(first)}; expected "
            "init(params) with the parameters that the updates are for"
        )
    return pairs


def _as_before(stats: Any, before: Any) -> Any:
    """Statistics in the dtypes of those before."""
    return jax.tree.map(lambda new, old: new.astype(old.dtype), stats, before)
