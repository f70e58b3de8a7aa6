"""Runs in files: a file stands for its version in a comparison, and says so if it cannot."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipgrad as cg
from clipgrad._commands.cli import main
from clipgrad._compare.program_record import program_data, program_from_data, program_record
from clipgrad._compare.run_file import read_run, write_run
from clipgrad._compare.save_run import saved
from clipgrad._compare.signatures import host_sketch, judge_signatures, signature
from clipgrad._compare.sketches import LARGEST_AT, NORM_AT, sketch
from clipgrad._compare.slices import shared_modules
from clipgrad._jaxpr import trace
from tests.compare_models import with_vjp
from tests.compare_pairs import EQUAL, PLANTED, Draw
from tests.test_compare_versions import ARGS as MLP_ARGS
from tests.test_compare_versions import LAYOUTS, mlp

pytestmark = pytest.mark.usefixtures("users_promotion")

CORE = ("advantage not stopped", "masks")
OTHERS = pytest.mark.exhaustive
halved = with_vjp(jnp.tanh, lambda grads: tuple(g / 2 for g in grads))


def loss(params, x, scale=1.0, act=jnp.tanh, names=("layers", "read")):
    def layer(h, w):
        with jax.named_scope("mlp"):
            return act(h @ w), None

    with jax.named_scope(names[0]):
        h, _ = lax.scan(layer, x, params["layers"])
    with jax.named_scope(names[1]):
        y = h @ params["out"] * scale
    return jnp.mean(y**2)


def changed(**how):
    return lambda params, x: loss(params, x, **how)


DRAW = Draw("float32")
ARGS = ({"layers": DRAW(3, 4, 4), "out": DRAW(4, 20, by=0.3)}, DRAW(5, 4))
FAULTS = {
    "value": changed(scale=1.1),
    "vjp": changed(act=halved),
}
WHERE = {"value": ("value", "read", None), "vjp": ("vjp", "layers/mlp", 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of a loss and of each wrong one."""
    folder = tmp_path_factory.mktemp("runs")
    for name, fun in {"right": loss, **FAULTS}.items():
        cg.save_run(fun, ARGS, folder / f"{name}.npz")
    return folder


@pytest.fixture(scope="module")
def right(folder):
    return folder / "right.npz"


def named(found):
    return [(f.kind, f.module, f.step, f.path, f.line) for f in found.findings]


def test_a_function_agrees_with_its_own_file(right):
    found = cg.compare(right, loss, ARGS)
    assert found.ok and not found.findings and not found.unmatched and not found.notes, str(found)
    assert len(found.rows) == 7 and all(row.cotangent is not None for row in found.rows)
    assert cg.compare(right, right).rows == cg.compare(str(right), str(right)).rows


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_says_what_its_function_would(fault, folder, right):
    between = cg.compare(loss, FAULTS[fault], ARGS)
    assert [(f.kind, f.module, f.step) for f in between.findings] == [WHERE[fault]]
    for pair in (
        (right, FAULTS[fault], ARGS),
        (loss, folder / f"{fault}.npz", ARGS),
        (right, folder / f"{fault}.npz"),
    ):
        found = cg.compare(*pair)
        assert named(found) == named(between) and not found.ok, str(found)
        assert not found.notes and not found.unmatched
        for own, other in zip(found.rows, between.rows, strict=True):
            assert (own.module, own.steps, own.kind) == (other.module, other.steps, other.kind)
            np.testing.assert_allclose(own.value, other.value, rtol=1e-5)
            tolerances = [(row.value_tolerance, row.cotangent_tolerance) for row in (own, other)]
            np.testing.assert_allclose(*tolerances, rtol=1e-4)


def rows(table):
    """Each name; the core without a mark, CI takes every eighth of the others: they are dear."""
    for i, name in enumerate(n for n in table if n not in CORE):
        marks = (OTHERS,) if i % 8 == 0 else (OTHERS, pytest.mark.product)
        yield pytest.param(name, marks=marks)
    yield from CORE


@pytest.mark.parametrize("name", list(rows([*PLANTED, *EQUAL])))
def test_pairs_of_losses_are_told_apart_by_their_files(name, tmp_path):
    pair = PLANTED.get(name) or EQUAL[name]
    args = pair.args(Draw("float32"))
    paths = [tmp_path / "fun.npz", tmp_path / "other.npz"]
    for fun, path in zip((pair.fun, pair.other), paths, strict=True):
        cg.save_run(fun, args, path)
    for found in (cg.compare(*paths), cg.compare(paths[0], pair.other, args)):
        expected = [pair.found] if pair.found else []
        assert [(f.kind, f.module, f.step) for f in found.findings] == expected, str(found)
        assert found.ok is (pair.found is None) and (found.rows or found.unmatched)


