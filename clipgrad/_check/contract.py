"""The contract of differentiation: values, dtypes and shapes, and that all is finite."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from clipgrad._check import vectors
from clipgrad._check.checked_function import CheckedFunction
from clipgrad._check.report import Failure
from clipgrad._check.tolerances import VALUE_PART, precision
from clipgrad._check.user_code import call_user
from clipgrad._check.verdict import told_apart
from clipgrad._programs import holds_floats


def primal(
    function: CheckedFunction, outputs: Sequence[jax.Array], how: str, relative: float | None = None
) -> list[Failure]:
    """The function called and the function differentiated have the same outputs.

    To a relative error, or to a tenth of what gradients may be off by.
    """
    failures = []
    for name, called, other in zip(function.output_names, function.outputs, outputs, strict=True):
        failures += [
            Failure("primal", name, f"{what} {a} when called, {b} when {how}")
            for what in ("dtype", "shape")
            if (a := getattr(called, what)) != (b := getattr(other, what))
        ]
        if called.shape == other.shape:
            failures += _same_value(name, called, other, how, relative)
    return failures


def _same_value(name, called, other, how, relative) -> list[Failure]:
    part = VALUE_PART * precision(vectors.real_name(called)).relative
    part = part if relative is None else relative
    called, other = vectors.widened_leaf(called), vectors.widened_leaf(other)
    size = np.sqrt(np.mean(np.abs(np.where(np.isfinite(called), called, 0.0)) ** 2))
    bad = ~np.isclose(other, called, part, part / 10 * size, equal_nan=True)
    if not bad.any():
        return []
    off = np.where(bad, np.nan_to_num(np.abs(called - other), nan=np.inf), -1)
    worst = np.unravel_index(np.argmax(off), bad.shape)
    index = str([int(i) for i in worst]) if worst else ""
    texts = told_apart(called[worst], other[worst])
    detail = (
        f"value {texts[0]} when called, {texts[1]} when {how}; "
        f"{int(bad.sum())} of {bad.size} elements differ"
    )
    return [Failure("primal", name + index, detail)]


def same_types(function: CheckedFunction, cotangents: Sequence) -> list[Failure]:
    """Each input's cotangent has the input's dtype and shape."""
    return [
        Failure("cotangent", name, f"the input has {what} {a}, its cotangent {b}")
        for name, x, ct in zip(function.names, function.inputs, cotangents, strict=True)
        for what in ("dtype", "shape")
        if (a := getattr(x, what)) != (b := getattr(ct, what, None))
    ]


def integers(function: CheckedFunction, covector: np.ndarray) -> list[Failure]:
    """Inputs that are not floats get a cotangent of type float0."""
    if all(map(holds_floats, function.arrays)):
        return []
    return [
        Failure("cotangent", "integer input", f"its cotangent has dtype {dtype}, not float0")
        for x, dtype in zip(function.arrays, _cotangent_types(function, covector), strict=True)
        if not holds_floats(x) and dtype != jax.dtypes.float0
    ]


def _cotangent_types(function: CheckedFunction, covector: np.ndarray) -> list:
    """The types of the cotangents of all arrays; in a trace, where there can be one."""
    seen = []

    def pull_back(xs, cotangents):
        seen[:] = [ct.dtype for ct in jax.vjp(function.whole, xs)[1](cotangents)[0]]

    call = pull_back if function.program is None else functools.partial(jax.eval_shape, pull_back)
    call_user(call, function.arrays, vectors.cotangent_leaves(covector, function.outputs))
    return seen


def finite_values(function: CheckedFunction) -> list[Failure]:
    """The outputs are finite."""
    failures = []
    for name, leaf in zip(function.output_names, function.outputs, strict=True):
        bad = ~np.isfinite(vectors.widened_leaf(leaf))
        if bad.any():
            index = [int(i) for i in np.argwhere(bad)[0]] or ""
            detail = (
                f"the value is not finite at {int(bad.sum())} of {bad.size} elements; choose "
                "another point, or leave this output out with output="
            )
            failures.append(Failure("finite", f"{name}{index}", detail))
    return failures


def finite_gradient(function: CheckedFunction, finite: np.ndarray) -> list[Failure]:
    """The gradient is finite."""
    failures = []
    for start, stop in function.ranges:
        bad = np.flatnonzero(~finite[start:stop])
        if bad.size:
            detail = f"{bad.size} of {stop - start} elements of the gradient are not finite"
            where = function.element(start + int(bad[0]))
            failures.append(Failure("finite", where, detail, indices=bad))
    return failures
