import dataclasses
import json
import math

import numpy as np
import pytest

import clipgrad as cg
from clipgrad._demo import _task
from clipgrad._demo._curves import band, first_nonfinite, over_training, short_number, span
from clipgrad._demo._figure import figure_of_results
from clipgrad._demo._report import report
from clipgrad._demo._table import table
from clipgrad._demo._tasks import TASKS
from clipgrad._demo._train import Result, Run

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
    return Result(TASKS[task], len(curves[0][0]), runs, 3.0)


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


@pytest.mark.parametrize("number, text", [(669.2, "669"), (0.0, "0.00"), (1.49e12, "1.49e+12")])
def test_numbers_are_three_digits(number, text):
    assert short_number(number) == text


def test_the_table_shows_each_arm_in_a_line():
    assert table(ENDING).splitlines()[1:] == [
        "goal: under 2.5 nats per character of unseen text  (2 seeds, 3 steps, 3 s)",
        "             nats per character  goal    finite  max gradient norm",
        "-----------  ------------------  ------  ------  -----------------",
        "no clipping  NaN                 0 of 2  0 of 2  NaN",
        "error clip   2.00..2.40          2 of 2  2 of 2  40.0",
    ]


def test_the_table_ends_with_the_note_of_a_task_that_has_one():
    with_note = ENDING._replace(task=dataclasses.replace(ENDING.task, note="it froze"))
    assert table(with_note).splitlines() == [*table(ENDING).splitlines(), "note: it froze"]


def test_the_legend_has_the_note_in_short_lines():
    noted = ENDING._replace(task=dataclasses.replace(ENDING.task, note="its layer froze " * 5))
    *_, legend = panels(noted)
    lines = legend.get_legend().get_title().get_text().split("\n")
    assert lines[1].startswith("goal: ") and " ".join(lines[2:]) == noted.task.note.strip()
    assert len(lines) == 4 and max(map(len, lines[2:])) <= 60


def test_the_report_has_null_for_what_is_not_finite_and_says_when_it_began():
    arms = json.loads(report([ENDING], 2, 3.0), parse_constant=pytest.fail)["tasks"]["char-rnn"][
        "arms"
    ]
    plain, clipped = arms["no clipping"], arms["error clip"]
    assert plain["gradient_clip"] is plain["error_clip"] is None
    assert clipped["error_clip"] == "ClipByNorm(max_norm=0.5, ord=2, axis=None)"
    assert [seed["loss"] for seed in plain["seeds"]] == [[4.0, None, None], [4.0, 3.5, None]]
    assert [seed["first_nonfinite_loss_step"] for seed in plain["seeds"]] == [2, 3]
    assert plain["seeds"][0]["final_loss"] is None
    assert plain["seeds"][0]["metrics"] == {"nats per character": None}
    assert plain["seeds"][1]["max_gradient_norm"] is None
    assert clipped["seeds"][0]["first_nonfinite_gradient_step"] is None
    assert clipped["seeds"][1]["max_gradient_norm"] == 40.0


def test_the_report_holds_what_the_panel_of_time_steps_shows():
    tasks = json.loads(report([THROUGH_TIME], 2, 3.0), parse_constant=pytest.fail)["tasks"]
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
    losses, norms, legend = figure_of_results([result]).subfigs[0].axes
    return losses, norms, legend


def crosses(axes):
    """The points of all crosses, in drawing order."""
    lines = [line for line in axes.lines if line.get_marker() == "x"]
    return [list(zip(*line.get_data(), strict=True)) for line in lines]


def test_a_run_that_becomes_nan_ends_in_a_cross_at_its_last_finite_value():
    losses, _, _ = panels(ENDING)
    last, row = crosses(losses)
    assert last == [(1, 4.0), (2, 3.5)]
    assert row == [(2, 0.95), (3, 0.95)]
    assert [text.get_text() for text in losses.texts] == ["no clipping: NaN in 2 of 2"]


def test_runs_that_are_nan_from_the_first_step_are_still_seen():
    nothing = [[NAN, NAN, NAN]] * 2
    losses, norms, _ = panels(made_up(nothing, nothing))
    for axes in (losses, norms):
        assert [points for points in crosses(axes) if points] == [
            [(1, 0.95), (1, 0.95)],
            [(1, pytest.approx(0.875)), (1, pytest.approx(0.875))],
        ]
        assert len(axes.texts) == 2


def test_a_run_that_stays_finite_has_no_cross():
    finite = [[4.0, 3.0, 2.0]] * 2
    losses, norms, _ = panels(made_up(finite, finite))
    assert crosses(losses) == crosses(norms) == []


