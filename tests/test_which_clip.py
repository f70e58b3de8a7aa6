"""The table on which clip to use is the data that a program stored, and its best cells are best."""

import json
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

from clipgrad._demo import task as _task

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


def parabola():
    """A loss whose minimum SGD reaches in one step at the learning rate 1/2."""
    return _task.Task(
        name="parabola",
        summary="",
        goal="",
        steps=4,
        optimizer=optax.sgd(0.5),
        arms=(),
        load=lambda: jnp.float32(3),
        init=lambda data, random: {"w": np.float32(random.normal())},
        sample=lambda data, key: data,
        loss=lambda params, batch: jnp.square(checkpoint_name(params["w"], "w") - batch),
        tag="w",
        evaluate=lambda first, last, data: {"square": jnp.square(last["w"] - data)},
        reached=lambda metrics: metrics["square"] < 1e-6,
    )


@pytest.mark.exhaustive
def test_a_way_is_compared_at_its_best_learning_rate_and_threshold(program):
    study = program.Study(
        parabola(),
        optax.sgd,
        (0.1, 0.5, 1e30),
        program.ways((1e-3, 100.0), program.error_by_value, (100.0,)),
    )
    results = {way: program.measure(study, rules) for way, rules in study.ways.items()}
    assert results["no clip"]["best"] == {"rate": 0.5, "threshold": None}
    assert results["norm"]["best"] == {"rate": 0.5, "threshold": 100.0}
    assert results["no clip"]["sweep"][-1]["square"] == [None, None]
    for result in results.values():
        assert result["metrics"] == {"reached": [1.0] * 5, "square": [0.0] * 5}


def test_the_table_has_a_star_at_the_ends_of_a_grid_and_the_worst_seed_last(program):
    sweep = [{"rate": r, "threshold": None, "accuracy": [r, r]} for r in (0.1, 0.2)]
    result = {
        "sweep": sweep,
        "best": {"rate": 0.2, "threshold": None},
        "metrics": {"accuracy": [0.5, None, 0.9], "reached": [0.0, 0.0, 1.0]},
    }
    task = {"metric": "accuracy", "ways": {"norm": result}}
    last = program.table({"tasks": {"digits": task}}).splitlines()[-1]
    assert last == "| digits | norm | 0.2* | - | 0.9 | 0.5 | NaN | 1 of 3 |"


def reached(task, way):
    return int(sum(CONTENT["tasks"][task]["ways"][way]["metrics"]["reached"]))


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


@pytest.mark.parametrize("way", ["error clip", "norm"])
def test_how_many_runs_of_the_sweep_swing_up_is_said(way):
    sweep = CONTENT["tasks"]["pendulum"]["ways"][way]["sweep"]
    costs = [np.inf if cost is None else cost for cell in sweep for cost in cell["cost"]]
    said = f"{sum(cost < 0.45 for cost in costs)} of the {len(costs)} runs"
    assert said in " ".join(PAGE.split())
