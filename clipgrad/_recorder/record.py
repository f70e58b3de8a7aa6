"""One step of a training, as the recorder keeps it until the flag of the step is known."""

import dataclasses
from typing import Any

import jax
import numpy as np

from clipgrad._recorder.flag import Flag, read_flag
from clipgrad._trees import check_tree, path_string


@dataclasses.dataclass
class StepRecord:
    """The record of a step.

    Attributes:
      copy: the flag, a small array that may not have arrived yet.
      norms: the statistics of the step, on the device.
      batch: the batch.
      key: the PRNG key.
      step: the number of the step that the user gave, or None.
      extra: what else the user gave.
      flag: the flag on the host, once it was looked at.
      before: the number of steps before it; None if it was not looked at.
      is_done: whether all was done that its flag asks for.
    """

    copy: Any
    norms: Any
    batch: Any
    key: Any
    step: Any
    extra: dict[str, Any]
    flag: Flag | None = None
    before: int | None = None
    is_done: bool = False

    def look(self) -> Flag:
        """The flag; waits for it."""
        if self.flag is None:
            self.flag = read_flag(self.copy)
        return self.flag

    @property
    def is_bad_step(self) -> bool:
        """Whether this very step has halted the training."""
        flag = self.look()
        return bool(flag.halted) and flag.count == flag.halted_at + 1 and not flag.microbatch

    @property
    def steps(self) -> int:
        """The number of steps in the dispatch, where the batch has an entry for each.

        1 where steps were not recorded, whose batches are not here.
        """
        flag, leaves = self.look(), jax.tree.leaves(self.batch)
        count = flag.count - (flag.count if self.before is None else self.before)
        is_stacked = bool(leaves) and all(np.shape(leaf)[:1] == (count,) for leaf in leaves)
        return count if count > 1 and is_stacked and not flag.microbatch else 1

    @property
    def has_bad_step(self) -> bool:
        """Whether the step that has halted the training is this one, or one of these."""
        flag = self.look()
        among = self.steps > 1 and flag.halted and flag.count - flag.halted_at <= self.steps
        return self.is_bad_step or bool(among)

    @property
    def numbers(self) -> dict[str, Any]:
        """The single numbers among what else the user gave, where they are."""
        return {name: value for name, value in self.extra.items() if _is_single_number(value)}


def kept_tree(name: str, tree: Any) -> Any:
    """The tree with copies of NumPy's arrays, which a data iterator may write into again.

    Raises:
      TypeError: a leaf is no array, number or text, or a key of a dictionary can't be written.
      ValueError: a buffer was donated, or a process of several has an array of its own.
    """
    check_tree(name, tree)
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _kept_leaf(name, path, leaf), tree)


def _kept_leaf(name: str, path: Any, leaf: Any) -> Any:
    where = f"{name}: got {{}} at {path_string(path)!r}" if path else f"{name}: got {{}}"
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            got = where.format("buffers that the step has overwritten")
            raise ValueError(
                f"{got}, expected arrays that can be kept; do not donate the {name}, or record its "
                "number instead, such as record(state, i)"
            )
        shared = not leaf.is_fully_addressable or name != "batch" or leaf.ndim == 0
        return leaf if jax.process_count() == 1 or shared else _alone(where, leaf)
    is_plain = type(leaf) in (bool, int, float, complex, str, bytes)
    if is_plain:
        return leaf
    array = np.array(leaf) if hasattr(leaf, "__array__") else None
    if array is None or array.dtype.hasobject or isinstance(leaf, np.ma.MaskedArray):
        got = where.format(f"{type(leaf).__name__}")
        raise TypeError(f"{got}, expected arrays, numbers or text")
    return array if jax.process_count() == 1 else _alone(where, leaf)


def _alone(where: str, leaf: Any) -> Any:
    got = where.format(f"{type(leaf).__name__} of one process")
    raise ValueError(
        f"{got}, expected arrays of all {jax.process_count()} processes; write "
        "jax.make_array_from_process_local_data(sharding, x) before the step"
    )


def _is_single_number(value: Any) -> bool:
    if isinstance(value, jax.Array | np.ndarray):
        real = any(jax.numpy.issubdtype(value.dtype, kind) for kind in (np.floating, np.integer))
        return value.ndim == 0 and real
    return isinstance(value, int | float)
