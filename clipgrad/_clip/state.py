"""The state of a gradient clip."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipgrad._arrays import (
    answers_lookups,
    clippable_paths,
    described,
    increment_if,
    largest,
    unboxed,
)
from clipgrad._clip.clipping import Clipped
from clipgrad._clip.limits import threshold_array
from clipgrad._clip.rule_thresholds import (
    PerLeaf,
    adaptive_threshold,
    main_threshold,
    resolve_schedules,
    schedules_of,
    with_threshold,
)
from clipgrad._clip.stats import ClipStats, stats_dtype
from clipgrad._clip.thresholds import unlimited
from clipgrad._compat import exportable, to_varying, varying_axes

# Which statistics a state keeps.
KeptStats = bool | Literal["per_leaf"]


@exportable
@answers_lookups("state", clip_stats="state.stats", norm="state.stats.norm")
class GradientClipState(NamedTuple):
    """The state of a gradient clip with a schedule, an adaptive threshold or statistics.

    Tree structure and dtypes are the same at initialization and after every update, so you can
    carry the state through `jax.lax.scan`, and save it. ``optax.tree.get(state, "stats")`` finds an
    attribute in the state of a whole optimizer.

    Attributes:
      count: the number of updates so far, at which schedules are evaluated.
      stats: the last update's `ClipStats`; ``None`` without ``stats=True``.
      clipped_count: the number of updates that were clipped; ``None`` without ``stats=True``.
      nonfinite_count: the number of updates with NaN or inf in the gradients; ``None`` without
        ``stats=True``.
      threshold: the rule's main threshold (``max_norm``, ``max``, ``threshold``, ``clipping``) at
        the last update; ``None`` for a function. If the threshold adapts for each leaf, an array in
        the order of ``jax.tree.leaves``.
      history: the state of an adaptive threshold, or ``None``.
      leaf_stats: the last update's `ClipStats` for each leaf, by path, such as
        ``"layers/0/kernel"``; ``None`` without ``stats="per_leaf"``.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    stats: ClipStats | None
    clipped_count: jax.Array | None
    nonfinite_count: jax.Array | None
    threshold: Any
    history: Any = None
    leaf_stats: dict[str, ClipStats] | None = None


def has_lasting_state(rule: Any, kept: KeptStats) -> bool:
    """Whether a clip needs a state of its own from one step to the next."""
    return bool(kept or schedules_of(rule)) or adaptive_threshold(rule) is not None


def first_state(rule: Any, tree: Any, kept: KeptStats) -> Any:
    """The state before the first update; ``kept`` as ``stats=`` of `gradient_clip`."""
    if not has_lasting_state(rule, kept):
        return optax.EmptyState()
    dtype, zero = stats_dtype(tree), functools.partial(jnp.zeros, (), jnp.int32)
    rule = resolve_schedules(rule, zero())
    threshold, history, paths = main_threshold(rule), None, clippable_paths(tree)
    if (adaptive := adaptive_threshold(rule)) is not None:
        norms = jnp.zeros(() if is_joint(rule) else len(paths), dtype)
        threshold, history = unlimited(norms), adaptive.init(norms)
    # Each field has a buffer of its own, so that the state can be donated.
    return GradientClipState(
        zero(),
        ClipStats.zero(dtype=dtype) if kept else None,
        zero() if kept else None,
        zero() if kept else None,
        None if threshold is None else threshold_array(threshold, dtype) + 0,
        history,
        {path: ClipStats.zero(dtype=dtype) for path in paths} if kept == "per_leaf" else None,
    )


def check_state(state: Any, rule: Any, kept: KeptStats) -> None:
    """Refuses a state without what the clip needs."""
    if isinstance(state, GradientClipState):
        return
    if has_lasting_state(rule, kept):
        needs = f"stats={kept!r}" if kept else "a schedule or an adaptive threshold"
        raise ValueError(
            f"state: got {type(state).__name__} with {needs}, expected the GradientClipState of "
            "init(params)"
        )
    if jax.tree.leaves(state):  # the parameters, say
        raise ValueError(
            f"state: got {described(state)} with arrays, expected the state of init(params); "
            "write update(grads, state, params)"
        )


def is_joint(rule: Any) -> bool:
    """Whether an adaptive threshold of this rule, or of a subclass, is one for the whole tree."""
    return rule.acts_on == "tree"


def adapted(rule: Any, state: GradientClipState, norms: list[Any]) -> tuple[Any, GradientClipState]:
    """The rule with the numbers that its threshold makes of these norms, and the next state."""
    assert state.threshold is not None
    dtype, shape = state.threshold.dtype, state.threshold.shape
    each = [largest(norm.value).astype(dtype) for norm in norms]
    if len(each) != state.threshold.size:
        raise ValueError(
            f"updates: got {len(each)} leaves to clip, but the state has {state.threshold.size} "
            "thresholds; expected the state of init(params) for the same parameters"
        )
    values = jnp.stack(each).reshape(shape) if each else jnp.zeros(shape, dtype)
    adaptive = main_threshold(rule)
    threshold, history = adaptive.update(state.history, jax.lax.stop_gradient(values))
    numbers = threshold if is_joint(rule) else PerLeaf(threshold)
    return with_threshold(rule, numbers), state._replace(history=history)


def next_state(state: Any, clipped: Clipped) -> Any:
    """The state after an update."""
    if not isinstance(state, GradientClipState):
        return state
    state = state._replace(count=increment_if(np.True_, state.count))
    if state.threshold is not None:
        value = main_threshold(clipped.rule)
        value = value.values if isinstance(value, PerLeaf) else value
        value = threshold_array(value, state.threshold.dtype)
        state = state._replace(threshold=jnp.broadcast_to(value, state.threshold.shape))
    if state.leaf_stats is not None:
        leaves = _under_first_paths(clipped.leaf_stats(), state.leaf_stats)
        state = state._replace(leaf_stats=_as_before(leaves, state.leaf_stats))
    if state.stats is None:
        return state
    stats = _as_before(clipped.stats(), state.stats)
    return state._replace(
        stats=stats,
        clipped_count=increment_if(stats.clipped, state.clipped_count),
        nonfinite_count=increment_if(stats.nonfinite > 0, state.nonfinite_count),
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
            "the state of init(params) for the same parameters"
        )
    return pairs


def _as_before(stats: Any, before: Any) -> Any:
    """Statistics in the types of those before."""
    return jax.tree.map(
        lambda new, old: to_varying(new.astype(old.dtype), varying_axes(old)), stats, before
    )
