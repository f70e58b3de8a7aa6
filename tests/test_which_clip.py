"""The table on which clip to use is the data that a program stored, and its best cells are best."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._demo import pendulum as _pendulum
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["graves-lstm", "two-heads", "language", "diffusion"])
def test_the_further_tasks_start_from_a_finite_loss_and_a_finite_gradient(name, program):
    task = program.STUDIES[name].task
    data = task.load()
    params = jax.tree.map(jnp.asarray, task.init(data, np.random.default_rng(0)))
    loss, grads = jax.value_and_grad(task.loss)(params, task.sample(data, jax.random.key(0)))
    assert jnp.isfinite(loss) and jnp.isfinite(cg.global_norm(grads))
    assert (cg.global_norm(grads) > 1e6) == (name == "two-heads")


@pytest.mark.parametrize("way", ["error clip", "norm"])
def test_how_many_runs_of_the_sweep_swing_up_is_said(way):
    sweep = CONTENT["tasks"]["pendulum"]["ways"][way]["sweep"]
    costs = [np.inf if cost is None else cost for cell in sweep for cost in cell["cost"]]
    said = f"{sum(cost < 0.45 for cost in costs)} of the {len(costs)} runs"
    assert said in " ".join(PAGE.split())


def reached(task, way):
    return int(sum(CONTENT["tasks"][task]["ways"][way]["metrics"]["reached"]))


def test_the_note_of_the_pendulum_is_what_was_measured():
    ways = CONTENT["tasks"]["pendulum"]["ways"]
    cut = "truncated plus norm"
    assert ways[cut]["best"]["threshold"] == 20 and reached("pendulum", cut) == 5
    assert all(median("pendulum", cut) < median("pendulum", way) for way in ways if way != cut)


def test_on_the_pendulum_the_error_clip_needs_the_norm_clip_and_the_other_way_round():
    ways = CONTENT["tasks"]["pendulum"]["ways"]
    both, alone = "error clip + norm", "error clip"
    assert [reached("pendulum", way) for way in (both, alone, "norm")] == [5, 2, 0]
    cells = ways[alone]["sweep"]
    assert sum(max(cell["cost"]) < 0.45 for cell in cells if None not in cell["cost"]) == 7
    assert ways[alone]["best"]["rate"] == max(cell["rate"] for cell in cells)


def test_a_pendulum_near_to_standing_multiplies_the_gradient_at_each_step():
    step, pull = _pendulum._PENDULUM_STEP, _pendulum._GRAVITY * _pendulum._PENDULUM_STEP
    motion = np.array([[1 + step * pull, step], [pull, 1]])
    factor = np.abs(np.linalg.eigvals(motion)).max()
    assert f"multiplies the gradient by {factor:.1f} at each step" in " ".join(PAGE.split())


def test_zero_nans_reaches_a_high_accuracy_with_a_first_layer_that_never_moves():
    metrics = CONTENT["tasks"]["blank-patches"]["ways"]["zero nans"]["metrics"]
    assert min(metrics["accuracy"]) > 0.9 and metrics["layer 1 moved"] == [0.0] * 5
    assert not any(metrics["reached"])


def median(task, way):
    values = CONTENT["tasks"][task]["ways"][way]["metrics"][CONTENT["tasks"][task]["metric"]]
    return np.median([np.inf if value is None else value for value in values])


def all_reach(way):
    tasks = CONTENT["tasks"].items()
    ways = {name: task["ways"][way] for name, task in tasks if way in task["ways"]}
    return {name for name, result in ways.items() if all(result["metrics"]["reached"])}


def test_the_page_says_where_a_norm_clip_is_enough_and_where_an_error_clip_is_better():
    small = {"char-rnn", "adding", "deep-mlp", "graves-lstm", "two-heads"}
    assert all_reach("norm") == small | {"language", "diffusion"}
    assert "seven of the ten tasks" in " ".join(PAGE.split())
    assert reached("deep-mlp", "no clip") == 5
    assert median("deep-mlp", "no clip") < median("deep-mlp", "error clip")
    assert median("deep-mlp", "error clip") <= median("deep-mlp", "norm")
    for task in ("char-rnn", "adding", "graves-lstm"):
        assert median(task, "error clip") > median(task, "norm")
    assert "blank-patches" in all_reach("error clip") - all_reach("norm")
    assert "pendulum" in all_reach("error clip + norm") - all_reach("norm")
    assert median("two-heads", "error clip") > median("two-heads", "norm") + 0.04
    for task, fixed in (("blank-patches", "fixed"), ("two-heads", "fixed plus norm")):
        assert abs(median(task, "error clip") - median(task, fixed)) < 0.01
    deep = CONTENT["tasks"]["deep-mlp"]["ways"]
    assert all(median("deep-mlp", "fixed") > median("deep-mlp", way) for way in list(deep)[:4])


LEARNED = ("adaptive error clip", "adaptive error clip + norm")
OTHERS = ("auto norm", "u-clip")
TODAY = ["no clip", "norm", "percentile 10", "percentile 90", "z-score", "skip spikes"]


def test_the_notes_of_the_tasks_of_today_are_what_was_measured():
    text = {way: median("language", way) for way in CONTENT["tasks"]["language"]["ways"]}
    assert all("language" in all_reach(way) for way in text if way != "u-clip")
    assert min(text.values()) == text["norm"] and text["auto norm"] - text["norm"] < 0.001
    gains = {way: round(text["no clip"] - nats, 2) for way, nats in text.items()}
    assert [gains[way] for way in ("norm", "warmed up longer", "skip spikes")] == [0.04, 0.03, 0.01]
    assert abs(gains["norm"] - gains["skip spikes + norm"]) < 0.01
    between = [*TODAY[2:5], "error clip", "error clip + norm", *LEARNED]
    assert all(text["norm"] < text[way] < text["no clip"] for way in between)
    ways = CONTENT["tasks"]["ppo"]["ways"]
    assert [reached("ppo", way) for way in TODAY] == [2, 3, 3, 2, 0, 0]
    assert sorted(ways, key=lambda way: reached("ppo", way))[-1] == LEARNED[1]
    tuned = ("error clip", "error clip + norm")
    assert [reached("ppo", way) for way in (*LEARNED, *tuned)] == [2, 4, 0, 0]
    assert all(ways[way]["best"]["rate"] == 1e-3 for way in ("skip spikes", "z-score"))
    noise = {way: median("diffusion", way) for way in CONTENT["tasks"]["diffusion"]["ways"]}
    assert "diffusion" in set.intersection(*map(all_reach, noise))
    assert min(noise, key=noise.get) == "per example" and round(noise["per example"], 2) == 0.27
    np.testing.assert_allclose([noise[way] for way in LEARNED], 0.274, atol=6e-4)
    others = set(noise) - {"per example", *LEARNED}
    assert all(abs(noise[way] - noise["no clip"]) < 1e-3 for way in others)


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


def test_the_notes_of_error_clips_that_find_their_threshold_are_what_was_measured():
    alone, joint = LEARNED
    swing = {way: median("pendulum", way) for way in CONTENT["tasks"]["pendulum"]["ways"]}
    assert sorted(swing, key=swing.get)[:2] == ["truncated plus norm", joint]
    shown = [swing[way] for way in (joint, "error clip + norm", "norm", "truncated plus norm")]
    np.testing.assert_allclose(shown, [0.171, 0.239, 0.8, 0.163], atol=6e-4)
    deep = {way: median("deep-mlp", way) for way in CONTENT["tasks"]["deep-mlp"]["ways"]}
    assert max(deep, key=lambda way: deep[way] * (way != "fixed")) == joint
    assert round(deep[joint], 2) == 0.98
    heads = [median("two-heads", way) for way in (joint, "norm", "error clip")]
    np.testing.assert_allclose(heads, [0.942, 0.924, 0.972], atol=6e-4)
    near = {"char-rnn": -0.01, "diffusion": -0.002, "adding": 0.001, "graves-lstm": 0.04}
    for task, above in (near | {"language": 0.025}).items():
        difference = median(task, joint) - median(task, "norm")
        np.testing.assert_allclose(difference, above, rtol=0.25)
    for task in ("char-rnn", "two-heads"):
        assert abs(median(task, alone) - median(task, "no clip")) < 0.015
    better = [
        reached(task, way) for task in ("pendulum", "adding") for way in (alone, "error clip")
    ]
    assert better == [4, 2, 4, 3]
    assert max(CONTENT["tasks"]["adding"]["ways"][alone]["metrics"]["squared error"]) < 1
    graves = [median("graves-lstm", way) for way in (alone, "error clip")]
    np.testing.assert_allclose(graves, [2.03, 2.13], atol=6e-3)
    for task in ("deep-mlp", "language", "diffusion"):
        assert abs(median(task, alone) - median(task, "error clip")) < 0.013


def test_the_notes_of_the_rules_of_others_are_what_was_measured():
    tasks = [task for task in CONTENT["tasks"] if task != "private-digits"]
    assert not any(reached("blank-patches", way) for way in (*LEARNED, *OTHERS))
    assert all_reach("auto norm") == all_reach("norm")
    for task in all_reach("norm"):
        assert abs(median(task, "auto norm") - median(task, "norm")) < 0.01
    pairs = [reached(task, way) for task in ("pendulum", "ppo") for way in ("auto norm", "norm")]
    assert pairs == [0, 0, 2, 3]
    kept = {task: reached(task, "u-clip") for task in tasks}
    assert {task for task, n in kept.items() if n == 5} == {"graves-lstm", "diffusion"}
    assert {task for task, n in kept.items() if n == 4} == {"char-rnn", "language"}
    assert list(kept.values()).count(0) == 6
    for task in set(tasks) - {"blank-patches"}:
        sign = -1 if CONTENT["tasks"][task]["metric"] == "accuracy" else 1
        assert sign * median(task, "u-clip") > sign * median(task, "norm")
    private = CONTENT["tasks"]["private-digits"]["ways"]
    assert [len(way["sweep"]) for way in private.values()] == [30, 6, 6]
    medians = [median("private-digits", way) for way in private]
    np.testing.assert_allclose(medians, [0.924, 0.919, 0.98], atol=6e-4)


def test_the_notes_of_the_other_tasks_are_what_was_measured():
    best = {
        (task, way): result["best"]["rate"]
        for task, found in CONTENT["tasks"].items()
        for way, result in found["ways"].items()
    }
    assert abs(median("char-rnn", "error clip + norm") - median("char-rnn", "norm")) < 0.02
    assert 30 < best["char-rnn", "norm"] / best["char-rnn", "no clip"] < 34
    assert best["graves-lstm", "norm"] == 10 * best["graves-lstm", "no clip"]
    lstm = CONTENT["tasks"]["graves-lstm"]["ways"]
    assert lstm["error clip"]["metrics"] == lstm["no clip"]["metrics"]
    adding = CONTENT["tasks"]["adding"]["ways"]["error clip"]["metrics"]
    assert reached("adding", "error clip") == 3
    assert sum(error > 1 for error in adding["squared error"]) == 1
    heads = CONTENT["tasks"]["two-heads"]["ways"]
    assert heads["fixed"]["metrics"]["accuracy"].count(None) == 2
    finite = {rate: [] for rate in (0.003, 0.01, 0.03, 0.1, 0.3)}
    for cell in heads["error clip"]["sweep"]:
        finite[cell["rate"]].append(min(x or 0 for x in cell["accuracy"]) > 0.87)
    assert [all(row) for row in finite.values()] == [True] * 4 + [False]
