"""`clipgrad check` and `clipgrad selftest`: reports, files, exit codes, clear lines."""

import argparse
import json

import jax.numpy as jnp
import pytest

from clipgrad._check.command import UsageError, add_check_parser, as_json, load
from clipgrad._check.report import Failure, GradCheckReport
from clipgrad._check.shapes import random_arguments
from clipgrad._selftest import add_selftest_parser, cases, laws

MODULE = """
import jax, jax.numpy as jnp

half = jax.custom_vjp(lambda x: x * x)
half.defvjp(lambda x: (x * x, x), lambda x, g: (x * g,))
number = 3

def model(params, x):
    return {"y": jnp.tanh(x @ params["w"]), "z": x}

def make():
    return {"w": jnp.ones((2, 2))}, jnp.ones((1, 2))

def make_list():
    return [jnp.ones(2)]
"""


def command(*words):
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    add_check_parser(subparsers)
    add_selftest_parser(subparsers)
    options = parser.parse_args([str(word) for word in words])
    return options.run(options)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "checked_by_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_right_function_of_the_current_folder_passes(folder, capsys):
    assert command("check", "checked_by_test:model", "--args", "checked_by_test:make") == 0
    assert "gradient check passed" in capsys.readouterr().out


def test_a_wrong_one_exits_with_one_and_the_report(folder, capsys):
    assert command("check", "checked_by_test:half", "--args", "f32[3]") == 1
    assert "analytic/numeric is 0.5 throughout" in capsys.readouterr().out


def test_the_report_is_written_as_json(folder):
    command("check", "checked_by_test:half", "--args", "f32[3]", "--json", folder / "report.json")
    report = json.loads((folder / "report.json").read_text())
    assert not report["ok"] and report["failures"][0]["check"] == "value"
    assert sorted(report["failures"][0]["indices"]) == [0, 1, 2]


def test_all_options_reach_the_check(folder, capsys):
    options = "--wrt 0/w --no-grad 1 --output y --mode full --delta 0.005 --points 1 --seed 3"
    rest = "--max-relative-error 0.01 --order 1 --device cpu --skip vmap --x64"
    words = [*options.split(), *rest.split()]
    assert command("check", "checked_by_test:model", "--args", "checked_by_test:make", *words) == 0


@pytest.mark.parametrize(
    ("function", "arguments", "line"),
    [
        ("nothing", "f32[3]", "got 'nothing'; expected module:function"),
        ("no_such_module:f", "f32[3]", "cannot import 'no_such_module'"),
        ("checked_by_test:absent", "f32[3]", "module 'checked_by_test' has no 'absent'"),
        (
            "checked_by_test:number",
            "f32[3]",
            "checked_by_test:number is a int; expected a function",
        ),
        ("checked_by_test:half", "f32[3", "is no list of shapes; write dtype[sizes]"),
        ("checked_by_test:half", "f31[3]", "'f31' is no dtype; expected one of f16, bf16"),
        ("checked_by_test:half", "f64[3]", "'f64' needs 64-bit types, which are off; add --x64"),
        ("checked_by_test:half", "checked_by_test:make_list", "returned a list; expected a tuple"),
        ("checked_by_test:half", "i32[3]", "args hold no floating-point array"),
    ],
)
def test_wrong_usage_exits_with_two_and_a_clear_line(folder, capsys, function, arguments, line):
    assert command("check", function, "--args", arguments) == 2
    assert line in capsys.readouterr().err


def test_shapes_give_random_arguments_of_these_dtypes_and_a_seed_fixes_them():
    arguments = random_arguments("f32[2,3], bf16[4], f32[], i32[2], c64[1], bool[2]", 0)
    assert [a.shape for a in arguments] == [(2, 3), (4,), (), (2,), (1,), (2,)]
    assert arguments[1].dtype == jnp.bfloat16 and arguments[5].dtype == jnp.bool
    assert (arguments[0] == random_arguments("f32[2,3]", 0)[0]).all()


def test_the_selftest_runs_on_what_is_there_and_says_what_is_not(capsys, monkeypatch):
    chosen = [next(cases())]
    monkeypatch.setattr("clipgrad._selftest.cases", lambda: chosen)
    assert command("selftest", "--device", "cpu,tpu") == 0
    text = capsys.readouterr().out
    assert "ok     clip_cotangent, off" in text
    assert "0 failed; devices: cpu; not there, so not run: tpu" in text


def test_the_selftest_fails_on_a_wrong_rule(capsys, monkeypatch):
    wrong = next(cases())._replace(function=lambda x, w: jnp.round(x), order=1)
    broken = [wrong._replace(function=lambda x, w: jnp.log(-(x**2)))]
    monkeypatch.setattr("clipgrad._selftest.cases", lambda: broken)
    law = next(laws())._replace(left=(jnp.zeros((3, 4)),))
    monkeypatch.setattr("clipgrad._selftest.laws", lambda: [law])
    assert command("selftest", "--device", "cpu") == 1
    assert "FAILED outputs clipped by" in capsys.readouterr().out
    assert command("selftest", "--device", "abacus") == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--delta", "0"], "delta=0.0; expected a positive number"),
        (["--order", "3"], "order=3; expected 1, or 2"),
        (["--max-relative-error", "-1"], "max_relative_error=-1.0; expected a number above 0"),
        (["--points", "0"], "points=0; expected 1 or more"),
        (["--skip", "speed"], "skip=['speed'] names no check"),
        (["--wrt", "y"], "wrt='y' means no floating-point leaf"),
        (["--no-grad", "0"], "nothing is left to check"),
        (["--output", "loss"], "output='loss' means no"),
        (["--device", "abacus"], "names no kind of device"),
    ],
)
def test_an_option_that_makes_no_sense_exits_with_two(folder, capsys, words, line):
    assert command("check", "checked_by_test:half", "--args", "f32[3]", *words) == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--mode", "slow"], ["--order", "two"], []])
def test_what_the_parser_refuses_exits_with_two(folder, words):
    required = ["--args", "f32[3]"] if words else []
    with pytest.raises(SystemExit) as caught:
        command("check", "checked_by_test:half", *required, *words)
    assert caught.value.code == 2


def test_the_file_holds_everything_that_the_report_does(folder):
    file = folder / "report.json"
    command("check", "checked_by_test:half", "--args", "f32[3]", "--json", file)
    report = json.loads(file.read_text())
    keys = "ok notes not_run evaluations seconds precision devices verified failures"
    assert set(report) == set(keys.split())
    assert report["devices"] == ["cpu"] and report["precision"] == "float64"
    failure = report["failures"][0]
    assert failure["analytic"] == pytest.approx(failure["numeric"] / 2, rel=1e-5)
    assert failure["where"].startswith("args[0][") and failure["error"] < 1e-6


def test_a_number_that_json_cannot_hold_is_null(folder):
    report = GradCheckReport(
        (Failure("jit", "args[0]", "raises"),), (), {}, 1, 0.1, "float64", ("cpu",), 0
    )
    assert as_json(report)["failures"][0]["numeric"] is None


def test_a_function_inside_of_a_class_is_found(folder):
    assert load("pathlib:Path.exists").__name__ == "exists"
    with pytest.raises(UsageError, match="module 'pathlib' has no 'Path.absent'"):
        load("pathlib:Path.absent")
