"""A loss and its gradient beside themselves in a wider type: where low precision loses.

Two numbers are others than for two versions: a gradient may be off by 5 % of its own
size, and the value told first is that at which the difference grows most.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._compare.compare_records import result
from clipgrad._compare.findings import Sides, at_line
from clipgrad._compare.judge import Judgment, judge
from clipgrad._compare.match import Matching, Pair, match
from clipgrad._compare.record import Row
from clipgrad._compare.recording import Recording
from clipgrad._compare.result import ComparisonFinding, GradientComparison
from clipgrad._compare.sketches import LENGTH, NORM_AT
from clipgrad._jaxpr import computed_types
from clipgrad._trees import widened_leaf

WIDER_DTYPES = ("float32", "float64")
MOST_ROUNDING = 0.05  # the share of a leaf's gradient that may be rounding
LOSING = 2.0  # a value at which the error grows by less is not one that loses precision
# A sum that is zero is nothing but rounding in the wider type as well. The error of such a leaf is
# 0.3 to 2 times the ratio of the types' roundings (a bias before a norm, of keys, of all logits).
# By chance it may be exactly zero; then the rounding of the program shows how large it could be.
NOTHING_LEFT = 1 / 16


def compare_with_wider(recording: Recording, dtype: str, rtol: float | None) -> GradientComparison:
    """Run a loss and its gradient as they are and in a wider type, and compare them."""
    narrow = recording.run()
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        wide = recording.run(jnp.dtype(dtype))
    pairs = match(narrow, wide, None, math.inf).pairs
    most = MOST_ROUNDING if rtol is None else rtol
    sides = Sides(narrow, wide, Matching([p for p in pairs if p.kind != "gradient"], [], []))
    lost, notes = [], []
    most_left = NOTHING_LEFT * _rounding_ratio(recording.traced.program, dtype)
    for p in (p for p in pairs if p.kind == "gradient"):
        row, its = sides.rows(p)
        found = lost_precision(row, its, dtype, most, most_left, lambda: recording.measure(narrow))
        if isinstance(found, str):
            notes.append(found)
        elif found is not None:
            lost.append(found)
    notes += _notes_of_loss(sides, dtype)
    if most_left == NOTHING_LEFT:
        other = "" if dtype == "float64" else '; compare it with "float64"'
        notes.append(f"nothing in fun is narrower than {dtype}, so no precision is lost{other}")
    gradients = sum(p.kind == "gradient" for p in pairs)
    if not lost and sum(note.endswith("zero but for rounding") for note in notes) == gradients:
        text = "no gradient is judged: each is zero but for rounding; diagnose(fun, args) says "
        lost.append(ComparisonFinding("not judged", text + "which operation makes it so"))
    growing = _growing(sides) if any(f.kind == "rounding" for f in lost) else []
    found = result(sides, [*growing, *lost], False)
    return GradientComparison(not lost, found.findings, found.rows, (), tuple(notes))


def lost_precision(
    row: Row, its: Row, dtype: str, most: float, most_left: float, measure: Callable[[], None]
) -> ComparisonFinding | str | None:
    """The finding of a gradient of which more than a share is rounding; or a note; or None."""
    own, wide = (np.ravel(widened_leaf(np.asarray(x.whole))) for x in (row, its))
    found = judge(own, wide, np.zeros(own.shape), row.eps, most)
    name, is_odd = row.label, bool(np.any(~np.isfinite(wide)))
    if math.isinf(found.difference) and np.any(np.isfinite(own) != np.isfinite(wide)):
        text = f"the gradient of {name} overflows: it has NaN or inf in {dtype} only"
        if not is_odd:
            text = f"the gradient of {name} overflows: it has NaN or inf, and is finite in {dtype}"
            text += "; scale the loss down, or compute what overflows in a type of a wider range"
        return ComparisonFinding("rounding", text, path=row.name, ratio=math.inf)
    if is_odd:
        text = f"the gradient of {name} has NaN or inf in both types, so it is not judged"
        return ComparisonFinding("not judged", text, path=row.name)
    error = found.difference
    if error <= most:
        return None
    if _is_nothing(row, its, error, most_left, measure):
        return f"{name}: zero but for rounding"
    share = f"{100 * error:.{1 if error < 0.1 else 0}f}% of"
    share = share if error <= 1 else f"{error:.2g} times the size of"
    text = f"{share} the gradient of {name} is rounding"
    return ComparisonFinding("rounding", text, path=row.name, ratio=error)


def _is_nothing(
    row: Row, its: Row, error: float, most_left: float, measure: Callable[[], None]
) -> bool:
    """Whether a gradient is rounding in the wider type as well; the floor is measured if needed."""
    if error >= most_left:
        return True
    if row.moved is None:
        measure()
    assert row.moved is not None and its.sketch is not None  # of a gradient
    moved, size = np.ravel(row.moved)[: LENGTH - 3], float(np.ravel(its.sketch)[NORM_AT])
    floor = float(np.linalg.norm(np.where(np.isfinite(moved), moved, 0)))
    return size == 0 or floor / size >= most_left


def _notes_of_loss(sides: Sides, dtype: str) -> list[str]:
    (pair,) = sides.of("output")
    own, wide = (float(np.asarray(row.whole)) for row in sides.rows(pair))
    if math.isfinite(wide) and not math.isfinite(own):
        return [f"the loss is {own}, and {wide:.3g} in {dtype}: it overflows"]
    return []


def _growing(sides: Sides) -> list[ComparisonFinding]:
    """The value at which the relative error grows most; or else the cotangent; or none."""
    for kind, pairs in (("value", sides.of("value")), ("cotangent", sides.of("cotangent")[::-1])):
        factor, pair = _most_growth(sides, pairs)
        if pair is None or factor <= LOSING:
            continue
        row, _ = sides.rows(pair)
        error = pair.judgment.difference
        if math.isinf(factor):
            text = f"the {kind} of {row.label} is NaN or inf in one of the types only"
        else:
            text = f"the relative error of the {kind} of {row.label} is {error:.2g}, {factor:.1f} "
            text += "times that before"
        return [at_line("rounding", text, row, row.name, pair, factor)]
    return []


def _most_growth(sides: Sides, pairs: Sequence[Pair]) -> tuple[float, Pair | None]:
    """The largest factor by which the error exceeds all before, and where; inf where it is odd."""
    best: tuple[float, Any] = (0.0, None)
    largest = 0.0
    for pair in pairs:
        own: Judgment = pair.judgment
        factor = own.difference / max(largest, sides.rows(pair)[0].eps)
        best = max(best, (factor, pair), key=lambda each: each[0])
        if math.isinf(own.difference):  # what follows may follow from it
            break
        largest = max(largest, own.difference)
    return best


def _rounding_ratio(program: Any, dtype: str) -> float:
    """The rounding of a program relative to that of a dtype; 1 if nothing in it is narrower.

    Of several narrower types it is the finest, whose rounding may be all that a leaf has.
    """
    eps = float(jnp.finfo(dtype).eps)
    found = [float(jnp.finfo(name).eps) for name in computed_types(program)]
    return min((each for each in found if each > eps), default=eps) / eps
