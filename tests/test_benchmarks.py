"""The benchmarks: rows run, and a peer with other numbers is refused. Nothing is timed here."""

import json
import types

import jax
import jax.numpy as jnp
import optax
import pytest

from benchmarks import __main__ as command
from benchmarks import held_out, report, rows
from benchmarks.rows import FLOOR, OURS, PEER, DifferentNumbersError, Row, Scale
from benchmarks.subjects import SUBJECTS, per_example

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.exhaustive]
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


def test_a_peer_of_a_subject_that_is_wrong_is_refused(monkeypatch):
    row = next(iter(SUBJECTS["norm"].rows(TINY)))._replace(budget=0)
    rows.measure(row)
    wrong = optax.stateless(lambda g, _: jax.tree.map(lambda x: 1.001 * x, g))
    right = optax.clip_by_global_norm
    monkeypatch.setattr(optax, "clip_by_global_norm", lambda c: optax.chain(right(c), wrong))
    with pytest.raises(DifferentNumbersError, match="clipgrad and optax differ by 0.001"):
        rows.measure(row)


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


def compared(name, kind, low):
    seconds = {"run": {"median": 0.002}}
    side = {"seconds": seconds, "facts": {}, "name": name, "kind": kind}
    ratio = {"median": low + 0.1, "low": low, "high": low + 0.2, "n": 5}
    return side, {"ours": "clipgrad", "theirs": name, "kind": kind, "ratio": {"run": ratio}}


def test_the_table_marks_what_is_slower_than_a_peer():
    found = [compared("slow", PEER, 0.5), compared("fast", PEER, 1.2), compared("copy", FLOOR, 1.2)]
    sides, ratios = zip(*found, strict=True)
    ours = {"seconds": {"run": {"median": 0.0031}}, "facts": {}, "name": "clipgrad", "kind": OURS}
    row = {"name": "work", "sides": [ours, *sides], "ratios": ratios, "absent": []}
    results = {"norm": {"title": "Norm", "rows": [row]}}
    assert "| work | clipgrad | 3.1 | slow | 2 | 0.60 | 0.50 to 0.70 |" in report.table(results)
    assert "fast | 2 | **1.30** |" in report.losses(results)
    assert "slow" not in report.losses(results) and "copy" not in report.losses(results)
    assert "*copy* | 2 | *1.30* |" in report.table(results)


def test_the_command_writes_json_a_table_and_keeps_other_sections(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "QUICK", TINY.part)
    first, norm = SUBJECTS["norm"].rows(TINY)[:1], "Global norm clip"
    subject = types.SimpleNamespace(TITLE=norm, rows=lambda scale: first)
    monkeypatch.setitem(SUBJECTS, "norm", subject)
    (tmp_path / "RESULTS.md").write_text("# Results\n\nOlder.\n")
    command.main(["--quick", "--only", "norm", "--out", str(tmp_path)])
    assert "leaves and compilation were not all run" in command.write(tmp_path)
    stored = json.loads((tmp_path / "norm.json").read_text())
    assert stored["machine"]["versions"]["jax"] == jax.__version__
    assert "--quick" in stored["command"] and len(stored["rows"]) == 1
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.startswith("# Results\n\nOlder.\n") and text.count("## Compared with") == 1
    assert "128 MB in 20 leaves" in text and text.count(report.START) == text.count(report.END) == 1


def test_some_rows_are_run_again_and_the_others_say_where_they_are_from(tmp_path, monkeypatch):
    def row(name):
        return Row(name, lambda: pair(lambda x: {"a": 2 * x, "b": x}).sides(), budget=0)

    subject = types.SimpleNamespace(TITLE="Norm", rows=lambda scale: list(map(row, "abc")))
    monkeypatch.setitem(SUBJECTS, "norm", subject)
    for chosen in ("ab", "c", "b"):
        command.main(["--only", "norm", "--out", str(tmp_path), "--rows", *chosen])
    found = json.loads((tmp_path / "norm.json").read_text())
    origins = {row["name"]: row.get("origin", found)["command"] for row in found["rows"]}
    runs = {name: origin.partition("--rows ")[2] for name, origin in origins.items()}
    assert list(runs.items()) == [("a", "a b"), ("b", "b"), ("c", "c")]
    # One line for all that differ in their rows alone, and one for another commit.
    assert (tmp_path / "RESULTS.md").read_text().count("* norm: ") == 1
    found["rows"][0]["origin"]["machine"] |= {"commit": "another", "load": 7}
    lines = report.origin({"norm": found}).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["* norm (1 row)", "* norm (2 rows)"]
    assert "another" in lines[0] and "Load average before: 7, so other" in lines[0]
    with pytest.raises(SystemExit):
        command.parsed(["--only", "norm", "--rows", "d"])


@pytest.mark.parametrize("work", per_example.WORK, ids=lambda work: work[0])
def test_a_model_of_examples_has_a_loss_of_one_and_the_leaves_of_its_twin(work):
    model = work[1](TINY)
    example = jax.tree.map(lambda leaf: leaf[0], model.batch(4))
    assert jax.eval_shape(model.loss, model.params, example).shape == ()
    sizes = [leaf.size for leaf in model.to_torch(model.params)]
    assert sum(sizes) == sum(leaf.size for leaf in jax.tree.leaves(model.params))


@pytest.mark.parametrize("checker", held_out.CHECKERS)
def test_held_out_programs_are_judged(checker):
    if checker == "torch":
        pytest.importorskip("torch")
    builds = [build for build in held_out.CASES if build.__name__.startswith("focal_loss")]
    with jax.enable_x64(True):
        verdicts = {b.__name__: held_out.judged(b, checker, "float64") for b in builds}
    assert [v["verdict"] for v in verdicts.values()] == [held_out.PASSES, held_out.FAILS]
    counts = {"wrong": 1, "missed": 0, "right": 1, "refused": 0, "unclear": 0}
    assert held_out.score(verdicts) == counts | {"raised on wrong": 0, "raised on right": 0}
