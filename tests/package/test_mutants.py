"""The breaks of the library that its tests should notice are still breaks of what it is."""

import ast
import collections
import functools

from benchmarks.mutants import FAULTS, MUTANTS, ROOT, files_of, mutated


def test_each_room_has_some():
    rooms = collections.Counter(mutant.room for mutant in MUTANTS)
    assert len(MUTANTS) == len({mutant[1:4] for mutant in MUTANTS})
    assert len(rooms) == 8 and min(rooms.values()) >= 4


def test_at_least_forty_faults_are_planted_in_all_rooms():
    assert len(FAULTS) == len({fault[1:4] for fault in FAULTS}) >= 40
    rooms = {name.rstrip("/") for fault in FAULTS for name in fault.tests}
    folders = {path.parent.name for path in ROOT.glob("tests/*/test_*.py")}
    assert rooms == folders - {"programs"}  # the other rooms are made of it


def test_a_mutant_is_one_text_of_its_file_and_has_tests():
    as_it_is = functools.cache(
        lambda file: ast.dump(ast.parse((ROOT / "clipgrad" / file).read_text()))
    )
    for mutant in (*MUTANTS, *FAULTS):
        assert ast.dump(ast.parse(mutated(mutant, ROOT))) != as_it_is(mutant.file), mutant
        assert 0 < len(files_of(mutant)) == len(mutant.tests), mutant
