"""Which rows of a table run by default and in CI, and that a selection runs whole."""

import pytest

pytest_plugins = ["pytester"]

INI = """
[pytest]
testpaths = .
addopts = -m 'not exhaustive'
markers =
  kinds
  ci
  row
  product
  exhaustive
"""
TESTS = """
import pytest

@pytest.mark.kinds("rule place", "scale")
@pytest.mark.parametrize("rule", ["value", "norm", "rms"])
@pytest.mark.parametrize("place", ["error", "gradient"])
@pytest.mark.parametrize("scale", range(5))
def test_law(rule, place, scale): pass

@pytest.mark.kinds(number=type)
@pytest.mark.parametrize("number", [1, 2, 0.5, pytest.param("a", marks=pytest.mark.exhaustive)])
def test_of_kinds(number): pass

@pytest.mark.kinds()
@pytest.mark.parametrize("row", range(9))
def test_of_one_kind(row): pass

@pytest.mark.parametrize("row", range(4))
def test_without_a_mark(row): pass

@pytest.mark.exhaustive
@pytest.mark.ci("tree", size=abs)
@pytest.mark.parametrize("tree", range(4))
@pytest.mark.parametrize("size", [-1, 1, 2])
def test_in_ci(tree, size): pass
"""


def run(pytester, *options):
    pytester.makepyfile(test_file=TESTS)
    pytester.makeini(INI)
    plugins = ("-p", "tests.kinds", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    passed, _, failed = pytester.inline_run(*plugins, *options).listoutcomes()
    assert not failed
    return [report.nodeid.partition("::")[2] for report in passed]


def test_without_a_selection_the_rows_that_differ_in_kind_run(pytester):
    names = run(pytester)
    law = [name[9:-1].split("-") for name in names if "law" in name]
    assert sorted((rule, place) for _, place, rule in law) == sorted(
        (rule, place) for rule in ("value", "norm", "rms") for place in ("error", "gradient")
    )
    assert {scale for scale, *_ in law} == set("01234")
    assert [name for name in names if "of_kinds" in name] == [
        "test_of_kinds[1]",
        "test_of_kinds[0.5]",
    ]
    assert [name for name in names if "one_kind" in name] == ["test_of_one_kind[0]"]
    assert sum("without" in name for name in names) == 4


def test_in_ci_each_pair_runs_or_what_the_mark_says(pytester):
    names = run(pytester, "-m", "not product")
    law = [tuple(name[9:-1].split("-")) for name in names if "law" in name]
    for parameters, number in (((0, 1), 10), ((0, 2), 15), ((1, 2), 6)):
        assert len({tuple(row[i] for i in parameters) for row in law}) == number
    assert 15 <= len(law) <= 18
    assert set(run(pytester)) < set(names)
    in_ci = [name[11:-1].rsplit("-", 1) for name in names if "in_ci" in name]
    assert sorted(tree for _, tree in in_ci) == list("0123")
    assert {abs(int(size)) for size, _ in in_ci} == {1, 2}
    assert sum("one_kind" in name for name in names) == 9
    assert sum("without" in name for name in names) == 4


ALL = 30 + 4 + 9 + 4 + 12


@pytest.mark.parametrize(
    "options, number",
    [
        (["-k", "rms"], 10),
        (["test_file.py::test_of_one_kind[7]"], 1),
        (["-m", ""], ALL),
        (["-m", "not exhaustive", "test_file.py"], 13),
    ],
    ids=str,
)
def test_what_is_selected_runs_whole(pytester, options, number):
    assert len(run(pytester, *options)) == number


def test_a_file_of_exhaustive_tests_is_not_even_imported_by_default(pytester):
    pytester.makepyfile(test_other="pytestmark = pytest.mark.exhaustive\nimport no_such_library")
    assert len(run(pytester)) == 13
