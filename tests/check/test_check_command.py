"""`clipgrad check` and `clipgrad selftest`: reports, files, exit codes, clear lines."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from clipgrad._check import CHECKS
from clipgrad._check.report import Failure, GradCheckReport
from clipgrad._commands.arguments import random_arguments
from clipgrad._commands.check_command import report_as_json
from clipgrad._commands.cli import main
from clipgrad._commands.function import load
from clipgrad._commands.selftest import cases, laws
from tests.helpers import array

MODULE = """
import jax, jax.numpy as jnp

half = jax.custom_vjp(lambda x: x * x)
half.defvjp(lambda x: (x * x, x), lambda x, g: (x * g,))
number = 3

def model(params, x):
    return {"y": jnp.tanh(x @ params["w"]), "z": x}

def make():
    return {"w": jnp.ones((2, 2))}, jnp.ones((1, 2))

def ones():
    return (jnp.ones(3),)

def wide(x):
    if x.dtype != "float64":
        raise TypeError("narrow")
    return jnp.sin(x)

def of_params(p):
    return p["w"]

def make_list():
    return [jnp.ones(2)]

def dense(x, w):
    return x @ w

def misleading():
    raise ValueError("a matrix is needed")

def broken(x):
    raise KeyError("mine")

calls = []

def late(x):
    calls.append(x)
    if len(calls) % 2 == 0:
        raise KeyError("traced")
    return x

def leaves():
    raise SystemExit(0)