def test_other_arguments_are_named_first(right):
    params = {**ARGS[0], "out": ARGS[0]["out"].at[1, 2].add(0.5)}
    found = cg.compare(right, loss, (params, ARGS[1]))
    assert [(f.kind, f.path) for f in found.findings][0] == ("argument", "out"), str(found)
    assert [f.kind for f in found.findings] == ["argument", "value"]
    found = cg.compare(right, loss, (ARGS[0], ARGS[1] * 2))
    assert found.findings[0].path == "args[1]" and "1 of 3" in found.findings[0].message


def test_the_file_has_what_the_issue_of_a_port_needs(right):
    file = read_run(right)
    header = file.header
    assert {"clipgrad", "jax", "device", "platform", "processes", "layout"} == {
        *header["circumstances"]
    }
    first = header["values"][0]
    assert first["name"] == "layers/mlp" and first["steps"] == [3] and first["shape"] == [5, 4]
    assert pathlib.Path(first["file"]).samefile(__file__) and first["line"] > 0
    assert {row[0]: row[1] for row in header["params"]} == {"layers": [3, 4, 4], "out": [4, 20]}
    out = np.asarray(ARGS[0]["out"], np.float64)
    sizes = file.arrays["params 1"][[NORM_AT, LARGEST_AT]]
    np.testing.assert_allclose(sizes, [np.linalg.norm(out), abs(out).max()])
    assert not any(np.size(x) == out.size for x in file.arrays.values())
    assert right.stat().st_size < 64_000


def test_a_finding_shows_sizes_that_are_apart(folder, right):
    message = cg.compare(folder / "value.npz", right).findings[0].message
    sizes = re.search(r" \(norm (\S+) beside (\S+), largest (\S+) beside (\S+)\)", message)
    numbers = [float(number) for number in sizes.groups()]
    np.testing.assert_allclose(numbers[::2], np.multiply(numbers[1::2], 1.1), rtol=0.01)


STEP_ARGS = (ARGS[0], ARGS[1], jax.random.key(3), jnp.arange(3))


def step(params, x, key, count, rate=0.1, ahead=1):
    value, grads = jax.value_and_grad(loss)(params, x)
    new = jax.tree.map(lambda p, g: p - rate * g, params, grads)
    return new, {"loss": value, "key": jax.random.split(key)[0], "count": count + ahead, "at": "a"}


def test_whole_steps_are_compared_by_their_files(tmp_path):
    path = tmp_path / "step"
    cg.save_run(step, STEP_ARGS, path, argnums=None)
    found = cg.compare(path, step, STEP_ARGS, argnums=None)
    assert found.ok and len(found.rows) == 6 and not found.notes, str(found)
    wrong = lambda *args: step(*args, rate=0.2, ahead=2)  # noqa: E731
    found, between = (cg.compare(f, wrong, STEP_ARGS, argnums=None) for f in (path, step))
    assert named(found) == named(between) and {f.path for f in found.findings} == {
        "0/layers", "0/out", "1/count",
    }  # fmt: skip
    ratios = [[f.ratio for f in x.findings if f.path != "1/count"] for x in (found, between)]
    np.testing.assert_allclose(*np.asarray(ratios, float), rtol=1e-3)
    found = cg.compare(path, step, (*STEP_ARGS[:2], jax.random.key(4), STEP_ARGS[3]), argnums=None)
    assert [(f.kind, f.path) for f in found.findings] == [
        ("argument", "args/2"),
        ("output", "1/key"),
    ]
    with pytest.raises(ValueError, match="run: got a step in fun, a loss in other, expected two"):
        cg.compare(path, loss, ARGS)


@pytest.mark.parametrize(
    "name", ["data parallel", *(pytest.param(n, marks=OTHERS) for n in LAYOUTS if "data" not in n)]
)
def test_sharded_arrays_are_in_the_file_as_a_whole(name, tmp_path):
    cg.save_run(mlp, LAYOUTS[name](), tmp_path / "run")
    found = cg.compare(tmp_path / "run", mlp, MLP_ARGS)
    assert found.ok and len(found.rows) == 2 and not found.unmatched and not found.findings
    layout = read_run(tmp_path / "run").header["circumstances"]["layout"]
    assert len(layout) == 4 and all("NamedSharding" in text for text in layout.values())
    found = cg.compare(tmp_path / "run", lambda *a: mlp(*a, by=1.01), MLP_ARGS)
    assert [f.module for f in found.findings] == ["second"]


# ---- damaged, foreign, newer ----


def other_header(right, path, **changes):
    file = read_run(right)
    header = {k: v for k, v in {**file.header, **changes}.items() if v is not None}
    write_run(path, {k: v for k, v in header.items() if k != "format"}, file.arrays)


