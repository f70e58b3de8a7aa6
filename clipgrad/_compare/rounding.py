"""The loss of low precision: a loss beside its own gradient, evaluated in a wider type.

Of values the modules are named at which the error grows; of gradients each leaf is judged by its
own size.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._compare.comparison import ComparisonFinding, GradientComparison, unjudged
from clipgrad._compare.differences import Judgment, floor_of, relative_floor, rounding
from clipgrad._compare.gradients import located
from clipgrad._compare.matching import match
from clipgrad._compare.places import ONE_ARGUMENT, ComparedPlace, compared_places
from clipgrad._compare.versions import VersionProgram, version
from clipgrad._jaxpr import computed_types

MOST_ROUNDING = 0.05  # the share of a leaf's gradient that may be rounding
LOSING = 2.0  # a module at which the error grows by less is not one that loses precision
MOST_MODULES = 10
WIDER_DTYPES = ("float32", "float64")
# A sum that is zero is nothing but rounding in the wider type as well. The error of such a leaf is
# 0.3 to 2 times the ratio of the types' roundings (a bias before a norm, of keys, of all logits).
# By chance it may be exactly zero; then the rounding of the program shows how large it could be.
NOTHING_LEFT = 1 / 16


def compare_dtypes(
    fun: Callable[..., Any],
    dtype: str,
    args: tuple,
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    rtol: float | None,
) -> GradientComparison:
    """Run a loss and its gradient as they are and in a wider type, and compare them.

    The gradient is traced before it is widened, so that custom rules stay as they are.
    """
    own = version(fun, args, kwargs, argnums, has_aux)
    pairs = match(own, own, None).pairs
    program = VersionProgram(own)
    narrow = program()
    # Of the whole gradient: a custom rule may be narrower than the loss.
    ratio = _rounding_ratio(program.traced.program, dtype)
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        wide = VersionProgram(own, jnp.dtype(dtype))()
    places, _ = compared_places(pairs, narrow, wide, floor_of(narrow, ()), None)
    most = MOST_ROUNDING if rtol is None else rtol
    floors = functools.cache(lambda: program.floor(narrow).grads)
    paths = [leaf.path for leaf in own.leaves]
    lost, notes = lost_precision(paths, narrow.grads, floors, wide.grads, dtype, ratio, most)
    if np.isfinite(wide.loss) and not np.isfinite(narrow.loss):
        notes.append(f"the loss is {narrow.loss}, and {wide.loss:.3g} in {dtype}: it overflows")
    if ratio == 1:
        wider = "" if dtype == "float64" else '; compare it with "float64"'
        notes.append(f"nothing in fun is narrower than {dtype}, so no precision is lost{wider}")
    modules = _growing(places, "value") or _growing(places, "cotangent")
    rows = tuple(place.row for place in places)
    return GradientComparison(not lost, (*modules, *lost), rows, (), tuple(notes))


def _growing(places: Sequence[ComparedPlace], what: str) -> list[ComparisonFinding]:
    """The places where the relative error grows most, in the order of growth."""
    found, largest = [], 0.0
    for place in places if what == "value" else places[::-1]:
        judgment: Judgment | None = getattr(place, what)
        if judgment is None:
            continue
        at = place.pair.own.value.place
        if not math.isfinite(judgment.difference):  # what follows may follow from it
            text = f"the {what} of {place.name} is NaN or inf in one of the types only"
            found.append(located("rounding", place.name, place.step, text, at, math.inf))
            break
        factor = judgment.difference / max(largest, rounding(place.pair.own.value.dtype))
        if factor > LOSING:
            text = f"the relative error of the {what} of {place.name} is {judgment.difference:.2g}"
            text += f", {factor:.1f} times that before"
            found.append(located("rounding", place.name, place.step, text, at, factor))
        largest = max(largest, judgment.difference)
    return sorted(found, key=lambda f: -(f.factor or 0))[:MOST_MODULES]


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
    nothing. That no leaf can be judged is a finding. Floors say how far the rounding of the program
    moves each gradient; the ratio is that of `_rounding_ratio`.
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
        moved = error
        if most < error < most_left:
            floor = floors()[i][left]
            moved = relative_floor(wide[left], np.where(np.isfinite(floor), floor, 0))
        if error > most and max(error, moved) >= most_left:
            notes.append(f"{name}: zero but for rounding")
            continue
        is_judged |= error > most or bool(np.any(left)) or not own.size
        if error > most:
            share = f"{100 * error:.{1 if error < 0.1 else 0}f}% of"
            share = share if error <= 1 else f"{error:.2g} times the size of"
            text = f"{share} the gradient of {name} is rounding"
            findings.append(ComparisonFinding("rounding", text, path=path, ratio=error))
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


def _rounding_ratio(program: Any, dtype: str) -> float:
    """The rounding of a program relative to that of a dtype; 1 if nothing in it is narrower.

    Of several narrower types it is the finest, whose rounding may be all that a leaf has.
    """
    eps = float(jnp.finfo(dtype).eps)
    found = [float(jnp.finfo(name).eps) for name in computed_types(program)]
    return min((each for each in found if each > eps), default=eps) / eps
