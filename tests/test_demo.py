"""The demo: what it trains, and its table, figure and numbers."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clipgrad._commands import cli
from clipgrad._demo import TASKS, Result, Run, demo_figure, head, row, train
from clipgrad._demo import blank_patches as _blank_patches
from clipgrad._demo import task as _task
from clipgrad._demo.results import over_seeds, span

pytestmark = pytest.mark.exhaustive

NAN, INF = math.nan, math.inf
# Almost all of the time goes into compiling: programs of twenty steps need no good code.
HASTY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def shortened(task):
    """Without the arms whose clips are those of another: each takes seconds to compile."""
    covered = (_task.PLAIN, _task.NORM, _task.ERROR)
    arms = tuple(arm for arm in task.arms if arm.label not in covered)
    arms = task.arms if task.name == "blank-patches" else arms
    return dataclasses.replace(task, arms=arms, options=HASTY)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """What the command writes for every task, which it names at the end."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    argv = ["demo", "--all", "--seeds", "2", "--steps", "20", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        for name, task in TASKS.items():
            patch.setitem(TASKS, name, shortened(task))
        patch.setattr("builtins.print", lambda *args, **kwargs: printed.extend(map(str, args)))
        patch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=HASTY))
        assert cli.main(argv) == 0
    assert printed == [str(out / "demo.png"), str(out / "demo.json")]
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG\r\n")
    return json.loads((out / "demo.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("name", TASKS)
def test_the_report_holds_every_curve_of_every_arm(name, content):
    assert content["versions"]["jax"] == jax.__version__ and content["seconds"] > 0
    task = content["tasks"][name]
    assert list(task["arms"]) == [arm.label for arm in shortened(TASKS[name]).arms]
    for arm in task["arms"].values():
        assert len(arm["seeds"]) == 2
        for seed in arm["seeds"]:
            assert len(seed["loss"]) == len(seed["gradient_norm"]) == task["steps"] == 20
            assert seed["loss"][0] > 0


def test_the_report_holds_the_gradient_norm_at_each_time_step(content):
    found = content["tasks"]["char-rnn"]["arms"][_task.BOTH]["gradient_norm_per_time_step"]
    low, middle, high = (np.array(found[key]) for key in ("min", "median", "max"))
    assert len(low) == len(middle) == len(high) == 40
    assert (0 < low).all() and (low <= middle).all() and (middle <= high).all()
    assert (high <= 3e-4 * math.sqrt(12 * 96) * (1 + 1e-5)).all()


# How many steps have a finite gradient and loss, and whether the first layer has moved.
BLANK_PATCHES = {
    _task.PLAIN: (0, 1, None),
    _task.NORM: (0, 1, None),
    _task.VALUE: (0, 1, None),
    _task.IF_FINITE: (0, 20, False),
    _task.ZERO_NANS: (0, 20, False),
    _task.ERROR: (20, 20, True),
    _task.BOTH: (20, 20, True),
}


@pytest.mark.parametrize("label", BLANK_PATCHES)
def test_only_an_error_clip_trains_every_layer_on_blank_patches(label, content):
    """With any gradient clip all is NaN; without NaN gradients the first layer stays."""
    gradient, loss, moved = BLANK_PATCHES[label]
    for seed in content["tasks"]["blank-patches"]["arms"][label]["seeds"]:
        for curve, count in (("gradient_norm", gradient), ("loss", loss)):
            assert [x is not None for x in seed[curve]] == [i < count for i in range(20)]
        if moved is None:
            assert seed["metrics"]["accuracy"] is None and not seed["goal_reached"]
        else:
            assert (seed["metrics"]["layer 1 moved"] > 0.01) == moved
            assert not moved or seed["loss"][-1] < 0.8 * seed["loss"][0]


def test_mended_patches_are_those_of_the_task_with_a_finite_gradient_where_one_is_blank():
    h = jnp.array([[[0.0, 0.0], [3.0, 4.0]]])
    np.testing.assert_allclose(_blank_patches.mended_unit(h), [[[0, 0], [0.6, 0.8]]], rtol=1e-6)
    slopes = jax.grad(lambda h: _blank_patches.mended_unit(h)[..., 0].sum())(h)
    np.testing.assert_allclose(slopes, [[[0, 0], [0.128, -0.096]]], rtol=1e-4)


def test_an_error_while_training_is_not_lost():
    def fail(count):
        raise RuntimeError("no progress")

    whole = TASKS["blank-patches"]
    task = dataclasses.replace(whole, arms=whole.arms[:1], steps=30)
    with pytest.raises(RuntimeError, match="no progress"):
        train([task], 1, fail)


# Of made-up curves.


def made_up(*curves, labels=(_task.PLAIN, _task.ERROR)):
    curves = [np.array(curve, np.float32) for curve in curves]
    runs = [
        Run(_task.Arm(label), loss, loss * 10, None, {"nats": loss[:, -1]}, loss[:, -1] < 2.5)
        for label, loss in zip(labels, curves, strict=True)
    ]
    return Result(dataclasses.replace(TASKS["char-rnn"], steps=curves[0].shape[1]), runs)


ENDING = made_up([[4.0, NAN, NAN], [4.0, 3.5, NAN]], [[4.0, 3.0, 2.0], [4.0, 3.2, 2.4]])


def test_a_number_of_each_column_leaves_out_what_is_not_finite():
    curves = np.array([[[1.0, 2.0, NAN], [3.0, NAN, NAN]], [[5.0, INF, -INF], [4.0, NAN, NAN]]])
    for of, expected in ((np.min, [1, 2, NAN]), (np.median, [3.5, 2, NAN]), (np.max, [5, 2, NAN])):
        np.testing.assert_array_equal(over_seeds(of, curves), expected)


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
    _, goal, names, line = head(ENDING.task, ENDING.runs[0]).splitlines()
    assert goal == "goal: under 2.5 nats per character of unseen text  (2 seeds, 3 steps)"
    assert names.split() == ["goal", "finite", "max", "gradient", "norm", "nats"]
    assert set(line) == {"-"}
    plain, clipped = map(row, ENDING.runs)
    assert plain.split("  ")[0] == "no clipping" and clipped.split("  ")[0] == "error clip"
    columns = [names.index(name) for name in ("goal", "finite", "max", "nats")]
    assert [plain[i:].split("  ")[0] for i in columns] == ["0 of 2", "0 of 2", "NaN", "NaN"]
    assert [clipped[i:].split("  ")[0] for i in columns] == [
        "2 of 2", "2 of 2", "40.0", "2.00..2.40",
    ]  # fmt: skip


def test_the_figure_says_what_ends_in_nan_and_cuts_an_explosion():
    losses, norms = demo_figure([ENDING]).subfigs[0].axes
    assert losses.get_title("right") == norms.get_title("right") == "no clipping: NaN in 2 of 2"
    losses, _ = demo_figure([made_up([[1.0, 1e30, 1.0]], [[1.0] * 3])]).subfigs[0].axes
    assert losses.get_ylim()[1] < 1e10
    assert losses.get_title("right") == "off the scale: up to 1e+30"
