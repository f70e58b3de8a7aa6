"""The loss of low precision: a loss beside its own gradient, evaluated in a wider type."""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._compare.comparison import GradientComparison
from clipgrad._compare.differences import Judgment, floor_of, rounding
from clipgrad._compare.findings import located
from clipgrad._compare.matching import match
from clipgrad._compare.places import ComparedPlace, compared_places
from clipgrad._compare.precision import lost_precision, precision_notes, rounding_ratio
from clipgrad._compare.records import ComparisonFinding
from clipgrad._compare.versions import VersionProgram, version

MOST_ROUNDING = 0.05  # the share of a leaf's gradient that may be rounding
LOSING = 2.0  # a module at which the error grows by less is not one that loses precision
MOST_MODULES = 10
WIDER_DTYPES = ("float32", "float64")


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
    ratio = rounding_ratio(program.traced.program, dtype)
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        wide = VersionProgram(own, jnp.dtype(dtype))()
    places, _ = compared_places(pairs, narrow, wide, floor_of(narrow, ()), None)
    most = MOST_ROUNDING if rtol is None else rtol
    floors = functools.cache(lambda: program.floor(narrow).grads)
    paths = [leaf.path for leaf in own.leaves]
    lost, notes = lost_precision(paths, narrow.grads, floors, wide.grads, dtype, ratio, most)
    notes += precision_notes(ratio, narrow.loss, wide.loss, dtype)
    modules = _growing(places, "value") or _growing(places, "cotangent")
    found = (*modules, *lost)
    rows = tuple(place.row for place in places)
    return GradientComparison(not lost, found, rows, (), tuple(notes))


def _growing(places: Sequence[ComparedPlace], what: str) -> list[ComparisonFinding]:
    """The places where the relative error grows most, in the order of growth."""
    order = places if what == "value" else places[::-1]
    found, largest = [], 0.0
    for place in order:
        judgment: Judgment | None = getattr(place, what)
        if judgment is None:
            continue
        at = place.pair.own.value.place
        if not math.isfinite(judgment.difference):  # what follows may follow from it
            text = f"the {what} of {place.name} is NaN or inf in one of the types only"
            found.append(located("rounding", place.name, place.step, text, at, math.inf))
            break
        unit = rounding(place.pair.own.value.dtype)
        before = max(largest, unit)
        factor = judgment.difference / before
        if factor > LOSING:
            text = (
                f"the relative error of the {what} of {place.name} is {judgment.difference:.2g}, "
                f"{factor:.1f} times that before"
            )
            found.append(located("rounding", place.name, place.step, text, at, factor))
        largest = max(largest, judgment.difference)
    return sorted(found, key=lambda f: -(f.factor or 0))[:MOST_MODULES]
