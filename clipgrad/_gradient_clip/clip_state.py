"""The state of a gradient clip, and its room for statistics in a training step."""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from clipgrad._compat import exportable, to_varying, varying_axes
from clipgrad._gradient_clip.clip_grads import Clipped, has_one_norm
from clipgrad._numerics import increment_if, largest
from clipgrad._rules import (
    PerLeaf,
    adaptive_threshold,
    main_threshold,
    resolve_schedules,
    schedules_of,
    threshold_array,
)
from clipgrad._stats import ClipStats, stats_dtype
from clipgrad._thresholds import unlimited
from clipgrad._trees import clippable_leaves, clippable_paths, instances, unboxed


@exportable
class GradientClipState(NamedTuple):
    """The state of a gradient clip with a schedule, an adaptive threshold or statistics.

    The tree structure and the dtypes are the same at initialization and after every update, so
    that it can be carried by `jax.lax.scan` and saved. ``optax.tree.get(state, "stats")`` finds
    a field of it in the state of a whole optimizer.

    Attributes:
      count: the number of updates so far, at which schedules are evaluated.
      stats: the `ClipStats` of the last update; ``None`` without ``stats=True``.
      clipped_count: the number of updates that were clipped; ``None`` without ``stats=True``.
      nonfinite_count: the number of updates with NaN or inf in the gradients; ``None`` without
        ``stats=True``.
      threshold: the first threshold of the rule at the last update; ``None`` if it has none. An
        adaptive threshold of a rule that acts on leaves is an array, in the order of
        ``jax.tree.leaves``.
      history: the state of an adaptive threshold, or ``None``.
      leaf_stats: the `ClipStats` of the last update for each leaf by path, such as
        ``"layers/0/kernel"``; ``None`` without ``stats="per_leaf"``.
    """

    # What a training step makes of an `optax.EmptyState` has statistics and no count.
    count: jax.Array | None  # pyright: ignore[reportIncompatibleMethodOverride]
    stats: ClipStats | None
    clipped_count: jax.Array | None
    nonfinite_count: jax.Array | None
    threshold: Any
    history: Any = None
    leaf_stats: dict[str, ClipStats] | None = None


# A context for calls of an optimizer by a training step: in "init" every clip makes a state with
# statistics, in "update" one without warns; "" is for others inside of these. JAX keeps compiled
# functions by it, so that none is used where it is not meant.
asking_for_stats = jax.make_user_context("")


def has_lasting_state(rule: Any, kept: bool | str) -> bool:
    """Whether a clip needs a state of its own from one step to the next."""
    return bool(kept or schedules_of(rule)) or adaptive_threshold(rule) is not None


def first_state(rule: Any, tree: Any, kept: bool | str) -> Any:
    """The state before the first update; ``kept`` as ``stats=`` of `gradient_clip`."""
    no_stats = _no_stats(rule, tree) if asking_for_stats.value == "init" else None
    if not has_lasting_state(rule, kept):
        empty = no_stats is None
        return optax.EmptyState() if empty else GradientClipState(None, no_stats, None, None, None)
    dtype, zero = stats_dtype(tree), functools.partial(jnp.zeros, (), jnp.int32)
    rule = resolve_schedules(rule, zero())
    threshold, history, paths = main_threshold(rule), None, clippable_paths(tree)
    if (adaptive := adaptive_threshold(rule)) is not None:
        norms = jnp.zeros(() if is_joint(rule) else len(paths), dtype)
        threshold, history = unlimited(norms), adaptive.init(norms)
    # Each field has a buffer of its own, so that the state can be donated.
    return GradientClipState(
        zero(),
        no_stats or (ClipStats.zero(dtype=dtype) if kept else None),
        zero() if kept else None,
        zero() if kept else None,
        None if threshold is None else threshold_array(threshold, dtype) + 0,
        history,
        {path: ClipStats.zero(dtype=dtype) for path in paths} if kept == "per_leaf" else None,
    )


def _no_stats(rule: Any, tree: Any) -> ClipStats:
    """Statistics of nothing that vary over the devices of a ``shard_map`` as a step's do.

    A branch of `jax.lax.cond` that does not act returns them in place of these.
    """
    axes = frozenset().union(*map(varying_axes, clippable_leaves(tree)))
    if has_one_norm(rule) and rule.ord == 2:
        names = rule.axis_name or ()
        axes -= {names} if isinstance(names, str) else set(names)
    return jax.tree.map(lambda x: to_varying(x, axes), ClipStats.zero(dtype=stats_dtype(tree)))


