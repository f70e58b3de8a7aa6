"""A capture: what a bad step was given, as it comes back from the disk."""

import dataclasses
import os
import pathlib
from typing import Any, Literal, get_args

from clipgrad._arrays import answers_lookups, donated_leaf, explain_call
from clipgrad._diagnose import CapturedArgs
from clipgrad._recorder.files import CAPTURE_PARTS, LeafEntry, orbax, read, read_manifest
from clipgrad._recorder.folders import mounted_folder
from clipgrad._recorder.paths import (
    Path,
    TextPath,
    is_value,
    listed,
    restored,
    stored_leaves,
    text_path,
)

Part = Literal["params", "state", "batch", "extra"]


@answers_lookups("capture", opt_state="capture.state")
@dataclasses.dataclass(frozen=True)
class Capture:
    """The inputs of a bad step, as `FlightRecorder` saved them.

    Trees become dictionaries (objects too) and lists, because loading does not run code. To get
    your own classes back, pass a tree to `load_capture` or `restore`.

    Attributes:
      path: the capture's folder, in a file system that this machine has mounted.
      state: the recorded state, with the parameters from before the bad step; with your own flag,
        ``record(..., bad=flag)``, the state that you recorded with that step. ``None`` if you had
        dropped the state before you called `FlightRecorder.close`, or if a later step overwrote the
        state.
      key: the step's PRNG key, or None.
      step: the step number.
      extra: all other arguments that you passed to ``record``.
      meta: ``halted_at``, ``statistics``, ``versions``, ``devices``, ``processes``, ``platform``,
        ``device_kind``; ``nonfinite``: whether the step was not finite, None with your own flag;
        ``optimizer``, if the gradient was finite: the leaves whose update the optimizer made NaN or
        inf; ``no_batch``: the reason if there is no batch; ``microbatch``: which microbatch you
        have, if ``optax.MultiSteps`` wraps `skip_spikes`; ``step_in_batch``: the bad step, if the
        batch is for several ``steps``.
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
        """The parameters that you passed as ``record(params=...)``, or those in the state."""
        params = _params_in(self.state) if self._params is None else self._params
        if params is None:
            raise ValueError(
                "params: got none, expected a state with params, or record(..., params=params), "
                "which no later step has overwritten"
            )
        return self._alive("params", params)

    @property
    def batch(self) -> Any:
        """The batch of the bad step; the last microbatch, if ``meta`` has ``microbatch``."""
        if "no_batch" in self.meta:
            raise ValueError(f"batch: got none: {self.meta['no_batch']}")
        return self._alive("batch", self._batch)

    @property
    def args(self) -> tuple[Any, Any]:
        """The parameters and the batch, for `diagnose`."""
        args = CapturedArgs((self.params, self.batch))
        if "optimizer" in self.meta:
            args.expected = f"as in step {self.step}: {self.meta['optimizer']}"
        elif self.meta["nonfinite"]:
            kind, jax_version = self.meta["device_kind"], self.meta["versions"]["jax"]
            which = self.meta.get("microbatch")
            args.expected = (
                f"not reproduced: step {self.step} was not finite on {self.meta['devices']} "
                f"devices ({kind}, jax {jax_version}), but is finite here; does the loss depend on "
                "a key, or on something else besides its arguments?"
            ) + (f" The batch is {which}." if which else "")
        return args

    def restore(self, like: Any, name: Part = "params") -> Any:
        """A part of the capture in the structure of your tree.

        Args:
          like: a tree with the same paths, such as a model or a flax ``TrainState``. Leaves other
            than arrays, numbers and text stay as they are.
          name: "params", "state", "batch" or "extra".

        Raises:
          ValueError: paths, shapes or dtypes differ, no part has this name, or a step has
            overwritten the arrays.

        Guarantees:
          * Leaves are paired by path, never by position.
          * You get the capture's own arrays, unless your tree has another sharding. If you donate
            the arrays, the capture loses them, too.
          * The result has the classes and shardings of your tree; a variable that a flax NNX model
            has in several places stays one variable.
        """
        if name not in get_args(Part):
            raise ValueError(f"name: got {name!r}, expected {', '.join(map(repr, get_args(Part)))}")
        return restored(like, self._alive(name, getattr(self, name)), name)

    def _alive(self, name: str, tree: Any) -> Any:
        """A part of the capture, unless a step has overwritten its arrays."""
        path = donated_leaf(tree)
        if path is None:
            return tree
        raise ValueError(
            f"{name}: got an array at {name}{path} that a step has overwritten, since it donates "
            "its arguments; expected a capture as it was loaded; write "
            f"load_capture({str(self.path)!r}) again, and pass jax.tree.map(jnp.copy, ...) of its "
            "arrays to such a step"
        )


@explain_call()
def load_capture(path: str | os.PathLike, like: Any = None) -> Capture:
    """Loads a bad training step that `FlightRecorder` saved, to `diagnose` or repeat it.

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

    Args:
      path: the folder of one capture, such as ``"captures/step_57"``, or ``error.path`` from a
        `HaltedError`.
      like: a tree with the same paths as the recorded state, or the parameters, or the pair
        ``(params, batch)``: you get these back in the classes and shardings of ``like``. Arrays may
        be `jax.ShapeDtypeStruct`. ``None``: you get dictionaries and lists.

    Returns:
      A `Capture`.

    Raises:
      FileNotFoundError: there is no capture, or the capture is incomplete.
      ValueError: the capture is damaged, has another version, or has dtypes that need
        ``jax_enable_x64``; or ``like`` has other paths, shapes or dtypes; or ``path`` is an address
        (``gs://``).
      TypeError: ``path`` is not a path.
      ImportError: orbax-checkpoint is not installed; it is the extra ``recorder``.

    Guarantees:
      * Values and dtypes are bit-identical to those in the run.
      * Everything in ``like`` comes back in the classes and shardings that ``like`` has; all else
        becomes dictionaries and lists with arrays on the default device.
      * Loading never runs code: a capture holds only numbers and JSON.
    """
    if path is None:
        raise TypeError(
            "path: got None, expected the folder of a capture; the path of a HaltedError is None "
            "if its capture could not be written, and its message says why"
        )
    folder = mounted_folder("path", path).absolute()
    meta, entries = read_manifest(folder)
    orbax()
    trees, leaves = ({}, {}) if like is None else _parts_like(entries, like)
    content: dict[str, Any] = dict.fromkeys(CAPTURE_PARTS) | {"extra": {}}
    content |= read(folder, entries, leaves)
    if content["params"] is None and "params" in trees:
        content["params"] = _params_in(content["state"])
    content |= {name: restored(tree, content[name], name) for name, tree in trees.items()}
    hidden = {f"_{name}": content.pop(name) for name in ("params", "batch")}
    return Capture(path=folder, step=meta["step"], meta=meta, **content, **hidden)


def _params_in(state: Any) -> Any:
    return state.get("params") if isinstance(state, dict) else getattr(state, "params", None)


def _parts_like(
    entries: dict[Path, LeafEntry], like: Any
) -> tuple[dict[str, Any], dict[Path, Any]]:
    """The parts of a capture that fit a tree, and the tree's leaves by path in the capture."""
    ways: list[dict[str, Any]] = [{"state": like}, {"params": like}]
    if isinstance(like, tuple) and len(like) == 2:
        ways.append({"params": like[0], "batch": like[1]})
    held = {name: _places(entries, name) for name in ("state", "params", "batch")}
    for way in ways:
        stored = {name: stored_leaves("like", tree) for name, tree in way.items()}
        if all(held[name].keys() == leaves.keys() for name, leaves in stored.items()):
            pairs = [(held[n][path], x) for n, part in stored.items() for path, x in part.items()]
            return way, dict(pairs)
    got, state, params = map(listed, (stored_leaves("like", like), held["state"], held["params"]))
    raise ValueError(
        f"like: got a tree with the paths {got}; expected those of the recorded state, {state}, or "
        f"of the parameters, {params}, or a pair (params, batch)"
    )


def _places(entries: dict[Path, LeafEntry], name: str) -> dict[TextPath, Path]:
    """For each path of a leaf in a part of a capture its path in the whole."""
    held = [path for path, e in entries.items() if "dtype" in e or is_value(e.get("value"))]
    is_in_state = name == "params" and not any(path[0] == name for path in held)
    start = ("state", name) if is_in_state else (name,)
    inside = [path for path in held if path[: len(start)] == start]
    return {text_path(path[len(start) :]): path for path in inside}
