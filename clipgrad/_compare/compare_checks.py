"""What `compare` was called with: it is checked before anything is traced."""

import os
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from clipgrad._arrays import (
    check_arguments,
    check_is_function,
    described,
    parameter_names,
    shown,
)
from clipgrad._compare.record import JAX, Record
from clipgrad._compare.save_run import check_argnums
from clipgrad._compare.wider import WIDER_DTYPES
from clipgrad._error_clip import check_call


def check_comparison(
    fun: Any,
    other: Any,
    args: Any,
    kwargs: Any,
    other_args: Any,
    argnums: Any,
    names: Any,
    rtol: Any,
) -> None:
    """Raise an error for what `compare` can't be called with."""
    _check_order(fun, other, args)
    if not is_path(fun):
        check_is_function(fun)
    if args is not None and not is_path(fun):
        check_arguments(fun, args, kwargs)
    elif callable(other) and args is not None:
        check_arguments(other, args, kwargs)
    _check_other(fun, other)
    _check_options(other_args, argnums, names, rtol)
    if isinstance(other, str) and is_dtype(other):
        _check_dtype(fun, other, other_args, argnums, names)
    _check_files_and_arguments(fun, other, args, kwargs, other_args)


def _check_files_and_arguments(
    fun: Any, other: Any, args: Any, kwargs: Any, other_args: Any
) -> None:
    """Raises an error for arguments beside two files, and for other ones than a function takes."""
    from_files = [is_path(run) for run in (fun, other)]
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
    if callable(fun):
        check_call(fun, args, kwargs)
    if callable(other) and other_args is None:
        check_call(other, args, kwargs)
    elif callable(other):
        _check_other_arguments(other, other_args, kwargs)


def _check_other_arguments(other: Any, other_args: Any, kwargs: Any) -> None:
    try:
        check_call(other, other_args, kwargs)
    except TypeError as error:
        is_of_these = str(error).startswith("args: ")
        raise TypeError(f"other_{error}" if is_of_these else str(error)) from None


def arguments_of(versions: tuple, args: Any, other_args: Any) -> list[Any]:
    """The arguments of each version; None for a run from a file."""
    both = args, args if other_args is None else other_args
    return [None if is_path(run) else x for run, x in zip(versions, both, strict=True)]


def check_files(records: Collection[Record], argnums: Any, names: Any) -> None:
    """Raise `ValueError` for a run of another framework beside what it can't be compared with."""
    others = [record.framework for record in records if record.framework != JAX]
    if not others:
        return
    is_alone = len(records) == 1
    if (is_alone and argnums is None) or not all(record.is_loss for record in records):
        raise ValueError(
            f"run: got a run of {others[0]} and a whole step, expected a loss in JAX, or a file "
            "that clipgrad.save_run wrote of one"
        )
    if is_alone or len({record.framework for record in records}) > 1:
        check_nothing_named(names)


def check_nothing_named(names: Any) -> None:
    """Raise `ValueError` for names of versions that are matched by numbers."""
    if names:
        raise ValueError(
            f"names: got {dict(names)!r} for versions whose parameters have no path in common, "
            "expected None; their values are matched by their numbers"
        )


def is_dtype(other: Any) -> bool:
    """Whether a version is the name of a wider dtype."""
    return isinstance(other, str) and other in WIDER_DTYPES


def is_path(run: Any) -> bool:
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


def _check_other(fun: Any, other: Any) -> None:
    """Raises an error for a second version that is none, such as the name of another dtype."""
    dtype = _dtype_name(other)
    if is_dtype(other):
        return
    if dtype and not (isinstance(other, str) and os.path.isfile(other)):
        raise _no_wider_dtype(fun, other, dtype)
    elif isinstance(other, str) and os.path.basename(other) == os.path.splitext(other)[0]:
        if not os.path.isfile(other):  # a word alone
            raise ValueError(
                f"other: got {other!r}, expected the name of a wider dtype, one of "
                f"{', '.join(WIDER_DTYPES)}, a function, or the path of a run"
            )
    elif not callable(other) and not is_path(other):
        raise TypeError(
            f"other: got {described(other)}, expected a function of the same arguments, the path "
            f"of a run, or the name of a dtype, one of {', '.join(WIDER_DTYPES)}"
        )


def _check_options(other_args: Any, argnums: Any, names: Any, rtol: Any) -> None:
    if other_args is not None and not isinstance(other_args, tuple):
        raise TypeError(
            f"other_args: got {type(other_args).__name__}, expected a tuple; for one argument "
            "write (x,)"
        )
    check_argnums(argnums)
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
    if is_path(fun):
        raise ValueError(
            f"other: got {other!r} beside a run from a file, expected a function or another run; "
            "write compare(fun, dtype, args) with the function"
        )
    for name, value in (("other_args", other_args), ("names", names)):
        if value is not None:
            raise ValueError(
                f"{name}: got {shown(value)} with other={other!r}, expected None; both runs are of "
                "fun"
            )
    if argnums is None:
        raise ValueError(
            f"argnums: got None with other={other!r}, expected positions of arguments to "
            "differentiate; to compare whole steps, write a function with wider arguments"
        )