def test_an_explosion_is_cut_and_the_cut_is_said():
    losses, _, _ = panels(made_up([[1.0, 1e30, 1.0]], [[1.0, 1.0, 1.0]]))
    assert losses.get_ylim()[1] < 1e10
    assert [text.get_text() for text in losses.texts] == ["off the scale: up to 1e+30"]


def test_panels_are_labelled_and_logarithmic():
    losses, norms, legend = panels(ENDING)
    assert losses.get_ylabel() == "loss"
    assert norms.get_ylabel() == "gradient norm before any gradient clip"
    for axes in (losses, norms):
        assert (axes.get_xscale(), axes.get_yscale(), axes.get_xlabel()) == ("log", "log", "step")
    shown = [text.get_text() for text in legend.get_legend().get_texts()]
    assert shown == [
        "no clipping\nnats per character NaN, goal 0 of 2",
        "error clip\nnats per character 2.00..2.40, goal 2 of 2",
    ]


def test_an_arm_has_one_colour_in_every_panel_of_every_task():
    finite = [[4.0, 3.0, 2.0]] * 2
    first, second = made_up(finite, finite), made_up(finite, labels=[_task.ERROR], task="adding")
    parts = figure_of_results([first, second]).subfigs
    lines = [axes.lines[-1] for part in parts for axes in part.axes[:2]]
    lines += [part.axes[2].get_legend().legend_handles[-1] for part in parts]
    assert len({line.get_color() for line in lines}) == 1
    assert first.runs[0].arm.label != first.runs[1].arm.label
    assert parts[0].axes[0].lines[0].get_color() != lines[0].get_color()


def test_every_arm_of_every_task_has_a_colour_of_its_own():
    labels = {arm.label for task in TASKS.values() for arm in task.arms}
    finite = [[4.0, 3.0, 2.0]] * 2
    shown = (
        figure_of_results([made_up(*[finite] * len(labels), labels=sorted(labels))])
        .subfigs[0]
        .axes[0]
    )
    assert len({line.get_color() for line in shown.lines}) == len(labels) == 8


def test_the_panel_of_time_steps_draws_what_was_recorded():
    *_, axes, _ = figure_of_results([THROUGH_TIME]).subfigs[0].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "log")
    assert axes.get_xlabel() == "time step"
    assert axes.get_ylabel() == "gradient norm after any error clip"
    drawn = [list(line.get_ydata()) for line in axes.lines]
    assert drawn[:3] == [[6, 2, 1], [4, 2, 1], pytest.approx([8e20, 4e9, 1])]
    for line in drawn[3:]:
        np.testing.assert_array_equal(line, [0.5, NAN, 0.5])
    assert all(list(line.get_xdata()) == [1, 2, 3] for line in axes.lines)
    plain, clipped = ({line.get_color() for line in axes.lines[i : i + 3]} for i in (0, 3))
    assert len(plain) == len(clipped) == 1 and plain != clipped
    assert axes.get_ylim()[0] < 0.5 and axes.get_ylim()[1] > 8e20


def test_the_key_of_time_steps_says_how_far_each_arm_goes():
    *_, key = figure_of_results([THROUGH_TIME]).subfigs[0].axes
    legend = key.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [
        "no clipping\nup to 8.00e+20",
        "error clip\nup to 0.500, NaN in 2 of 2",
    ]
    assert legend.get_title().get_text().startswith("The gradient of 'h' at each time step")
    assert legend.get_title().get_text().endswith("range of 2 seeds over 2 steps")


@pytest.mark.parametrize("value, text", [(NAN, "NaN in 2 of 2"), (0.0, "up to 0.00")])
def test_time_steps_with_nothing_to_draw_are_still_in_the_key(value, text):
    nothing = {label: np.full((2, 1, 3), value) for label in (_task.PLAIN, _task.ERROR)}
    chart = figure_of_results([made_up([[4.0]] * 2, [[4.0]] * 2, through_time=nothing)])
    chart.canvas.draw()
    shown = [line.get_text() for line in chart.subfigs[0].axes[-1].get_legend().get_texts()]
    assert shown == [f"no clipping\n{text}", f"error clip\n{text}"]


def test_only_a_task_with_time_steps_has_their_panel_and_it_is_twice_as_high():
    chart = figure_of_results([ENDING, THROUGH_TIME])
    assert [len(part.axes) for part in chart.subfigs] == [3, 5]
    first, second = (part.bbox.height for part in chart.subfigs)
    assert second == pytest.approx(2 * first, rel=0.1)
