"""The benchmarks: rows run, and a peer with other numbers is refused. Nothing is timed here."""

import os
import time

import jax
import jax.numpy as jnp
import pytest

from benchmarks import report, rows, timing
from benchmarks.__main__ import use_cpu_seconds
from benchmarks.rows import FLOOR, OURS, PEER, DifferentNumbersError, Row, Scale
from benchmarks.subjects import SUBJECTS, per_example

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.slow]
TINY = Scale(1 / 500)


def pair(theirs, ours=lambda x: {"a": 2 * x, "b": x}):
    x = jnp.arange(1.0, 5.0)
    sides = [rows.jitted("ours", OURS, ours, x), rows.jitted("theirs", PEER, theirs, x)]
    return Row("doubled", lambda: sides, budget=0)


def test_a_row_of_equal_sides_is_measured():
    result = rows.measure(pair(lambda x: {"a": x + x, "b": x}))
    (compared,) = result["ratios"]
    assert compared["ratio"]["run"]["median"] > 0
    assert result["sides"][1]["facts"]["difference"] == 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: {"a": 2.0001 * x, "b": x},
        lambda x: {"a": 2 * x, "b": x.at[0].add(1e-4)},
        lambda x: {"a": 2 * x, "b": x.at[0].set(jnp.nan)},
        lambda x: {"a": 2 * x, "b": x[:2]},
        lambda x: {"a": 2 * x},
    ],
)
def test_a_row_whose_sides_differ_is_refused(wrong):
    with pytest.raises(DifferentNumbersError, match="doubled: ours and theirs differ by"):
        rows.measure(pair(wrong))


def test_a_side_of_ours_that_does_less_is_compared_with_what_does_less_alone():
    x = jnp.ones(4)
    sides = [rows.jitted("ours", OURS, lambda x: 2 * x, x)]
    sides += [rows.jitted("part of it", OURS, jnp.sum, x, numbers=None)]
    sides += [rows.jitted("theirs", PEER, lambda x: x + x, x)]
    sides += [rows.jitted("floor", FLOOR, lambda x: x, x, numbers=None)]
    compared = rows.measure(Row("doubled", lambda: sides, budget=0))["ratios"]
    assert [(pair["ours"], pair["theirs"]) for pair in compared] == [
        ("ours", "theirs"),
        ("ours", "floor"),
        ("part of it", "floor"),
    ]


def test_a_busy_machine_is_timed_in_cpu_seconds_of_one_thread(monkeypatch):
    monkeypatch.setattr(timing.Clock, "read", timing.Clock.read)
    monkeypatch.setenv("XLA_FLAGS", "--others")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    use_cpu_seconds()
    assert timing.Clock.read is time.process_time and os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ["XLA_FLAGS"] == "--others --xla_cpu_multi_thread_eigen=false"


CHEAP = {"norm": -1, "clips": 1, "per_example": 0, "compilation": 0, "error_clip": -1}


# Peers warn of what they call themselves.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("subject", CHEAP)
def test_rows_run_and_say_what_was_not_run(subject):
    row = SUBJECTS[subject].rows(TINY)[CHEAP[subject]]
    result = rows.measure(row._replace(budget=0))
    assert {side["kind"] for side in result["sides"]} >= {OURS, PEER}
    assert all(side["why"] for side in result["absent"])
    for compared in result["ratios"]:
        assert all(ratio["median"] > 0 for ratio in compared["ratio"].values())


def test_the_rows_of_the_short_table_exist():
    for subject, name, _, _ in report.SHORT:
        assert name in [row.name for row in SUBJECTS[subject].rows(Scale(1))]


@pytest.mark.parametrize("work", per_example.WORK, ids=lambda work: work[0])
def test_a_model_of_examples_has_a_loss_of_one_and_the_leaves_of_its_twin(work):
    model = work[1](TINY)
    example = jax.tree.map(lambda leaf: leaf[0], model.batch(4))
    assert jax.eval_shape(model.loss, model.params, example).shape == ()
    sizes = [leaf.size for leaf in model.to_torch(model.params)]
    assert sum(sizes) == sum(leaf.size for leaf in jax.tree.leaves(model.params))
