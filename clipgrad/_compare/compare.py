"""From two versions of a loss, or of a training step, to the first place where they differ.

Trace each version, or read its file: `recorded`, `load_record`. Run what was traced:
`Recording.run`. Match the rows of both: `match_by_name`, `match_by_number`. Judge the pairs:
`by_rounding`, `ByPrecision`; and give the one `result`.
"""

import dataclasses
import functools
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
from clipgrad._compare.durations import LINES, ROUNDING, RUNS, TRACING, Durations
from clipgrad._compare.file import load_record
from clipgrad._compare.findings import by_rounding
from clipgrad._compare.inner_lines import with_inner_line
from clipgrad._compare.leaf_pairs import have_leaves_in_common, mark_stacks
from clipgrad._compare.line_pairs import named_lines
from clipgrad._compare.loss_recording import ALL
from clipgrad._compare.match_by_name import (
    check_common,
    check_names,
    have_values_in_common,
    match_by_name,
)
from clipgrad._compare.match_by_number import match_by_number
from clipgrad._compare.matching import Matching
from clipgrad._compare.moved_leaves import (
    NONE_MOVED,
    MovedLeaves,
    left_by_name,
    left_by_number,
    moved_leaves,
)
from clipgrad._compare.record import JAX, Record
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

    You can compare two functions, a function and a file that `save_run` wrote, or one function and
    the same function in float32 or float64. You do not edit either version.

    Example:
      >>> import clipgrad as cg, jax, jax.numpy as jnp
      >>> def loss(w, x, scale=1.0):
      ...     with jax.named_scope("hidden"):
      ...         h = jnp.tanh(x @ w) * scale
      ...     return jnp.mean(h**2)
      >>> args = jnp.ones((3, 2)), jnp.ones((4, 3))
      >>> comparison = cg.compare(loss, lambda w, x: loss(w, x, scale=1.1), args)
      >>> comparison.ok, comparison.findings[0].kind, comparison.findings[0].module
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
        With ``{"layers_*": "layers"}``, modules are matched with scan steps, in order, and the
        gradients of their parameters with the layers of a stack. Leaves of a renamed module are
        matched, too, also if one has another name there, such as kernel and weight. Paths of
        leaves are names, ``{"wte": "embed/embedding"}``, and so are lines,
        ``{"model.py:8": "port.py:20"}``.
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
    the measured rounding error. Where a difference is above four roundings, ``fun`` runs eight more
    times to measure the rounding error: each result, each term of a sum and each constant moves by
    one rounding. If rounding alone moves a value by over 10 %, only a difference four times larger
    counts.

    Guarantees:
      * ``ok`` says that all outputs and gradients were compared, and agree. If one version lacks an
        output or a leaf, that is a finding. If some outputs or gradient leaves are mostly rounding
        error in both versions, you get a note; if these are half or more of all, or have most of
        the norm, you get a finding of kind "not judged".
      * A "value" finding is the first named value that differs, in the order of computation, scan
        steps included. The named values before it agree; the finding names the module of the
        operations in between, or a line there that only one version has.
      * Where a "value" or "vjp" finding names a module, its lines are compared in one more run of
        both functions, and the message says at which of them the versions first differ.
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
      * If the arguments of both functions are given, leaves without a partner of the same path are
        matched by their numbers: renamed leaves, layers and their stack, and fused leaves such as
        ``qkv`` beside ``wq``, ``wk`` and ``wv``, along any axis and in any order.
      * If the parameters have no path in common, also not by ``names``, as with a torch run, values
        are matched by their numbers, in any order of axes.
      * With a dtype as ``other``, findings have the kind "rounding": the value at which the error
        grows most, and each leaf whose gradient has a rounding error above ``rtol`` (0.05). Custom
        rules stay, because the gradient is traced before it is widened. The table of relative
        errors is always printed.
      * Files and dtypes are checked before any function runs. If no value is narrower than the
        dtype, nothing runs.
      * If a comparison takes longer than a minute, a note says what took the time, and what would
        make it shorter.
    """
    options: Any = {"other_args": other_args, "argnums": argnums, "names": names, "rtol": rtol}
    check_comparison(fun, other, args, kwargs, **options)
    call: Any = dict(kwargs or {}), argnums, has_aux
    versions: Any = fun, other
    durations = Durations()
    with settings_of_runs():
        if is_dtype(other):
            with durations.of(TRACING):
                recording = recorded(versions[0], args or (), *call)
            comparison = _beside_itself(recording, versions[1], rtol, durations)
        else:
            comparison = _two_versions(versions, args, call, durations, **options)
    return dataclasses.replace(comparison, notes=(*comparison.notes, *durations.notes()))


def _two_versions(
    versions: Any,
    args: tuple | None,
    call: tuple,
    durations: Durations,
    other_args: tuple | None,
    argnums: Any,
    names: Any,
    rtol: float | None,
) -> GradientComparison:
    """The comparison of two functions or files."""
    arguments = arguments_of(versions, args, other_args)
    files = {i: load_record(versions[i]) for i in range(2) if arguments[i] is None}
    check_files(files.values(), argnums, names)
    among = next((record.argnums for record in files.values()), ())
    has_others = bool(files) or other_args is not None  # which may be in other orders of axes
    more: Any = has_others, among
    with durations.of(TRACING):
        traced = [
            files[i] if i in files else recorded(versions[i], arguments[i], *call, *more)
            for i in range(2)
        ]
        ready = _checked(_with_lines_alike(traced, names), names)
    with durations.of(RUNS):
        a, b = (x.run(whole=has_others) if isinstance(x, Recording) else x for x in ready)
    matched = functools.partial(
        _matched, a, b, names, rtol, bool(files), _moved(ready, (a, b), names)
    )
    sides = Sides(a, b, matched())
    if rtol is None and not _is_same(sides):
        with durations.of(ROUNDING):
            is_measured = _measure(ready, (a, b))
        sides = Sides(a, b, matched()) if is_measured else sides
    with durations.of(LINES):
        verdict = with_inner_line(by_rounding(sides), sides, ready, names)
    return result(sides, verdict)


def _beside_itself(
    recording: Recording, dtype: str, rtol: float | None, durations: Durations
) -> GradientComparison:
    """The comparison of a loss with itself in a wider type."""
    if not is_narrower(recording, dtype):
        return nothing_narrower(recording, dtype)
    with durations.of(RUNS):
        narrow, wide = recording.run(whole=True), run_in(recording, dtype)
    judge = ByPrecision(recording, dtype, MOST_ROUNDING if rtol is None else rtol)
    sides = Sides(narrow, wide, match_by_name(narrow, wide, rtol=math.inf))
    with durations.of(ROUNDING):
        verdict = judge(sides)
    return result(sides, verdict)


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
    """The versions, one of JAX first; `ValueError` if they can't be matched."""
    a, b = (x if isinstance(x, Record) else x.record for x in versions)
    is_by_number = _is_by_number(a, b, names)
    if is_by_number and not (a.has_arrays and b.has_arrays):
        check_nothing_named(names)
    else:
        check_names(a, b, names)
    if not is_by_number:
        check_common(a, b)
        mark_stacks(versions, names)
    return versions[::-1] if a.framework != JAX == b.framework else versions


