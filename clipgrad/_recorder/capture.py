"""A capture: what a bad step was given, as it comes back from the disk."""

import dataclasses
import os
import pathlib
from typing import Any

import jax

from clipgrad._diagnose import CapturedArgs
from clipgrad._folders import mounted_folder
from clipgrad._recorder.restored import restored
from clipgrad._recorder.storage import MANIFEST, orbax, read, read_manifest, readable
from clipgrad._trees import donated_leaf

_CAPTURED = ("params", "state", "batch", "extra")
_NO_PARAMS = (
    "params: got none, expected a state with params, or record(..., params=params); the state has "
)


@dataclasses.dataclass(frozen=True)
class Capture:
    """The inputs of a bad step, as `FlightRecorder` saved them.

    Its trees are dictionaries, lists, tuples, and the states of optax and of this library. Objects
    of other classes become dictionaries of their fields, because loading does not run code from the
    capture; `restore` puts them into your model.

    Attributes:
      path: the folder of the capture, in a file system that this machine has mounted.
      state: the recorded state, with the parameters from before the bad step. ``None`` if you no
        longer had it when you called `FlightRecorder.close`.
      key: the PRNG key of the step, or None.
      step: the number of the step.
      extra: the other arguments of ``record``.
      meta: ``halted_at``, ``statistics``, ``versions``, ``devices``, ``processes``, ``platform``,
        ``device_kind``; ``no_batch`` gives the reason if there is no batch; ``microbatches`` is
        their number if ``optax.MultiSteps`` wraps `skip_spikes`. If the batch was recorded with
        several steps, ``steps`` is their number, and ``step_in_batch`` the position of the bad one
        along the leading axis of the batch.
    """

    path: pathlib.Path
    state: Any
    key: Any
    step: Any
    extra: dict[str, Any]
    meta: dict[str, Any]
    _params: Any = dataclasses.field(repr=False)
    _batch: Any = dataclasses.field(repr=False)

    @property
    def params(self) -> Any:
        """The parameters given to ``record(params=...)``, or else those in the state."""
        if self._params is not None:
            return self._alive("params", self._params)
        state = self.state
        params = state.get("params") if isinstance(state, dict) else getattr(state, "params", None)
        if params is None:
            raise ValueError(_NO_PARAMS + _fields(state))
        return self._alive("params", params)

    @property
    def batch(self) -> Any:
        """The batch of the bad step; a list of them, if ``meta`` has ``microbatches``."""
        if "no_batch" in self.meta:
            raise ValueError(f"batch: got none: {self.meta['no_batch']}")
        return self._alive("batch", self._batch)

    @property
    def args(self) -> tuple[Any, Any]:
        """The parameters and the batch, for `diagnose`."""
        args = CapturedArgs((self.params, self.batch))
        norms = self.meta["statistics"].get("skip_spikes/raw_norm") or [0]
        if not norms[-1]:
            kind, jax_version = self.meta["device_kind"], self.meta["versions"]["jax"]
            args.expected = (
                f"not reproduced: step {self.step} was not finite on {self.meta['devices']} "
                f"devices ({kind}, jax {jax_version}), but is finite here; does the loss depend on "
                "a key, or on something else besides its arguments?"
            )
        return args

    def restore(self, like: Any, name: str = "params") -> Any:
        """A part of the capture in the structure of your tree.

        Guarantees:
          * Leaves are paired by their paths, never by position.
          * The arrays are those of the capture: a step that donates them overwrites both.
          * The result has the classes of your tree; a variable that a model of flax NNX has in
            several places stays one.

        Args:
          like: a tree with the same paths, such as a model or a flax ``TrainState``. What is not an
            array, a number or text in it stays as it is.
          name: "params", "state", "batch" or "extra".

        Raises:
          ValueError: paths, shapes or dtypes differ, there is no part of this name, or a step has
            overwritten the arrays.
        """
        if name not in _CAPTURED:
            raise ValueError(f"name: got {name!r}, expected {', '.join(map(repr, _CAPTURED))}")
        return restored(like, self._alive(name, getattr(self, name)), name)

    def _alive(self, name: str, tree: Any) -> Any:
        """A part of the capture, unless a step has overwritten its arrays."""
        path = donated_leaf(tree)
        if path is None:
            return tree
        at, again = f" at {name}{path}" if path else "", f"load_capture({str(self.path)!r})"
        raise ValueError(
            f"{name}: got an array{at} that a step has overwritten, since it donates its "
            f"arguments; expected a capture as it was loaded; write {again} again, and pass "
            "jax.tree.map(jnp.copy, ...) of its arrays to such a step"
        )


def load_capture(path: str | os.PathLike, *, mesh: jax.sharding.Mesh | None = None) -> Capture:
    """Loads a capture of `FlightRecorder`.

    Guarantees:
      * Values and dtypes are bit-identical to the values and dtypes of the run.
      * Arrays are sharded as in the run, over ``mesh`` or over a mesh like the mesh of the run. If
        there are fewer devices than that, each array is on the first device.
      * Loading does not run code from the capture, which holds only numbers and JSON.

    Args:
      path: the folder of the capture.
      mesh: the devices to load it onto, with the same axes as the mesh of the run.

    Returns:
      A `Capture`.

    Raises:
      FileNotFoundError: there is no capture, or only an incomplete one.
      ValueError: it is of a later version, has dtypes that need ``jax_enable_x64``, or the mesh
        does not have the axes of the run, or does not divide an array; or ``path`` is an address
        (``gs://``).
      TypeError: ``mesh`` is not a mesh, or ``path`` is not a path.
      ImportError: orbax-checkpoint is not installed; it is the extra ``recorder``.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax, tempfile
      >>> tx = cg.skip_spikes(optax.sgd(0.1), halt=True)
      >>> params = jnp.ones(2)
      >>> _, state = tx.update(jnp.full(2, jnp.nan), tx.init(params), params)
      >>> recorder = cg.FlightRecorder(tempfile.mkdtemp(), raise_on_halt=False)
      >>> recorder.record(state, jnp.zeros(3), params=params)
      >>> recorder.close()
      >>> cg.load_capture(recorder.captures[0]).args
      (Array([1., 1.], dtype=float32), Array([0., 0., 0.], dtype=float32))
    """
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"mesh: got {type(mesh).__name__}, expected a jax.sharding.Mesh or None")
    if path is None:
        raise TypeError(
            "path: got None, expected the folder of a capture; the path of a HaltedError is None "
            "if its capture could not be written, and its message says why"
        )
    folder = mounted_folder("path", path).absolute()
    manifest = read_manifest(folder)
    orbax()
    with readable(folder, MANIFEST):
        content = read(folder, manifest["content"], mesh)
    meta = manifest["meta"]
    kept = {name: content.get(name) for name in ("state", "key")} | {"step": meta["step"]}
    own = {"_params": content.get("params"), "_batch": content.get("batch")}
    return Capture(folder, **kept, extra=content.get("extra", {}), meta=meta, **own)


def _fields(state: Any) -> str:
    if isinstance(state, dict):
        return ", ".join(map(str, state))
    return ", ".join(getattr(state, "_fields", ())) or f"no names, it is a {type(state).__name__}"
