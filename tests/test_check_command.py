"""`clipgrad check` and `clipgrad selftest`: reports, files, exit codes, clear lines."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from clipgrad._check.options import CHECKS
from clipgrad._check.report import Failure, GradCheckReport
from clipgrad._commands.arguments import inferred_arguments, parameters_of, random_arguments
from clipgrad._commands.check import report_as_json
from clipgrad._commands.cli import main
from clipgrad._commands.function import UsageError, load
from clipgrad._commands.selftest import cases, laws

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

def dense(x, w):
    return x @ w

def shift(p, x: "f32[3]"):
    return p.w + x

def scalars(x: float, y: jax.Array):
    return x * y

def misleading(x: float):
    raise ValueError("a matrix is needed")

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


def test_a_wrong_one_exits_with_one_and_the_report(folder, capsys):
    assert command("check", "here:half", "--args", "f32[3]") == 1
    assert "analytic/numeric is 0.5 throughout" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_all_options_reach_the_check(folder, capsys):
    options = "--wrt 0/w --no-grad 1 --output y --mode full --points 1 --seed 3"
    rest = "--max-relative-error 0.01 --order 1 --device cpu --skip vmap --x64"
    words = [*options.split(), *rest.split()]
    assert command("check", "here:model", "--args", "here:make", *words) == 0


SHAPES_EXPECTED = (
    'expected shapes, dtype[sizes], such as "f32[8,16], f32[16]", or module:function, a function '
    "that returns the tuple of arguments"
)


@pytest.mark.parametrize(
    ("function", "arguments", "line"),
    [
        ("nothing", "f32[3]", "function: got 'nothing', expected module:function"),
        ("here:haff", "f32[3]", "module 'here' has no 'haff'; the nearest are ['half', "),
        ("here:number", "f32[3]", "here:number: got a int, expected a function"),
        ("here:half", "f32[3", f"args: got 'f32[3', {SHAPES_EXPECTED}"),
        ("here:half", "f31[3]", "args: got 'f31', expected a dtype, one of f32, c64"),
        (
            "here:half",
            "f64[3]",
            "args: got 'f64', expected a type of 32 bits or less; for 64 bits add --x64",
        ),
        ("here:half", "here:make_list", "here:make_list: got a list from it, expected the tuple"),
        ("here:half", "here:leaves", "here:leaves raises SystemExit: 0"),
        ("here:half", "i32[3]", "args: got leaves of ['int32'], expected a floating-point array"),
        ("here:dense", "f32[3], f32[4]", "here:dense raises TypeError: dot_general requires contr"),
        ("exits:f", "f32[3]", "cannot import 'exits': SystemExit: 0"),
    ],
)
def test_what_cannot_be_run_exits_with_two_and_one_line(folder, capsys, function, arguments, line):
    (folder / "exits.py").write_text("raise SystemExit(0)")
    assert command("check", function, "--args", arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith(f"clipgrad check: {line}") and streams.err.count("\n") == 1


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("layer.py::dense", "layer:dense"),
        ("./layer.py:dense", "layer:dense"),
        ("pkg/layer.py:Dense.apply", "pkg.layer:Dense.apply"),
        ("pkg.layer.dense", "pkg.layer:dense"),
        ("layer.py", "layer:function"),
        ("{}/pkg/layer.py:dense", "pkg.layer:dense"),
    ],
)
def test_a_file_is_answered_by_the_module(folder, capsys, written, meant):
    written = written.format(folder)
    assert command("check", written) == 2
    line = f"function: got {written!r}, expected module:function; write {meant}"
    assert capsys.readouterr().err == f"clipgrad check: {line}\n"


def test_a_report_that_cannot_be_written_exits_with_two(folder, capsys):
    file = folder / "nowhere" / "report.json"
    assert command("check", "here:half", "--args", "f32[3]", "--json", file) == 2
    line = "clipgrad check: FileNotFoundError: [Errno 2] No such file or directory"
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (
            "shift",
            "--args: got nothing, expected the shapes that annotations, docstring and defaults "
            'of here:shift do not give; write clipgrad check here:shift --args "f32[8,16], '
            'f32[3]"  (shapes for p, x), or --args module:make_args',
        ),
        (
            "misleading",
            "here:misleading raises ValueError: a matrix is needed, for f32[] from its signature; "
            'write clipgrad check here:misleading --args "f32[8,16]"  (shapes for x), or '
            "--args module:make_args",
        ),
    ],
)
def test_arguments_without_shapes_are_asked_for_with_the_line_to_write(
    folder, capsys, function, line
):
    assert command("check", f"here:{function}") == 2
    assert capsys.readouterr().err == f"clipgrad check: {line}\n"


def test_arguments_whose_shapes_are_known_may_be_left_out(folder, capsys):
    assert command("check", "here:scalars", "--seed", "1") == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first == "arguments: f32[], f32[]"
    assert second.startswith("gradient check passed (")


ARRAY, COUNTS = jnp.ones((2, 3)), np.ones(2, np.int32)


def inferred(function):
    return str(inferred_arguments(parameters_of(function), 0))


@pytest.mark.parametrize(
    ("body", "shapes"),
    [
        ('def f(x: Float32[Array, "b d"], w: Float[Array, "d e=2"]): 0', "f32[3,4], f32[4,2]"),
        (
            'def f(x: Float[Array, "... #n _ _"], w: BFloat16[Array, "*b n"]): 0',
            "f32[3,4,5], bf16[3]",
        ),
        (
            'def f(x: Float[Array, "3"], i: Int[Array, "2"], m: Bool[Array, ""]): 0',
            "f32[3], i32[2], bool[]",
        ),
        ('def f(x: Complex[Array, "3"] | None): 0', "c64[3]"),
        ('def f(x: Float[Array, "3"], eps=1e-6, *, w: Float[Array, "2"]): 0', "f32[3], w=f32[2]"),
        ('@jax.jit\n@jax.custom_vjp\ndef f(x: Shaped[Array, "3"], *r, **s): 0', "f32[3]"),
    ],
)
@pytest.mark.parametrize("head", ["", "from __future__ import annotations"])
def test_annotations_of_jaxtyping_give_shapes(body, shapes, head):
    text = f"{head}\nimport jax\nfrom jax import Array\nfrom jaxtyping import *\n{body}"
    names = {}
    exec(text, names)
    assert inferred(names["f"]) == shapes


@pytest.mark.parametrize("dims", ["n+1", "{n}"])
def test_a_size_that_is_computed_is_not_inferred(dims):
    names = {}
    exec(f"from jaxtyping import *\nimport jax\ndef f(x: Float[jax.Array, '{dims}']): 0", names)
    assert inferred(names["f"]) == "None"


@pytest.mark.parametrize(
    ("document", "shapes"),
    [
        ("Args:\n      x: f32[8,16]\n      w: the weights, bf16[16].", "f32[8,16], bf16[16]"),
        ("Args:\n      x (8, 16): inputs\n      w (Array): of shape (16,)", "f32[8,16], f32[16]"),
        (
            "Parameters\n    x : array of shape (8, 16)\n    w : array, shape (16)",
            "f32[8,16], f32[16]",
        ),
        ("Args:\n      x: in the interval (1, 10)\n      w: f32[16]", "None"),
        ("Args:\n      ax: f32[3]\n      w: f32[16]", "None"),
        ("Args:\n      x (float, optional): a list[int]\n      w: f32[16]", "None"),
        ("The weights w: f32[16], and x: f32[8].", "None"),
    ],
)
def test_a_docstring_gives_shapes(document, shapes):
    def function(x, w):
        pass

    function.__doc__ = f"A layer.\n\n    {document}\n    "
    assert inferred(function) == shapes


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x=ARRAY, n=3: x, "f32[2,3]"),
        (lambda x=COUNTS, scale=2.0: x, "i32[2]"),
        (lambda n=3, x=0.5: x, "x=0.5"),
        (lambda n=3: n, "None"),
        (lambda x, w=ARRAY: x, "None"),
        (dict, "None"),
    ],
)
def test_defaults_that_are_arrays_give_shapes_and_floats_where_nothing_else_does(function, shapes):
    assert inferred(function) == shapes


def test_shapes_give_random_arguments_of_these_dtypes_and_a_seed_fixes_them():
    arguments = random_arguments("float32[2,3], bf16[4], f32[], i32[2], c64[1], bool[2]", 0)
    assert [a.shape for a in arguments] == [(2, 3), (4,), (), (2,), (1,), (2,)]
    assert arguments[1].dtype == jnp.bfloat16 and arguments[5].dtype == jnp.bool
    assert (arguments[0] == random_arguments("f32[2,3]", 0)[0]).all()


@pytest.mark.exhaustive
def test_the_selftest_runs_on_what_is_there_and_says_what_is_not(capsys, monkeypatch):
    chosen = [next(cases())]
    monkeypatch.setattr("clipgrad._commands.selftest.cases", lambda: chosen)
    assert command("selftest", "--device", "cpu,tpu") == 0
    text = capsys.readouterr().out
    assert "ok     clip_cotangent, off" in text
    assert "0 failed; devices: cpu; missing here, so not run: tpu" in text


def test_the_selftest_fails_on_a_wrong_rule(capsys, monkeypatch):
    wrong = next(cases())._replace(function=lambda x, w: jnp.round(x), order=1)
    broken = [wrong._replace(function=lambda x, w: jnp.log(-(x**2)))]
    monkeypatch.setattr("clipgrad._commands.selftest.cases", lambda: broken)
    law = next(laws())._replace(left=(jnp.zeros((3, 4)),))
    monkeypatch.setattr("clipgrad._commands.selftest.laws", lambda: [law])
    assert command("selftest", "--device", "cpu") == 1
    assert "FAILED outputs clipped by" in capsys.readouterr().out
    assert command("selftest", "--device", "abacus") == 2
    assert capsys.readouterr().err.startswith("clipgrad selftest: devices: got ('abacus',), exp")


ALL_CHECKS = ", ".join(CHECKS)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--skip vmap,speed --skip size",
            f"skip: got ['speed', 'size'], expected some of {ALL_CHECKS}",
        ),
        ("--no-grad 0", "wrt: got None, with no_grad=[0], which leaves nothing to check of"),
    ],
)
def test_an_option_that_makes_no_sense_exits_with_two(folder, capsys, words, line):
    assert command("check", "here:half", "--args", "f32[3]", *words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"clipgrad check: {line}") and error.count("\n") == 1


def test_the_help_shows_choices_and_defaults(capsys):
    with pytest.raises(SystemExit):
        command("check", "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--order {1,2} 2 also checks the second derivative (default: 1)" in text
    assert "--mode {auto,full} auto: single elements" in text
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


def test_a_function_inside_of_a_class_is_found(folder):
    assert load("pathlib:Path.exists").__name__ == "exists"
    with pytest.raises(UsageError, match="module 'pathlib' has no 'Path.absent'"):
        load("pathlib:Path.absent")
