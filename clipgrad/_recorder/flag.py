"""A step as the state of an optimizer shows it: the flag of `skip_spikes`, norms, zero leaves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipgrad._arrays import donated_leaf, instances, largest
from clipgrad._clip import GradientClipState, SkipSpikesState
from clipgrad._errors import docs_page, first_few
from clipgrad._frameworks import without_variables
from clipgrad._training import scalars

_OWN_STATES = SkipSpikesState | GradientClipState | optax.MultiStepsState
_NAMED_LEAVES = 4


class Flag(NamedTuple):
    """The halt and the counts that a state holds."""

    halted: Any  # whether a step has halted the training
    halted_at: Any  # the step that did
    count: Any  # the number of steps
    microbatch: Any  # of an `optax.MultiSteps` around it: gradients since its last step


class Small(NamedTuple):
    """The small numbers of a state: their positions among its leaves, or the numbers."""

    skips: SkipSpikesState  # without its window, the flags of leaves and the state inside
    clips: tuple[GradientClipState, ...]  # their statistics alone
    microbatch: Any  # None without an `optax.MultiSteps` around `skip_spikes`


def copied_flag(place: Small, leaves: list[Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The flag and the norms of a state, none of them a buffer of the state.

    Raises:
      ValueError: the state was donated.
    """
    small = jax.tree.map(lambda i: leaves[i], place)
    if donated_leaf(small) is not None:
        raise ValueError(
            "state: got buffers that the step has overwritten, expected the state that the step "
            "returned; call state = step(state, batch), then record(state, batch)"
        )
    return _copied_numbers(small)


@jax.jit
def _copied_numbers(small: Small) -> tuple[jax.Array, dict[str, jax.Array]]:
    skips, clips, microbatch = small
    flag = Flag(skips.halted, skips.halted_at, skips.count, 0 if microbatch is None else microbatch)
    # Under pmap and vmap each of them has an axis.
    numbers = jnp.stack([jnp.max(jnp.asarray(x)).astype(jnp.int32) for x in flag])
    found = {name: x for name, x in scalars((skips, *clips)).items() if name.endswith("norm")}
    return numbers, {name: largest(x).astype(jnp.float32) for name, x in found.items()}


def find_flag(structure: Any) -> Small:
    """The place of the one flag.

    Raises:
      ValueError: there is none, or there are several.
    """
    found = list(_own_states(structure.unflatten(range(structure.num_leaves)), None))
    skips = [entry for entry in found if isinstance(entry[0], SkipSpikesState)]
    flags = [(state, microbatch) for state, microbatch in skips if state.halted is not None]
    if len(flags) != 1:
        without = bool(skips) and not flags
        got = "a state of skip_spikes without halt" if without else f"{len(flags)} states"
        raise ValueError(
            f"state: got {got}{'' if without else ' of skip_spikes(halt=...)'}, expected the state "
            "of an optimizer that has one: write clipgrad.skip_spikes(optimizer, halt=True)"
        )
    ((flag, microbatch),) = flags
    clips = tuple(_only(s, ["stats"]) for s, _ in found if isinstance(s, GradientClipState))
    large = ("inner_state", "window", "nonfinite_leaves")
    small = [name for name in flag._fields if name not in large]
    return without_variables(Small(_only(flag, small), clips, microbatch))


def _only(state: Any, fields: list[str]) -> Any:
    """A state with some of its fields, None instead of the others."""
    return state._replace(**{name: None for name in state._fields if name not in fields})


def _own_states(tree: Any, microbatch: Any) -> Any:
    """The states of clips in a tree, and the microbatch of the accumulation around each."""
    for state in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, _OWN_STATES)):
        if isinstance(state, optax.MultiStepsState):
            yield from _own_states(state.inner_opt_state, state.mini_step)
        elif isinstance(state, _OWN_STATES):
            yield state, microbatch
        if isinstance(state, SkipSpikesState):
            yield from _own_states(state.inner_state, microbatch)


def made_by_the_optimizer(state: Any) -> str:
    """A sentence on a bad step whose gradient was finite and whose update was not; else empty."""
    states = instances(without_variables(state), SkipSpikesState)
    flags = jax.device_get([s.nonfinite_leaves or {} for s in states])
    spoilt = [repr(path) for each in flags for path, flag in each.items() if np.any(flag)]
    if not spoilt:
        return ""
    names = first_few(spoilt, _NAMED_LEAVES)
    return f"the gradient was finite, and the optimizer made an update of {names} that is not"


def warning_of_zeros(state: Any, loss: Any) -> str | None:
    """A warning of leaves whose gradient was exactly zero in the first step; None: there are none.

    Clips with ``stats="per_leaf"`` say it. Nothing is known if all leaves are zero, as at a loss of
    0 or where gradients are still accumulated.
    """
    clips = instances(without_variables(state), GradientClipState)
    found = {path: s.zeros == 1 for clip in clips for path, s in (clip.leaf_stats or {}).items()}
    loss, flags = jax.device_get((loss, found))
    zero = [name for name, is_zero in flags.items() if np.all(is_zero)]
    if not zero or len(zero) == len(found) or (loss is not None and not np.any(loss)):
        return None
    names = first_few([*map(repr, zero)], _NAMED_LEAVES)
    return (
        f"the gradient of {names} was exactly zero in the first recorded step, which trains "
        "nothing; to find the line, call clipgrad.diagnose(loss, (params, batch)) "
        f"({docs_page('zero')})"
    )