def foreign(right, path):
    """Each kind of file that is none of a run: its name, what it is called, how it is made."""
    whole = right.read_bytes()
    less = dict(list(read_run(right).arrays.items())[1:])
    yield "no such file", lambda: None
    yield "a folder", path.mkdir
    path.rmdir()
    yield "an empty file", lambda: path.write_bytes(b"")
    yield "no whole .npz file", lambda: path.write_text("loss 3.4\n" * 99)
    yield "no whole .npz file", lambda: path.write_bytes(b"\x93NUMPY\x01\x00" + bytes(80))
    yield "an archive of something else", lambda: np.savez(path, header_=np.ones(3))
    yield "a damaged file", lambda: np.savez(path, header=np.ones(3))
    pickled = np.array([{}], object)
    yield "a damaged file", lambda: np.savez(path, header=pickled, allow_pickle=True)
    yield "a damaged file", lambda: write_run(path, read_run(right).header, less)
    for name in ("kind", "values", "leaves", "program", "params", "circumstances", "types"):
        yield "a damaged file", lambda name=name: other_header(right, path, **{name: None})
        yield "a damaged file", lambda name=name: other_header(right, path, **{name: [[1]]})
    for cut in np.linspace(0, len(whole), 12)[1:-1]:
        yield "no whole .npz file", lambda cut=cut: path.write_bytes(whole[: int(cut)])


def test_what_is_no_run_is_said_in_a_sentence(right, tmp_path):
    path = tmp_path / "x.npz"
    for what, make in foreign(right, path):
        make()
        with pytest.raises(
            ValueError, match=r"run: got '.*', .*, expected a file that save_run"
        ) as e:
            cg.compare(path, right)
        assert what in str(e.value), str(e.value)


def test_a_newer_file_is_said_to_be_newer(right, tmp_path, monkeypatch):
    path = tmp_path / "new.npz"
    monkeypatch.setattr("clipgrad._compare.run_file.RUN_FORMAT", 3)
    write_run(path, {"kind": "new"}, {})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="of format 3, expected format 2, which this version"):
        cg.compare(path, right)


def test_no_changed_byte_is_read_as_other_numbers(right, tmp_path):
    """Of 60 bytes all over the file: an error, or the numbers that were written."""
    whole, path = bytearray(right.read_bytes()), tmp_path / "x.npz"
    own, errors = read_run(right), 0
    for at in np.random.default_rng(0).integers(0, len(whole), 60):
        changed = whole.copy()
        changed[at] ^= 0x55
        path.write_bytes(changed)
        try:
            saved(path)
            found = read_run(path)
        except ValueError as error:
            assert "expected a file that save_run wrote" in str(error)
            errors += 1
        else:
            assert found.header == own.header and found.arrays.keys() == own.arrays.keys()
            assert all(np.array_equal(own.arrays[k], found.arrays[k]) for k in own.arrays)
    assert errors > 30


def test_a_file_is_whole_or_as_before(right, tmp_path, monkeypatch):
    path, file = tmp_path / "run.npz", read_run(right)
    path.write_text("before")

    def killed(opened, **arrays):
        opened.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", killed)
    with pytest.raises(KeyboardInterrupt):
        write_run(path, file.header, file.arrays)
    assert path.read_text() == "before" and [p.name for p in tmp_path.iterdir()] == ["run.npz"]
    monkeypatch.undo()
    write_run(path, file.header, file.arrays)
    assert read_run(path).header == file.header and path.stat().st_mode & 0o400


# ---- usage ----


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: cg.compare(p, p, ARGS), ValueError, "args: got arguments beside two runs"),
        (lambda p: cg.compare(p, loss), TypeError, "args: got NoneType, expected a tuple"),
        (lambda p: cg.compare(p, loss, ARGS, other_args=ARGS), ValueError, "other_args: got arg"),
        (lambda p: cg.compare(p, "float32", ARGS), ValueError, "other: got 'float32' beside a run"),
        (lambda p: cg.compare(3, p, ARGS), TypeError, "fun: got 3, expected a function"),
        (lambda p: cg.compare("no.npz", loss, ARGS), ValueError, "got 'no.npz', no such file"),
        (
            lambda p: cg.compare(loss, "float16", ARGS),
            ValueError,
            "or the path of a run",
        ),
        (lambda p: cg.save_run(loss, ARGS, 3), TypeError, "path: got 3, expected the path of a"),
        (lambda p: cg.save_run(loss, ARGS, "no/x.npz"), ValueError, "in a folder that exists"),
        (lambda p: cg.save_run(loss, [3], p), TypeError, "args: got list, expected a tuple"),
    ],
)
def test_wrong_usage_is_said(call, error, message, right):
    with pytest.raises(error, match=message):
        call(right)


