"""Which rows of a table run by default; the others are ``slow``.

A row is slow if it costs more than 0.3 seconds of the processor, or shows in another combination
what rows that run by default show. ``pytest`` leaves slow rows out, ``pytest -m ""`` runs all.

* `some_of`: a table as two lists, all rows and those that run by default.
* `this_turn`: each second row, say, of a table: all of them within two seeds.
* `other_half`: the slow rows that `pytest --half SEED` leaves out.
* `first_row`, `first_rows(n)`, `each_value`, `crossed(n)` and `in_turn` stand above the
  ``parametrize`` of a test, one or several.

Of the combinations that `each_value` and `crossed` add, half are rows: ``CLIPGRAD_SEED=1`` has the
others.
"""

import collections
import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from tests.helpers import SEED

slow = pytest.mark.slow


def some_of(every: Iterable[Any], some: Iterable[Any]) -> list[Any]:
    """All rows for ``parametrize``, of which those that `some` has run by default.

    A row is a value, or a tuple of several.
    """
    every, some = list(every), list(some)
    assert all(row in every for row in some), "expected rows of the table"
    return [row if row in some else _slow(row) for row in every]


def _slow(row: Any) -> Any:
    return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=slow)


def this_turn(rows: Iterable[Any], of: int = 2, always: Iterable[Any] = ()) -> list[Any]:
    """Each second row, or so, in turn: another `helpers.SEED` has others; and some rows always."""
    always = list(always)
    return [row for i, row in enumerate(rows, SEED) if i % of == 0 or row in always]


def is_first(item: pytest.Item) -> bool:
    """Whether a test takes so long that it starts before the others."""
    return any(marker.kwargs.get("first") for marker in item.iter_markers("slow"))


def other_half(items: Iterable[pytest.Item], seed: str) -> set[pytest.Item]:
    """Of the slow rows of each test all but half, drawn by a seed; none of those that start first.

    The order of rows goes by their names, so that a new row leaves the others where they are.
    """
    tests = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") and not is_first(item):
            tests[item.nodeid.partition("[")[0]].append(item)
    drawn = lambda item: zlib.crc32(f"{seed} {item.nodeid}".encode())  # noqa: E731
    return {item for each in tests.values() for item in sorted(each, key=drawn)[: len(each) // 2]}


def in_turn(test: Callable) -> Any:
    """Each value of each parameter in one row at least: the parameters are read side by side."""
    return _with_rows(test, lambda sizes: [(row, True) for row in _side_by_side(sizes)])


def first_row(test: Callable) -> Any:
    """The rows of `in_turn`, of which the first runs by default."""
    return first_rows(1)(test)


def first_rows(count: int) -> Callable[[Callable], Any]:
    """The rows of `in_turn`, of which the first ones run by default."""

    def choose(sizes: Sequence[int]) -> Rows:
        return [(row, i < count) for i, row in enumerate(_side_by_side(sizes))]

    return lambda test: _with_rows(test, choose)


def each_value(test: Callable) -> Any:
    """Those of `in_turn`; slow: half of the two longest parameters crossed, the others in turn."""
    return _with_rows(test, _crossed)


def crossed(count: int) -> Callable[[Callable], Any]:
    """The rows of `each_value`, of which the first ones run by default."""

    def choose(sizes: Sequence[int]) -> Rows:
        return [(row, i < count) for i, (row, _) in enumerate(_crossed(sizes))]

    return lambda test: _with_rows(test, choose)


# Positions in each parameter, and whether the row runs by default.
Rows = list[tuple[tuple[int, ...], bool]]


def _side_by_side(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(i % size for size in sizes) for i in range(max(sizes))]


def _crossed(sizes: Sequence[int]) -> Rows:
    first = _side_by_side(sizes)
    a, b = sorted(range(len(sizes)), key=lambda n: -sizes[n])[:2]
    seen, more = {(row[a], row[b]) for row in first}, []
    for i, j in itertools.product(range(sizes[a]), range(sizes[b])):
        if (i, j) not in seen and (i + j + SEED) % 2 == 0:
            row = [(i + j + n) % size for n, size in enumerate(sizes)]
            row[a], row[b] = i, j
            more.append((tuple(row), False))
    return [*((row, True) for row in first), *more]


def _with_rows(test: Any, choose: Callable[[Sequence[int]], Rows]) -> Any:
    """The test with one ``parametrize`` in place of those that it has."""
    tables = [mark for mark in test.pytestmark if mark.name == "parametrize"][::-1]
    test.pytestmark = [mark for mark in test.pytestmark if mark.name != "parametrize"]
    columns = [_parameters(mark) for mark in tables]
    chosen = choose([len(column) for column in columns])
    params = [
        _joined([column[i] for column, i in zip(columns, row, strict=True)], is_default)
        for row, is_default in chosen
    ]
    names = [name for mark in tables for name in _names(mark)]
    return pytest.mark.parametrize(names, params)(test)


def _joined(parts: Sequence[Any], is_default: bool) -> Any:
    return pytest.param(
        *(value for part in parts for value in part.values),
        marks=[*(mark for part in parts for mark in part.marks), *[slow] * (not is_default)],
        id="-".join(part.id for part in parts),
    )


def _names(mark: Any) -> list[str]:
    names = mark.args[0]
    return names.replace(",", " ").split() if isinstance(names, str) else list(names)


def _parameters(mark: Any) -> list[Any]:
    """The rows of a ``parametrize``, each as what ``pytest.param`` returns, with its name."""
    names, values, ids = _names(mark), list(mark.args[1]), mark.kwargs.get("ids")
    listed = None if ids is None or callable(ids) else list(ids)
    rows = []
    for i, value in enumerate(values):
        row = value
        if not isinstance(value, type(pytest.param())):
            row = pytest.param(*(value if len(names) > 1 else [value]))
        shown = [_shown(v, ids, f"{n}{i}") for v, n in zip(row.values, names, strict=True)]
        name = listed[i] if listed else row.id or "-".join(shown)
        rows.append(pytest.param(*row.values, marks=row.marks, id=str(name)))
    return rows


def _shown(value: Any, ids: Any, otherwise: str) -> str:
    """The name of a value, as pytest has it."""
    name = ids(value) if callable(ids) else None
    if name is None and (value is None or isinstance(value, str | int | float | bool)):
        name = value
    return str(getattr(value, "__name__", otherwise) if name is None else name)
