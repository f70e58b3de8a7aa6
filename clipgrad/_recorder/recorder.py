"""The flight recorder: it keeps what a step was given until the step is known to be good."""

import collections
import os
import pathlib
import tempfile
import warnings
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from clipgrad._recorder.circumstances import circumstances
from clipgrad._recorder.flag import Flag, FlagPlace, find_flag
from clipgrad._recorder.halted_error import HaltedError
from clipgrad._recorder.newest import Newest
from clipgrad._recorder.record import StepRecord, kept_tree
from clipgrad._recorder.storage import MANIFEST, orbax, write
from clipgrad._trees import check_tree, is_array

# Some numbers of each step: enough for a picture, and less than one small array in all.
_STATISTICS = 256


class FlightRecorder:
    r"""Writes down what a bad step was given, in any loop with ``skip_spikes(halt=...)``.

    After each step it keeps the batch, starts a copy of the flag to the host, and looks at the
    flags that have arrived. Once one is set it writes a capture: the parameters from before the bad
    step, the batch of that very step, the PRNG key, the number of the step, statistics of the steps
    before, versions and mesh. Then it raises `HaltedError`.

    Guarantees:
      * It keeps nothing of the size of the parameters: of a state it copies the flag and a few
        norms, so buffers of the state may be donated.
      * In one process it never waits for the device. The batches of steps whose flags have not
        arrived are kept until they have, however far the loop is ahead; the runtime holds them too.
      * Several processes must stop at the same step. There `record` looks at the flag of
        ``keep - 1`` steps before, and waits for it: the loop is never further ahead.
      * The batch is that of the bad step, or none: where the loop records only some of its steps,
        or a state that has halted before, the capture says that it has no batch.
      * A capture has its name only once it is complete, and none is ever overwritten.
      * No thread, no global state; loading a capture runs no code of it.

    Args:
      directory: where captures are written, one folder each, such as ``step_57``. They hold
        parameters and data.
      keep: how many batches are kept of steps that are known to be good, and how far several
        processes run ahead. An ``optax.MultiSteps`` *around* `skip_spikes` needs as many as it
        accumulates, since the capture has the batches of all of them.
      max_captures: how many captures there may be in the directory, those of earlier runs included;
        after that none is written, and the error says so.
      raise_on_halt: ``False``: only a warning is raised for a capture that can't be written;
        ``captures`` has those that are, and the training stays halted until `resume`.

    Raises:
      ImportError: orbax-checkpoint is not installed; it is the extra ``recorder``.
      OSError: the directory can't be made or written to.
      ValueError: ``keep`` or ``max_captures`` is not a positive integer.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax, tempfile
      >>> step = cg.train_step(lambda w, x: jnp.sum(jnp.log(w * x)),
      ...                      cg.skip_spikes(optax.sgd(0.1), halt=True))
      >>> state = step.init(jnp.ones(2))
      >>> recorder = cg.FlightRecorder(tempfile.mkdtemp())
      >>> try:
      ...     for i, x in enumerate([jnp.ones(2), jnp.array([1.0, 0.0]), jnp.ones(2)]):
      ...         state, _ = step(state, x)
      ...         recorder.record(state, x, step=i)
      ...     recorder.close()
      ... except cg.HaltedError as error:
      ...     capture = cg.load_capture(error.path)
      >>> print(capture.step, capture.batch)
      1 [1. 0.]
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep: int = 4,
        max_captures: int = 3,
        raise_on_halt: bool = True,
    ) -> None:
        for name, value in (("keep", keep), ("max_captures", max_captures)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: got {value!r}, expected a positive integer")
        orbax()
        self.directory = pathlib.Path(directory).absolute()
        _check_writable(self.directory)
        self.keep, self.max_captures, self.raise_on_halt = keep, max_captures, raise_on_halt
        self.captures: list[pathlib.Path] = []
        self._records: collections.deque[StepRecord] = collections.deque()
        self._past: collections.deque[tuple] = collections.deque(maxlen=_STATISTICS)
        self._place: FlagPlace | None = None
        self._names: list[str] = []
        self._halted_at: int | None = None
        self._unwritten: StepRecord | None = None
        self._newest = Newest({})

    def record(
        self, state: Any, batch: Any, *, key: Any = None, step: Any = None, **extra: Any
    ) -> None:
        """Keeps what a step was given, and looks at the flags of earlier steps.

        Args:
          state: the state *after* the step, any tree with the one state of
            ``skip_spikes(halt=...)``: that of `train_step`, a flax ``TrainState``, an
            ``nnx.Optimizer``, the state of an optimizer, a tuple of such.
          batch: what the step was given, any tree of arrays; or its number, where the data can be
            found again by it. NumPy arrays are copied; arrays of JAX must not be donated.
          key: the PRNG key of the step.
          step: the number of the step; by default that of `skip_spikes`, 0 for the first.
          **extra: whatever else belongs to the step. Single numbers, such as ``loss=loss``, are
            statistics; ``params=`` are the parameters, where ``state`` has none.

        Raises:
          HaltedError: a step was bad, and its capture is written; unless ``raise_on_halt=False``.
          ValueError: ``state`` has no flag or several, or ``state`` or ``batch`` was donated.
          TypeError: a leaf of ``batch`` is no array, number or text.
        """
        params = extra.pop("params", None)
        leaves, structure = jax.tree.flatten(state)
        if self._place is None or structure != self._place.structure:
            check_tree("state", state)
            self._place = find_flag(structure)
            self._names = self._place.names(leaves)
        data = {"batch": kept_tree("batch", batch), "key": kept_tree("key", key)}
        more = {name: kept_tree(name, value) for name, value in extra.items()}
        number = _variable(step)
        flag, norms, copied = self._place.copied(leaves, number if is_array(number) else None)
        step = number if copied is None else copied
        flag.copy_to_host_async()
        self._records.append(StepRecord(flag, norms, **data, step=step, extra=more))
        given = {} if params is None else {"params": jax.tree.flatten(params)}
        self._newest = Newest({"state": (leaves, structure)} | given)
        several = jax.process_count() > 1
        self._look(waiting=len(self._records) - self.keep + 1 if several else 0, peek=not several)

    def close(self) -> None:
        """Looks at the flags of all steps that are left over, and waits for them.

        The state that was recorded last must still be there, in a variable of yours; else the
        capture has no parameters and says so. A capture that could not be written is tried again.

        Raises:
          HaltedError: a step was bad, as for `record`.
        """
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None:
            self._halt(unwritten)
        self._look(waiting=len(self._records))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif not isinstance(error, HaltedError):
            self._close_after(error)

    def _close_after(self, error: BaseException) -> None:
        """What ends the loop stays the error; it says if a step was bad as well."""
        try:
            self.close()
        except Exception as other:
            error.add_note(str(other))

    def _look(self, waiting: int, peek: bool = False) -> None:
        """Looks at flags in their order: waits for the first ones, others must have arrived."""
        for i, record in enumerate(list(self._records)):
            if record.flag is None and not (i < waiting or peek and record.copy.is_ready()):
                break
            self._look_at(record)
        while len(self._records) > self.keep and self._records[0].flag is not None:
            self._records.popleft()

    def _look_at(self, record: StepRecord) -> None:
        if record.flag is not None:
            return
        flag = record.look()
        self._past.append((record.step, flag, record.norms, record.numbers))
        halted_at = flag.halted_at if flag.halted else None
        known, self._halted_at = self._halted_at, halted_at
        if halted_at is not None and halted_at != known:
            self._halt(record)

    def _halt(self, record: StepRecord) -> None:
        """Writes the capture of a bad step, and raises."""
        message, cause, path = f"the training has halted at step {self._step(record)}", None, None
        try:
            path = self._written(record)
            self.captures.append(path)
            message += (
                f"; its capture is {path}: clipgrad.diagnose(loss, "
                "clipgrad.load_capture(path).args) looks for the reason, and "
                "opt_state = clipgrad.resume(opt_state) goes on"
            )
        except Exception as error:
            cause = error
            message += "; its capture could not be written: "
            several = isinstance(error, _TooManyError)
            message += str(error) if several else f"{type(error).__name__}: {error}"
            if not several:
                self._unwritten = record
                message += "; close() tries again, while your state is there"
        if self.raise_on_halt:
            raise HaltedError(path, message) from cause
        if cause is not None:
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def _written(self, record: StepRecord) -> pathlib.Path:
        there = [p for p in self.directory.glob(f"[!.]*/{MANIFEST}")]
        if len(there) >= self.max_captures:
            raise _TooManyError(
                f"max_captures: got {self.max_captures}, and that many are in {self.directory}"
            )
        step = self._step(record)
        path = self.directory / f"step_{step}"
        again = (self.directory / f"step_{step}_{i}" for i in range(1, len(there) + 2))
        path = next(p for p in (path, *again) if not p.exists())
        content, meta = self._newest.alive(), self._meta(record)
        batch, missing = self._batch(record)
        content |= {"key": record.key, "extra": record.extra} if record.is_bad_step else {}
        content |= {} if missing else {"batch": batch}
        meta |= {"no_batch": missing} if missing else {}
        meta |= {"microbatches": len(batch)} if self._accumulates and not missing else {}
        write(path, content, meta)
        return path

    @property
    def _accumulates(self) -> bool:
        return self._place is not None and self._place.accumulates

    def _step(self, record: StepRecord) -> Any:
        """The number of the bad step."""
        if record.step is None or not record.is_bad_step:
            return record.look().halted_at
        return _plain_number(record.step)

    def _batch(self, record: StepRecord) -> tuple[Any, str | None]:
        """The batch of the bad step, or why there is none."""
        flag = record.look()
        if not record.is_bad_step:
            return None, (
                f"the first record after step {flag.halted_at} is that of step {flag.count - 1}; "
                "call record after every step, or clipgrad.resume if the state was halted before"
            )
        if not self._accumulates:
            return record.batch, None
        return _microbatches(list(self._records), record)

    def _meta(self, record: StepRecord) -> dict[str, Any]:
        """What the capture says besides what it holds."""
        flag = record.look()
        return {
            "step": self._step(record),
            "halted_at": flag.halted_at,
            "statistics": self._statistics(flag),
            **circumstances(),
        }

    def _statistics(self, flag: Flag) -> dict[str, list]:
        """The numbers of the steps up to the bad one, by name."""
        past = [entry for entry in self._past if entry[1].count <= flag.count]
        rows = []
        for step, each, norms, numbers in past:
            row = {"step": each.count - 1 if step is None else _plain_number(step)}
            row |= dict(zip(self._names, np.asarray(norms).tolist(), strict=True))
            rows.append(row | {name: _plain_number(x) for name, x in numbers.items()})
        names = {name: None for row in rows for name in row}
        return {name: [row.get(name) for row in rows] for name in names}


class _TooManyError(RuntimeError):
    """There are as many captures as there may be."""


def _microbatches(records: list[StepRecord], bad: StepRecord) -> tuple[Any, str | None]:
    """The batches of all gradients of a step, where ``optax.MultiSteps`` is around the flag."""
    last = first = next(i for i, record in enumerate(records) if record is bad)
    while first and records[first - 1].look().microbatch:
        first -= 1
    whole = records[first].look().microbatch == 1 if first < last else first > 0
    if not whole:
        return None, (
            "optax.MultiSteps is around skip_spikes, and not all of the batches that it "
            "accumulated are kept; write keep= as many, or skip_spikes(optax.MultiSteps(...))"
        )
    return [record.batch for record in records[first : last + 1]], None


def _check_writable(directory: pathlib.Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass


def _variable(step: Any) -> Any:
    """The array of a step, which may be a variable of flax NNX."""
    leaves = jax.tree.leaves(step)
    return leaves[0] if len(leaves) == 1 else None


def _plain_number(number: Any) -> Any:
    """A number as JSON has it; None for a buffer that was donated meanwhile."""
    if isinstance(number, jax.Array) and number.is_deleted():
        return None
    return number if isinstance(number, int | float | str) else np.asarray(number).item()
