"""The flight recorder: it keeps the inputs of a step until the step is known to be good."""

import collections
import glob
import importlib.metadata
import os
import pathlib
import platform
import tempfile
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np
from jax.core import Tracer

from clipgrad._arrays import answers_lookups, explain_call
from clipgrad._errors import warn
from clipgrad._recorder.files import captures_in, orbax, write
from clipgrad._recorder.flag import (
    copied_flag,
    find_flag,
    made_by_the_optimizer,
    own_flags,
    warning_of_zeros,
)
from clipgrad._recorder.folders import mounted_folder
from clipgrad._recorder.step_record import (
    StepNumbers,
    StepRecord,
    check_writable,
    held_weakly,
    is_number,
    kept_tree,
    not_donated,
)

# Some numbers of each step: enough to see a trend, and less than one small array in all.
_STATISTICS = 256
_CAPTURE_PACKAGES = ("clipgrad", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")


class HaltedError(RuntimeError):
    """A training step was bad, and the capture is written.

    Attributes:
      path: the capture, for `load_capture`; ``None`` if it could not be written.
    """

    def __init__(self, path: pathlib.Path | None, message: str = "") -> None:
        super().__init__(message or f"the training has halted; its capture is {path}")
        self.path = path

    def __reduce__(self) -> tuple:
        return type(self), (self.path, str(self))


@answers_lookups("recorder")
@explain_call()
class FlightRecorder:
    """Saves the parameters, the batch and the key of a bad training step, in any loop.

    A step is bad if your optimizer, ``skip_spikes(halt=...)``, halts, or if you say so by a flag,
    ``record(..., bad=flag)``.

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

    Args:
      directory: the folder for captures; each capture gets a subfolder, such as ``step_57``. To
        write to a bucket, mount the bucket.
      keep: the number of batches to keep from steps that are known to be good.
      max_captures: the largest number of captures in the directory, earlier runs included.
      raise_on_halt: ``False``: you get no error, and a warning if a capture can't be written. The
        attribute ``captures`` lists the captures, and training stays halted until `resume`.

    Raises:
      ImportError: orbax-checkpoint is not installed; it is the extra ``recorder``.
      OSError: the directory can't be made or written to.
      TypeError: the directory is not a path.
      ValueError: ``keep`` or ``max_captures`` is not a positive integer, or the path of the
        directory is an address (``gs://``), or has the character ``*``, ``?`` or ``[``.

    After each step you call `record`. `record` keeps the batch, starts to copy the flag to the
    host, and reads the flags that have arrived. If a flag is set, `record` writes a capture: the
    parameters from before the bad step, the batch and the key of that step, norms of earlier steps,
    and versions. Then `record` raises `HaltedError`.

    Guarantees:
      * The recorder does not copy or hold the parameters, so you may donate the state's buffers.
        With your own flag, the recorder holds each step's state until that step's flag arrives,
        since no optimizer keeps the parameters from before a bad step.
      * In one process, only the first `record` waits for the device, and each batch is kept until
        the flag of that step arrives. Several processes must stop at the same step, so there
        `record` waits for the flag from ``keep - 1`` steps before.
      * A capture never has the batch of another step. If you do not record every step, or record a
        state that had already halted, the capture says that there is no batch. If
        ``optax.MultiSteps`` wraps `skip_spikes`, the capture has the last microbatch.
      * If your compiled function takes several steps, record the state after the last step, the
        batches of all steps, stacked along the leading axis, and the step numbers,
        ``step=range(i, i + 4)``. The capture then has all batches, and says which one is bad.
        Without step numbers a batch counts as the last step's; if the batch may be either, you get
        an error.
      * The first `record` warns if a leaf's gradient was exactly zero in the first step, provided
        that a clip with ``stats="per_leaf"`` measures this.
      * If something can't be written, the first `record` raises the error, not the halt much later.
        Functions and other objects in a state or a model are left out.
      * A folder gets the name of a capture only when the capture is complete, and never overwrites
        another one. Loading a capture does not run code from the capture.
    """

    directory: pathlib.Path
    captures: list[pathlib.Path]

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
        self.directory = mounted_folder("directory", directory).absolute()
        _check_writable(self.directory)
        self.keep, self.max_captures, self.raise_on_halt = keep, max_captures, raise_on_halt
        self.captures = []
        self._records: collections.deque[StepRecord] = collections.deque()
        self._past: collections.deque[dict] = collections.deque(maxlen=_STATISTICS)
        self._place: Any = None  # of the flag in the trees that `record` gets
        self._structure: Any = None
        self._newest: Callable[[], Any] = lambda: None
        self._own_count = 0  # of the recorded steps
        self._count: int | None = None  # of the steps of the last record that was looked at
        self._bad_step: int | None = None  # of this record, or an earlier one that halted it
        self._unwritten: StepRecord | None = None

    @explain_call()
    def record(
        self,
        state: Any,
        batch: Any,
        *,
        key: Any = None,
        step: Any = None,
        bad: Any = None,
        **extra: Any,
    ) -> None:
        """Keeps the inputs of a step, and reads the flags of earlier steps.

        Args:
          state: the state *after* the step, any tree with exactly one ``skip_spikes(halt=...)``
            state: the state from `train_step`, a flax ``TrainState``, an ``nnx.Optimizer``, an
            optimizer state, or a tuple of these. With ``bad`` any tree.
          batch: the step's batch, any tree of arrays; or a number by which you can load the data
            again. NumPy arrays are copied; do not donate JAX arrays.
          key: the step's PRNG key.
          step: the step number; by default the number that `skip_spikes` counts, or with ``bad``
            the number of earlier records. If one compiled function takes several steps, all step
            numbers, such as ``range(i, i + 4)``.
          bad: your own flag for a bad step, if no optimizer halts: ``True``, ``False`` or a boolean
            array, such as ``~jnp.isfinite(loss)``, for which `record` does not wait. For several
            steps, one flag each. The capture has the state that you recorded with the bad step, so
            you get the parameters *after* that step, unless you pass the earlier ones as
            ``params=``. If a later step donates the parameters before the flag has arrived, the
            capture has none; to prevent this, pass ``bool(flag)``, which waits. If several bad
            steps follow each other, the first is captured.
          **extra: other values from the step. Single numbers, such as ``loss=loss``, become
            statistics; pass ``params=`` if ``state`` does not have the parameters.

        Raises:
          HaltedError: a step was bad, and the capture is written; not with ``raise_on_halt=False``.
          ValueError: ``bad`` is ``None``, and ``state`` has no flag or several; ``state`` or
            ``batch`` was donated; or the batch may belong to several steps, see ``step``.
          TypeError: ``bad`` is no flag; a leaf of ``batch`` is not an array, a number or text; an
            array has a dtype that orbax does not write; or a key of a dictionary is not text or an
            integer.
        """
        params = extra.pop("params", None)
        leaves, structure = jax.tree.flatten((state, params))
        if any(isinstance(leaf, Tracer) for leaf in (*leaves, *jax.tree.leaves(batch))):
            raise TypeError(
                "record: got a traced array, expected the state that a compiled step returned; "
                "call this outside of jax.jit and jax.lax.scan, after the step"
            )
        numbers, is_first = StepNumbers.of(step, batch), self._structure is None
        flags = own_flags(bad, numbers.count if numbers.is_stacked else None)
        if is_first or structure != self._structure or flags is None and self._place.skips is None:
            check_writable("state", state)
            check_writable("params", params)
            self._place, self._structure = find_flag(structure, flags is not None), structure
        inputs = {"batch": kept_tree("batch", batch), "key": kept_tree("key", key)}
        inputs["extra"] = {name: kept_tree(name, value) for name, value in extra.items()}
        flag, norms = copied_flag(self._place, leaves, flags, self._own_count + numbers.count)
        if isinstance(flag, jax.Array):
            flag.copy_to_host_async()
        self._own_count += numbers.count
        own_state = None if flags is None else (state, params)
        self._records.append(StepRecord(flag, norms, inputs, numbers, own_state))
        self._newest = held_weakly(leaves, structure)
        if is_first and (warning := warning_of_zeros(state, extra.get("loss"))):
            warn(warning)
        several = jax.process_count() > 1
        self._look(waiting=len(self._records) - self.keep + 1 if several else 0, peek=not several)

    def close(self) -> None:
        """Waits for all remaining flags, and reads them.

        Keep the last recorded state in a variable until then; otherwise the capture has no
        parameters and says so. If an earlier capture could not be written, `close` tries again.

        Raises:
          HaltedError: a step was bad, as for `record`.
        """
        if self._unwritten is not None:
            self._halt(self._unwritten)
        self._look(waiting=len(self._records))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
        elif not isinstance(error, HaltedError):
            try:  # the error stays the one raised, and says if a step was bad as well
                self.close()
            except Exception as other:
                error.add_note(str(other))

    def _look(self, waiting: int, peek: bool = False) -> None:
        """Reads flags in order: waits for so many, with ``peek`` also those that have arrived."""
        for i, record in enumerate(list(self._records)):
            if not record.is_done and not (i < waiting or peek and record.is_ready):
                break
            self._look_at(record)
        while len(self._records) > self.keep and self._records[0].is_done:
            self._records.popleft()

    def _look_at(self, record: StepRecord) -> None:
        """Acts on a flag; after an interruption, as by Ctrl-C, the flag is still to be acted on."""
        if record.is_done:
            return
        flag = record.flag
        if not record.is_read:
            record.before, self._count, record.is_read = self._count, flag.count, True
            number = record.numbers.at(-1)
            row = {"step": flag.count - 1 if number is None else number} | record.norms
            row |= {name: x for name, x in record.inputs["extra"].items() if is_number(x)}
            self._past.append(row)
            if record.may_be_stacked:
                raise ValueError(_which_steps(flag.count - (record.before or 0)))
        bad_step, earlier = record.bad_step, self._bad_step
        is_new = bad_step != earlier if flag.halted else earlier is None
        if bad_step is not None and is_new:
            self._unwritten = record
        self._bad_step, record.is_done = bad_step, True
        if self._unwritten is record:
            self._halt(record)
        else:
            record.own_state = None

    def _halt(self, record: StepRecord) -> None:
        message, cause, path = f"the training has halted at step {_step_of(record)}", None, None
        if record.flag.halted:
            state, _ = self._newest() or (None, None)
            made = made_by_the_optimizer(state)
            message += f": {made}" if made else ""
        else:
            message = f"step {_step_of(record)} is bad by the flag of the loop"
        try:
            path = self._written(record)
            self._unwritten = record.own_state = None
            self.captures.append(path)
            message += (
                f"; its capture is {path}; to find the reason, call clipgrad.diagnose(loss, "
                "clipgrad.load_capture(path).args)"
            )
            if record.flag.halted:
                message += "; to continue, write opt_state = clipgrad.resume(opt_state)"
        except Exception as error:
            cause = error
            message += f"; its capture could not be written: {type(error).__name__}: {error}"
            message += "; close() tries again, if your state still exists"
        if self.raise_on_halt:
            raise HaltedError(path, message) from cause
        if cause is not None:
            warn(message, RuntimeWarning)

    def _written(self, record: StepRecord) -> pathlib.Path:
        if len(captures_in(self.directory)) >= self.max_captures:
            raise RuntimeError(
                f"max_captures: got {self.max_captures}, but there are as many in {self.directory}"
            )
        step, flag = _step_of(record), record.flag
        names = [f"step_{step}", *(f"step_{step}_{i}" for i in range(1, self.max_captures + 1))]
        paths = [path for path in map(self.directory.joinpath, names) if not path.exists()]
        meta = {"step": step, "halted_at": record.bad_step, "statistics": self._statistics()}
        meta["nonfinite"] = bool(flag.nonfinite) if flag.halted else None
        held = self._newest() if flag.halted else not_donated(record.own_state)
        state, params = held or (None, None)
        content = {"state": state} | ({} if params is None else {"params": params})
        if record.place is not None:
            content |= record.inputs
            if record.numbers.is_stacked:
                meta |= {"steps": record.numbers.count, "step_in_batch": record.place}
            made = made_by_the_optimizer(state) if flag.halted else ""
            meta |= {"optimizer": made} if made else {}
            if self._place.microbatch is not None:
                meta["microbatch"] = "the last of those that optax.MultiSteps has averaged"
        else:
            meta["no_batch"] = (
                f"the first record after step {record.bad_step} was of step {flag.count - 1}; call "
                "record after every step, or clipgrad.resume if the state was halted before"
            )
        return write(paths, content, meta | _circumstances())

    def _statistics(self) -> dict[str, list]:
        """The numbers of the steps up to the bad one, by name."""
        rows = [{name: _plain_number(x) for name, x in row.items()} for row in self._past]
        names = {name: None for row in rows for name in row}
        return {name: [row.get(name) for row in rows] for name in names}


def _circumstances() -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in _CAPTURE_PACKAGES}
    return {
        "versions": versions | {"python": platform.python_version()},
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    }


def _check_writable(directory: pathlib.Path) -> None:
    if glob.has_magic(str(directory)):
        raise ValueError(
            f"directory: got {str(directory)!r}, expected a path without *, ? and [, which orbax "
            "takes for a pattern"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass


def _which_steps(count: int) -> str:
    return (
        f"batch: got one with a leading axis of {count} at the first record after {count} steps, "
        "which may be one batch or a batch for each of the steps; call record after every step, or "
        f"if a compiled function takes {count} steps, write record(state, batches, "
        f"step=range(i, i + {count}))"
    )


def _step_of(record: StepRecord) -> Any:
    """The user's number of the bad step, if it was recorded and has one; else the optimizer's."""
    number = None if record.place is None else record.numbers.at(record.place)
    return record.bad_step if number is None else _plain_number(number)


def _plain_number(number: Any) -> Any:
    """A number, or text, as JSON has it; None for a buffer that was donated meanwhile."""
    if isinstance(number, jax.Array) and number.is_deleted():
        return None
    plain = np.asarray(number).item()
    return plain if isinstance(plain, bool | int | str) else float(plain)
