"""Values of lines in two records: those of one statement, and those of equal numbers.

Versions that share code run the same statements, as often; where one runs a statement more often,
the calls that led there say which runs are the same. What is left has the numbers of a value of the
other version, in any layout, or nothing there is like it.
"""

import collections
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from clipgrad._arrays import nearest
from clipgrad._compare.equal_rows import SAME_NORM, Moved, numbers_at
from clipgrad._compare.judge import EQUAL_ROUNDINGS, Judgment, judge_rows
from clipgrad._compare.pairs import Pair, cotangent_pairs, instances_of
from clipgrad._compare.record import Instance, Record, Row
from clipgrad._compare.sketches import LENGTH, MASKED, NORM_AT, SIZES
from clipgrad._names import BACKWARD, is_line_pattern

FLOORS = 4  # a floor is that of one version, and a root mean square


def named_lines(names: Mapping[str, str] | None) -> dict[str, str]:
    """Those of the names that are of lines."""
    return {name: other for name, other in (names or {}).items() if is_line_pattern(name)}


def line_pairs(a: Record, b: Record, names: Mapping[str, str] | None) -> list[Pair]:
    """The values of one statement in both records, run by run."""
    chosen = named_lines(names)
    groups = _by_statement(a, chosen), _by_statement(b, {name: name for name in chosen.values()})
    pairs = []
    for key, ours in groups[0].items():
        pairs += _runs(a, b, ours, groups[1].get(key, []))
    return pairs


def check_lines(a: Record, b: Record, names: Mapping[str, str]) -> None:
    """Raise `ValueError` for a line of ``names`` that is of no value in its version."""
    if chosen := named_lines(names):
        _check_named(a, chosen, "fun")
        _check_named(b, chosen.values(), "other")


def _check_named(record: Record, names: Iterable[str], version: str) -> None:
    there = list(dict.fromkeys(row.name for row in record.rows if row.is_line))
    for name in names:
        if name not in there:
            raise ValueError(
                f"names: got {name!r}, expected a line of {version} that computes a floating "
                f"value; {nearest(name, there)}"
            )


def _by_statement(record: Record, chosen: Mapping[str, str]) -> dict[Hashable, list[Instance]]:
    """The values of each statement, of one shape, in the order of time."""
    groups: dict[Hashable, list[Instance]] = collections.defaultdict(list)
    for at in lines_of(record):
        row = record.rows[at[0]]
        what = chosen.get(row.name, row.statement)
        groups[what, row.view == BACKWARD, row.shape].append(at)
    return groups


def lines_of(record: Record) -> list[Instance]:
    """The values of lines, at each step."""
    return [at for at in instances_of(record) if record.rows[at[0]].is_line]


def _runs(a: Record, b: Record, ours: list[Instance], theirs: list[Instance]) -> list[Pair]:
    """As many runs in both are the same in order, and otherwise those with the same calls.

    From the longest ends of calls on: the outermost calls are those of the versions themselves.
    """
    if len(ours) == len(theirs):
        return _in_order(ours, theirs)
    counts = [len(r.rows[i].calls) for r, at in ((a, ours), (b, theirs)) for i, _ in at]
    pairs: list[Pair] = []
    for count in range(max(counts, default=0), 1, -1):
        groups, others = _by_calls(a, ours, count), _by_calls(b, theirs, count)
        same = [key for key in groups if len(groups[key]) == len(others.get(key, ()))]
        pairs += [pair for key in same for pair in _in_order(groups[key], others[key])]
        paired = {p.a for p in pairs}, {p.b for p in pairs}
        ours = [at for at in ours if at not in paired[0]]
        theirs = [at for at in theirs if at not in paired[1]]
    return pairs


def _in_order(ours: list[Instance], theirs: list[Instance]) -> list[Pair]:
    return [Pair("value", *both) for both in zip(ours, theirs, strict=True)]


def _by_calls(record: Record, runs: list[Instance], count: int) -> dict[tuple, list[Instance]]:
    groups: dict[tuple, list[Instance]] = collections.defaultdict(list)
    for at in runs:
        groups[record.rows[at[0]].calls[-count:]].append(at)
    return groups


