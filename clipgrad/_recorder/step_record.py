"""One step of a training, as the recorder keeps it until the flag of the step is known."""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._arrays import donated_leaf, is_array, path_string
from clipgrad._recorder.files import is_writable
from clipgrad._recorder.flag import Flag
from clipgrad._recorder.paths import leaves_by_path, path_text


@dataclasses.dataclass
class StepRecord:
    """The record of a step."""

    copy: Any  # of the flag, a small array that may not have arrived yet
    norms: Any  # on the device
    inputs: dict[str, Any]  # batch, key and extra
    numbers: "StepNumbers"
    own_state: Any = None  # state and parameters, if the loop has a flag of its own
    before: int | None = None  # the number of steps before it; None if it is the first record
    is_read: bool = False  # whether its flag was read
    is_done: bool = False  # whether all was done that its flag asks for

    @functools.cached_property
    def flag(self) -> Flag:
        """The flag on the host; waits for it."""
        return Flag(*(int(x) for x in np.asarray(self.copy)))

    @property
    def is_ready(self) -> bool:
        """Whether the flag has arrived."""
        return isinstance(self.copy, np.ndarray) or self.copy.is_ready()

    @property
    def bad_step(self) -> int | None:
        """The number of the flag's bad step, recorded or not; 0 for the first."""
        return self.flag.bad_step(self.numbers.count)

    @property
    def place(self) -> int | None:
        """The place of the bad step among the recorded ones; None if it is not recorded."""
        flag, count, bad = self.flag, self.numbers.count, self.bad_step
        taken = flag.count if self._taken is None else self._taken
        if bad is None or flag.microbatch or taken < count or bad < flag.count - count:
            return None
        return bad - (flag.count - count)

    @property
    def _taken(self) -> int | None:
        """The steps since the last record; None if it is the first, or counts began anew."""
        is_known = self.before is not None and self.before <= self.flag.count
        return self.flag.count - self.before if is_known else None

    @property
    def may_be_stacked(self) -> bool:
        """Whether it is unknown if the batch is one batch, or one for each of several steps."""
        taken = self._taken or 1
        is_one = self.numbers.is_stacked or taken == 1
        return not is_one and _has_leading_axis(self.inputs["batch"], taken)


@dataclasses.dataclass(frozen=True)
class StepNumbers:
    """The numbers of the recorded steps, as the user gave them.

    Attributes:
      numbers: a number or text, or a number for each of several steps; ``None``: none was given.
      count: the number of steps.
      is_stacked: whether the batch has an entry for each step.
    """

    numbers: Any
    count: int = 1
    is_stacked: bool = False

    @classmethod
    def of(cls, step: Any, batch: Any) -> "StepNumbers":
        """The numbers by the argument ``step`` of `FlightRecorder.record`."""
        is_array = isinstance(step, jax.Array | np.ndarray) and np.ndim(step) == 1
        if not is_array and not isinstance(step, range | list | tuple):
            return cls(_step_number(step))
        numbers = jnp.copy(step) if isinstance(step, jax.Array) else [*map(_step_number, step)]
        if not (len(numbers) and _has_leading_axis(batch, len(numbers))):
            shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
            raise ValueError(
                f"batch: got leaves of the shapes {shapes} with step={step!r:.60}, expected a "
                f"leading axis of {len(numbers)}, with a batch for each of these steps"
            )
        return cls(numbers, len(numbers), True)

    def at(self, place: int) -> Any:
        """The number of one of the steps; None if none was given."""
        return self.numbers[place] if self.is_stacked else self.numbers


def _has_leading_axis(batch: Any, size: int) -> bool:
    leaves = jax.tree.leaves(batch)
    return bool(leaves) and all(np.shape(leaf)[:1] == (size,) for leaf in leaves)


def _step_number(step: Any) -> Any:
    """The number of a step, which may be a variable of NNX, or a buffer that is donated later."""
    leaves = jax.tree.leaves(step)
    number = jnp.copy(leaves[0]) if isinstance(next(iter(leaves), None), jax.Array) else step
    if not (number is None or isinstance(number, str) or is_number(number)):
        raise TypeError(
            f"step: got {step!r:.60} of type {type(step).__name__}, expected a number or text, or "
            "a range of numbers if the batch has an entry for each of several steps"
        )
    return number


def is_number(value: Any) -> bool:
    """Whether a value is a single real number."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        return isinstance(value, int | float)
    is_real = any(jnp.issubdtype(value.dtype, kind) for kind in (np.floating, np.integer))
    return value.ndim == 0 and is_real


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


def not_donated(tree: Any) -> Any:
    """The tree; None if a step has overwritten an array of it."""
    return None if donated_leaf(tree) is not None else tree


def held_weakly(leaves: list[Any], structure: Any) -> Callable[[], Any]:
    """A function that returns a tree, or None if one of its arrays is gone or was donated."""
    references = [_reference(leaf) for leaf in leaves]

    def alive() -> Any:
        leaves = [reference() for reference in references]
        gone = any(x is None or isinstance(x, jax.Array) and x.is_deleted() for x in leaves)
        return None if gone else structure.unflatten(leaves)

    return alive


def _reference(leaf: Any) -> Any:
    try:
        return weakref.ref(leaf)
    except TypeError:  # numbers, which are small
        return lambda: leaf
