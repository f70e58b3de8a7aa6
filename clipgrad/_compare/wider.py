"""A loss and its gradient beside themselves in a wider type: where low precision loses.

Two rules are others than for two versions: a gradient may be off by 5 % of its size, and the first
finding is the value at which the error grows most, not the first value that differs.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._arrays import widened_leaf
from clipgrad._compare.judge import judge
from clipgrad._compare.record import Record, Row
from clipgrad._compare.recording import Recording
from clipgrad._compare.result import ComparisonFinding, GradientComparison
from clipgrad._compare.sides import Sides, Verdict
from clipgrad._compare.sketches import NORM_AT
from clipgrad._programs import computed_types

WIDER_DTYPES = ("float32", "float64")
MOST_ROUNDING = 0.05  # the share of a leaf's gradient that may be rounding
LOSING = 2.0  # a value at which the error grows by less is not one that loses precision
# A sum that is zero is nothing but rounding in the wider type as well. The error of such a leaf is
# 0.3 to 2 times the ratio of the types' roundings (a bias before a norm, of keys, of all logits).
# By chance it may be exactly zero; then the rounding of the program shows how large it could be.
NOTHING_LEFT = 1 / 16


def is_narrower(recording: Recording, dtype: str) -> bool:
    """Whether something in a program is narrower than a type; read from its trace."""
    return _rounding_ratio(recording.traced.program, dtype) > 1


def nothing_narrower(recording: Recording, dtype: str) -> GradientComparison:
    """The result where nothing is narrower than a type: nothing has to run."""
    other = "" if dtype == "float64" else '; compare it with "float64"'
    note = f"nothing in fun is narrower than {dtype}, so no precision is lost{other}"
    return GradientComparison(True, (), (), (), (*recording.record.notes, note), dtype)


def run_in(recording: Recording, dtype: str) -> Record:
    """The record of a run in a wider type."""
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        return recording.run(jnp.dtype(dtype), whole=True)


@dataclasses.dataclass(frozen=True)
class ByPrecision:
    """The judge of a loss and its gradient beside themselves in a wider type.

    Attributes:
      recording: the loss.
      dtype: the wider type.
      most: the share of a leaf's gradient that may be rounding.
    """

    recording: Recording
    dtype: str
    most: float = MOST_ROUNDING

    def __call__(self, sides: Sides) -> Verdict:
        gradients = sides.of("gradient")
        most_left = NOTHING_LEFT * _rounding_ratio(self.recording.traced.program, self.dtype)
        measure = functools.partial(self.recording.measure, sides.a, ("gradient",))
        limits = self.dtype, self.most, most_left, measure
        said = [lost_precision(*sides.rows(p), *limits) for p in gradients]
        lost = [each for each in said if isinstance(each, ComparisonFinding)]
        notes = [each for each in said if isinstance(each, str)]
        if len(notes) == len(gradients):
            text = "each gradient is zero but for rounding, so nothing tells how much precision is "
            text += "lost; diagnose(fun, args) says which operation makes it so"
            lost.append(ComparisonFinding("not judged", text))
        growing = _growing(sides) if any(f.kind == "rounding" for f in lost) else []
        return Verdict([*growing, *lost], [*notes, *_notes_of_loss(sides, self.dtype)], self.dtype)


def lost_precision(
    row: Row, other: Row, dtype: str, most: float, most_left: float, measure: Callable[[], None]
) -> ComparisonFinding | str | None:
    """The finding of a gradient of which more than a share is rounding; or a note; or None."""
    narrow, wide = (np.ravel(widened_leaf(np.asarray(x.numbers.whole))) for x in (row, other))
    error = judge(narrow, wide, np.zeros(narrow.shape), row.eps, most).difference
    is_odd, name = [not np.all(np.isfinite(x)) for x in (narrow, wide)], row.label
    if all(is_odd):
        text = f"the gradient of {name} has NaN or inf in both types, so nothing tells how much "
        text += "precision is lost"
        return ComparisonFinding("not judged", text, path=row.name)
    if any(is_odd):
        text = f"the gradient of {name} overflows: it has NaN or inf in {dtype} only"
        if is_odd[0]:
            text = f"the gradient of {name} overflows: it has NaN or inf, and is finite in {dtype}"
            text += "; scale the loss down, or compute what overflows in a type of a wider range"
        return ComparisonFinding("rounding", text, path=row.name, ratio=math.inf)
    if error <= most:
        return None
    if error >= most_left or _is_nothing(row, other, most_left, measure):
        return f"{name}: zero but for rounding"
    share = f"{100 * error:.{1 if error < 0.1 else 0}f}% of"
    share = share if error <= 1 else f"{error:.2g} times the size of"
    text = f"{share} the gradient of {name} is rounding"
    return ComparisonFinding("rounding", text, path=row.name, ratio=error)


def _is_nothing(row: Row, other: Row, most_left: float, measure: Callable[[], None]) -> bool:
    """Whether a gradient is rounding in the wider type as well, by how far rounding moves it."""
    if row.numbers.moved is None:
        measure()
    moved, sketch = row.numbers.moved, other.numbers.sketch
    assert moved is not None and sketch is not None  # of a gradient
    moved, size = np.ravel(moved)[:NORM_AT], float(np.ravel(sketch)[NORM_AT])
    floor = float(np.linalg.norm(np.where(np.isfinite(moved), moved, 0)))
    return size == 0 or floor / size >= most_left


def _notes_of_loss(sides: Sides, dtype: str) -> list[str]:
    (pair,) = sides.of("output")
    narrow, wide = (float(np.asarray(row.numbers.whole)) for row in sides.rows(pair))
    if math.isfinite(wide) and not math.isfinite(narrow):
        return [f"the loss is {narrow}, and {wide:.3g} in {dtype}: it overflows"]
    return []


def _growing(sides: Sides) -> list[ComparisonFinding]:
    """The value at which the error exceeds all before by most; or else the cotangent; or none."""
    for kind, pairs in (("value", sides.of("value")), ("cotangent", sides.of("cotangent")[::-1])):
        largest, factor, pair = 0.0, LOSING, None
        for p in pairs:
            error = p.judgment.difference
            if (growth := error / max(largest, sides.rows(p)[0].eps)) > factor:
                factor, pair = growth, p
            if math.isinf(error):  # what follows may follow from it
                break
            largest = max(largest, error)
        if pair is None:
            continue
        row = sides.rows(pair)[0]
        text = f"the {kind} of {row.label} is NaN or inf in one of the types only"
        if math.isfinite(factor):
            text = f"the relative error of the {kind} of {row.label} is "
            text += f"{pair.judgment.difference:.2g}, {factor:.1f} times that before"
        finding = sides.at_line("rounding", text, row.name, pair)
        return [dataclasses.replace(finding, factor=factor)]
    return []


def _rounding_ratio(program: Any, dtype: str) -> float:
    """The rounding of a program relative to that of a dtype; 1 if nothing in it is narrower.

    Of several narrower types it is the finest, whose rounding may be all that a leaf has.
    """
    eps = float(jnp.finfo(dtype).eps)
    roundings = [float(jnp.finfo(name).eps) for name in computed_types(program)]
    return min((each for each in roundings if each > eps), default=eps) / eps
