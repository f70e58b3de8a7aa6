"""The precision of each leaf of a gradient: the leaf beside the same leaf in a wider type."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from clipgrad._compare.differences import relative_floor
from clipgrad._compare.findings import ONE_ARGUMENT
from clipgrad._compare.records import ComparisonFinding, unjudged
from clipgrad._jaxpr import computed_types

# A sum that is zero is nothing but rounding in the wider type as well. The error of such a leaf is
# 0.3 to 2 times the ratio of the types' roundings (a bias before a norm, of keys, of all logits).
# By chance it may be exactly zero; then the rounding of the program shows how large it could be.
NOTHING_LEFT = 1 / 16


def lost_precision(
    paths: Sequence[str],
    grads: Sequence[np.ndarray],
    floors: Callable[[], Sequence[np.ndarray]],
    exact: Sequence[np.ndarray],
    dtype: str,
    ratio: float,
    most: float,
) -> tuple[list[ComparisonFinding], list[str]]:
    """The leaves of whose gradient more than a share is rounding, and notes of others.

    Each leaf is judged by its own size: a gradient beside it that is large or infinite excuses
    nothing. That no leaf can be judged is a finding.

    Args:
      paths: the path of each leaf.
      grads: the gradient as the function computes it.
      floors: gives how far the rounding of the program moves each gradient.
      exact: the gradient in the wider type.
      dtype: the name of this type.
      ratio: how many times coarser the rounding of the function is; see `rounding_ratio`.
      most: the share of a leaf's gradient that may be rounding.
    """
    findings, notes, is_judged = [], [], False
    most_left = NOTHING_LEFT * ratio
    for i, (path, own, wide) in enumerate(zip(paths, grads, exact, strict=True)):
        name = path or ONE_ARGUMENT
        odd, odd_there = ~np.isfinite(own), ~np.isfinite(wide)
        if np.any(odd != odd_there):
            findings.append(_overflowed(path, odd & ~odd_there, odd_there & ~odd, dtype))
            continue
        left = ~odd
        error = relative_floor(wide[left], np.abs(own[left] - wide[left]))
        if error > most and (error >= most_left or _movement(floors()[i], wide, left) >= most_left):
            notes.append(f"{name}: zero but for rounding")
            continue
        is_judged |= error > most or bool(np.any(left)) or not own.size
        findings += [_rounded_leaf(path, error)] if error > most else []
        if np.any(odd):
            count = f"{name}: {_count(odd)} of its gradient"
            notes.append(f"{count} are NaN or inf in both types, so not judged")
    if not findings and not is_judged:
        findings.append(
            unjudged(
                "no gradient is judged: each is zero but for rounding, or NaN or inf in both "
                "types; diagnose(fun, args) says which operation makes it so"
            )
        )
    return findings, notes


def _rounded_leaf(path: str, error: float) -> ComparisonFinding:
    share = (
        f"{100 * error:.{1 if error < 0.1 else 0}f}% of"
        if error <= 1
        else f"{error:.2g} times the size of"
    )
    text = f"{share} the gradient of {path or ONE_ARGUMENT} is rounding"
    return ComparisonFinding("rounding", text, path=path, ratio=error)


def _movement(floor: np.ndarray, wide: np.ndarray, left: np.ndarray) -> float:
    """The relative movement of a gradient by rounding, where it stays finite."""
    return relative_floor(wide[left], np.where(np.isfinite(floor), floor, 0)[left])


def _overflowed(path: str, here: np.ndarray, there: np.ndarray, dtype: str) -> ComparisonFinding:
    """The finding of a gradient that is not finite in one of the types only."""
    text = f"the gradient of {path or ONE_ARGUMENT} overflows: "
    if np.any(here):
        text += f"{_count(here)} are NaN or inf, and finite in {dtype}; scale the loss down, or "
        text += "compute what overflows in a type with a wider range"
    else:
        text += f"{_count(there)} are NaN or inf in {dtype} only"
    return ComparisonFinding("rounding", text, path=path, ratio=math.inf)


def _count(odd: np.ndarray) -> str:
    return f"{np.sum(odd)} of {odd.size} numbers"


def rounding_ratio(program: Any, dtype: str) -> float:
    """The rounding of a program relative to that of a dtype; 1 if nothing in it is narrower.

    Of several narrower types it is the finest, whose rounding may be all that a leaf has.
    """
    eps = float(jnp.finfo(dtype).eps)
    found = [float(jnp.finfo(name).eps) for name in computed_types(program)]
    return min((each for each in found if each > eps), default=eps) / eps


def precision_notes(ratio: float, loss: Any, wide_loss: Any, dtype: str) -> list[str]:
    """Notes of a loss that overflows, and of a program that has nothing narrower than a dtype."""
    found = []
    if np.isfinite(wide_loss) and not np.isfinite(loss):
        found.append(f"the loss is {loss}, and {wide_loss:.3g} in {dtype}: it overflows")
    if ratio == 1:
        wider = "" if dtype == "float64" else '; compare it with "float64"'
        found.append(f"nothing in fun is narrower than {dtype}, so no precision is lost{wider}")
    return found