class _Sizes(NamedTuple):
    """The norms and largest elements of values, and how far they may be from equal ones.

    Attributes:
      record: of the values.
      at: the instances.
      sizes: shape (n, 2).
      near: relative distances, shape (n,).
      known: which have numbers that say something, shape (n,).
    """

    record: Record
    at: list[Instance]
    sizes: np.ndarray
    near: np.ndarray
    known: np.ndarray

    @classmethod
    def of(cls, record: Record, instances: list[Instance]) -> "_Sizes":
        numbers = np.array([_numbers(record, at) for at in instances])
        numbers = numbers.reshape(len(instances), 2, LENGTH)
        sizes = numbers[:, 0, SIZES]
        with np.errstate(divide="ignore", invalid="ignore"):
            moved = np.nan_to_num(numbers[:, 1, NORM_AT] / sizes[:, 0], nan=0, posinf=1)
        eps = np.array([record.rows[i].eps for i, _ in instances])
        near = np.maximum(np.maximum(SAME_NORM, EQUAL_ROUNDINGS * eps), FLOORS * moved)
        # A mask hides the other numbers, and of zeros there are many.
        known = (sizes[:, 1] < MASKED) & (sizes[:, 0] > 0) & (numbers[:, 0, -1] == 0)
        return cls(record, instances, sizes, near, known & (near < 0.05))

    def row(self, i: int) -> Row:
        return self.record.rows[self.at[i][0]]

    def says(self, i: int) -> bool:
        """Whether sizes alone tell a value from others: a single number is equal by chance."""
        return bool(self.known[i]) and self.row(i).size > 1

    def alike(self, sizes: np.ndarray, near: Any) -> np.ndarray:
        """Which of the values have these sizes, to relative distances ``near``."""
        apart = np.abs(self.sizes - sizes) <= np.asarray(near)[..., None] * np.abs(sizes)
        return np.all(apart, axis=1)


def _numbers(record: Record, at: Instance) -> Moved:
    """The sketch of a value, and how far rounding moves it; NaN where it is not known."""
    known = numbers_at(record.rows[at[0]], at[1])
    return (np.full(LENGTH, np.nan), np.zeros(LENGTH)) if known is None else known


def equal_lines(a: Record, b: Record, pairs: list[Pair], rtol: float | None) -> list[Pair]:
    """The values of lines without a partner whose numbers a value of the other version has.

    With their cotangents. Of several it is the one that is nearest in the order of computation.
    """
    values = [p for p in pairs if p.kind == "value"]
    ours, theirs = _Sizes.of(a, lines_of(a)), _Sizes.of(b, lines_of(b))
    left = set(ours.at) - {p.a for p in values}, set(theirs.at) - {p.b for p in values}
    equal = []
    for i, at in enumerate(ours.at):
        if at in left[0] and (j := _equal(ours, i, theirs, rtol)) is not None:
            equal.append(Pair("value", at, theirs.at[j]))
            left[1].discard(theirs.at[j])
    for j, at in enumerate(theirs.at):
        if at in left[1] and (i := _equal(theirs, j, ours, rtol)) is not None:
            equal.append(Pair("value", ours.at[i], at))
    near = ours.near.max(initial=SAME_NORM)
    equal += cotangent_pairs(a, b, equal)
    return [p._replace(judgment=_judgment(a, b, p, rtol, near)) for p in equal]


def copied_lines(record: Record) -> list[Instance]:
    """The values of lines that have the numbers of an argument, in any layout."""
    lines = lines_of(record)
    sketches = {i: record.rows[i].numbers.sketch for i in record.of("argument")}
    arguments = [(i, ()) for i, sketch in sketches.items() if sketch is not None]
    if not (lines and arguments):
        return []
    values, inputs = _Sizes.of(record, lines), _Sizes.of(record, arguments)
    is_copy = lambda i: values.known[i] and inputs.alike(values.sizes[i], SAME_NORM).any()  # noqa: E731
    return [at for i, at in enumerate(lines) if is_copy(i)]


def _equal(values: _Sizes, i: int, others: _Sizes, rtol: float | None) -> int | None:
    """The number of the value of ``others`` that is equal to one; the nearest in order, or None."""
    row, (_, steps) = values.row(i), values.at[i]
    near = np.maximum(values.near[i], others.near)
    maybe = np.flatnonzero(others.alike(values.sizes[i], near)).tolist()

    def is_equal(j: int) -> bool:
        alike = _same_order(row, others.row(j), steps, others.at[j][1], rtol)
        return alike is not None or (values.says(i) and others.says(j))

    def distance(j: int) -> float:
        return abs(i / len(values.at) - j / len(others.at))

    return min(filter(is_equal, maybe), key=distance, default=None)


def _same_order(
    row: Row, other: Row, at: Any, other_at: Any, rtol: float | None
) -> Judgment | None:
    """The judgment of two values that agree element by element; None if they do not."""
    if row.shape != other.shape:
        return None
    judgment = judge_rows(row, other, at, other_at, rtol, FLOORS)
    return judgment if judgment is not None and judgment.agrees else None


def _judgment(a: Record, b: Record, pair: Pair, rtol: float | None, near: float) -> Judgment:
    """The judgment of two values, or cotangents, of one order of axes, or else of their sizes."""
    rows = a.rows[pair.a[0]], b.rows[pair.b[0]]
    if judgment := _same_order(*rows, pair.a[1], pair.b[1], rtol):
        return judgment
    x, y = (_numbers(r, at)[0][SIZES] for r, at in ((a, pair.a), (b, pair.b)))
    apart = float(np.max(np.abs(x - y) / np.maximum(np.abs(y), np.finfo(float).tiny)))
    return Judgment(apart, max(near, rtol or 0), True, ((x[0], y[0]), (x[1], y[1])))
