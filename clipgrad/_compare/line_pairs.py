"""Values of lines in two records: those of one statement, and those of equal numbers.

Versions that share code run the same statements, as often; where one runs a statement more often,
the calls that led there say which runs are the same. What is left has the numbers of a value of the
other version, in any layout, or nothing there is like it.
"""

import collections
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from clipgrad._arrays import nearest
from clipgrad._compare.judge import EQUAL_ROUNDINGS, Judgment, judge_rows
from clipgrad._compare.pairs import Pair, instances_of
from clipgrad._compare.record import Instance, Record
from clipgrad._compare.sketches import LARGEST_AT, LENGTH, MASKED, NORM_AT
from clipgrad._names import BACKWARD, is_line_pattern

# Norms and largest elements of equal numbers in another layout, summed in another order.
SAME_SIZES = 1e-5
FLOORS = 4  # a floor is that of one version, and a root mean square


def named_lines(names: Mapping[str, str] | None) -> dict[str, str]:
    """Those of the names that are of lines."""
    return {own: other for own, other in (names or {}).items() if is_line_pattern(own)}


def line_pairs(a: Record, b: Record, names: Mapping[str, str] | None) -> list[Pair]:
    """The values of one statement in both records, run by run.

    Raises:
      ValueError: a line of ``names`` is of no value in its version.
    """
    chosen = named_lines(names)
    _check_named(a, chosen, "fun")
    _check_named(b, chosen.values(), "other")
    groups = _by_statement(a, chosen), _by_statement(b, {name: name for name in chosen.values()})
    pairs = []
    for key, own in groups[0].items():
        others = groups[1].get(key, [])
        pairs += _runs(a, b, own, others)
    return pairs


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
    found: dict[Hashable, list[Instance]] = collections.defaultdict(list)
    for at in lines_of(record):
        row = record.rows[at[0]]
        what = chosen.get(row.name, row.statement)
        found[what, row.view == BACKWARD, row.shape].append(at)
    return found


def lines_of(record: Record) -> list[Instance]:
    """The values of lines, at each step."""
    return [at for at in instances_of(record) if record.rows[at[0]].is_line]


def _runs(a: Record, b: Record, own: list[Instance], others: list[Instance]) -> list[Pair]:
    """As many runs in both are the same in order, and otherwise those with the same calls.

    From the longest ends of calls on: the outermost calls are those of the versions themselves.
    """
    if len(own) == len(others):
        return [Pair("value", *pair) for pair in zip(own, others, strict=True)]
    longest = max(
        (len(r.rows[i].calls) for r, at in ((a, own), (b, others)) for i, _ in at), default=0
    )
    pairs: list[Pair] = []
    for count in range(longest, 1, -1):
        left = [_by_calls(r, at, count) for r, at in ((a, own), (b, others))]
        same = [key for key in left[0] if len(left[0][key]) == len(left[1].get(key, ()))]
        found = [Pair("value", *pair) for key in same
                 for pair in zip(left[0][key], left[1][key], strict=True)]  # fmt: skip
        own = [at for at in own if at not in {p.own for p in found}]
        others = [at for at in others if at not in {p.other for p in found}]
        pairs += found
    return pairs


def _by_calls(record: Record, at: list[Instance], count: int) -> dict[tuple, list[Instance]]:
    found: dict[tuple, list[Instance]] = collections.defaultdict(list)
    for own in at:
        found[record.rows[own[0]].calls[-count:]].append(own)
    return found


class _Sizes(NamedTuple):
    """The norms and largest elements of values, and how far they may be from equal ones.

    Attributes:
      at: the instances.
      sizes: shape (n, 2).
      near: relative distances, shape (n,).
      known: which have numbers that say something, shape (n,).
    """

    at: list[Instance]
    sizes: np.ndarray
    near: np.ndarray
    known: np.ndarray

    @classmethod
    def of(cls, record: Record, at: list[Instance]) -> "_Sizes":
        sketches = [_sketch(record, own) for own in at]
        numbers = np.array(sketches).reshape(len(at), 2, LENGTH)
        sizes = numbers[:, 0, NORM_AT : LARGEST_AT + 1]
        with np.errstate(divide="ignore", invalid="ignore"):
            moved = np.nan_to_num(numbers[:, 1, NORM_AT] / sizes[:, 0], nan=0, posinf=1)
        eps = np.array([record.rows[i].eps for i, _ in at])
        near = np.maximum(np.maximum(SAME_SIZES, EQUAL_ROUNDINGS * eps), FLOORS * moved)
        # A mask hides the other numbers, and of zeros there are many.
        known = (sizes[:, 1] < MASKED) & (sizes[:, 0] > 0) & (numbers[:, 0, -1] == 0)
        return cls(at, sizes, near, known & (near < 0.05))


