"""The demo: what it trains, and its table, figure and numbers."""

import contextlib
import functools
import io
import json
import math

import jax
import numpy as np
import pytest

from clipgrad import _demo
from clipgrad._commands import cli
from clipgrad._demo import TASKS, Arm, Run, demo_figure, head, row, span

pytestmark = pytest.mark.slow

NAN = math.nan


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """What the command writes for blank-patches, which it names at the end.

    Its output goes to no terminal, so it is the table alone, without the progress.
    """
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    argv = ["demo", "--all", "--task", "blank-patches", "--seeds", "2", "--steps", "20"]
    with (
        contextlib.redirect_stdout(io.StringIO()) as shown,
        contextlib.redirect_stderr(io.StringIO()) as errors,
        jax.numpy_dtype_promotion("standard"),
    ):
        assert cli.main([*argv, "--out", str(out)]) == 0
    lines = shown.getvalue().splitlines()
    assert lines[-2:] == [str(out / "demo.png"), str(out / "demo.json")]
    assert errors.getvalue() == "" and "\r" not in shown.getvalue()
    labels = [arm.label for arm in TASKS["blank-patches"].arms]
    table = lines[-4 - len(labels) : -4]
    assert [line for line in lines if line.startswith(tuple(labels))] == table
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG\r\n")
    return json.loads((out / "demo.json").read_text(), parse_constant=pytest.fail)


# How many steps have a finite gradient and loss, and whether the first layer has moved.
BLANK_PATCHES = {
    _demo.PLAIN: (0, 1, None),
    _demo.NORM: (0, 1, None),
    _demo.VALUE: (0, 1, None),
    _demo.IF_FINITE: (0, 20, False),
    _demo.ZERO_NANS: (0, 20, False),
    _demo.ERROR: (20, 20, True),
    _demo.BOTH: (20, 20, True),
}


@pytest.mark.parametrize("label", BLANK_PATCHES)
def test_only_an_error_clip_trains_every_layer_on_blank_patches(label, content):
    """With any gradient clip all is NaN; without NaN gradients the first layer stays."""
    gradient, loss, moved = BLANK_PATCHES[label]
    arm = content["tasks"]["blank-patches"][label]
    for seed in range(2):
        for curve, count in (("norm", gradient), ("loss", loss)):
            assert [x is not None for x in arm[curve][seed]] == [i < count for i in range(20)]
        if moved is None:
            assert arm["metrics"]["accuracy"][seed] is None and not arm["reached"][seed]
        else:
            assert (arm["metrics"]["layer 1 moved"][seed] > 0.01) == moved
            assert not moved or arm["loss"][seed][-1] < 0.8 * arm["loss"][seed][0]


def test_a_recurrent_task_has_the_gradient_norm_at_each_time_step(monkeypatch):
    monkeypatch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=_demo.QUICK))
    task = TASKS["char-rnn"]
    arms, steps = [arm for arm in task.arms if arm.label == _demo.BOTH], []
    task = task._replace(arms=arms, steps=4, options=_demo.QUICK)
    with jax.numpy_dtype_promotion("standard"):
        (run,) = _demo.train(
            task._replace(arms=arms, steps=4, options=_demo.QUICK), 2, steps.append
        )
    assert run.through_time.shape == (2, 4, 40) and sum(steps) == 4
    assert (0 < run.through_time).all()
    assert (run.through_time <= 3e-4 * math.sqrt(12 * 96) * (1 + 1e-5)).all()


def made_up(*curves, labels=(_demo.PLAIN, _demo.ERROR)):
    """A task with made-up losses, of which the norms are ten times as large."""
    curves = [np.array(curve, np.float32) for curve in curves]
    runs = [
        Run(Arm(label), loss, loss * 10, None, {"nats": loss[:, -1]}, loss[:, -1] < 2.5)
        for label, loss in zip(labels, curves, strict=True)
    ]
    return TASKS["char-rnn"]._replace(steps=curves[0].shape[1], recurrent=False), runs


ENDING = made_up([[4.0, NAN, NAN], [4.0, 3.5, NAN]], [[4.0, 3.0, 2.0], [4.0, 3.2, 2.4]])


def test_the_table_shows_each_arm_in_a_line():
    task, runs = ENDING
    _, goal, names, line = head(task, runs[0]).splitlines()
    assert goal == "goal: under 2.5 nats per character of unseen text  (2 seeds, 3 steps)"
    assert names.split() == ["goal", "finite", "max", "gradient", "norm", "nats"]
    assert set(line) == {"-"}
    plain, clipped = map(row, runs)
    assert plain.split() == "no clipping 0 of 2 0 of 2 NaN NaN".split()
    assert clipped.split() == "error clip 2 of 2 2 of 2 40.0 2.00..2.40".split()
    assert span(np.array([1.0, NAN, 3.0, math.inf])) == "1.00..3.00, 2 NaN"


def test_the_figure_says_what_ends_in_nan_and_cuts_an_explosion():
    losses, norms = demo_figure([ENDING]).subfigs[0].axes
    assert losses.get_title("right") == norms.get_title("right") == "no clipping: NaN in 2 of 2"
    np.testing.assert_array_equal(losses.lines[0].get_ydata().filled(0), [4.0, 3.5, 0])
    losses, _ = demo_figure([made_up([[1.0, 1e30, 1.0]], [[1.0] * 3])]).subfigs[0].axes
    assert losses.get_ylim()[1] < 1e10
    assert losses.get_title("right") == "off the scale: up to 1e+30"
