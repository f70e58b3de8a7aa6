"""The precision of each leaf of a gradient: the leaf beside the same leaf in a wider type."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from clipgrad._compare.differences import movement
from clipgrad._compare.records import ComparisonFinding, unjudged
from clipgrad._jaxpr import computed_types

# From this many times the gradient on, the rounding of a leaf says that its gradient in the wider
# type is rounding, too. Of a sum that is zero it is 2**13 for float16 beside float32, 2**16 for
# bfloat16, and 2**29 for float32 beside float64.
NOTHING_LEFT = {"float32": 2.0**9, "float64": 2.0**22}


class LeafPrecision(NamedTuple):
    """The verdict on the precision of a leaf.

    Attributes:
      is_judged: whether there is a gradient to judge.
      finding: the loss of precision, or None.
      note: what else there is to say, or "".
    """

    is_judged: bool
    finding: ComparisonFinding | None = None
    note: str = ""


def lost_precision(
    paths: Sequence[str],
    grads: Sequence[np.ndarray],
    exact: Sequence[np.ndarray],
    dtype: str,
    most: float,
) -> tuple[list[ComparisonFinding], list[str]]:
    """The leaves of whose gradient more than a share is rounding, and notes of others.

    Each leaf is judged by its own size: a gradient beside it that is large or infinite excuses
    nothing. That no leaf can be judged is a finding.

    Args:
      paths: the path of each leaf.
      grads: the gradient as the function computes it.
      exact: the gradient in the wider type.
      dtype: the name of this type.
      most: the share of a leaf's gradient that may be rounding.
    """
    leaves = zip(paths, grads, exact, strict=True)
    found = [_precision(path, near, wide, dtype, most) for path, near, wide in leaves]
    findings = [leaf.finding for leaf in found if leaf.finding]
    if not any(leaf.is_judged for leaf in found):
        findings.append(
            unjudged(
                "no gradient is judged: each is zero but for rounding, or NaN or inf in both "
                "types; diagnose(fun, args) says which operation makes it so"
            )
        )
    return findings, [leaf.note for leaf in found if leaf.note]


def _precision(
    path: str, near: np.ndarray, wide: np.ndarray, dtype: str, most: float
) -> LeafPrecision:
    name = path or "the argument"
    odd, odd_there = ~np.isfinite(near), ~np.isfinite(wide)
    if np.any(odd != odd_there):
        return LeafPrecision(True, _overflowed(path, odd & ~odd_there, odd_there & ~odd, dtype))
    left, note = ~odd, ""
    if np.any(odd):
        note = f"{name}: {_count(odd)} of its gradient are NaN or inf in both types, so not judged"
    error = movement(wide[left], [near[left]])
    if error <= most:
        return LeafPrecision(bool(np.any(left)) or not near.size, None, note)
    if error >= NOTHING_LEFT[dtype]:
        return LeafPrecision(False, None, f"{name}: zero but for rounding")
    share = f"{100 * error:.2g}% of" if error <= 1 else f"{error:.2g} times the size of"
    text = f"{share} the gradient of {name} is rounding"
    return LeafPrecision(True, ComparisonFinding("rounding", text, path=path, ratio=error), note)


def _overflowed(path: str, here: np.ndarray, there: np.ndarray, dtype: str) -> ComparisonFinding:
    """The finding of a gradient that is not finite in one of the types only."""
    text = f"the gradient of {path or 'the argument'} overflows: "
    if np.any(here):
        text += f"{_count(here)} are NaN or inf, and finite in {dtype}; scale the loss down, or "
        text += "compute what overflows in a type with a wider range"
    else:
        text += f"{_count(there)} are NaN or inf in {dtype} only"
    return ComparisonFinding("rounding", text, path=path, ratio=math.inf)


def _count(odd: np.ndarray) -> str:
    return f"{np.sum(odd)} of {odd.size} numbers"


def precision_notes(program: Any, loss: Any, wide_loss: Any, dtype: str) -> list[str]:
    """Notes of a loss that overflows, and of a program that has nothing narrower than a dtype."""
    found = []
    if np.isfinite(wide_loss) and not np.isfinite(loss):
        found.append(f"the loss is {loss}, and {wide_loss:.3g} in {dtype}: it overflows")
    eps = jnp.finfo(dtype).eps
    if all(jnp.finfo(name).eps <= eps for name in computed_types(program)):
        wider = "" if dtype == "float64" else '; compare it with "float64"'
        found.append(f"nothing in fun is narrower than {dtype}, so no precision is lost{wider}")
    return found
