"""What `pytest --half SEED` leaves out, as `bash .ci/run half` does."""

import dataclasses
from typing import Any

import pytest

from tests.rows import other_half


@dataclasses.dataclass(eq=False)
class Row:
    """A row of a test, as pytest collects it; `mark` is None or that of a slow row."""

    nodeid: str
    mark: Any = None

    def iter_markers(self, name):
        return [mark for mark in (self.mark,) if mark and mark.name == name]

    def get_closest_marker(self, name):
        return next(iter(self.iter_markers(name)), None)


def left_out(rows, seed):
    return {item.nodeid for item in other_half(rows, seed)}


def test_of_each_test_half_of_the_slow_rows_run_and_each_comes_with_some_seed():
    slow, first = pytest.mark.slow.mark, pytest.mark.slow(first=True).mark
    rows = [Row("a.py::test[default]"), Row("a.py::alone", slow)]
    rows += [Row(f"b.py::notebook[{k}]", first) for k in range(3)]
    tables = {test: [f"{test}[{k}]" for k in range(n)] for test, n in {"c": 5, "d": 4}.items()}
    rows += [Row(name, slow) for names in tables.values() for name in names]
    every = {name for names in tables.values() for name in names}
    seen = set()
    for seed in map(str, range(16)):
        missing = left_out(rows, seed)
        assert missing < every
        assert [len(missing & set(names)) for names in tables.values()] == [2, 2]
        assert missing == left_out(rows[::-1], seed)
        seen |= every - missing
    assert seen == every
