"""The flag of `skip_spikes(halt=...)`: where it is in a state, and a copy that outlives it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from clipgrad._clip import GradientClipState, SkipSpikesState
from clipgrad._numerics import largest
from clipgrad._training import scalars

_FLAG_STATES = SkipSpikesState | GradientClipState | optax.MultiStepsState


class Flag(NamedTuple):
    """The halt and the counts that a state holds.

    Attributes:
      halted: whether a step has halted the training.
      halted_at: the step that did.
      count: the number of steps.
      microbatch: how many gradients an ``optax.MultiSteps`` around it has since its last step.
    """

    halted: Any
    halted_at: Any
    count: Any
    microbatch: Any


class _Small(NamedTuple):
    """The numbers of a state that are copied after each step."""

    skips: SkipSpikesState
    clips: tuple[GradientClipState, ...]
    microbatch: Any


class FlagPlace(NamedTuple):
    """The places of the flag and the statistics among the leaves of a state.

    Attributes:
      structure: the structure of the state.
      small: the positions of the small numbers among its leaves.
    """

    structure: Any
    small: _Small

    @property
    def accumulates(self) -> bool:
        return self.small.microbatch is not None

    def names(self, leaves: list[Any]) -> list[str]:
        return list(jax.eval_shape(_flag_norms, self._chosen(leaves)))

    def copied(self, leaves: list[Any], step: Any) -> tuple[jax.Array, jax.Array, Any]:
        """The flag, the statistics and the step, none of them a buffer of the state.

        Raises:
          ValueError: the state was donated.
        """
        chosen = self._chosen(leaves)
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(chosen)):
            raise ValueError(
                "state: got buffers that the step has overwritten, expected the state that the "
                "step returned; call state = step(state, batch), then record(state, batch)"
            )
        return _copied_flag(chosen, step)

    def _chosen(self, leaves: list[Any]) -> Any:
        return jax.tree.map(lambda i: leaves[i], self.small)


def find_flag(structure: Any) -> FlagPlace:
    """The place of the one flag.

    Raises:
      ValueError: there is none, or there are several.
    """
    numbered = structure.unflatten(range(structure.num_leaves))
    found = list(_own_states(numbered, None))
    flags = [(s, m) for s, m in found if isinstance(s, SkipSpikesState) and s.halted is not None]
    if len(flags) != 1:
        without = any(isinstance(s, SkipSpikesState) for s, _ in found) and not flags
        got = "a state of skip_spikes without halt" if without else f"{len(flags)} states"
        raise ValueError(
            f"state: got {got}{'' if without else ' of skip_spikes(halt=...)'}, expected the state "
            "of an optimizer that has one: write clipgrad.skip_spikes(optimizer, halt=True)"
        )
    ((skips, microbatch),) = flags
    clips = tuple(_single_numbers(s) for s, _ in found if isinstance(s, GradientClipState))
    small = _Small(_single_numbers(skips), clips, _single_numbers(microbatch))
    return FlagPlace(structure, small)


def _own_states(tree: Any, microbatch: Any) -> Any:
    """The states of clips in a tree, and the microbatch of the accumulation around each."""
    for state in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, _FLAG_STATES)):
        if isinstance(state, optax.MultiStepsState):
            yield from _own_states(state.inner_opt_state, state.mini_step)
        elif isinstance(state, _FLAG_STATES):
            yield state, microbatch
        if isinstance(state, SkipSpikesState):
            yield from _own_states(state.inner_state, microbatch)


def _single_numbers(state: Any) -> Any:
    """A state with its single numbers alone, taken out of the variables of flax NNX."""
    if isinstance(state, SkipSpikesState):
        state = state._replace(inner_state=None, window=None)
    elif isinstance(state, GradientClipState):
        state = state._replace(history=None, leaf_stats=None, threshold=None)
    if hasattr(state, "_fields"):
        return type(state)(*map(_single_numbers, state))
    leaves = jax.tree.leaves(state)
    return leaves[0] if len(leaves) == 1 else None


def _flag_norms(small: _Small) -> dict[str, jax.Array]:
    stats = scalars((small.skips, *small.clips))
    return {name: jnp.asarray(stats[name]) for name in sorted(stats) if name.endswith("norm")}


@jax.jit
def _copied_flag(small: _Small, step: Any) -> tuple[jax.Array, jax.Array, Any]:
    skips, microbatch = small.skips, small.microbatch
    microbatch = jnp.zeros((), jnp.int32) if microbatch is None else microbatch
    flag = Flag(skips.halted, skips.halted_at, skips.count, microbatch)
    # Under pmap and vmap each of them has an axis.
    numbers = jnp.stack([jnp.max(x).astype(jnp.int32) for x in flag])
    norms = jnp.stack([largest(x).astype(jnp.float32) for x in _flag_norms(small).values()])
    # A copy, since a result that is an argument shares its buffer.
    return numbers, norms, jax.tree.map(jnp.copy, step)
