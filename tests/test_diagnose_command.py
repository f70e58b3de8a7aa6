"""The command `clipgrad diagnose`: what it prints, writes and exits with."""

import json

import pytest

from clipgrad._commands.cli import main

MODULE = """
import jax.numpy as jnp

def loss(x):
    return jnp.sum(jnp.sqrt(x))

def sick():
    return (jnp.array([1.0, 0.0]),)

def well():
    return (jnp.array([1.0, 4.0]),)

def with_aux(y, x):
    return loss(x), y
"""


@pytest.fixture
def models(tmp_path, monkeypatch, request):
    name = "models_" + request.node.name.partition("[")[0]
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


def test_a_sick_loss_exits_with_1_and_names_the_line(models, capsys):
    assert main(["diagnose", f"{models}:loss", "--args", f"{models}:sick"]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("vjp: ") and f"{models}.py:5: the VJP of sqrt at 0" in shown.out
    assert shown.err == "" and max(map(len, shown.out.splitlines())) <= 100


def test_a_healthy_loss_exits_with_0(models, capsys):
    assert main(["diagnose", f"{models}:loss", "--args", f"{models}:well"]) == 0
    assert capsys.readouterr().out == "nothing is wrong with the gradient\n"


@pytest.mark.exhaustive
def test_picture_and_data_are_written(models, tmp_path):
    out = tmp_path / "new" / "out"
    options = ["--args", f"{models}:sick", "--out", str(out)]
    assert main(["diagnose", f"{models}:loss", *options]) == 1
    assert (out / "diagnosis.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads((out / "diagnosis.json").read_text())
    assert not data["ok"] and data["findings"][0]["kind"] == "vjp" and data["rows"]
    assert data["findings"][0]["line"] == 5


def test_other_arguments_and_aux_are_options(models):
    what = ["diagnose", f"{models}:with_aux", "--args", "f32[2], f32[2]"]
    assert main([*what, "--argnums", "0", "--has-aux"]) in (0, 1)
    assert main([*what, "--argnums", "0"]) == 2


@pytest.mark.parametrize("args, code", [("sick", 1), ("well", 2)])
def test_a_folder_that_cannot_be_written_does_not_hide_a_finding(
    models, tmp_path, capsys, args, code
):
    (tmp_path / "file").write_text("")
    options = ["--args", f"{models}:{args}", "--out", str(tmp_path / "file")]
    assert main(["diagnose", f"{models}:loss", *options]) == code
    shown = capsys.readouterr()
    assert shown.err.startswith("clipgrad diagnose: ") and shown.err.count("\n") == 1
    assert shown.out.startswith("vjp: " if code == 1 else "nothing is wrong")
