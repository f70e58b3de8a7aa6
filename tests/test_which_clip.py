"""The table on which clip to use is the data that a program stored, and its best cells are best."""

import json
import pathlib
import sys

import numpy as np
import pytest

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


def test_seeds_of_the_sweep_are_not_those_of_the_comparison():
    sweep, comparison = (set(CONTENT["seeds"][key]) for key in ("sweep", "comparison"))
    assert len(comparison) >= 5 and not sweep & comparison


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
