"""The breaks of the library that its tests should notice are still breaks of what it is."""

import ast
import collections

import pytest

from benchmarks.mutants import MUTANTS, ROOT, files_of, mutated


def test_each_room_has_some():
    rooms = collections.Counter(mutant.room for mutant in MUTANTS)
    assert len(MUTANTS) == len({mutant[1:4] for mutant in MUTANTS})
    assert len(rooms) == 8 and min(rooms.values()) >= 4


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.file}: {m.text[:30]}")
def test_a_mutant_is_one_text_of_its_file_and_has_tests(mutant):
    assert ast.dump(ast.parse(mutated(mutant, ROOT))) != ast.dump(
        ast.parse((ROOT / "clipgrad" / mutant.file).read_text())
    )
    assert mutant.tests
    assert len(files_of(mutant)) == len(mutant.tests)
