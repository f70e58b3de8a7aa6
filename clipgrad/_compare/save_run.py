"""A version of a comparison as a record: recorded now, or read from a file."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from clipgrad._arrays import explain_call
from clipgrad._compare.file import check_path, save_record
from clipgrad._compare.loss_recording import ALL, Argument, recorded_by_all, recorded_loss
from clipgrad._compare.recording import Recording
from clipgrad._compare.steps import recorded_step
from clipgrad._error_clip import check_call
from clipgrad._programs import settings_of_runs


@explain_call()
def save_run(
    fun: Callable[..., Any],
    args: tuple,
    path: str | os.PathLike,
    *,
    argnums: int | Sequence[int] | Literal["all"] | None = ALL,
    has_aux: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Runs a loss and its gradient, or a training step, and saves a file for `compare`.

    You can then compare with a version from another process, cluster, commit, or JAX version.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, os, tempfile
      >>> loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
      >>> args, path = (jnp.ones((3, 2)), jnp.ones((4, 3))), os.path.join(tempfile.mkdtemp(), "run")
      >>> cg.save_run(loss, args, path)
      >>> cg.compare(path, loss, args).ok
      True

    Args:
      fun: a function that returns a floating scalar or ``(scalar, aux)``; with ``argnums=None``,
        any tree.
      args: the tuple of arguments; for one argument write ``(params,)``.
      path: the file to write, such as ``"before.npz"``; an existing file is replaced.
      argnums: the positions of the arguments to differentiate; ``"all"``: every argument that holds
        floats; ``None``: none, for a whole training step.
      has_aux: ``True`` if ``fun`` returns ``(scalar, aux)``; aux is not saved.
      kwargs: keyword arguments.

    Returns:
      None: the run is in the file.

    Raises:
      TypeError: an argument has another type than above, or is traced.
      ValueError: as from `compare`.
      OSError: the file cannot be written.

    Guarantees:
      * The file is a NumPy archive (``.npz``) with a JSON header, and without pickled objects.
      * The file has no arrays, only sketches: 515 numbers, among them the norm and the largest
        magnitude, for each named value and cotangent at each scan step, and for each gradient,
        output and argument; and how far rounding moves these. For integers and keys the file has a
        hash of the values.
      * `compare` finds the same kind, module and step as between the two functions.
      * You never get half a file: a temporary file is written first, and then renamed.
      * With several processes, all call `save_run`, and the first writes the file.
    """
    first: Any = fun
    if isinstance(first, str | os.PathLike) and callable(args):
        raise TypeError(
            f"fun: got the path {os.fspath(first)!r}, expected a function; write "
            "save_run(fun, args, path)"
        )
    one_by_one = not isinstance(args, tuple) and not isinstance(path, str | os.PathLike)
    check_call(fun, args, path if one_by_one else kwargs)
    check_path(path)
    with settings_of_runs():
        save_record(recorded(fun, args, dict(kwargs or {}), argnums, has_aux).run(floor=True), path)


def check_argnums(argnums: Any) -> None:
    """Raise an error for text that is not ``"all"``, and for what is no position."""
    if isinstance(argnums, str) and argnums != ALL:
        raise ValueError(
            f'argnums: got {argnums!r}, expected "all", positions of arguments, or None for '
            "whole steps"
        )


def recorded(
    fun: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int] | str | None,
    has_aux: bool,
    with_arguments: bool = True,
    among: Collection[Argument] = (),
) -> Recording:
    """The recording of a loss, by all arguments or ``among`` these, or of a step."""
    check_argnums(argnums)
    if isinstance(argnums, str):
        return recorded_by_all(fun, args, kwargs, has_aux, among, with_arguments)
    if argnums is not None:
        return recorded_loss(fun, args, kwargs, argnums, has_aux, with_arguments)
    if has_aux:
        raise ValueError(
            "has_aux: got True with argnums=None, expected False; all outputs are compared"
        )
    return recorded_step(fun, args, kwargs, with_arguments)
