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
from clipgrad._compare.compare_records import compare_records
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

    You can compare two functions, a function and a file that `save_run` wrote, or one function and
    the same function in float32 or float64. You do not edit either version.

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
      fun: the first version, a function that returns a floating scalar or ``(scalar, aux)``; with
        ``argnums=None``, any tree. Or the path of a `save_run` file.
      other: the second version: a function of the same arguments, or the path of a file. Or
        ``"float32"`` or ``"float64"``, to see the cost of low precision: ``fun`` and its gradient
        run unchanged, and once more in this dtype.
      args: the tuple of arguments for both functions; leave ``args`` out for two files.
      kwargs: keyword arguments for both versions.
      other_args: the tuple of arguments for ``other``, if they have other dtypes, trees or layouts.
      argnums: the positions of the arguments to differentiate; ``"all"``: every argument that holds
        floats, or, if you compare with a file, the arguments that were differentiated there.
        ``None``, for whole training steps: nothing is differentiated, and all outputs are compared.
        Python numbers in ``kwargs`` are not differentiated.
      has_aux: ``True`` if the functions return ``(scalar, aux)``; aux is not compared.
      names: if names differ, a mapping from names in ``fun`` to names in ``other``:
        ``{"encoder/Dense_*": "enc/linear*"}``. The start of a path stands for everything below.
        With ``{"layers_*": "layers"}``, modules are matched with scan steps, in order. Lines are
        names, too: ``{"model.py:8": "port.py:20"}``.
      rtol: a relative tolerance, such as 1e-3, that replaces the measured one.

    Returns:
      A `GradientComparison`; ``print`` it.

    Raises:
      TypeError: an argument has another type than above, or is traced, because you call `compare`
        inside `jax.jit`.
      ValueError: a loss is not a floating scalar, ``argnums`` is out of range, a name in ``names``
        does not exist in its version, or the versions have no output in common.

    Each version is traced once, and runs in one compiled program. A named value is a tag, or a
    value that leaves a module or a scan step. If a loss has no names at all, each line counts, such
    as ``"model.py:8"``: the last floating value that each run of the line computes. For each named
    value and cotangent, the program returns only a sketch, 256 sums with random signs: the
    difference of two sketches has the norm of the difference of the values, to about 10 %. So a
    comparison needs about the memory of a gradient.

    Two values differ if their relative difference is above four roundings of the dtype, and above
    the measured rounding error. To measure the rounding error, ``fun`` runs eight more times; each
    result, each term of a sum and each constant moves by one rounding. If rounding alone moves a
    value by over 10 %, only a difference four times larger counts.

    Guarantees:
      * ``ok`` says that all outputs and gradients were compared, and agree. If one version lacks an
        output or a leaf, that is a finding. If rounding decides some outputs or gradient leaves in
        both versions, you get a note; if these are half or more of all, or have most of the norm,
        you get a finding of kind "not judged".
      * A "value" finding is the first named value that differs, in the order of computation, scan
        steps included. The named values before it agree; the finding names the module of the
        operations in between, or a line there that only one version has.
      * If the versions share code, lines are matched by statement, run by run; otherwise by their
        numbers, in any layout. A finding says up to which lines the versions are the same, and
        which lines come next.
      * If all values agree, a "vjp" finding is the first cotangent that differs, in backward order.
        The finding names the module of the operations that use the value, and the lines of custom
        rules among these operations. If all cotangents agree, too, each leaf with another gradient
        is a "grads" finding.
      * Each finding shows the lines in both versions.
      * If outputs and gradients agree, differences inside are notes.
      * A NaN or inf that both versions have counts as equal. A mask of -1e9 does not hide other
        differences. Integers, booleans and keys are compared by value, whatever their width.
      * If a gradient is zero but for rounding in both versions, this is a note.
      * With ``argnums=None`` outputs are compared by path. If one output is computed from another,
        the earlier one is the first "output" finding. If a constant factor explains the difference,
        the finding says so.
      * If a saved run had other arguments, the first finding has the kind "argument".
      * If the parameters have no path in common, as with a torch run, values are matched by their
        numbers, in any order of axes.
      * With a dtype as ``other``, findings have the kind "rounding": the value at which the error
        grows most, and each leaf whose gradient has a rounding error above ``rtol`` (0.05). Custom
        rules stay, because the gradient is traced before it is widened. The table of relative
        errors is always printed.
      * Files and dtypes are checked before any function runs. If no value is narrower than the
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
        records = _run(_with_lines_alike(recordings), rtol is None)
        return _compared(records[0], records[1], names, rtol, bool(files))


def _with_lines_alike(versions: list[Record | Recording]) -> list[Record | Recording]:
    """The versions, all with values of lines if one of them has no other values."""
    if not any(version.has_lines for version in versions):
        return versions
    return [x if isinstance(x, Record) or x.has_lines else x.with_lines() for x in versions]


def _run(versions: Sequence[Record | Recording], is_measuring: bool) -> list[Record]:
    """The records, of which the first that is made now says what rounding moves, or a file does."""
    records: list[Record] = []
    for version in versions:
        if isinstance(version, Recording):
            is_measured = any(row.moved is not None for r in records for row in r.rows)
            version = version.run(floor=is_measuring and not is_measured)
        records.append(version)
    return records


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
