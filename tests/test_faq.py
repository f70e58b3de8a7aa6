"""The FAQ: its error texts are real, and its table is what the demo's RNN does."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import clipgrad as cg
from clipgrad._cli import main

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


CLIPS = {"none": "no clipping", "norm clip": "gradient clip: norm", "error clip": "error clip"}
CLIPS["both"] = "error clip + norm"
ROW = re.compile(r"\| ([\w ]+) \| ([\d.]+) to ([\d.]+) \| (\d) of 5 \|")


@pytest.mark.exhaustive
def test_the_table_of_clips_is_what_the_demo_prints(tmp_path):
    assert main(["demo", "--task", "char-rnn", "--out", str(tmp_path)]) == 0
    tasks = json.loads((tmp_path / "demo.json").read_text())["tasks"]
    rows = ROW.findall(TEXT)
    assert [row[0] for row in rows] == list(CLIPS)
    for name, *bounds, reached in rows:
        seeds = tasks["char-rnn"]["arms"][CLIPS[name]]["seeds"]
        losses = [seed["metrics"]["nats per character"] for seed in seeds]
        assert sum(seed["goal_reached"] for seed in seeds) == int(reached)
        if name != "none":  # a run that explodes differs between machines
            assert [min(losses), max(losses)] == pytest.approx([float(b) for b in bounds], abs=0.02)
