"""The states of clips and wrappers in the state of an optimizer, by the names of loggers.

`found_in` is the one search of an optimizer's state: metrics, `scalars`, the recorder's flag and
the undoing of a skipped step read it, so that a clip has one name everywhere.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from clipgrad._arrays import count_nonfinite, instances
from clipgrad._clip import ClipStats, GradientClipState, SkipSpikesState
from clipgrad._training.watch_updates import UpdateNorms, WatchUpdatesState

_OF_CLIPS = ("count", "clipped_count", "nonfinite_count", "threshold")
_OF_SKIPS = (
    *("raw_norm", "judged", "limit", "skipped", "skipped_count", "spike_count"),
    *("skipped_consecutive", "nonfinite_consecutive"),
)
STATES = (GradientClipState, SkipSpikesState, WatchUpdatesState)
_OF_OPTAX = (optax.MultiStepsState, optax.ApplyIfFiniteState)


class OptimizerStates(NamedTuple):
    """The states of this library in the state of an optimizer, in its order.

    Attributes:
      clips: of the clips by name, those with statistics first.
      skips: of each `skip_spikes` by name.
      updates: the norms of each `watch_updates` by name.
      microbatches: for each of ``skips`` the count of gradients that the `optax.MultiSteps` around
        it has averaged since its last step; ``None`` without one.
      averages: of each `optax.MultiSteps`.
      finite_checks: of each `optax.apply_if_finite`.
    """

    clips: dict[str, GradientClipState]
    skips: dict[str, SkipSpikesState]
    updates: dict[str, dict[str, UpdateNorms]]
    microbatches: dict[str, Any]
    averages: list[optax.MultiStepsState]
    finite_checks: list[optax.ApplyIfFiniteState]

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

    @property
    def averages_skipped_steps(self) -> bool:
        """Whether an `optax.MultiSteps` that skips nothing has `skip_spikes` inside."""
        return any(
            found_in(state.inner_opt_state).skips and not jax.tree.leaves(state.skip_state)
            for state in self.averages
        )

    def have_skipped(self, before: "OptimizerStates", updates: Any) -> Any:
        """Whether an optimizer has skipped the step from the states ``before``, with its update.

        `skip_spikes` does, `optax.apply_if_finite`, and the function of `optax.MultiSteps` that is
        asked whether to. A model's state and what gradients overwrite are undone then.
        """
        flags = [state.skipped for state in self.skips.values()]
        flags += [flag for state in self.averages for flag in _asked(state.skip_state)]
        pairs = zip(before.finite_checks, self.finite_checks, strict=True)
        # It takes a gradient that is not finite after too many of them. And its flag may be of an
        # earlier step, where it is inside of `optax.MultiSteps`.
        counts = [new.total_notfinite > old.total_notfinite for old, new in pairs]
        if counts:
            flags.append(jnp.stack(counts).any() & (count_nonfinite(updates, axis_name=()) == 0))
        return functools.reduce(jnp.logical_or, flags) if flags else False


def found_in(opt_state: Any) -> OptimizerStates:
    """The states of clips and of wrappers of this library, also those inside of each other.

    The clips with statistics are called ``clip``, or ``clip_0``, ``clip_1``, ... if there are
    several. Those without go on with the numbers.
    """
    states = list(_states_in(opt_state, None))

    def of(kind: Any) -> list[Any]:
        return [state for state, _ in states if isinstance(state, kind)]

    clips = of(GradientClipState)
    with_stats = [state for state in clips if state.stats is not None]
    others = [state for state in clips if state.stats is None]
    names = numbered("clip", len(with_stats or others))
    names += [f"clip_{i}" for i in range(len(names), len(clips))]
    updates = [state.norms for state in of(WatchUpdatesState)]
    skips = [pair for pair in states if isinstance(pair[0], SkipSpikesState)]
    by_name = dict(zip(numbered("skip_spikes", len(skips)), skips, strict=True))
    return OptimizerStates(
        dict(zip(names, with_stats + others, strict=True)),
        {name: state for name, (state, _) in by_name.items()},
        dict(zip(numbered("updates", len(updates)), updates, strict=True)),
        {name: microbatch for name, (_, microbatch) in by_name.items()},
        of(optax.MultiStepsState),
        of(optax.ApplyIfFiniteState),
    )


def numbered(name: str, count: int) -> list[str]:
    """The names of so many things of one kind."""
    return [name] if count == 1 else [f"{name}_{i}" for i in range(count)]


def _asked(skip_state: Any) -> list[jax.Array]:
    """The answer of the function that `optax.MultiSteps` asks whether to skip a gradient."""
    is_asked = isinstance(skip_state, dict) and "should_skip" in skip_state
    return [skip_state["should_skip"]] if is_asked else []


def _states_in(tree: Any, microbatch: Any) -> Iterator[tuple[Any, Any]]:
    """Each state before those inside of it, with the count of the innermost average around it."""
    for state in instances(tree, (*STATES, *_OF_OPTAX)):
        yield state, microbatch
        is_average = isinstance(state, optax.MultiStepsState)
        yield from _states_in(tuple(state), state.mini_step if is_average else microbatch)


def _fields(state: Any, names: tuple[str, ...]) -> dict[str, Any]:
    pairs = {name: getattr(state, name) for name in names}
    return {name: value for name, value in pairs.items() if value is not None}
