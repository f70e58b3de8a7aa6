"""`clipgrad diagnose` and `clipgrad compare`: what they print, write and exit with."""

import json

import jax
import numpy as np
import optax
import pytest

import clipgrad as cg
from clipgrad._commands.cli import main
from tests.helpers import array

MODULE = """
import functools
import jax, jax.numpy as jnp

def root(x):
    return jnp.sum(jnp.sqrt(x))

def sick():
    return (jnp.array([1.0, 0.0]),)

def well():
    return (jnp.array([1.0, 4.0]),)

def with_aux(y, x):
    return root(x), y

def loss(w, x, scale=1.0, name="hidden"):
    with jax.named_scope(name):
        h = jnp.tanh(x @ w) * scale
    return jnp.mean(h**2)

def changed(w, x):
    return loss(w, x, scale=1.1)

def renamed(w, x):
    return loss(w, x, name="other")

def make():
    return jnp.ones((3, 2)), jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)

def as_list():
    return list(make())

@functools.partial(jax.jit, donate_argnums=0)
def step(w, x):
    return w - 0.1 * jax.grad(loss)(w, x), jnp.sum(x**2)

def wrong_step(w, x):
    return w - 0.8 * jax.grad(loss)(w, x), 8 * jnp.sum(x**2)

def undecided(w, x, wave=jnp.sin):
    return jnp.sum(wave(w * 3e8))

def undecided_too(w, x):
    return undecided(w, x, jnp.cos)
"""


@pytest.fixture
def models(tmp_path, monkeypatch, request):
    """The name of a module in the current folder, another one for each test."""
    name = f"models{abs(hash(request.node.name)) % 10**6}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


def diagnose(models, args, *options, function="root"):
    return main(["diagnose", f"{models}:{function}", "--args", args.format(models), *options])


def compare(models, function, other, *options):
    other = other if other.startswith("float") else f"{models}:{other}"
    return main(["compare", f"{models}:{function}", other, "--args", f"{models}:make", *options])


def test_a_sick_loss_exits_with_1_and_names_the_line(models, capsys):
    assert diagnose(models, "{}:sick") == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("vjp: ") and f"{models}.py:6: the VJP of sqrt at 0" in shown.out
    assert shown.err == "" and max(map(len, shown.out.splitlines())) <= 100


def test_a_healthy_loss_exits_with_0(models, capsys):
    assert diagnose(models, "{}:well") == 0
    assert capsys.readouterr().out == "nothing is wrong with the gradient\n"


def test_other_arguments_and_aux_are_options(models):
    what = models, "f32[2], f32[2]", "--argnums", "0"
    assert diagnose(*what, "--has-aux", function="with_aux") in (0, 1)
    assert diagnose(*what, function="with_aux") == 2


@pytest.mark.parametrize("args, code", [("sick", 1), ("well", 2)])
def test_a_folder_that_cannot_be_written_does_not_hide_a_finding(
    models, tmp_path, capsys, args, code
):
    (tmp_path / "file").write_text("")
    assert diagnose(models, f"{{}}:{args}", "--out", str(tmp_path / "file")) == code
    shown = capsys.readouterr()
    assert shown.err.startswith("clipgrad diagnose: ") and shown.err.count("\n") == 1
    assert shown.out.startswith("vjp: " if code == 1 else "nothing is wrong")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "name", "kind", "line"),
    [
        (lambda models, out: diagnose(models, "{}:sick", "--out", out), "diagnosis", "vjp", 6),
        (
            lambda models, out: compare(models, "loss", "changed", "--out", out),
            "comparison", "value", 19,
        ),
    ],
    ids=["diagnose", "compare"],
)  # fmt: skip
def test_a_picture_and_data_are_written(run, name, kind, line, models, tmp_path):
    out = tmp_path / "new" / "out"
    assert run(models, str(out)) == 1
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads((out / f"{name}.json").read_text())
    assert not data["ok"] and data["rows"]
    assert (data["findings"][0]["kind"], data["findings"][0]["line"]) == (kind, line)


