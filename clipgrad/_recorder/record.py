"""One step of a training, as the recorder keeps it until the flag of the step is known."""

import dataclasses
import functools
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from clipgrad._recorder.flag import Flag
from clipgrad._trees import path_string


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
      before: the number of steps before it; None if it was not looked at.
      is_done: whether all was done that its flag asks for.
    """

    copy: Any
    norms: Any
    batch: Any
    key: Any
    step: Any
    extra: dict[str, Any]
    before: int | None = None
    is_done: bool = False

    @functools.cached_property
    def flag(self) -> Flag:
        """The flag on the host; waits for it."""
        return Flag(*(int(x) for x in np.asarray(self.copy)))

    @property
    def is_bad_step(self) -> bool:
        flag = self.flag
        return bool(flag.halted) and flag.count == flag.halted_at + 1 and not flag.microbatch

    @property
    def steps(self) -> int:
        """The number of steps in the dispatch, where the batch has an entry for each.

        1 where steps were not recorded, whose batches are not here.
        """
        flag, leaves = self.flag, jax.tree.leaves(self.batch)
        count = flag.count - (flag.count if self.before is None else self.before)
        is_stacked = bool(leaves) and all(np.shape(leaf)[:1] == (count,) for leaf in leaves)
        return count if count > 1 and is_stacked and not flag.microbatch else 1

    @property
    def has_bad_step(self) -> bool:
        """Whether the step that has halted the training is this one, or one of these."""
        flag = self.flag
        among = self.steps > 1 and flag.halted and flag.count - flag.halted_at <= self.steps
        return self.is_bad_step or bool(among)


def kept_tree(name: str, tree: Any) -> Any:
    """The tree with copies of NumPy's arrays, which a data iterator may write into again.

    Raises:
      TypeError: a leaf is no array, number or text, or a key of a dictionary can't be written.
      ValueError: a buffer was donated, or a process of several has an array of its own.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _kept_leaf(name, path, leaf), tree)


def _kept_leaf(name: str, path: Any, leaf: Any) -> Any:
    where = f"{name}: got {{}} at {path_string(path)!r}" if path else f"{name}: got {{}}"
    several = jax.process_count() > 1
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            got = where.format("buffers that the step has overwritten")
            raise ValueError(
                f"{got}, expected arrays that can be kept; do not donate the {name}, or record its "
                "number instead, such as record(state, i)"
            )
        shared = not leaf.is_fully_addressable or name != "batch" or leaf.ndim == 0
        return _alone(where, leaf) if several and not shared else leaf
    if type(leaf) in (bool, int, float, complex, str, bytes):
        return leaf
    array = np.array(leaf) if hasattr(leaf, "__array__") else None
    if array is None or array.dtype.hasobject or isinstance(leaf, np.ma.MaskedArray):
        got = where.format(f"{type(leaf).__name__}")
        raise TypeError(f"{got}, expected arrays, numbers or text")
    return _alone(where, leaf) if several else array


def _alone(where: str, leaf: Any) -> Any:
    got = where.format(f"{type(leaf).__name__} of one process")
    raise ValueError(
        f"{got}, expected arrays of all {jax.process_count()} processes; write "
        "jax.make_array_from_process_local_data(sharding, x) before the step"
    )


def is_single_number(value: Any) -> bool:
    """Whether a value is a real number, which may be an array without axes."""
    if isinstance(value, jax.Array | np.ndarray):
        real = any(jax.numpy.issubdtype(value.dtype, kind) for kind in (np.floating, np.integer))
        return value.ndim == 0 and real
    return isinstance(value, int | float)


class Newest:
    """The trees that were recorded last, for as long as their arrays are there.

    Args:
      trees: the leaves and the structure of each; the arrays are not kept alive.
    """

    def __init__(self, trees: Mapping[str, tuple[list[Any], Any]]) -> None:
        self._trees = {
            name: ([_reference(leaf) for leaf in leaves], structure)
            for name, (leaves, structure) in trees.items()
        }

    def alive(self) -> dict[str, Any]:
        """The trees; empty if an array of them is gone or was donated."""
        found = {}
        for name, (references, structure) in self._trees.items():
            leaves = [reference() for reference in references]
            if any(x is None or isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
                return {}
            found[name] = structure.unflatten(leaves)
        return found


def _reference(leaf: Any) -> Any:
    try:
        return weakref.ref(leaf)
    except TypeError:  # numbers, which are small
        return lambda: leaf
