"""The loss of low precision: a loss beside its own gradient, evaluated in a wider type."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._compare.comparison import GradientComparison
from clipgrad._compare.differences import Judgment, movement, rounding
from clipgrad._compare.findings import ONE_ARGUMENT, located
from clipgrad._compare.matching import match
from clipgrad._compare.places import ComparedPlace, compared_places
from clipgrad._compare.records import ComparisonFinding
from clipgrad._compare.versions import Version, VersionProgram, VersionRun, dtype_and_shape, version

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
    names = frozenset((value.name, value.kind) for value in own.values)
    narrow = VersionProgram(own, names)(0)
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        wide = VersionProgram(own, names, jnp.dtype(dtype))(0)
    places, _ = compared_places(pairs, narrow, wide, [], None)
    lost, notes = _lost_leaves(own, narrow, wide, MOST_ROUNDING if rtol is None else rtol)
    modules = _growing(places, "value") or _growing(places, "cotangent")
    found = (*modules, *lost)
    rows = tuple(place.row for place in places)
    return GradientComparison(not lost, found, rows, (), tuple(notes))


def _lost_leaves(
    own: Version, narrow: VersionRun, wide: VersionRun, most: float
) -> tuple[list[ComparisonFinding], list[str]]:
    """The leaves whose gradient is more than a share rounding error; notes of those near zero."""
    inputs = [own.subject.inputs[i] for i in own.subject.chosen]
    eps = rounding(*(x.dtype for x in inputs))
    whole = math.sqrt(sum(np.sum(np.abs(g) ** 2) for g in wide.grads))
    floor = 4 * eps * whole / math.sqrt(max(1, sum(g.size for g in wide.grads)))
    found, notes = [], []
    pairs = zip(own.paths, narrow.grads, wide.grads, strict=True)
    for path, near, exact in pairs:
        error = movement(exact, [near])
        if error <= most:
            continue
        size = np.linalg.norm(near - exact) / math.sqrt(max(1, exact.size))
        name = path or ONE_ARGUMENT
        if size <= floor:
            notes.append(_small(name, error, exact, floor))
            continue
        text = f"{error:.0%} of the gradient of {name} is rounding"
        found.append(ComparisonFinding("rounding", text, path=path, ratio=error))
    return found, notes


def _small(name: str, error: float, exact: np.ndarray, floor: float) -> str:
    """A note of an error that is small beside the whole gradient."""
    if np.linalg.norm(exact) <= floor * math.sqrt(exact.size):
        return f"{name}: zero but for rounding"
    return (
        f"{name}: {error:.2g} of its gradient is rounding, no more than four roundings of the "
        + ("whole gradient")
    )


def _growing(places: Sequence[ComparedPlace], what: str) -> list[ComparisonFinding]:
    """The places where the relative error grows most, in the order of growth."""
    order = places if what == "value" else places[::-1]
    found, largest = [], 0.0
    for place in order:
        judgment: Judgment | None = getattr(place, what)
        if judgment is None or not math.isfinite(judgment.difference):
            continue
        unit = rounding(dtype_and_shape(place.pair.own.value)[0])
        before = max(largest, unit)
        factor = judgment.difference / before
        if factor > LOSING:
            text = (
                f"the relative error of the {what} of {place.name} is {judgment.difference:.2g}, "
                f"{factor:.1f} times that before"
            )
            at = place.pair.own.value.place
            found.append(located("rounding", place.name, place.step, text, at, factor))
        largest = max(largest, judgment.difference)
    return sorted(found, key=lambda f: -(f.factor or 0))[:MOST_MODULES]
