import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clipgrad._commands import cli
from clipgrad._demo import TASKS
from clipgrad._demo import blank_patches as _blank_patches
from clipgrad._demo import task as _task
from clipgrad._demo.train import train

pytestmark = pytest.mark.exhaustive

# Almost all of the time goes into compiling: programs of twenty steps need no good code.
HASTY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def shortened(task):
    """Without the arms whose clips are those of another: each takes seconds to compile."""
    covered = (_task.PLAIN, _task.NORM, _task.ERROR)
    arms = tuple(arm for arm in task.arms if arm.label not in covered)
    arms = task.arms if task.name == "blank-patches" else arms
    return dataclasses.replace(task, arms=arms, options=HASTY)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    argv = ["demo", "--all", "--seeds", "2", "--steps", "20", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        for name, task in TASKS.items():
            patch.setitem(TASKS, name, shortened(task))
        patch.setattr("builtins.print", lambda *args, **kwargs: printed.extend(map(str, args)))
        patch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=HASTY))
        code = cli.main(argv)
    return code, printed, out


@pytest.fixture(scope="module")
def content(everything):
    return json.loads((everything[2] / "demo.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.exhaustive
def test_every_task_runs_end_to_end_and_its_files_are_named(everything):
    code, printed, out = everything
    assert code == 0
    assert printed == [str(out / "demo.png"), str(out / "demo.json")]
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("name", TASKS)
def test_the_report_holds_every_curve_of_every_arm(name, content):
    assert content["settings"] == {"tasks": list(TASKS), "seeds": 2}
    assert content["versions"]["jax"] == jax.__version__
    assert content["seconds"] > 0
    task = content["tasks"][name]
    assert list(task["arms"]) == [arm.label for arm in shortened(TASKS[name]).arms]
    for arm in task["arms"].values():
        assert [seed["seed"] for seed in arm["seeds"]] == [0, 1]
        for seed in arm["seeds"]:
            assert len(seed["loss"]) == len(seed["gradient_norm"]) == task["steps"] == 20
            assert seed["loss"][0] > 0


@pytest.mark.parametrize("name, steps, bound", [("char-rnn", 40, 3e-4), ("pendulum", 200, 1e-3)])
def test_the_report_holds_the_gradient_norm_at_each_time_step(name, steps, bound, content):
    found = content["tasks"][name]["arms"][_task.BOTH]["gradient_norm_per_time_step"]
    low, middle, high = (np.array(found[key]) for key in ("min", "median", "max"))
    assert len(low) == len(middle) == len(high) == steps
    assert (0 < low).all() and (low <= middle).all() and (middle <= high).all()
    elements = {"char-rnn": 12 * 96, "pendulum": 32}[name]  # or examples
    assert (high <= bound * math.sqrt(elements) * (1 + 1e-5)).all()


# The first steps whose gradient and loss are not finite, and whether the first layer has moved.
BLANK_PATCHES = {
    _task.PLAIN: (1, 2, None),
    _task.NORM: (1, 2, None),
    _task.VALUE: (1, 2, None),
    _task.IF_FINITE: (1, None, False),
    _task.ZERO_NANS: (1, None, False),
    _task.ERROR: (None, None, True),
    _task.BOTH: (None, None, True),
}


@pytest.mark.parametrize("label", BLANK_PATCHES)
def test_only_an_error_clip_trains_every_layer_on_blank_patches(label, content):
    """With any gradient clip all is NaN; without NaN gradients the first layer stays."""
    gradient, loss, moved = BLANK_PATCHES[label]
    for seed in content["tasks"]["blank-patches"]["arms"][label]["seeds"]:
        assert seed["first_nonfinite_gradient_step"] == gradient
        assert seed["first_nonfinite_loss_step"] == loss
        if moved is None:
            assert seed["final_loss"] is seed["metrics"]["accuracy"] is None
            assert not seed["goal_reached"]
        else:
            assert (seed["metrics"]["layer 1 moved"] > 0.01) == moved
            assert not moved or seed["final_loss"] < 0.8 * seed["loss"][0]


@pytest.mark.exhaustive
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