@pytest.mark.parametrize("name", ["diagnose", "compare"])
def test_a_result_is_written_as_json_without_a_picture(name, models, tmp_path):
    run, code = {
        "diagnose": (lambda *options: diagnose(models, "{}:sick", *options), 1),
        "compare": (lambda *options: compare(models, "loss", "renamed", *options), 0),
    }[name]
    assert run("--json", "missing/folder.json") == 2
    assert run("--json", "result.json") == code
    data = json.loads((tmp_path / "result.json").read_text())
    assert data["ok"] == (code == 0) and data["message"]
    assert {path.suffix for path in tmp_path.iterdir()} <= {".py", ".json", ""}


@pytest.mark.slow
def test_versions_that_differ_exit_with_1_and_name_the_module(models, capsys):
    assert compare(models, "loss", "changed") == 1
    shown = capsys.readouterr().out
    assert shown.startswith("value: the values differ from here on: hidden\n")
    assert f"{models}.py:19: the value of hidden differs by 0.091" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.slow
def test_versions_that_agree_exit_with_0(models, capsys):
    assert compare(models, "loss", "loss") == 0
    assert capsys.readouterr().out == "no difference beyond rounding, at 1 place\n"
    assert compare(models, "loss", "renamed", "--name", "hidden=other", "--argnums", "0", "1") == 0
    assert "not matched" not in capsys.readouterr().out


@pytest.mark.slow
def test_whole_steps_may_donate_their_arguments(models, capsys):
    assert compare(models, "step", "step", "--steps") == 0
    assert compare(models, "step", "wrong_step", "--steps") == 1
    assert "output: an output differs: 1" in capsys.readouterr().out


def test_a_dtype_is_another_version(models):
    assert compare(models, "loss", "float32") == 0
    assert compare(models, "loss", "float64") == 0


def test_a_missing_file_is_told_before_anything_runs(models, capsys):
    assert main(["compare", f"{models}:absent", "missing/before.npz", "--args", "f32[2]"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_capture_of_a_model_says_how_it_is_restored(models, tmp_path, capsys):
    """A capture has dictionaries, which a loss of a model can't call."""
    text = "import jax.numpy as jnp\ndef loss(model, x): return jnp.sum(model(x))\n"
    (tmp_path / f"{models}_of.py").write_text(text)
    state = cg.skip_spikes(optax.sgd(0.1), halt=True)
    params = {"w": array(np.ones(2))}
    update = jax.jit(lambda grads: state.update(grads, state.init(params), params))
    _, bad = update({"w": array([np.nan, np.nan])})
    with cg.FlightRecorder(tmp_path / "captures", raise_on_halt=False) as recorder:
        recorder.record(bad, array(np.ones(2)), params=params)
    capture = str(recorder.captures[0])
    assert main(["diagnose", f"{models}_of:loss", "--capture", capture]) == 2
    shown = capsys.readouterr().err
    assert "not callable" in shown and "--args module:restored, a function of the capture" in shown


@pytest.mark.slow
def test_nothing_judged_exits_with_1(models, capsys):
    assert compare(models, "undecided", "undecided_too") == 1
    assert capsys.readouterr().out.startswith("not judged: neither agreement nor a difference")


@pytest.mark.parametrize(
    "options, match",
    [
        (["loss", "loss", "--out", "gs://bucket/run"], "--out: got 'gs://bucket/run', an address"),
        (["loss", "absent"], "has no 'absent'"),
        (["loss", "float16"], "other: got 'float16', expected module:function, or one of float32"),
        (["loss", "loss", "--name", "hidden"], "--name: got 'hidden', expected FUN=OTHER"),
        (["loss", "loss", "--argnums", "7"], "argnums: got 7"),
        (["loss", "loss", "--other-args", "{}:as_list"], "got a list from it, expected the tuple"),
    ],
)
def test_wrong_usage_of_compare_is_one_line_and_exits_with_2(models, capsys, options, match):
    assert compare(models, *[option.format(models) for option in options]) == 2
    shown = capsys.readouterr()
    assert match in shown.err and shown.err.count("\n") == 1 and shown.out == ""
