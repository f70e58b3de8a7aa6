"""The FAQ: its error texts are real, and its table is what the demo's RNN does."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._demo import _task
from clipgrad._demo._tasks import TASKS
from clipgrad._demo._train import train

TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "faq.md").read_text()


pytestmark = pytest.mark.usefixtures("users_promotion")


FAILURES = {
    "TypeError: rule: got 0.1": lambda: cg.clip_cotangent(jnp.ones(2), 0.1),
    "ValueError: params: got None": lambda: cg.clip_grads(jnp.ones(2), cg.AdaptiveClip()),
    "TypeError: max_norm: got a schedule": lambda: cg.clip_cotangent(
        jnp.ones(2), cg.ClipByNorm(lambda step: 1.0)
    ),
    "ValueError: where: got 'bias'": lambda: cg.clip_grads(
        {"kernel": jnp.ones(2)}, cg.ClipByValue(1.0), where="bias"
    ),
    "TypeError: can't apply forward-mode": lambda: jax.jvp(
        lambda x: cg.clip_cotangent(x, cg.ClipByValue(1.0)), (1.0,), (1.0,)
    ),
}
HEADINGS = re.findall(r"^### `(\w+Error: .*)`$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("heading", HEADINGS, ids=lambda heading: heading[:30])
def test_the_error_texts_of_the_faq_are_real(heading):
    (call,) = [call for start, call in FAILURES.items() if heading.startswith(start)]
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert f"{caught.type.__name__}: {caught.value}".startswith(heading)


def test_every_known_error_text_is_in_the_faq():
    assert len(HEADINGS) == len(FAILURES)


CLIPS = {"none": _task.PLAIN, "norm clip": _task.NORM, "error clip": _task.ERROR}
CLIPS["both"] = _task.BOTH
ROW = re.compile(r"\| ([\w ]+) \| ([\d.]+) to ([\d.]+) \| (\d) of 5 \|")
# How far rounding, which differs between machines, moves the losses and the runs at the goal.
SLACK = {"none": (np.inf, 0), "norm clip": (0.02, 0), "error clip": (0.1, 0), "both": (0.1, 1)}
ROWS = {clip: tuple(map(float, row)) for clip, *row in ROW.findall(TEXT)}


def test_the_table_has_the_clips_of_the_demo():
    assert list(ROWS) == list(CLIPS)
    assert list(CLIPS.values()) == [arm.label for arm in TASKS["char-rnn"].arms]


@pytest.mark.parametrize(
    ("clip", "seeds"),
    [
        ("norm clip", 1),
        pytest.param("norm clip", 5, marks=pytest.mark.exhaustive),
        pytest.param("error clip", 5, marks=pytest.mark.exhaustive),
        pytest.param("both", 5, marks=pytest.mark.exhaustive),
        pytest.param("none", 5, marks=pytest.mark.exhaustive),
    ],
)
def test_a_row_of_the_table_is_what_the_demo_trains(clip, seeds):
    arms = tuple(arm for arm in TASKS["char-rnn"].arms if arm.label == CLIPS[clip])
    task = dataclasses.replace(TASKS["char-rnn"], arms=arms)
    (run,) = train(task, seeds, task.steps, lambda steps: None).runs
    losses, (lowest, highest, reached) = run.metrics["nats per character"], ROWS[clip]
    slack, runs = SLACK[clip]
    assert abs(np.sum(run.reached) - (reached if seeds == 5 else 1)) <= runs
    assert np.isinf(slack) or lowest - slack < np.min(losses) <= np.max(losses) < highest + slack
