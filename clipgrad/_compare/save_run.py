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
    """Runs a loss and its gradient, or a training step, and writes what `compare` needs to a file.

    The file stands for one of the two versions in `compare`: of another process, cluster, commit,
    or version of JAX.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, os, tempfile
      >>> loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
      >>> args, path = (jnp.ones((3, 2)), jnp.ones((4, 3))), os.path.join(tempfile.mkdtemp(), "run")
      >>> cg.save_run(loss, args, path)
      >>> cg.compare(path, loss, args).ok
      True

    Args:
      fun: a function that returns a floating scalar, or ``(scalar, aux)``. With ``argnums=None`` it
        may return any tree.
      args: the tuple of its arguments; for one argument ``(params,)``.
      path: where to write the file, such as ``"before.npz"``; one that is there is replaced.
      argnums: the positions of the arguments to differentiate; ``"all"``: every argument that holds
        floats; ``None``: nothing is differentiated, for a whole training step.
      has_aux: ``True`` if the function returns ``(scalar, aux)``; aux is not kept.
      kwargs: keyword arguments.

    Returns:
      None: the run is in the file.

    Raises:
      TypeError: an argument is not of the type above, or is traced.
      ValueError: as of `compare`.
      OSError: the file cannot be written.

    Guarantees:
      * The file is a NumPy archive (``.npz``) with a header in JSON, and without pickled objects.
      * Numbers of arrays are not in the file, but sketches of them: 515 numbers of each named value
        and its cotangent at each step of a scan, of each gradient, output and argument, among them
        the norm and the largest magnitude; and how far rounding moves them. Of integers and keys
        there is a hash of their values.
      * `compare` finds the kind, the module and the step that it finds between the functions.
      * The file is whole or not there: it is written beside its place, and moved there.
      * Of several processes, which all call this, the first writes the file.
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
