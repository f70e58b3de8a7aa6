"""The usual suspects: operations without a finite value or derivative at some point."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from clipgrad._docs import docs_page

OperandValues = Sequence[float]
DOUBLE_WHERE = "the double `where` below"
_WITHIN_ONE = "jnp.clip(x, jnp.finfo(x.dtype).eps - 1, 1 - jnp.finfo(x.dtype).eps)"


def _at_zero(values: OperandValues) -> bool:
    """Of what is zero, or so small that a processor may compute with zero instead."""
    return bool(abs(values[0]) < np.finfo(np.float32).tiny)


def _at_inf(values: OperandValues) -> bool:
    return bool(np.isinf(values).any()) or values[-1] == 0


def _values_overflow(values: OperandValues) -> bool:
    return bool(np.isfinite(values).all()) and values[0] != 0


class Suspect(NamedTuple):
    """A row of the table of `docs/nan.md`.

    Attributes:
      code: the operation as an expression of ``x``.
      at: where it goes wrong.
      computes: what the backward pass computes there.
      applies: whether this happens for these values of the operands.
      primitives: the operations of JAX that go wrong.
      functions: the functions around them; empty: any.
      instead: what to write instead, for people; code comes first.
      why: the reason in a finding, with ``{}`` for the operation.
      fix: the fix in a finding.
      kind: "vjp", "value" if the value goes wrong too, or "hidden" if that is hidden from the loss.
      dtype: the dtype of the operation, if it matters.
    """

    code: str
    at: str
    computes: str
    applies: Callable[[OperandValues], bool]
    primitives: tuple[str, ...]
    functions: tuple[str, ...] = ()
    instead: str = DOUBLE_WHERE
    why: str = "{} has no finite derivative at 0"
    fix: str = "mask its input: with ok = x > 0, jnp.where(ok, f(jnp.where(ok, x, 1.0)), 0.0)"
    kind: str = "vjp"
    dtype: str | None = None

    def advice(self, operation: str) -> str:
        """Why the operation goes wrong here, and the fix: a part of a line."""
        page = f" ({docs_page('nan')})" if self.instead == DOUBLE_WHERE else ""
        return f"{self.why.format(operation)}; {self.fix}{page}"


# Functions that a mask of -inf is for.
MASKING = ("softmax", "log_softmax", "logsumexp", "softmax_cross_entropy")
# What makes inf of finite numbers by its size alone.
OVERFLOWING = ("mul", "add", "sub", "square", "integer_pow", "exp", "exp2", "expm1", "cumsum")
OVERFLOWING += (
    "add_any",
    "reduce_sum",
    "dot_general",
    "conv_general_dilated",
    "convert_element_type",
)
_BOUNDED = "jnp.exp(jnp.minimum(x, jnp.log(jnp.finfo(x.dtype).max) - 1))"
_SOLVES = ("custom_linear_solve", "triangular_solve", "lu", "cholesky", "linear_solve", "solve")
MASKED_INPUT = (
    "mask its input, not only its result: with ok where it is finite, "
    "jnp.where(ok, f(jnp.where(ok, x, 1.0)), 0.0)"
)
# The next step where no row of the table fits: kinds, operations, values, and the step.
NEXT_STEPS = (
    (("value",), ("gather",), None,
     "jnp.take and others read NaN there: correct the indices, or make the array larger; "
     'mode="clip" hides such an index'),
    (("value",), ("exp", "exp2", "expm1", "sinh", "cosh"), _values_overflow,
     f"bound its argument, as in {_BOUNDED}"),
    (("value", "raises"), _SOLVES, None,
     "the matrix may be singular: add a small multiple of the identity to it, or solve the "
     "least-squares problem, as jnp.linalg.lstsq does"),
    (("vjp",), ("div",), lambda values: 0 < abs(values[-1]) < 1e-15,
     "the backward pass computes 1 / x ** 2, which overflows"),
    (("vjp",), ("div",), lambda values: values[-1] == 0, "the backward pass computes 1 / 0"),
    (("vjp",), ("atan2",), lambda values: not np.any(values), "the backward pass computes 0 / 0"),
)  # fmt: skip
# fmt: off
SUSPECTS = (
    Suspect("jnp.sqrt(x)", "0", "1 / 0", _at_zero, ("sqrt", "cbrt")),
    Suspect("jnp.linalg.norm(jnp.stack([x, x]))", "0", "0 / 0", _at_zero, ("sqrt",), ("norm",),
            why="norm has no derivative at 0",
            fix="use a safe norm: with ok = jnp.sum(x * x) > 0, "
            "jnp.where(ok, jnp.linalg.norm(jnp.where(ok, x, 1.0)), 0.0)"),
    Suspect("jnp.where(x > 0, jnp.log(x), 0.0)", "0", "0 · inf, from the branch not taken",
            lambda values: values[0] in (0, -1), ("log", "log1p"),
            why="{} has no finite derivative here, even if jnp.where masks its result"),
    Suspect("x ** 0.3", "0", "1 / 0", _at_zero, ("pow",)),
    Suspect("jnp.std(jnp.stack([x, x]))", "0", "0 / 0 for equal numbers",
            _at_zero, ("sqrt",), ("std", "_std", "nanstd"),
            instead="`jnp.sqrt(jnp.var(jnp.stack([x, x])) + 1e-6)`",
            why="std has no derivative where all numbers are equal",
            fix="write jnp.sqrt(jnp.var(x) + 1e-6)"),
    Suspect("jnp.log(jax.nn.softmax(jnp.stack([x, 0.0]))[0])", "-200", "the log of an underflow",
            _at_zero, ("log",), kind="value", why="log(0) is -inf",
            instead="`jax.nn.log_softmax(jnp.stack([x, 0.0]))[0]`",
            fix="for the log of a softmax use jax.nn.log_softmax"),
    Suspect("jax.nn.softmax(jnp.stack([x, -jnp.inf]))[0]", "-inf",
            "a row that is masked throughout", _at_inf, ("sub", "div"), MASKING, kind="value",
            instead="a finite mask by `jnp.where(mask, x, jnp.finfo(x.dtype).min)`, not by a sum",
            why="a row whose elements are all masked holds only -inf",
            fix="select a finite mask: jnp.where(mask, x, jnp.finfo(x.dtype).min); a mask that is "
            "added overflows in float16"),
    Suspect("jnp.arccos(x)", "1", "1 / 0", lambda values: abs(values[0]) == 1,
            ("acos", "asin", "atanh"), instead=f"`jnp.arccos({_WITHIN_ONE})`",
            why="{} has no finite derivative here",
            fix=f"keep its input inside, as in jnp.arccos({_WITHIN_ONE})"),
    Suspect("jnp.arccosh(x)", "1", "1 / 0", lambda values: values[0] == 1, ("acosh",),
            instead="`jnp.arccosh(jnp.maximum(x, 1 + jnp.finfo(x.dtype).eps))`",
            why="{} has no finite derivative here",
            fix="keep its input inside: jnp.arccosh(jnp.maximum(x, 1 + jnp.finfo(x.dtype).eps))"),
    Suspect("jnp.where(x < 80, jnp.exp(x), 0.0)", "200", "0 · inf, from the branch not taken",
            lambda values: values[0] > 0, ("exp", "exp2", "expm1"), kind="hidden",
            instead=f"`jnp.where(x < 80, {_BOUNDED}, 0.0)`",
            why="jnp.where, jnp.minimum and jnp.clip hide the value of {}, not its derivative",
            fix=f"bound its argument, as in {_BOUNDED}, or mask it too: "
            "jnp.where(ok, jnp.exp(jnp.where(ok, x, 0.0)), 0.0)"),
    Suspect("x.astype(jnp.float16) ** 4", "300", "more than 65504, the largest float16",
            _values_overflow, OVERFLOWING, kind="value", dtype="float16",
            instead="`x.astype(jnp.bfloat16) ** 4`",
            why="the largest float16 is 65504",
            fix="compute in bfloat16 or float32; scaling the loss does not help a value"),
)
# fmt: on


def suspect(
    kind: str, operation: str, function: str | None, dtype: str, values: OperandValues
) -> Suspect | None:
    """The row that an operation at these values belongs to, the most special one."""
    fits = [
        row
        for row in SUSPECTS
        if row.kind == kind
        and operation in row.primitives
        and (not row.functions or function in row.functions)
        and row.dtype in (None, dtype)
        and len(values)
        and row.applies(values)
    ]
    return max(fits, key=lambda row: bool(row.functions), default=None)


def next_step(kind: str, operation: str, values: OperandValues) -> str | None:
    """The advice for an operation that has no row, if there is any."""
    fits = (
        step
        for kinds, names, applies, step in NEXT_STEPS
        if kind in kinds and operation in names
        if applies is None or (len(values) and applies(values))
    )
    return next(fits, None)
