"""A run of a loss or of a training step, saved to be compared elsewhere or later."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils

from clipgrad._compare.port_record import PORT, PortRun, port_file, saved_port
from clipgrad._compare.run_file import RunFile, damaged, read_run, write_run
from clipgrad._compare.sides import GRADIENT, Side, gradient_file, live_side, saved_gradient
from clipgrad._compare.step_runs import STEP, StepRun, run_step, saved_step, step_file
from clipgrad._compare.versions import version
from clipgrad._error_clip import check_call
from clipgrad._jaxpr import settings_of_runs


def save_run(
    fun: Callable[..., Any],
    args: tuple,
    path: str | os.PathLike,
    *,
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Runs a loss and its gradient, or a step, and writes what `compare` needs to a file.

    The file stands for one of the two versions in `compare`: of another process, cluster, version
    of JAX or commit. It is a NumPy archive (``.npz``) with a header in JSON, and without pickled
    objects.

    Guarantees:
      * Numbers of arrays are not in the file, but sketches of them: 515 numbers of each named value
        and its cotangent at each step of a scan, of each gradient and each argument, among them the
        norm and the largest magnitude; and how far rounding moves them. The loss, and outputs of a
        step that are one number, are kept.
      * `compare` finds the kind, the module and the step that it finds between the functions.
      * The file is whole or not there: it is written beside its place, and moved there.
      * Of several processes, which all call this, the first writes the file.

    Args:
      fun: a function that returns a scalar, or ``(scalar, aux)``. With ``argnums=None`` it may
        return any tree.
      args: the tuple of arguments.
      path: where to write the file, such as ``"before.npz"``; one that is there is replaced.
      argnums: the positions of the arguments to differentiate, or ``None`` for a whole step.
      has_aux: whether the function returns ``(scalar, aux)``; aux is not kept.
      kwargs: keyword arguments.

    Returns:
      None: the run is in the file.

    Raises:
      TypeError: an argument is not of the type above, or is traced.
      ValueError: as of `compare`.
      OSError: the file cannot be written.

    Example:
      >>> import clipgrad as cg, jax, jax.numpy as jnp, os, tempfile
      >>> def loss(w, x, scale=1.0):
      ...     with jax.named_scope("hidden"):
      ...         h = jnp.tanh(x @ w) * scale
      ...     return jnp.mean(h**2)
      >>> args, path = (jnp.ones((3, 2)), jnp.ones((4, 3))), os.path.join(tempfile.mkdtemp(), "run")
      >>> cg.save_run(loss, args, path)
      >>> cg.compare(path, loss, args).ok
      True
      >>> cg.compare(path, lambda w, x: loss(w, x, scale=1.1), args).findings[0].module
      'hidden'
    """
    check_call(fun, args, kwargs)
    check_path(path)
    with settings_of_runs():
        side = live("fun", fun, args, dict(kwargs or {}), argnums, has_aux, signed=True)
        file = step_file(side) if isinstance(side, StepRun) else gradient_file(side)
    _write_once(path, file)


def check_path(path: Any) -> None:
    """Raise an error for what is no path, or one in a folder that is not there."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: got {path!r}, expected the path of a file, such as 'before.npz'")
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise ValueError(f"path: got {os.fspath(path)!r}, expected one in a folder that exists")


def write_port(path: str | os.PathLike, run: PortRun) -> None:
    _write_once(path, port_file(run))


def _write_once(path: str | os.PathLike, file: RunFile) -> None:
    try:
        if jax.process_index() == 0:
            write_run(path, file.header, file.arrays)
    finally:
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("clipgrad run")


def live(
    name: str,
    fun: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int] | None,
    has_aux: bool,
    *,
    signed: bool,
) -> Side | StepRun:
    """A version that runs now; signed beside one from a file."""
    if argnums is None:
        if has_aux:
            raise ValueError(
                "has_aux: got True with argnums=None, expected False; all outputs are compared"
            )
        return run_step(name, fun, args, kwargs, signed)
    return live_side(version(fun, args, kwargs, argnums, has_aux), signed)


def saved(path: str | os.PathLike) -> Side | StepRun | PortRun:
    """A version from a file.

    Raises:
      ValueError: it holds no run that can be read.
    """
    file = read_run(path)
    kinds = {GRADIENT: saved_gradient, STEP: saved_step, PORT: saved_port}
    try:
        return kinds[file.header["kind"]](file)
    except Exception as error:  # of plain data that is not what it should be
        raise damaged(path, error) from error
