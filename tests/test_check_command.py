"""`clipgrad check` and `clipgrad selftest`: reports, files, exit codes, clear lines."""

import argparse
import json

import jax.numpy as jnp
import pytest

from clipgrad._check.command import add_check_parser
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