def _sketch(record: Record, at: Instance) -> tuple[np.ndarray, np.ndarray]:
    """The sketch of a value, and how far rounding moves it."""
    row = record.rows[at[0]]
    if row.sketch is None:
        return np.full(LENGTH, np.nan), np.zeros(LENGTH)
    moved = np.zeros(LENGTH) if row.moved is None else row.moved[at[1]][0]
    return row.sketch[at[1]][0], moved


def equal_lines(a: Record, b: Record, pairs: list[Pair], rtol: float | None) -> list[Pair]:
    """The values of lines without a partner whose numbers a value of the other version has.

    With their cotangents. Of several it is the one that is nearest in the order of computation.
    """
    values = [p for p in pairs if p.kind == "value"]
    ours, theirs = lines_of(a), lines_of(b)
    left = set(ours) - {p.own for p in values}, set(theirs) - {p.other for p in values}
    own, others = _Sizes.of(a, ours), _Sizes.of(b, theirs)
    found = []
    for i, at in enumerate(ours):
        if at in left[0] and (j := _equal(a, b, own, others, i, rtol)) is not None:
            found.append((at, theirs[j]))
            left[1].discard(theirs[j])
    for j, at in enumerate(theirs):
        if at in left[1] and (i := _equal(b, a, others, own, j, rtol)) is not None:
            found.append((ours[i], at))
    known = own.near.max(initial=SAME_SIZES)
    equal = [
        Pair("value", mine, its, _judgment(a, b, mine, its, rtol, known)) for mine, its in found
    ]
    return [*equal, *_equal_cotangents(a, b, equal, rtol, known)]


def copied_lines(record: Record) -> list[Instance]:
    """The values of lines that have the numbers of an argument, in any layout."""
    lines = lines_of(record)
    arguments = [(i, ()) for i in record.of("argument") if record.rows[i].sketch is not None]
    if not (lines and arguments):
        return []
    own, others = _Sizes.of(record, lines), _Sizes.of(record, arguments)
    found = []
    for i, at in enumerate(lines):
        apart = np.abs(others.sizes - own.sizes[i]) <= SAME_SIZES * np.abs(own.sizes[i])
        found += [at] if own.known[i] and apart.all(axis=1).any() else []
    return found


def _equal(
    a: Record, b: Record, own: _Sizes, others: _Sizes, i: int, rtol: float | None
) -> int | None:
    """The value of the other record that is equal to one, the nearest in order; None if none is."""
    row = a.rows[own.at[i][0]]
    near = np.maximum(own.near[i], others.near)
    apart = np.abs(others.sizes - own.sizes[i]) <= near[:, None] * np.abs(own.sizes[i])
    maybe = np.flatnonzero(apart.all(axis=1)).tolist()
    if not (own.known[i] and row.size > 1):
        maybe = [j for j in maybe if b.rows[others.at[j][0]].shape == row.shape]
    same = [j for j in maybe if _is_equal(a, b, own, others, i, j, rtol)]
    here = i / max(1, len(own.at))
    return min(same, key=lambda j: abs(here - j / max(1, len(others.at))), default=None)


def _is_equal(
    a: Record, b: Record, own: _Sizes, others: _Sizes, i: int, j: int, rtol: float | None
) -> bool:
    (mine, at), (its, steps) = own.at[i], others.at[j]
    row, other = a.rows[mine], b.rows[its]
    if row.shape == other.shape:
        judgment = judge_rows(row, other, at, steps, rtol, FLOORS)
        if judgment is not None and judgment.agrees:
            return True
    # The other order of axes, or another layout: a single number would be equal by chance.
    return bool(own.known[i] and others.known[j] and row.size > 1 and other.size > 1)


def _judgment(
    a: Record, b: Record, own: Instance, other: Instance, rtol: float | None, near: float
) -> Judgment:
    """The judgment of two values, or cotangents, of one order of axes, or else of their sizes."""
    row, its = a.rows[own[0]], b.rows[other[0]]
    judgment = (
        judge_rows(row, its, own[1], other[1], rtol, FLOORS) if row.shape == its.shape else None
    )
    if judgment is not None and judgment.agrees:
        return judgment
    x, y = (_sketch(r, at)[0][NORM_AT : LARGEST_AT + 1] for r, at in ((a, own), (b, other)))
    apart = float(np.max(np.abs(x - y) / np.maximum(np.abs(y), np.finfo(float).tiny)))
    return Judgment(apart, max(near, rtol or 0), True, ((x[0], y[0]), (x[1], y[1])))


def _equal_cotangents(
    a: Record, b: Record, equal: list[Pair], rtol: float | None, near: float
) -> list[Pair]:
    own, others = ({r.rows[i].node: i for i in r.of("cotangent")} for r in (a, b))
    found = []
    for p in equal:
        i, j = own.get(p.own[0]), others.get(p.other[0])
        if i is not None and j is not None:
            mine, its = (i, p.own[1]), (j, p.other[1])
            found.append(Pair("cotangent", mine, its, _judgment(a, b, mine, its, rtol, near)))
    return found
