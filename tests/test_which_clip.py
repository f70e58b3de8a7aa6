"""The table on which clip to use is the data that a program stored, and its best cells are best."""

import json
import pathlib
import sys

import numpy as np
import pytest

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.exhaustive]

ROOT = pathlib.Path(__file__).parents[1]
CONTENT = json.loads((ROOT / "docs" / "which_clip.json").read_text())
PAGE = (ROOT / "docs" / "which_clip.md").read_text()
RESULTS = [
    pytest.param(task, result, id=f"{name}, {way}")
    for name, task in CONTENT["tasks"].items()
    for way, result in task["ways"].items()
]


@pytest.fixture(scope="module")
def program():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
        import which_clip

        return which_clip


def test_the_table_of_the_page_is_that_of_the_stored_data(program):
    assert program.table(CONTENT) in PAGE


def test_the_stored_data_have_every_task_and_way_and_cell_of_the_program(program):
    assert list(CONTENT["tasks"]) == list(program.STUDIES)
    assert CONTENT["seeds"] == {
        "sweep": list(program.SWEPT),
        "comparison": list(program.COMPARED),
    }
    for name, study in program.STUDIES.items():
        ways = CONTENT["tasks"][name]["ways"]
        assert list(ways) == list(study.ways)
        for way, result in ways.items():
            cells = [(cell["rate"], cell["threshold"]) for cell in result["sweep"]]
            thresholds = study.ways[way].thresholds
            assert cells == [(rate, each) for rate in study.rates for each in thresholds]


@pytest.mark.parametrize("task, result", RESULTS)
def test_the_best_cell_is_the_best_of_the_sweep(task, result):
    sign = -1 if task["metric"] == "accuracy" else 1
    means = {
        (cell["rate"], cell["threshold"]): np.inf
        if None in cell[task["metric"]]
        else sign * np.mean(cell[task["metric"]])
        for cell in result["sweep"]
    }
    best = means[result["best"]["rate"], result["best"]["threshold"]]
    # Means are stored with four digits, so that two cells may look the same.
    assert best <= min(means.values()) + 1e-3 * abs(best) or np.isinf(best)
    assert len(result["metrics"][task["metric"]]) == len(CONTENT["seeds"]["comparison"])


def all_reach(way):
    tasks = CONTENT["tasks"].items()
    ways = {name: task["ways"][way] for name, task in tasks if way in task["ways"]}
    return {name for name, result in ways.items() if all(result["metrics"]["reached"])}


LEARNED = ("adaptive error clip", "adaptive error clip + norm")
OTHERS = ("auto norm", "u-clip")


def test_how_many_tasks_each_way_solves_with_every_seed():
    page = " ".join(PAGE.split())
    counts = {way: len(all_reach(way) - {"private-digits"}) for way in ("norm", *LEARNED, *OTHERS)}
    assert list(counts.values()) == [7, 3, 8, 7, 2]
    assert [len(all_reach(way)) for way in ("error clip + norm", "error clip")] == [9, 6]
    assert (
        "norm clip 7; an error clip that finds its own threshold, with a norm clip 8, alone 3; a "
        "tuned error clip, with a norm clip 9, alone 6; `AutoNorm` 7; `u_clip` 2"
    ) in page
    assert "eight of the ten tasks" in page
