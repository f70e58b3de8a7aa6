import json
import math
import re

import numpy as np
import pytest

import clipgrad as cg
from clipgrad._demo import TASKS
from clipgrad._demo import task as _task
from clipgrad._demo.curves import band, first_nonfinite, over_training, span
from clipgrad._demo.figure import demo_figure
from clipgrad._demo.report import report
from clipgrad._demo.table import foot, head, row
from clipgrad._demo.train import Result, Run

pytestmark = pytest.mark.exhaustive

NAN, INF = math.nan, math.inf


def made_up(*curves, labels=(_task.PLAIN, _task.ERROR), task="char-rnn", through_time=None):
    runs = [
        Run(
            _task.Arm(label, error_clip=cg.ClipByNorm(0.5) if label == _task.ERROR else None),
            np.array(curve, np.float32),
            np.array(curve, np.float32) * 10,
            None if through_time is None else np.array(through_time[label], np.float32),
            {"nats per character": np.array([row[-1] for row in curve], np.float32)},
            np.array([row[-1] < 2.5 for row in curve]),
            1.5,
        )
        for label, curve in zip(labels, curves, strict=True)
    ]
    return Result(TASKS[task], len(curves[0][0]), runs)


THROUGH_TIME = made_up(
    [[4.0, 3.0]] * 2,
    [[4.0, 3.0]] * 2,
    through_time={
        _task.PLAIN: [[[4, 2, 1], [6, 2, 1]], [[6, 2, 1], [8e20, 4e9, 1]]],
        _task.ERROR: [[[0.5, NAN, 0.5]] * 2, [[0.5, INF, 0.5]] * 2],
    },
)
ENDING = made_up([[4.0, NAN, NAN], [4.0, 3.5, NAN]], [[4.0, 3.0, 2.0], [4.0, 3.2, 2.4]])


def test_the_first_step_that_is_not_finite_is_counted_from_one():
    curves = np.array([[1.0, 2.0, 3.0], [NAN, 2.0, 3.0], [1.0, INF, NAN], [1.0, 2.0, -INF]])
    assert first_nonfinite(curves) == [None, 1, 2, 3]


def test_the_band_leaves_out_what_is_not_finite():
    found = band(np.array([[1.0, 2.0, NAN], [3.0, NAN, NAN], [5.0, INF, NAN]]))
    np.testing.assert_array_equal(found.steps, [1, 2, 3])
    np.testing.assert_array_equal(found.low, [1, 2, NAN])
    np.testing.assert_array_equal(found.middle, [3, 2, NAN])
    np.testing.assert_array_equal(found.high, [5, 2, NAN])


def test_the_band_of_many_steps_keeps_every_extreme():
    curves = np.ones((2, 1000))
    curves[1, 777] = 50.0
    found = band(curves, points=20)
    assert len(found.steps) <= 20
    assert found.high.max() == 50.0 and found.low.min() == 1.0 and found.middle.max() == 1.0


def test_the_range_over_training_has_an_entry_for_each_time_step():
    found = over_training(np.array([[[1.0, NAN], [2.0, INF]], [[9.0, NAN], [4.0, -INF]]]))
    np.testing.assert_array_equal(found.steps, [1, 2])
    np.testing.assert_array_equal(found.low, [1, NAN])
    np.testing.assert_array_equal(found.middle, [3, NAN])
    np.testing.assert_array_equal(found.high, [9, NAN])


@pytest.mark.parametrize(
    "values, text",
    [
        ([0.9141, 0.93], "0.914..0.930"),
        ([0.5, 0.5001], "0.500"),
        ([NAN, NAN], "NaN"),
        ([1.0, NAN, 3.0, INF], "1.00..3.00, 2 NaN"),
    ],
)
def test_a_range_says_how_many_are_lost(values, text):
    assert span(np.array(values)) == text


def test_the_table_shows_each_arm_in_a_line():
    _, goal, names, line = head(ENDING.task, 2, 3, ["nats per character"]).splitlines()
    rows = list(map(row, ENDING.runs))
    assert foot(ENDING.task) == [f"note: {ENDING.task.note}"]
    assert goal == "goal: under 2.5 nats per character of unseen text  (2 seeds, 3 steps)"
    assert names.split("  ")[-1].strip() == "max gradient norm" and set(line) == {"-"}
    assert [re.split(r"  +", found) for found in rows] == [
        ["no clipping", "NaN", "0 of 2", "0 of 2", "NaN"],
        ["error clip", "2.00..2.40", "2 of 2", "2 of 2", "40.0"],
    ]
    columns = [names.index(name) for name in ("nats", "goal", "finite", "max")]
    for found in rows:
        assert all(found[start] != " " == found[start - 1] for start in columns)


def test_the_report_has_null_for_what_is_not_finite_and_says_when_it_began():
    arms = json.loads(report([ENDING], 3.0), parse_constant=pytest.fail)["tasks"]["char-rnn"][
        "arms"
    ]
    plain, clipped = arms["no clipping"], arms["error clip"]
    assert plain["gradient_clip"] is plain["error_clip"] is None
    assert clipped["error_clip"] == "ClipByNorm(max_norm=0.5, ord=2, axis=None, axis_name=None)"
    assert [seed["loss"] for seed in plain["seeds"]] == [[4.0, None, None], [4.0, 3.5, None]]
    assert [seed["first_nonfinite_loss_step"] for seed in plain["seeds"]] == [2, 3]
    assert plain["seeds"][0]["final_loss"] is None
    assert plain["seeds"][0]["metrics"] == {"nats per character": None}
    assert plain["seeds"][1]["max_gradient_norm"] is None
    assert clipped["seeds"][0]["first_nonfinite_gradient_step"] is None
    assert clipped["seeds"][1]["max_gradient_norm"] == 40.0


def test_the_report_holds_what_the_panel_of_time_steps_shows():
    tasks = json.loads(report([THROUGH_TIME], 3.0), parse_constant=pytest.fail)["tasks"]
    plain, clipped = tasks["char-rnn"]["arms"].values()
    assert plain["gradient_norm_per_time_step"] == {
        "min": [4.0, 2.0, 1.0],
        "median": [6.0, 2.0, 1.0],
        "max": [8e20, 4e9, 1.0],
    }
    assert clipped["gradient_norm_per_time_step"] == {
        "min": [0.5, None, 0.5],
        "median": [0.5, None, 0.5],
        "max": [0.5, None, 0.5],
    }


def panels(result):
    losses, norms = demo_figure([result]).subfigs[0].axes
    return losses, norms


def inside(axes):
    """The texts in a panel, without the names of the curves to its right."""
    return [text.get_text() for text in axes.texts if text.xy[0] != 1.015]


def test_an_explosion_is_cut_and_the_cut_is_said():
    losses, _ = panels(made_up([[1.0, 1e30, 1.0]], [[1.0, 1.0, 1.0]]))
    assert losses.get_ylim()[1] < 1e10
    assert inside(losses) == ["off the scale: up to 1e+30"]
