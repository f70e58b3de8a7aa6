"""From two versions of a loss, or of a training step, to the first place where they differ."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from clipgrad._arrays import (
    check_arguments,
    check_is_function,
    described,
    explain_call,
    parameter_names,
    shown,
)
from clipgrad._compare.compare_records import compare_records, is_same
from clipgrad._compare.file import load_record
from clipgrad._compare.loss_recording import ALL
from clipgrad._compare.match import same_rows
from clipgrad._compare.ports import compare_by_numbers
from clipgrad._compare.record import TORCH, Record
from clipgrad._compare.recording import Recording
from clipgrad._compare.result import GradientComparison
from clipgrad._compare.save_run import recorded
from clipgrad._compare.wider import WIDER_DTYPES, compare_with_wider
from clipgrad._error_clip import check_call
from clipgrad._programs import settings_of_runs


@explain_call(
    dtype='write compare(fun, "float32", args)',
)
def compare(
    fun: Callable[..., Any] | str | os.PathLike,
    other: Callable[..., Any] | str | os.PathLike,
    args: tuple | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    other_args: tuple | None = None,
    argnums: int | Sequence[int] | Literal["all"] | None = ALL,
    has_aux: bool = False,
    names: Mapping[str, str] | None = None,
    rtol: float | None = None,
) -> GradientComparison:
    """Finds the first place where two versions of a loss, or of a training step, differ.

    The versions may be two functions, a function and a file that `save_run` wrote, or one function
    and the same function in float32 or float64. You do not edit either.

    Example:
      >>> import clipgrad as cg, jax, jax.numpy as jnp
      >>> def loss(w, x, scale=1.0):
      ...     with jax.named_scope("hidden"):
      ...         h = jnp.tanh(x @ w) * scale
      ...     return jnp.mean(h**2)
      >>> args = jnp.ones((3, 2)), jnp.ones((4, 3))
      >>> found = cg.compare(loss, lambda w, x: loss(w, x, scale=1.1), args)
      >>> found.ok, found.findings[0].kind, found.findings[0].module
      (False, 'value', 'hidden')

    Args:
      fun: the first version, a function that returns a floating scalar, or ``(scalar, aux)``. With
        ``argnums=None`` it may return any tree. Or the path of a file of `save_run`.
      other: the second version: a function of the same arguments, or the path of a file. Or
        ``"float32"`` or ``"float64"``, to see what low precision costs: ``fun`` and its gradient
        run as they are, and in this dtype.
      args: the tuple of arguments of the functions; leave it out beside two files.
      kwargs: keyword arguments of both versions.
      other_args: the tuple of arguments of ``other``, if they have other dtypes, trees or layouts.
      argnums: the positions of the arguments to differentiate; ``"all"``: every argument that holds
        floats, or beside a file those that the file has; ``None``: nothing is differentiated, and
        all outputs are compared, for whole training steps. Python numbers among keyword arguments
        stay as they are.
      has_aux: ``True`` if the functions return ``(scalar, aux)``; aux is not compared.
      names: the names of values in ``other`` by their names in ``fun``, where they differ:
        ``{"encoder/Dense_*": "enc/linear*"}``. The start of a path stands for all that is below. In
        ``{"layers_*": "layers"}``, the modules are matched with the steps of a scan, in order.
        Lines are names too: ``{"model.py:8": "port.py:20"}``.
      rtol: a relative tolerance, such as 1e-3, in place of the measured one.

    Returns:
      A `GradientComparison`; ``print`` it.

    Raises:
      TypeError: an argument is not of the type above, or is traced: it is called inside of
        `jax.jit`.
      ValueError: a loss is not a floating scalar, ``argnums`` is out of range, a name of
        ``names`` is of no value in its version, or the versions have no output in common.

    Each version is traced once, and runs in one compiled program. A named value is a tag, or what
    leaves a module or a step of a scan. Of a loss in which nothing has a name it is the last
    floating value of each run of a line, such as ``"model.py:8"``. Of each named value and of its
    cotangent only a sketch leaves the program, 256 sums with random signs: the norm of the
    difference of two sketches is the norm of the difference of the values, to about 10 %. So a
    comparison needs the memory of a gradient.

    A value differs if its relative difference is above four roundings of its dtype, and above what
    rounding does there. To measure that, where a difference is above four roundings, the program of
    ``fun`` runs eight more times with each result, each term of a sum and each constant moved by
    one rounding of its own dtype. If rounding
    alone moves a value by over 10 %, only a difference four times larger counts.

    Guarantees:
      * ``ok`` says that all outputs and gradients of both were compared, and agree. An output or a
        leaf that one version lacks is a finding. What rounding decides in both versions is a note,
        but a finding of kind "not judged" if it is half or more of the outputs or of the leaves of
        the gradient, or has most of their norm.
      * A "value" finding is the first named value in the order of computation, steps of scans
        included, that differs. It names the common module of the operations between this value and
        the named values before it, which agree; or a line there that only one version has.
      * Lines of versions that share code are matched by their statement, run by run. Those of other
        code are matched by their numbers, in any layout. A finding says up to which lines the
        versions are the same, and which lines come next.
      * If all values agree, a "vjp" finding is the first cotangent in backward order that differs;
        it names the module of the operations that use the value, and the lines of the custom rules
        among them. If all cotangents agree too, each leaf whose gradient differs is a "grads"
        finding.
      * A finding has the lines of both versions.
      * If outputs and gradients agree, what differs inside is a note.
      * NaN and inf are equal where both versions have the same. A mask of -1e9 hides nothing.
        Integers, booleans and keys are compared by value, whatever their width.
      * If a gradient is zero but for rounding in both versions, this is a note.
      * With ``argnums=None`` the outputs are compared by path. An "output" finding comes before
        those computed from it, and has the factor between the versions, if one explains it.
      * The path of a run stands for its function. If the runs had other arguments, a finding of
        kind "argument" is the first.
      * Versions whose parameters have no path in common, such as a run of torch, are matched by
        their numbers, in any order of axes.
      * With the name of a dtype as ``other``, findings are of kind "rounding": the value at which
        the error grows most, and each leaf whose gradient is more than ``rtol`` (0.05) rounding
        error. The gradient is traced before it is widened, so custom rules stay. The table of
        relative errors is always printed.
      * Files and dtypes are checked before a function is called. If nothing is narrower than the
        dtype, nothing runs.
    """
    _check_order(fun, other, args)
    if not _is_path(fun):
        check_is_function(fun)
    if args is not None and not _is_path(fun):
        check_arguments(fun, args, kwargs)
    elif callable(other) and args is not None:
        check_arguments(other, args, kwargs)
    _check_comparison(fun, other, other_args, argnums, names, rtol)
    named = dict(kwargs or {})
    with settings_of_runs():
        if isinstance(other, str) and not _is_path(other):
            check_call(fun, args, kwargs)
            call: Any = fun, args, named, argnums, has_aux
            return compare_with_wider(recorded(*call), other, rtol)
        versions: Any = fun, other
        given = _arguments_of(fun, other, args, kwargs, other_args)
        files = {i: load_record(versions[i]) for i in range(2) if given[i] is None}
        among = next((record.argnums for record in files.values()), ())
        more: Any = named, argnums, has_aux, bool(files) or other_args is not None, among
        recordings = [
            files[i] if i in files else recorded(versions[i], given[i], *more) for i in range(2)
        ]
        runs = _with_lines_alike(recordings)
        records = [run.run() if isinstance(run, Recording) else run for run in runs]
        found = _compared(records[0], records[1], names, rtol, bool(files))
        if rtol is not None or is_same(found) or not _measure(runs, records):
            return found
        return _compared(records[0], records[1], names, rtol, bool(files))


def _with_lines_alike(versions: list[Record | Recording]) -> list[Record | Recording]:
    """The versions, all with values of lines if one of them has no other values."""
    if not any(version.has_lines for version in versions):
        return versions
    return [x if isinstance(x, Record) or x.has_lines else x.with_lines() for x in versions]


def _measure(runs: Sequence[Record | Recording], records: Sequence[Record]) -> bool:
    """Add what rounding moves to the first record that is made now, unless a file says it."""
    if any(row.moved is not None for record in records for row in record.rows):
        return False
    for run, record in zip(runs, records, strict=True):
        if isinstance(run, Recording):
            run.measure(record)
            return True
    return False


def _compared(
    a: Record, b: Record, names: Mapping[str, str] | None, rtol: float | None, from_file: bool
) -> GradientComparison:
    """Compare by names, or by numbers where the two name nothing alike."""
    if a.framework == b.framework and not _are_other_trees(a, b):
        return compare_records(a, b, names, rtol, from_file)
    if not (a.is_loss and b.is_loss):
        raise ValueError(
            "run: got a run of torch and a whole step, expected a loss in JAX, or a file that "
            "clipgrad.save_run wrote of one"
        )
    if names:
        raise ValueError(
            f"names: got {dict(names)!r} for versions whose parameters have no path in common, "
            "expected None; their values are matched by their numbers"
        )
    return compare_by_numbers(*((b, a) if a.framework == TORCH else (a, b)), rtol)


def _are_other_trees(a: Record, b: Record) -> bool:
    """Whether the first arguments of two losses have no leaf in common, by their paths."""
    gradients = [a.rows[i] for i in a.of("gradient")]
    if not gradients or not b.is_loss:
        return False
    same = same_rows(a, b, "gradient")
    return not any(a.rows[i].leaf[0] == gradients[0].leaf[0] for i in same)


def _arguments_of(fun: Any, other: Any, args: Any, kwargs: Any, other_args: Any) -> list[Any]:
    """The arguments of each version; None for a run from a file."""
    from_files = [_is_path(run) for run in (fun, other)]
    if any(from_files) and other_args is not None:
        raise ValueError(
            "other_args: got arguments beside a run from a file, expected None; args are those of "
            "the function"
        )
    if all(from_files) and args is not None:
        raise ValueError(
            "args: got arguments beside two runs from files, expected none; write compare(path, "
            "other_path)"
        )
    given = []
    for run, own in ((fun, args), (other, args if other_args is None else other_args)):
        if not _is_path(run):
            check_call(run, args, kwargs)
        given.append(None if _is_path(run) else own)
    return given


def _is_path(run: Any) -> bool:
    """Whether a version is the path of a file: text that is not the name of a dtype."""
    return isinstance(run, os.PathLike) or (isinstance(run, str) and run not in WIDER_DTYPES)


def _check_order(fun: Any, other: Any, args: Any) -> None:
    """Raises `TypeError` for the name of a dtype, or the tuple of arguments, in another place."""
    if isinstance(fun, str) and fun in WIDER_DTYPES and callable(other):
        raise TypeError(f'fun: got {fun!r}, expected a function; write compare(fun, "{fun}", args)')
    for name, value in (("fun", fun), ("other", other)):
        if isinstance(value, tuple) and callable(args):
            raise TypeError(
                f"{name}: got a tuple, expected a version, and args the tuple of arguments; write "
                "compare(fun, other, args)"
            )


def _check_comparison(
    fun: Any, other: Any, other_args: Any, argnums: Any, names: Any, rtol: Any
) -> None:
    dtype = _dtype_name(other)
    if isinstance(other, str) and other in WIDER_DTYPES:
        _check_dtype(fun, other, other_args, argnums, names)
    elif dtype and not (isinstance(other, str) and os.path.isfile(other)):
        raise _no_wider_dtype(fun, other, dtype)
    elif isinstance(other, str) and os.path.basename(other) == os.path.splitext(other)[0]:
        if not os.path.isfile(other):  # a word alone
            raise ValueError(
                f"other: got {other!r}, expected the name of a wider dtype, one of "
                f"{', '.join(WIDER_DTYPES)}, a function, or the path of a run"
            )
    elif not callable(other) and not _is_path(other):
        raise TypeError(
            f"other: got {described(other)}, expected a function of the same arguments, the path "
            f"of a run, or the name of a dtype, one of {', '.join(WIDER_DTYPES)}"
        )
    if other_args is not None and not isinstance(other_args, tuple):
        raise TypeError(
            f"other_args: got {type(other_args).__name__}, expected a tuple; for one argument "
            "write (x,)"
        )
    is_named = names is None or isinstance(names, Mapping)
    if not is_named or not all(isinstance(x, str) for pair in (names or {}).items() for x in pair):
        raise TypeError(
            f"names: got {names!r}, expected a mapping from names in fun to names in other, such "
            'as {"layers_*": "layers"}'
        )
    if rtol is not None and not (isinstance(rtol, int | float) and 0 <= rtol < float("inf")):
        raise ValueError(f"rtol: got {rtol!r}, expected a tolerance of at least 0, such as 1e-3")


def _dtype_name(other: Any) -> str:
    """The name of a dtype, given as text or as an object; "" for anything else."""
    if not isinstance(other, str | type | np.dtype):
        return ""
    try:
        dtype = jnp.dtype(other)
    except TypeError:
        return ""
    return "" if dtype.kind == "O" else dtype.name


def _no_wider_dtype(fun: Any, other: Any, dtype: str) -> Exception:
    """The error of a dtype that is no name of a wider one."""
    wider = f"the name of a wider dtype, one of {', '.join(WIDER_DTYPES)}"
    if dtype in WIDER_DTYPES:
        return TypeError(f'other: got {dtype} itself, expected {wider}; write "{dtype}"')
    got = repr(other if isinstance(other, str) else dtype)
    text = f"other: got {got}, expected {wider}, a function, or the path of a run"
    if jnp.issubdtype(dtype, jnp.floating):
        names = parameter_names(fun, 2) if callable(fun) else []
        first, *rest = names or ["params", "x"]
        call = f"fun({', '.join([f'cast({first})', *rest])})"
        text += f"; for what {dtype} costs, cast inside: compare(lambda {', '.join([first, *rest])}"
        text += f': {call}, "float32", args), where cast makes arrays of {dtype}'
    return ValueError(text)


def _check_dtype(fun: Any, other: str, other_args: Any, argnums: Any, names: Any) -> None:
    if _is_path(fun):
        raise ValueError(
            f"other: got {other!r} beside a run from a file, expected a function or another run; "
            "write compare(fun, dtype, args) with the function"
        )
    for name, given in (("other_args", other_args), ("names", names)):
        if given is not None:
            raise ValueError(
                f"{name}: got {shown(given)} with other={other!r}, expected None; both runs are of "
                "fun"
            )
    if argnums is None:
        raise ValueError(
            f"argnums: got None with other={other!r}, expected positions of arguments to "
            "differentiate; to compare whole steps, write a function with wider arguments"
        )
