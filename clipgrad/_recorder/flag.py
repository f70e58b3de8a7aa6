"""A step as the state of an optimizer shows it: the flag of `skip_spikes`, norms, zero leaves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._arrays import donated_leaf, largest
from clipgrad._clip import GradientClipState, SkipSpikesState
from clipgrad._errors import docs_page, first_few
from clipgrad._frameworks import without_variables
from clipgrad._training import found_in, scalars

_FLAGS = bool | np.bool_ | np.ndarray
_NAMED_LEAVES = 4


class Flag(NamedTuple):
    """The halt and the counts that a state holds, and the loop's own flag.

    A loop without a halting optimizer has only its own flag, and the count of records.
    """

    halted: Any  # whether a step has halted the training, and with it state and parameters
    halted_at: Any  # the step that did
    count: Any  # the number of steps
    microbatch: Any  # of an `optax.MultiSteps` around it: gradients since its last step
    nonfinite: Any  # whether the last step was not finite
    bad: Any  # which of the recorded steps the loop's own flag calls bad, from 1 on; 0: none

    def bad_step(self, steps: int) -> int | None:
        """The number of the step that is bad, 0 for the first; ``steps`` were recorded at once."""
        if self.halted:
            return self.halted_at
        return self.count - steps + self.bad - 1 if self.bad else None


class FlagLeaves(NamedTuple):
    """The leaves of a state that say how a step went: their positions, or the leaves themselves."""

    # Without its window, the flags of leaves and the state inside; None: it has none.
    skips: SkipSpikesState | None
    clips: tuple[GradientClipState, ...]  # their statistics alone
    microbatch: Any  # None without an `optax.MultiSteps` around `skip_spikes`


def copied_flag(
    place: FlagLeaves, leaves: list[Any], bad: Any, count: int
) -> tuple[Any, dict[str, jax.Array]]:
    """The flag and the norms of a state, none of them a buffer of the state.

    ``bad``: the loop's own flags of the recorded steps, ``count``: of all that were recorded.

    Raises:
      ValueError: the state was donated.
    """
    small = jax.tree.map(lambda i: leaves[i], place)
    if donated_leaf(small) is not None:
        raise ValueError(
            "state: got buffers that the step has overwritten, expected the state that the step "
            "returned; call state = step(state, batch), then record(state, batch)"
        )
    if place.skips is None and isinstance(bad, np.ndarray):  # it is known already
        flag = Flag(0, -1, count, 0, 0, np.argmax(bad) + 1 if np.any(bad) else 0)
        return np.asarray(flag, np.int32), {}
    return _copied_numbers(small, np.zeros(1, bool) if bad is None else bad, np.int32(count))


@jax.jit
def _copied_numbers(
    small: FlagLeaves, bad: jax.Array, count: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    skips, clips, microbatch = small
    first = jnp.where(jnp.any(bad), jnp.argmax(bad) + 1, 0)
    flag = Flag(False, -1, count, 0, False, first)
    if skips is not None:
        of_state = skips.halted, skips.halted_at, skips.count
        nonfinite = skips.nonfinite_consecutive > 0
        flag = Flag(*of_state, 0 if microbatch is None else microbatch, nonfinite, first)
    # Under pmap and vmap each of them has an axis.
    numbers = jnp.stack([jnp.max(jnp.asarray(x)).astype(jnp.int32) for x in flag])
    states = (*([] if skips is None else [skips]), *clips)
    numbers_by_name = scalars(states) if states else {}
    norms = {name: x for name, x in numbers_by_name.items() if name.endswith("norm")}
    return numbers, {name: largest(x).astype(jnp.float32) for name, x in norms.items()}


def own_flags(bad: Any, steps: int | None) -> Any:
    """The loop's own flags, one for each recorded step, or None.

    An array of one step, such as one entry for each device, is a single flag: whether any is set.

    Raises:
      TypeError: ``bad`` is no flag.
      ValueError: it is not one flag for each of several steps, or was donated.
    """
    if bad is None:
        return None
    leaves = jax.tree.leaves(bad)
    flag = leaves[0] if len(leaves) == 1 else bad
    is_array = isinstance(flag, jax.Array)
    array = flag if is_array else np.asarray(flag) if isinstance(flag, _FLAGS) else None
    if array is None or not (array.dtype == bool or jnp.issubdtype(array.dtype, np.integer)):
        raise TypeError(
            f"bad: got {bad!r:.60} of type {type(bad).__name__}, expected True, False or an array "
            "of these; write bad=~jnp.isfinite(loss)"
        )
    if donated_leaf(array) is not None:
        raise ValueError("bad: got a buffer that a step has overwritten, expected one that is kept")
    if steps is None:
        return (jnp.any if is_array else np.any)(array).reshape(1)
    if array.shape != (steps,):
        raise ValueError(
            f"bad: got the shape {array.shape}, expected ({steps},), a flag for each of the steps"
        )
    return array != 0


def find_flag(structure: Any, has_own: bool) -> FlagLeaves:
    """The place of the one flag; ``has_own``: none is needed, since the loop has its own flag.

    Raises:
      ValueError: there is none, or there are several.
    """
    states = found_in(structure.unflatten(range(structure.num_leaves)))
    flags = [(s, states.microbatches[n]) for n, s in states.skips.items() if s.halted is not None]
    clips = tuple(_only(state, ["stats"]) for state in states.clips.values())
    if has_own and len(flags) != 1:
        return without_variables(FlagLeaves(None, clips, None))
    if len(flags) != 1:
        without = bool(states.skips) and not flags
        got = "a state of skip_spikes without halt" if without else f"{len(flags)} states"
        raise ValueError(
            f"state: got {got}{'' if without else ' of skip_spikes(halt=...)'}, expected the state "
            "of an optimizer that has one: write clipgrad.skip_spikes(optimizer, halt=True), and "
            "record(state, batch) with the state that the step returned; in a loop without such an "
            "optimizer write record(state, batch, bad=flag)"
        )
    ((flag, microbatch),) = flags
    large = ("inner_state", "window", "nonfinite_leaves")
    small = [name for name in flag._fields if name not in large]
    return without_variables(FlagLeaves(_only(flag, small), clips, microbatch))


def _only(state: Any, fields: list[str]) -> Any:
    """A state with some of its fields, None instead of the others."""
    return state._replace(**{name: None for name in state._fields if name not in fields})


def made_by_the_optimizer(state: Any) -> str:
    """A sentence on a bad step whose gradient was finite and whose update was not; else empty."""
    states = found_in(without_variables(state)).skips.values()
    flags = jax.device_get([s.nonfinite_leaves or {} for s in states])
    spoilt = [repr(path) for each in flags for path, flag in each.items() if np.any(flag)]
    if not spoilt:
        return ""
    names = first_few(spoilt, _NAMED_LEAVES)
    return f"the gradient was finite, and the optimizer made an update of {names} that is not"


def warning_of_zeros(state: Any, loss: Any) -> str | None:
    """A warning of leaves whose gradient was exactly zero in the first step; None: there are none.

    Clips with ``stats="per_leaf"`` measure this. If all leaves are zero, nothing is known: the loss
    may be 0, or gradients may still be accumulated.
    """
    clips = found_in(without_variables(state)).clips.values()
    is_zero = {
        path: s.all_zero == 1 for clip in clips for path, s in (clip.leaf_stats or {}).items()
    }
    loss, flags = jax.device_get((loss, is_zero))
    zero = [name for name, flag in flags.items() if np.all(flag)]
    if not zero or len(zero) == len(is_zero) or (loss is not None and not np.any(loss)):
        return None
    names = first_few([*map(repr, zero)], _NAMED_LEAVES)
    return (
        f"the gradient of {names} was exactly zero in the first recorded step, which trains "
        "nothing; to find the line, call clipgrad.diagnose(loss, (params, batch)) "
        f"({docs_page('zero')})"
    )