"""


def command(*words):
    return main([str(word) for word in words])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_function_inside_of_a_class_is_found(folder):
    assert load("pathlib:Path.exists").__name__ == "exists"


@pytest.mark.slow
def test_a_wrong_one_exits_with_one_and_the_report(folder, capsys):
    assert command("check", "here:half", "--args", "f32[3]") == 1
    assert "analytic/numeric is 0.5 throughout" in capsys.readouterr().out


@pytest.mark.slow
def test_all_options_reach_the_check(folder, capsys):
    options = "--wrt 0/w --no-grad 1 --output y --mode full --points 1 --seed 3"
    rest = "--max-relative-error 0.01 --order 1 --device cpu --skip vmap --x64"
    words = [*options.split(), *rest.split()]
    assert command("check", "here:model", "--args", "here:make", *words) == 0


def test_x64_has_arguments_and_the_function_in_64_bits(folder, capsys):
    words = "check", "here:wide", "--args", "here:ones", "--skip", "vmap", "--points", "1"
    assert command(*words, "--x64") == 0
    assert command(*words) == 2 and "narrow" in capsys.readouterr().err


def test_a_report_in_a_folder_that_is_not_there_is_told_before_anything_is_loaded(folder, capsys):
    assert command("check", "here:absent", "--json", "nowhere/report.json") == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_shapes_for_a_function_of_a_dictionary_name_a_function_of_arguments(folder, capsys):
    assert command("check", "here:of_params", "--args", "f32[3,4]") == 2
    assert "string indexing" in (shown := capsys.readouterr().err)
    assert "write --args module:make_args" in shown and shown.count("\n") == 1


SHAPES = (
    'expected shapes, dtype[sizes], such as "f32[8,16], f32[16]", or module:function, a function '
    "that returns the tuple of arguments"
)
ALL_CHECKS = ", ".join(CHECKS)
WRONG = {
    "nothing": "function: got 'nothing', expected module:function",
    "here:haff": "module 'here' has no 'haff'; the nearest are ['half', ",
    "here:number": "here:number: got a int, expected a function",
    "exits:f": "cannot import 'exits': SystemExit: 0",
    "pathlib:Path.absent": "module 'pathlib' has no 'Path.absent'",
    "here:dense": "--args: got nothing, expected the arguments of here:dense; write --args "
    '"f32[8,16]", the shape of each, or --args module:make_args',
    "here:half --args f32[3": f"--args: got 'f32[3', {SHAPES}",
    "here:half --args 2,3": f"--args: got '2,3', {SHAPES}; write \"f32[2,3]\"",
    "here:half --args f31[3]": "--args: got 'f31', expected a dtype, one of f32, c64",
    "here:half --args f64[3]": "--args: got 'f64', expected a type of 32 bits or less; for 64 bits "
    "add --x64",
    "here:half --args here:make_list": "here:make_list: got a list from it, expected the tuple",
    "here:half --args here:leaves": "here:leaves raises SystemExit: 0",
    "here:half --args i32[3]": "args: got leaves of ['int32'], expected a floating-point array",
    "here:dense --args f32[3],f32[4]": "here:dense raises TypeError: dot_general requires contr",
    "here:half --args f32[3] --tolerance 2": "tolerance: got 2.0, expected a number between 0",
    "here:half --args f32[3] --skip vmap,speed --skip size": "skip: got ['speed', 'size'], exp",
    "here:half --args f32[3] --no-grad 0": "wrt: got None, with no_grad=[0], which leaves noth",
}
MODULES = {  # as they are written, and as they are meant
    "./layer.py::dense": "layer:dense",
    "pkg/layer.py:Dense.apply": "pkg.layer:Dense.apply",
    "pkg.layer.dense": "pkg.layer:dense",
    "layer.py": "layer:function",
}
WRONG |= {
    name: f"function: got {name!r}, expected module:function; write {meant}\n"
    for name, meant in MODULES.items()
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_run_exits_with_two_and_one_line(folder, capsys, words):
    (folder / "exits.py").write_text("raise SystemExit(0)")
    assert command("check", *words.split()) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1
    assert streams.err.startswith(f"clipgrad check: {WRONG[words]}")


def test_a_report_that_cannot_be_written_exits_with_two(folder, capsys):
    file = folder / "nowhere" / "report.json"
    assert command("check", "here:half", "--args", "f32[3]", "--json", file) == 2
    line = "clipgrad check: FileNotFoundError: [Errno 2] No such file or directory"
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize(
    ("function", "arguments", "where"),
    [
        ("here:broken", "f32[3]", 'raise KeyError("mine")'),
        ("here:half", "here:misleading", 'raise ValueError("a matrix is needed")'),
        ("exits:f", "f32[3]", "raise SystemExit(0)"),
        ("here:late", "f32[3]", 'raise KeyError("traced")'),
    ],
)
def test_a_fault_of_a_function_shows_its_traceback_where_the_line_says_so(
    folder, capsys, function, arguments, where
):
    (folder / "exits.py").write_text("raise SystemExit(0)")
    what = ["check", function, "--args", arguments]
    assert command(*what) == 2
    short = capsys.readouterr().err
    assert short.endswith(" (--traceback shows where)\n") and short.count("\n") == 1
    assert command(*what, "--traceback") == 2
    long = capsys.readouterr().err
    assert where in long and long.splitlines()[-1] == short.removesuffix(
        " (--traceback shows where)\n"
    )


def test_a_misspelt_option_is_answered_with_the_nearest(folder, capsys):
    with pytest.raises(SystemExit, match="2"):
        command("check", "here:half", "--args", "f32[3]", "--modes", "full")
    assert "got '--modes', which is no argument; the nearest are ['--mode'" in (
        capsys.readouterr().err
    )


def test_shapes_give_random_arguments_of_these_dtypes_and_a_seed_fixes_them():
    arguments = random_arguments("float32[2,3], bf16[4], f32[], i32[2], c64[1], bool[2]", 0)
    assert [a.shape for a in arguments] == [(2, 3), (4,), (), (2,), (1,), (2,)]
    assert arguments[1].dtype == jnp.bfloat16 and arguments[5].dtype == jnp.bool
    np.testing.assert_array_equal(arguments[0], random_arguments("f32[2,3]", 0)[0])


@pytest.mark.slow
def test_the_selftest_runs_on_what_is_there_and_says_what_is_not(capsys, monkeypatch):
    chosen = [next(cases())]
    monkeypatch.setattr("clipgrad._commands.selftest.cases", lambda: chosen)
    assert command("selftest", "--device", "cpu,tpu") == 0
    text = capsys.readouterr().out
    assert "ok     clip_cotangent, off" in text
    assert "0 failed; devices: cpu; not here, so not run: tpu" in text


def test_the_selftest_fails_on_a_wrong_rule(capsys, monkeypatch):
    wrong = next(cases())._replace(function=lambda x, w: jnp.round(x), order=1)
    broken = [wrong._replace(function=lambda x, w: jnp.log(-(x**2)))]
    monkeypatch.setattr("clipgrad._commands.selftest.cases", lambda: broken)
    law = next(laws())._replace(left=(array(np.zeros((3, 4))),))
    monkeypatch.setattr("clipgrad._commands.selftest.laws", lambda: [law])
    assert command("selftest", "--device", "cpu") == 1
    assert "FAILED outputs clipped by" in capsys.readouterr().out
    assert command("selftest", "--device", "abacus") == 2
    assert capsys.readouterr().err.startswith("clipgrad selftest: devices: got ('abacus',), exp")
    assert command("selftest", "--device", "tpu") == 2
    line = "clipgrad selftest: --device: got tpu, expected a device that is here\n"
    assert capsys.readouterr().err == line


def test_the_help_shows_choices_and_defaults(capsys):
    with pytest.raises(SystemExit):
        command("check", "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--order {1,2} 2 also checks the second derivative (default: 1)" in text
    assert "--mode {auto,full} auto: single elements" in text and "(default: auto) --max" in text
    assert f"such as vmap,jit; some of {ALL_CHECKS} --device" in text


def test_the_file_holds_everything_that_the_report_does(folder):
    file = folder / "report.json"
    command("check", "here:half", "--args", "f32[3]", "--json", file)
    report = json.loads(file.read_text())
    keys = "ok notes not_run evaluations seconds precision devices verified failures"
    assert set(report) == set(keys.split())
    assert report["devices"] == ["cpu"] and report["precision"] == "float64"
    failure = report["failures"][0]
    assert not report["ok"] and failure["check"] == "value"
    assert sorted(failure["indices"]) == [0, 1, 2]
    assert failure["analytic"] == pytest.approx(failure["numeric"] / 2, rel=1e-5)
    assert failure["where"].startswith("args[0][") and failure["error"] < 1e-6


def test_a_number_that_json_cannot_hold_is_null(folder):
    report = GradCheckReport(
        (Failure("jit", "args[0]", "raises"),), (), {}, 1, 0.1, "float64", ("cpu",), 0
    )
    assert report_as_json(report)["failures"][0]["numeric"] is None
