"""Advice: a table of operations without a finite value or derivative at some point.

A new suspect is a row of `SUSPECTS`, the same row of the table in `docs/nan.md`, and a line in
`tests/diagnose/test_diagnose.py`: a test holds the three together. What no row fits has its
advice, if any, from `NEXT_STEPS`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, primitives

from clipgrad._diagnose.guilty import MASKING
from clipgrad._errors import docs_page
from clipgrad._programs import (
    has_custom_vjp,
    is_bad_at,
    is_linear_solve,
    numeric_of,
)

DOUBLE_WHERE = "the double `where` below"
_WITHIN_ONE = "jnp.clip(x, jnp.finfo(x.dtype).eps - 1, 1 - jnp.finfo(x.dtype).eps)"
# What a row is about: the elements of the operands where an operation goes wrong. So small a number
# is zero where a processor computes with zero instead.
WHEN: dict[str, Callable[[Sequence[float]], Any]] = {
    "always": lambda values: True,
    "zero": lambda values: abs(values[0]) < np.finfo(np.float32).tiny,
    "log of zero": lambda values: values[0] in (0, -1),
    "one": lambda values: abs(values[0]) == 1,
    "positive": lambda values: values[0] > 0,
    "inf": lambda values: bool(np.isinf(values).any()) or values[-1] == 0,
    "finite": lambda values: bool(np.isfinite(values).all()) and values[0] != 0,
    "all zero": lambda values: not np.any(values),
    "divisor zero": lambda values: values[-1] == 0,
    "divisor tiny": lambda values: 0 < abs(values[-1]) < 1e-15,  # whose square is 0 in float32
}


class Suspect(NamedTuple):
    """A row of the table of `docs/nan.md`.

    Attributes:
      code: the operation as an expression of ``x``.
      at: where it goes wrong.
      computes: what the backward pass computes there.
      when: for which values of the operands this happens, a row of `WHEN`.
      holds: whether an operation of JAX is one that goes wrong, mostly `is_bad_at` of a point that
        several operations share, as acos, asin and atanh do.
      functions: the functions around them; empty: any.
      instead: what to write instead, for people; code comes first.
      why: the reason in a finding, with ``{}`` for the operation.
      fix: the fix in a finding, with ``{}`` for the operation.
      kind: "vjp", "value" if the value goes wrong too, or "hidden" if that is hidden from the loss.
      dtype: the dtype of the operation, if it matters.
    """

    code: str
    at: str
    computes: str
    when: str
    holds: Callable[[JaxprEqn], bool]
    functions: tuple[str, ...] = ()
    instead: str = DOUBLE_WHERE
    why: str = "{} has no finite derivative at 0"
    fix: str = "mask its input: with ok = x > 0, jnp.where(ok, f(jnp.where(ok, x, 1.0)), 0.0)"
    kind: str = "vjp"
    dtype: str | None = None

    def advice(self, operation: str) -> str:
        """Why the operation goes wrong here, and the fix: a part of a line."""
        page = f" ({docs_page('nan')})" if self.instead == DOUBLE_WHERE else ""
        return f"{self.why.format(operation)}; {self.fix.format(operation)}{page}"


_BOUNDED = "jnp.exp(jnp.minimum(x, jnp.log(jnp.finfo(x.dtype).max) - 1))"
MASKED_INPUT = (
    "mask its input, not only its result: with ok where it is finite, "
    "jnp.where(ok, f(jnp.where(ok, x, 1.0)), 0.0)"
)


def _has_derivative_rule(equation: JaxprEqn) -> bool:
    return has_custom_vjp(equation) or equation.primitive is primitives.custom_jvp_call_p


def is_lookup(equation: JaxprEqn) -> bool:
    return equation.primitive is primitives.gather_p


def _is_exponential(equation: JaxprEqn) -> bool:
    return numeric_of(equation).is_exponential


def _is_solve(equation: JaxprEqn) -> bool:
    return is_linear_solve(equation) or is_bad_at("singular")(equation)


def _overflows(equation: JaxprEqn) -> bool:
    return numeric_of(equation).overflows


def _is_in_softmax(equation: JaxprEqn) -> bool:
    return equation.primitive in (primitives.sub_p, primitives.div_p)


# The next step where no row of the table fits: kinds, operations, when, and the step.
NEXT_STEPS = (
    (("value",), is_lookup, "always",
     "jnp.take and others read NaN there: correct the indices, or make the array larger; "
     'mode="clip" hides such an index'),
    (("value",), _is_exponential, "finite",
     f"bound its argument, as in {_BOUNDED}"),
    (("value", "raises"), _is_solve, "always",
     "the matrix may be singular: add a small multiple of the identity to it, or solve the "
     "least-squares problem, as jnp.linalg.lstsq does"),
    (("value",), is_bad_at("one"), "always", f"keep its input inside: {_WITHIN_ONE}"),
    (("value",), is_bad_at("divisor zero"), "divisor zero",
     "mask the divisor y: with ok = y != 0, jnp.where(ok, x / jnp.where(ok, y, 1.0), 0.0)"),
    (("vjp",), is_bad_at("equal values"), "always",
     "the backward pass divides by differences of eigenvalues or singular values, and two of them "
     "are equal: use the values alone, or add a small diagonal matrix with different entries"),
    (("vjp",), is_bad_at("divisor zero"), "divisor tiny",
     "the backward pass computes 1 / x ** 2, which overflows"),
    (("vjp",), is_bad_at("divisor zero"), "divisor zero", "the backward pass computes 1 / 0"),
    (("vjp",), is_bad_at("all zero"), "all zero", "the backward pass computes 0 / 0"),
    (("vjp",), _has_derivative_rule, "always",
     "this rule is yours: cg.check_grads compares it with numerical slopes"),
)  # fmt: skip
# fmt: off
SUSPECTS = (
    Suspect("jnp.sqrt(x)", "0", "1 / 0", "zero", is_bad_at("zero")),
    Suspect("jnp.linalg.norm(jnp.stack([x, x]))", "0", "0 / 0", "zero", is_bad_at("zero"),
            ("norm",),
            why="norm has no derivative at 0",
            fix="use a safe norm: with ok = jnp.sum(x * x) > 0, "
            "jnp.where(ok, jnp.linalg.norm(jnp.where(ok, x, 1.0)), 0.0)"),
    Suspect("jnp.where(x > 0, jnp.log(x), 0.0)", "0", "0 · inf, from the branch not taken",
            "log of zero", is_bad_at("log of zero"),
            why="{} has no finite derivative here, even if jnp.where masks its result"),
    Suspect("x ** 0.3", "0", "1 / 0", "zero", is_bad_at("zero base")),
    Suspect("jnp.std(jnp.stack([x, x]))", "0", "0 / 0 for equal numbers",
            "zero", is_bad_at("zero"), ("std", "_std", "nanstd"),
            instead="`jnp.sqrt(jnp.var(jnp.stack([x, x])) + 1e-6)`",
            why="std has no derivative where all numbers are equal",
            fix="write jnp.sqrt(jnp.var(x) + 1e-6)"),
    Suspect("jnp.log(jax.nn.softmax(jnp.stack([x, 0.0]))[0])", "-200", "the log of an underflow",
            "zero", is_bad_at("log of zero"), kind="value", why="log(0) is -inf",
            instead="`jax.nn.log_softmax(jnp.stack([x, 0.0]))[0]`",
            fix="for the log of a softmax use jax.nn.log_softmax"),
    Suspect("jax.nn.softmax(jnp.stack([x, -jnp.inf]))[0]", "-inf",
            "a row whose elements are all masked", "inf", _is_in_softmax, MASKING, kind="value",
            instead="a finite mask by `jnp.where(mask, x, jnp.finfo(x.dtype).min)`, not by a sum",
            why="a row whose elements are all masked holds only -inf",
            fix="select a finite mask: jnp.where(mask, x, jnp.finfo(x.dtype).min); a mask that is "
            "added overflows in float16"),
    Suspect("jax.nn.logsumexp(jnp.stack([x, x]))", "-inf", "a row whose elements are all masked",
            "log of zero", is_bad_at("log of zero"), ("logsumexp",), kind="value",
            instead="the same mask",
            why="a row whose elements are all masked has the logsumexp -inf",
            fix="select a finite mask: jnp.where(mask, x, jnp.finfo(x.dtype).min)"),
    Suspect("jnp.arccos(x)", "1", "1 / 0", "one",
            is_bad_at("one"), instead=f"`jnp.arccos({_WITHIN_ONE})`",
            why="{} has no finite derivative here",
            fix=f"keep its input inside, as in jnp.{{}}({_WITHIN_ONE})"),
    Suspect("jnp.arccosh(x)", "1", "1 / 0", "one", is_bad_at("one from above"),
            instead="`jnp.arccosh(jnp.maximum(x, 1 + jnp.finfo(x.dtype).eps))`",
            why="{} has no finite derivative here",
            fix="keep its input inside: jnp.{}(jnp.maximum(x, 1 + jnp.finfo(x.dtype).eps))"),
    Suspect("jnp.where(x < 80, jnp.exp(x), 0.0)", "200", "0 · inf, from the branch not taken",
            "positive", _is_exponential, kind="hidden",
            instead=f"`jnp.where(x < 80, {_BOUNDED}, 0.0)`",
            why="jnp.where, jnp.minimum and jnp.clip hide the value of {}, not its derivative",
            fix=f"bound its argument, as in {_BOUNDED}, or mask it too: "
            "jnp.where(ok, jnp.exp(jnp.where(ok, x, 0.0)), 0.0)"),
    Suspect("x.astype(jnp.float16) ** 4", "300", "more than 65504, the largest float16",
            "finite", _overflows, kind="value", dtype="float16",
            instead="`x.astype(jnp.bfloat16) ** 4`",
            why="the largest float16 is 65504",
            fix="compute in bfloat16 or float32; scaling the loss does not help a value"),
)
# fmt: on


def suspect(
    kind: str, operation: JaxprEqn, function: str | None, dtype: str, values: Sequence[float]
) -> Suspect | None:
    """The row that an operation at these values belongs to: one with functions, or the first."""
    fits = [
        row
        for row in SUSPECTS
        if row.kind == kind
        and row.holds(operation)
        and (not row.functions or function in row.functions)
        and row.dtype in (None, dtype)
        and len(values)
        and WHEN[row.when](values)
    ]
    return max(fits, key=lambda row: bool(row.functions), default=None)


def next_step(kind: str, operation: JaxprEqn, values: Sequence[float]) -> str | None:
    """The advice for an operation that has no row, if there is any."""
    fits = (
        step
        for kinds, holds, when, step in NEXT_STEPS
        if kind in kinds and holds(operation)
        if when == "always" or (len(values) and WHEN[when](values))
    )
    return next(fits, None)