MODULE = """
import jax.numpy as jnp
from tests.test_compare_runs import ARGS, loss

def changed(*args):
    return loss(*args, scale=1.1)

def make():
    return ARGS
"""


def test_the_command_compares_with_files(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "runmodels.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    right, wrong = str(folder / "right.npz"), str(folder / "value.npz")
    assert main(["compare", right, right]) == 0
    assert main(["compare", right, wrong]) == 1
    assert "value: the values differ from here on: read" in capsys.readouterr().out
    assert main(["compare", right, "runmodels:changed", "--args", "runmodels:make"]) == 1
    assert main(["compare", right, "missing.npz"]) == 2
    assert "got 'missing.npz', no such file" in capsys.readouterr().err
    assert main(["compare", right, wrong, "--args", "runmodels:make"]) == 2
    assert "--args" in capsys.readouterr().err


# ---- the parts ----


@pytest.mark.parametrize("dtype", ["float32", "complex64", "bfloat16"])
def test_the_sketch_of_the_host_is_that_of_the_device(dtype):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(7, 90)) * np.where(rng.random((7, 90)) < 0.1, 1e9, 1)
    x = x + (1j * x if dtype == "complex64" else 0)
    x[2, 3], x[3, 4], x[4, 5] = np.nan, np.inf, -np.inf
    x = jnp.asarray(x, dtype)
    host = np.asarray(x).astype(np.complex128 if dtype == "complex64" else np.float64)
    np.testing.assert_allclose(host_sketch(host), sketch(x), rtol=2e-5, atol=1e-5)
    assert host_sketch(np.zeros(0)).shape == sketch(jnp.zeros(0)).shape


def test_signatures_tell_arrays_apart_but_not_their_roundings():
    x = DRAW(6, 7)
    half = signature(x.astype(jnp.bfloat16))
    assert not judge_signatures(signature(x), half).differs
    assert judge_signatures(signature(x), signature(x * 1.1)).differs
    assert judge_signatures(signature(x), signature(x.T)).differs
    keys, integers = jax.random.split(jax.random.key(1)), jnp.arange(4)
    for own, other in ((keys, keys[::-1]), (integers, integers + 1)):
        assert not judge_signatures(signature(own), signature(own)).differs
        assert judge_signatures(signature(own), signature(other)).differs
    assert judge_signatures(signature(x), signature(integers)).differs


def test_a_program_is_read_as_it_was_written():
    traced = jax.make_jaxpr(jax.grad(loss))(*ARGS)
    program = program_record(traced)
    data = json.loads(json.dumps(program_data(program)))
    again = program_from_data(data)
    assert json.loads(json.dumps(program_data(again))) == data
    assert shared_modules(program, again) == shared_modules(program, program) != set()
    other = program_record(jax.make_jaxpr(jax.grad(changed(scale=2.0)))(*ARGS))
    assert ("transpose", "read") not in shared_modules(again, other)
    assert shared_modules(again, other) == shared_modules(program, other)


# ---- the modules that two programs share: the same operations of the same operands ----

A, B = jnp.arange(4.0), jnp.ones(4)


def program(inside, extra=False):
    def run(a, b):
        with jax.named_scope("before"):
            x = jnp.sin(a)
        with jax.named_scope("inside"):
            y = inside(x, b)
        with jax.named_scope("after"):
            return jnp.sum(y * x) + (jnp.sum(x) if extra else 0)

    return program_record(trace(run, (A, B), {}).program)


def shared(other, extra=False):
    return shared_modules(program(jnp.subtract), program(other, extra))


def looped(x, b, by=1.0):
    return jax.lax.scan(lambda h, y: (h, y * by), x[0], b)[1]


OTHER_INSIDE = {
    "operands exchanged": lambda x, b: b - x,
    "another operand": lambda x, b: x - x,
    "another number": lambda x, b: x - b * 2,
    "a stop": lambda x, b: jax.lax.stop_gradient(x) - b,
    "a rule of its own": with_vjp(jnp.subtract, lambda grads: grads),
}


def test_equal_programs_share_all_modules():
    assert shared(jnp.subtract) == {("before",), ("inside",), ("after",)}
    assert shared_modules(program(looped), program(looped)) >= {("inside",), ("after",)}


@pytest.mark.parametrize("name", OTHER_INSIDE)
def test_what_differs_is_in_the_changed_module_alone(name):
    assert shared(OTHER_INSIDE[name]) == {("before",), ("after",)}


def test_a_change_inside_of_a_loop_is_one_of_the_loop():
    found = shared_modules(program(looped), program(lambda x, b: looped(x, b, by=2.0)))
    assert found == {("before",), ("after",)}


def test_a_module_with_another_operation_is_not_shared():
    assert shared(jnp.subtract, extra=True) == {("before",), ("inside",)}