def check_state(state: Any, needed: bool) -> None:
    """Refuses a state without what the clip needs; warns of statistics that find no place."""
    kept = state if isinstance(state, GradientClipState) else None
    if needed and (kept is None or kept.count is None):
        raise ValueError(
            f"state: got {type(state).__name__} with a schedule or an adaptive threshold, "
            "expected the GradientClipState of init(params)"
        )
    if asking_for_stats.value == "update" and (kept is None or kept.stats is None):
        warnings.warn(
            "train_step: the metrics lack the statistics of a gradient clip, because its state, "
            f"{type(state).__name__}, has no place for them; expected an optimizer whose init "
            "calls the init of the clip and can be traced, and a state of this optimizer",
            stacklevel=2,
        )


def is_joint(rule: Any) -> bool:
    """Whether an adaptive threshold of this rule, or of a subclass, is one for the whole tree."""
    return rule.acts_on == "tree"


def next_threshold(adaptive: Any, state: GradientClipState, norms: list[Any]) -> tuple[Any, Any]:
    """The adaptive threshold of this step, and its history."""
    assert state.threshold is not None
    dtype, shape = state.threshold.dtype, state.threshold.shape
    each = [largest(norm.value).astype(dtype) for norm in norms]
    if len(each) != state.threshold.size:
        raise ValueError(
            f"updates: got {len(each)} leaves to clip, but the state has {state.threshold.size} "
            "thresholds; expected the state of init(params) for the same parameters"
        )
    values = jnp.stack(each).reshape(shape) if each else jnp.zeros(shape, dtype)
    return adaptive.update(state.history, jax.lax.stop_gradient(values))


def next_state(state: Any, clipped: Clipped) -> Any:
    """The state after an update: what it has room for."""
    if not isinstance(state, GradientClipState):
        return state
    if state.count is not None:
        state = state._replace(count=optax.safe_increment(state.count))
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
    if state.clipped_count is None:
        return state._replace(stats=stats)
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


def stats_in(state: Any) -> tuple[ClipStats, ...]:
    """The statistics of all clips in the state of an optimizer, in the order of its leaves."""
    clips = instances(state, GradientClipState)
    return tuple(clip.stats for clip in clips if clip.stats is not None)


def with_room(state: Any, template: Any) -> Any:
    """The state of an optimizer with statistics of 0 in every clip.

    ``template`` is what ``init`` makes where statistics are wanted, or its shapes. A state of
    another structure is left as it is.
    """
    leaves, structure = jax.tree.flatten(template, is_leaf=_is_clip)
    try:
        parts = structure.flatten_up_to(state)
    except ValueError:
        return state
    return structure.unflatten(map(_room, parts, leaves))


def _room(state: Any, template: Any) -> Any:
    if not _is_clip(template):
        return state
    zeros = jax.tree.map(
        lambda x: to_varying(jnp.zeros(x.shape, x.dtype), varying_axes(x)), template.stats
    )
    if isinstance(state, GradientClipState):
        return state._replace(stats=zeros)
    is_empty = isinstance(state, optax.EmptyState)
    return GradientClipState(None, zeros, None, None, None) if is_empty else state


def without_room(state: Any, before: Any) -> Any:
    """The state of an optimizer after an update, with room only where that before had it.

    The statistics of a clip that did not act are 0 for this step. Those that its state keeps stay.
    """
    leaves, structure = jax.tree.flatten(state, is_leaf=_is_clip)
    kept = iter(instances(before, GradientClipState))
    return structure.unflatten([_closed(x, kept) if _is_clip(x) else x for x in leaves])


def _closed(state: GradientClipState, kept: Any) -> Any:
    if state.count is None:
        return optax.EmptyState()
    before = next(kept)
    if before.stats is None or state.stats is None:
        return state._replace(stats=before.stats)
    acted = state.stats.size > 0

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(acted, range(acted.ndim, new.ndim)), new, old)

    return state._replace(stats=jax.tree.map(choose, state.stats, before.stats))


def _is_clip(tree: Any) -> bool:
    return isinstance(tree, GradientClipState)
