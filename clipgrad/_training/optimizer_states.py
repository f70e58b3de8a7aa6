"""The states of clips and wrappers in the state of an optimizer, by the names of loggers.

This is the one search of an optimizer's state: metrics, `scalars` and the undoing of a skipped step
read it, so that a clip has one name everywhere.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from clipgrad._arrays import instances
from clipgrad._clip import ClipStats, GradientClipState, SkipSpikesState, count_nonfinite
from clipgrad._training.watch_updates import UpdateNorms, WatchUpdatesState

_OF_CLIPS = ("count", "clipped_count", "nonfinite_count", "threshold")
_OF_SKIPS = (
    *("raw_norm", "judged", "limit", "skipped", "skipped_count", "spike_count"),
    *("skipped_consecutive", "nonfinite_consecutive"),
)
STATES = (GradientClipState, SkipSpikesState, WatchUpdatesState)


class OptimizerStates(NamedTuple):
    """The states of this library in the state of an optimizer, in its order."""

    clips: dict[str, GradientClipState]
    skips: dict[str, SkipSpikesState]
    updates: dict[str, dict[str, UpdateNorms]]

    @property
    def measured(self) -> dict[str, ClipStats]:
        """The statistics of the clips that have some."""
        return {name: s.stats for name, s in self.clips.items() if s.stats is not None}

    @property
    def leaves(self) -> dict[str, dict[str, ClipStats]]:
        """The statistics of each leaf, of the clips that have them."""
        return {name: s.leaf_stats for name, s in self.clips.items() if s.leaf_stats}

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        """Other numbers than statistics, and the statistics of leaves, below each name."""
        records = {name: _fields(state, _OF_CLIPS) for name, state in self.clips.items()}
        for name, leaves in self.leaves.items():
            # Of a tree that is one array the statistics of its leaf are those of the tree.
            records[name]["leaves"] = {path: stats for path, stats in leaves.items() if path}
        return records | {name: _fields(state, _OF_SKIPS) for name, state in self.skips.items()}


def found_in(opt_state: Any) -> OptimizerStates:
    """The states of clips and of wrappers of this library, also those inside of each other.

    The clips with statistics are called ``clip``, or ``clip_0``, ``clip_1``, ... if there are
    several. Those without go on with the numbers.
    """
    clips = list(_within(opt_state, GradientClipState))
    with_stats = [state for state in clips if state.stats is not None]
    others = [state for state in clips if state.stats is None]
    names = numbered("clip", len(with_stats or others))
    names += [f"clip_{i}" for i in range(len(names), len(clips))]
    skips = list(_within(opt_state, SkipSpikesState))
    updates = [state.norms for state in _within(opt_state, WatchUpdatesState)]
    return OptimizerStates(
        dict(zip(names, with_stats + others, strict=True)),
        dict(zip(numbered("skip_spikes", len(skips)), skips, strict=True)),
        dict(zip(numbered("updates", len(updates)), updates, strict=True)),
    )


def numbered(name: str, count: int) -> list[str]:
    """The names of so many things of one kind."""
    return [name] if count == 1 else [f"{name}_{i}" for i in range(count)]


def was_skipped(before: Any, after: Any, updates: Any) -> Any:
    """Whether an optimizer has skipped a step, from its states before and after, and its update.

    `skip_spikes` does, `optax.apply_if_finite`, and the function of `optax.MultiSteps` that is
    asked whether to. A model's state and what gradients overwrite are undone then.
    """
    flags = [state.skipped for state in _within(after, SkipSpikesState)]
    flags += [flag for s in _within(after, optax.MultiStepsState) for flag in _asked(s.skip_state)]
    kinds = optax.ApplyIfFiniteState
    pairs = zip(_within(before, kinds), _within(after, kinds), strict=True)
    # It takes a gradient that is not finite after too many of them. And its flag may be of an
    # earlier step, where it is inside of `optax.MultiSteps`.
    counts = [new.total_notfinite > old.total_notfinite for old, new in pairs]
    if counts:
        flags.append(jnp.stack(counts).any() & (count_nonfinite(updates, axis_name=()) == 0))
    return functools.reduce(jnp.logical_or, flags) if flags else False


def averages_skipped_steps(opt_state: Any) -> bool:
    """Whether an `optax.MultiSteps` that skips nothing has `skip_spikes` inside."""
    return any(
        instances(state.inner_opt_state, SkipSpikesState) and not jax.tree.leaves(state.skip_state)
        for state in _within(opt_state, optax.MultiStepsState)
    )


def _asked(skip_state: Any) -> list[jax.Array]:
    """The answer of the function that `optax.MultiSteps` asks whether to skip a gradient."""
    is_asked = isinstance(skip_state, dict) and "should_skip" in skip_state
    return [skip_state["should_skip"]] if is_asked else []


def _within(tree: Any, kind: Any) -> Iterator[Any]:
    """The states of one kind, each of them before those inside of it."""
    for state in instances(tree, kind):
        yield state
        yield from _within(tuple(state), kind)


def _fields(state: Any, names: tuple[str, ...]) -> dict[str, Any]:
    pairs = {name: getattr(state, name) for name in names}
    return {name: value for name, value in pairs.items() if value is not None}
