"""One step of a training, as the recorder keeps it until the flag of the step is known."""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from clipgrad._arrays import is_array, path_string
from clipgrad._recorder.files import is_writable
from clipgrad._recorder.flag import Flag
from clipgrad._recorder.paths import leaves_by_path, path_text


@dataclasses.dataclass
class StepRecord:
    """The record of a step."""

    copy: Any  # of the flag, a small array that may not have arrived yet
    norms: Any  # on the device
    inputs: dict[str, Any]  # batch, key and extra
    step: Any  # None if the user gave none
    before: int | None = None  # the number of steps before it; None if it was not looked at
    is_done: bool = False  # whether all was done that its flag asks for

    @functools.cached_property
    def flag(self) -> Flag:
        """The flag on the host; waits for it."""
        return Flag(*(int(x) for x in np.asarray(self.copy)))

    @property
    def steps(self) -> int:
        """The number of steps in the dispatch, if the batch has an entry for each; else 1."""
        count = self.flag.count - (self.flag.count if self.before is None else self.before)
        leaves = jax.tree.leaves(self.inputs["batch"])
        is_stacked = bool(leaves) and all(np.shape(leaf)[:1] == (count,) for leaf in leaves)
        return count if count > 1 and is_stacked else 1

    @property
    def has_bad_step(self) -> bool:
        """Whether the step that has halted the training is this one, or one of these."""
        flag = self.flag
        is_bad = flag.halted and flag.count - flag.halted_at <= self.steps
        return bool(is_bad) and not flag.microbatch


def kept_tree(name: str, tree: Any) -> Any:
    """The tree with copies of NumPy's arrays, which a data iterator may write into again.

    Raises:
      TypeError: a leaf, or a key of a dictionary, can't be written.
      ValueError: a buffer was donated, or a process of several has an array of its own.
    """
    leaves_by_path(name, tree)
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _kept_leaf(name, path, leaf), tree)


def check_writable(name: str, tree: Any) -> None:
    """Raises `TypeError` for a key or an array that can't be written; objects are left out."""
    for path, leaf in leaves_by_path(name, tree).items():
        if is_array(leaf):
            _check_writable_dtype(f"{name}: got {{}} at {path_text(path)!r}", leaf)


def _kept_leaf(name: str, path: Any, leaf: Any) -> Any:
    if type(leaf) in (bool, int, float, complex, str):
        return leaf
    where = f"{name}: got {{}} at {path_string(path)!r}" if path else f"{name}: got {{}}"
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise ValueError(
                f"{where.format('buffers that the step has overwritten')}, expected arrays that "
                f"can be kept; do not donate the {name}, or record its number instead, such as "
                "record(state, i)"
            )
        array, is_shared = leaf, not leaf.is_fully_addressable or name != "batch" or not leaf.ndim
    else:
        array, is_shared = np.array(leaf) if hasattr(leaf, "__array__") else None, False
        if array is None or array.dtype.hasobject or isinstance(leaf, np.ma.MaskedArray):
            got = where.format(type(leaf).__name__)
            raise TypeError(f"{got}, expected arrays, numbers or text")
    _check_writable_dtype(where, array)
    if not is_shared and jax.process_count() > 1:
        raise ValueError(
            f"{where.format(f'{type(leaf).__name__} of one process')}, expected arrays of all "
            f"{jax.process_count()} processes; write "
            "jax.make_array_from_process_local_data(sharding, x) before the step"
        )
    return array


def _check_writable_dtype(where: str, array: Any) -> None:
    if not is_writable(array.dtype):
        raise TypeError(
            f"{where.format(f'an array of dtype {array.dtype}')}, expected numbers of a type that "
            "orbax writes; convert it, or record its number instead"
        )


def held_weakly(leaves: list[Any], structure: Any) -> Callable[[], Any]:
    """A function that returns a tree, or None if an array of it is gone or was donated."""
    references = [_reference(leaf) for leaf in leaves]

    def alive() -> Any:
        found = [reference() for reference in references]
        gone = any(x is None or isinstance(x, jax.Array) and x.is_deleted() for x in found)
        return None if gone else structure.unflatten(found)

    return alive


def _reference(leaf: Any) -> Any:
    try:
        return weakref.ref(leaf)
    except TypeError:  # numbers, which are small
        return lambda: leaf
