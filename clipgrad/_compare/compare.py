"""From two versions of a loss, or of a training step, to the first place where they differ.

Trace each version, or read its file: `recorded`, `load_record`. Run what was traced:
`Recording.run`. Match the rows of both: `match_by_name`, `match_by_number`. Judge the pairs:
`by_rounding`, `ByPrecision`; and give the one `result`.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from clipgrad._arrays import explain_call
from clipgrad._compare.compare_checks import (
    arguments_of,
    check_comparison,
    check_files,
    check_nothing_named,
    is_dtype,
)
from clipgrad._compare.comparison_result import result
from clipgrad._compare.file import load_record
from clipgrad._compare.findings import by_rounding
from clipgrad._compare.inner_lines import with_inner_line
from clipgrad._compare.line_pairs import named_lines
from clipgrad._compare.loss_recording import ALL
from clipgrad._compare.match_by_name import (
    check_common,
    check_names,
    match_by_name,
    same_rows,
)
from clipgrad._compare.match_by_number import match_by_number
from clipgrad._compare.matching import Matching
from clipgrad._compare.record import TORCH, Record
from clipgrad._compare.recording import Recording
from clipgrad._compare.result import GradientComparison
from clipgrad._compare.save_run import recorded
from clipgrad._compare.sides import Sides
from clipgrad._compare.wider import (
    MOST_ROUNDING,
    ByPrecision,
    is_narrower,
    nothing_narrower,
    run_in,
)
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
    rounding does there. To measure that, the program of ``fun`` runs eight more times with each
    result, each term of a sum and each constant moved by one rounding of its own dtype. If rounding
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
    options: Any = {"other_args": other_args, "argnums": argnums, "names": names, "rtol": rtol}
    check_comparison(fun, other, args, kwargs, **options)
    call: Any = dict(kwargs or {}), argnums, has_aux
    versions: Any = fun, other
    with settings_of_runs():
        if is_dtype(other):
            return _beside_itself(recorded(versions[0], args or (), *call), versions[1], rtol)
        arguments = arguments_of(versions, args, other_args)
        files = {i: load_record(versions[i]) for i in range(2) if arguments[i] is None}
        check_files(files.values(), argnums, names)
        among = next((record.argnums for record in files.values()), ())
        more: Any = bool(files) or other_args is not None, among
        traced = [
            files[i] if i in files else recorded(versions[i], arguments[i], *call, *more)
            for i in range(2)
        ]
        ready = _checked(_with_lines_alike(traced, names), names)
        a, b = _run(ready, rtol is None)
        sides = Sides(a, b, _matched(a, b, names, rtol, bool(files)))
        return result(sides, with_inner_line(by_rounding(sides), sides, ready, names))


def _beside_itself(recording: Recording, dtype: str, rtol: float | None) -> GradientComparison:
    """The comparison of a loss with itself in a wider type."""
    if not is_narrower(recording, dtype):
        return nothing_narrower(recording, dtype)
    narrow, wide = recording.run(), run_in(recording, dtype)
    judge = ByPrecision(recording, dtype, MOST_ROUNDING if rtol is None else rtol)
    sides = Sides(narrow, wide, match_by_name(narrow, wide, rtol=math.inf))
    return result(sides, judge(sides))


def _with_lines_alike(
    versions: list[Record | Recording], names: Mapping[str, str] | None
) -> list[Record | Recording]:
    """The versions, all with values of lines if one has no other values, or if lines are named."""
    if not (named_lines(names) or any(version.has_lines for version in versions)):
        return versions
    return [x if isinstance(x, Record) or x.has_lines else x.with_lines() for x in versions]


def _checked(
    versions: list[Record | Recording], names: Mapping[str, str] | None
) -> list[Record | Recording]:
    """The versions, the one of torch last; `ValueError` if they can't be matched."""
    a, b = (x if isinstance(x, Record) else x.record for x in versions)
    if not _is_by_number(a, b):
        check_names(a, b, names)
        check_common(a, b)
    else:
        check_nothing_named(names)
    return versions[::-1] if a.framework == TORCH != b.framework else versions


def _run(versions: Sequence[Record | Recording], is_measuring: bool) -> list[Record]:
    """The records, of which the first that is made now says what rounding moves, or a file does."""
    records: list[Record] = []
    for version in versions:
        if isinstance(version, Recording):
            is_measured = any(row.numbers.moved is not None for r in records for row in r.rows)
            version = version.run(floor=is_measuring and not is_measured)
        records.append(version)
    return records


def _matched(
    a: Record,
    b: Record,
    names: Mapping[str, str] | None,
    rtol: float | None,
    with_arguments: bool,
) -> Matching:
    """Rows matched by names, or by numbers where the two name nothing alike."""
    if _is_by_number(a, b):
        return match_by_number(a, b, rtol)
    return match_by_name(a, b, names, rtol, with_arguments)


def _is_by_number(a: Record, b: Record) -> bool:
    """Whether two losses are of two frameworks, or have no leaf of the first argument in common."""
    gradients = [a.rows[i] for i in a.of("gradient")]
    if not gradients or not b.is_loss:
        return False
    same = same_rows(a, b, "gradient")
    is_one_tree = any(a.rows[i].leaf[0] == gradients[0].leaf[0] for i in same)
    return a.framework != b.framework or not is_one_tree