def _is_same(sides: Sides) -> bool:
    """Whether nothing differs by more than four roundings, and no version lacks anything."""
    matching = sides.matching
    return not matching.alone and all(pair.judgment.agrees for pair in matching.pairs)


def _measure(versions: Sequence[Record | Recording], records: Sequence[Record]) -> bool:
    """Add what rounding moves to the first record made now, unless a file before says it."""
    for version, record in zip(versions, records, strict=True):
        if isinstance(version, Recording):
            version.measure(record)
            return True
        if any(row.numbers.moved is not None for row in record.rows):
            return False
    return False


def _moved(
    versions: Sequence[Record | Recording],
    records: Sequence[Record],
    names: Mapping[str, str] | None,
) -> MovedLeaves:
    """The leaves that the versions hold in other leaves, where all numbers are known."""
    recordings = [x for x in versions if isinstance(x, Recording)]
    if len(recordings) < len(versions):
        return NONE_MOVED
    a, b = records
    left = left_by_number(a, b) if _is_by_number(a, b, names) else left_by_name(a, b, names)
    return moved_leaves(recordings, records, left)


def _matched(
    a: Record,
    b: Record,
    names: Mapping[str, str] | None,
    rtol: float | None,
    with_arguments: bool,
    moved: MovedLeaves,
) -> Matching:
    """Rows matched by names, or by numbers where the two name nothing alike."""
    if _is_by_number(a, b, names):
        return match_by_number(a, b, rtol, moved)
    return match_by_name(a, b, names, rtol, with_arguments, moved)


def _is_by_number(a: Record, b: Record, names: Mapping[str, str] | None) -> bool:
    """Whether two losses are of two frameworks, or have no leaf of the first argument in common.

    Neither by their paths nor under new names. Where ``names`` are those of leaves alone, values
    are matched by numbers, too; and where they are of values, leaves that have none.
    """
    if not a.is_loss or not b.is_loss:
        return False
    if a.framework != b.framework:
        return True
    if names and a.has_arrays and b.has_arrays:
        return not have_values_in_common(a, b, names)
    return not have_leaves_in_common(a, b, names)
