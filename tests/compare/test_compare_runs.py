"""Runs in files: a file stands for its version in a comparison, and says so if it cannot."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipgrad as cg
from clipgrad._commands.cli import main
from clipgrad._compare import file
from clipgrad._compare.record import Record
from clipgrad._compare.sketches import LARGEST_AT, NORM_AT, host_sketch, sketch
from tests.compare.compare_layouts import ARGS as MLP_ARGS
from tests.compare.compare_layouts import LAYOUTS, mlp
from tests.compare.compare_models import with_vjp
from tests.compare.compare_pairs import EQUAL, PLANTED, Draw
from tests.helpers import array, key_of
from tests.rows import this_turn

pytestmark = pytest.mark.usefixtures("users_promotion")

CORE = ("advantage not stopped", "masks")
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
def right(tmp_path_factory):
    """The file of a loss."""
    path = tmp_path_factory.mktemp("runs") / "right.npz"
    cg.save_run(loss, ARGS, path)
    return path


@pytest.fixture(scope="module")
def folder(right):
    """Files of a loss and of each wrong one."""
    for name, fun in FAULTS.items():
        cg.save_run(fun, ARGS, right.with_stem(name))
    return right.parent


def named(comparison):
    return [(f.kind, f.module, f.step, f.path, f.line) for f in comparison.findings]


@pytest.mark.slow
def test_a_function_agrees_with_its_own_file(right):
    comparison = cg.compare(right, loss, ARGS)
    assert (
        comparison.ok
        and not comparison.findings
        and not comparison.unmatched
        and not comparison.notes
    ), str(comparison)
    assert len(comparison.rows) == 7 and all(row.cotangent is not None for row in comparison.rows)
    assert cg.compare(right, right).rows == cg.compare(str(right), str(right)).rows


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_says_what_its_function_would(fault, folder, right):
    between = cg.compare(loss, FAULTS[fault], ARGS)
    assert [(f.kind, f.module, f.step) for f in between.findings] == [WHERE[fault]]
    for pair in (
        (right, FAULTS[fault], ARGS),
        (loss, folder / f"{fault}.npz", ARGS),
        (right, folder / f"{fault}.npz"),
    ):
        comparison = cg.compare(*pair)
        assert named(comparison) == named(between) and not comparison.ok, str(comparison)
        assert not comparison.notes and not comparison.unmatched
        for mine, other in zip(comparison.rows, between.rows, strict=True):
            assert (mine.module, mine.steps, mine.kind) == (other.module, other.steps, other.kind)
            np.testing.assert_allclose(mine.value, other.value, rtol=1e-5)
            tolerances = [(row.value_tolerance, row.cotangent_tolerance) for row in (mine, other)]
            np.testing.assert_allclose(*tolerances, rtol=1e-4)


def rows(table):
    """An eighth of the pairs: all are compared without files."""
    return this_turn(table, 8, CORE)


@pytest.mark.slow
@pytest.mark.parametrize("name", rows([*PLANTED, *EQUAL]))
def test_pairs_of_losses_are_told_apart_by_their_files(name, tmp_path):
    pair = PLANTED.get(name) or EQUAL[name]
    args = pair.args(Draw("float32"))
    paths = [tmp_path / "fun.npz", tmp_path / "other.npz"]
    for fun, path in zip((pair.fun, pair.other), paths, strict=True):
        cg.save_run(fun, args, path)
    for comparison in (cg.compare(*paths), cg.compare(paths[0], pair.other, args)):
        expected = [pair.finding] if pair.finding else []
        assert [(f.kind, f.module, f.step) for f in comparison.findings] == expected, str(
            comparison
        )
        assert comparison.ok is (pair.finding is None) and (comparison.rows or comparison.unmatched)


@pytest.mark.slow
def test_other_arguments_are_named_first(right):
    params = {**ARGS[0], "out": ARGS[0]["out"].at[1, 2].add(0.5)}
    comparison = cg.compare(right, loss, (params, ARGS[1]))
    assert [(f.kind, f.path) for f in comparison.findings][0] == ("argument", "out"), str(
        comparison
    )
    assert [f.kind for f in comparison.findings] == ["argument", "value"]
    comparison = cg.compare(right, loss, (ARGS[0], ARGS[1] * 2))
    assert comparison.findings[0].path == "args[1]" and "1 of 3" in comparison.findings[0].message


@pytest.mark.slow
def test_the_file_is_the_table_without_the_numbers_of_arrays(right):
    record = file.load_record(right)
    assert {"clipgrad", "jax", "device", "platform", "processes"} == {*record.circumstances}
    rows = {(row.kind, row.name): row for row in record.rows}
    first = rows["value", "layers/mlp"]
    assert (
        first.steps == (3,) and first.shape == (5, 4) and first.numbers.sketch.shape == (3, 1, 515)
    )
    path, _, line = first.line.rpartition(":")
    assert pathlib.Path(path).samefile(__file__) and int(line) > 0
    out, numbers = rows["argument", "out"], np.asarray(ARGS[0]["out"], np.float64)
    sizes = out.numbers.sketch[0, [NORM_AT, LARGEST_AT]]
    np.testing.assert_allclose(sizes, [np.linalg.norm(numbers), abs(numbers).max()])
    assert (
        rows["gradient", "out"].node == out.node
        and rows["cotangent", "read"].numbers.moved is not None
    )
    assert right.stat().st_size < 90_000


def test_a_record_is_read_as_it_was_written(right, tmp_path):
    record = file.load_record(right)
    file.save_record(record, tmp_path / "again")
    again = file.load_record(tmp_path / "again")
    assert record.edges == again.edges != [] and record.scopes == again.scopes
    for row, row_of_other in zip(record.rows, again.rows, strict=True):
        known = [f for f in vars(row) if f != "numbers"]
        assert [getattr(row, f) for f in known] == [getattr(row_of_other, f) for f in known]
        assert row.numbers.exact == row_of_other.numbers.exact
        for x, y in zip(row.numbers[1:3], row_of_other.numbers[1:3], strict=True):
            assert (x is None) == (y is None) and (x is None or np.array_equal(x, y))


@pytest.mark.slow
def test_a_finding_shows_sizes_that_are_apart(folder, right):
    message = cg.compare(folder / "value.npz", right).findings[0].message
    sizes = re.search(r" \(norm (\S+) beside (\S+), largest (\S+) beside (\S+)\)", message)
    numbers = [float(number) for number in sizes.groups()]
    np.testing.assert_allclose(numbers[::2], np.multiply(numbers[1::2], 1.1), rtol=0.01)


STEP_ARGS = (
    ARGS[0],
    ARGS[1],
    key_of(3),
    array(np.arange(3), np.int32),
)


def step(params, x, key, count, rate=0.1, ahead=1):
    value, grads = jax.value_and_grad(loss)(params, x)
    new = jax.tree.map(lambda p, g: p - rate * g, params, grads)
    return new, {"loss": value, "key": jax.random.split(key)[0], "count": count + ahead, "at": "a"}


@pytest.mark.slow
def test_whole_steps_are_compared_by_their_files(tmp_path):
    path = tmp_path / "step"
    cg.save_run(step, STEP_ARGS, path, argnums=None)
    comparison = cg.compare(path, step, STEP_ARGS, argnums=None)
    assert comparison.ok and len(comparison.rows) > 6 and not comparison.notes, str(comparison)
    wrong = lambda *args: step(*args, rate=0.2, ahead=2)  # noqa: E731
    comparison, between = (cg.compare(f, wrong, STEP_ARGS, argnums=None) for f in (path, step))
    assert named(comparison) == named(between) and {f.path for f in comparison.findings} == {
        "0/layers", "0/out", "1/count",
    }  # fmt: skip
    ratios = [[f.ratio for f in x.findings if f.path != "1/count"] for x in (comparison, between)]
    np.testing.assert_allclose(*np.asarray(ratios, float), rtol=1e-3)
    comparison = cg.compare(
        path, step, (*STEP_ARGS[:2], jax.random.key(4), STEP_ARGS[3]), argnums=None
    )
    assert [(f.kind, f.path) for f in comparison.findings] == [
        ("argument", "args/2"),
        ("output", "1/key"),
    ]
    with pytest.raises(ValueError, match="write argnums=None for both or for none"):
        cg.compare(path, loss, ARGS)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_sharded_arrays_are_in_the_file_as_a_whole(name, tmp_path):
    cg.save_run(mlp, LAYOUTS[name](), tmp_path / "run")
    comparison = cg.compare(tmp_path / "run", mlp, MLP_ARGS)
    assert (
        comparison.ok
        and len(comparison.rows) == 2
        and not comparison.unmatched
        and not comparison.findings
    )
    comparison = cg.compare(tmp_path / "run", lambda *a: mlp(*a, by=1.01), MLP_ARGS)
    assert [f.module for f in comparison.findings] == ["second"]


# ---- damaged, foreign, newer ----


def rewritten(right, path, change):
    """The file with a change of its header and arrays."""
    header, arrays = file._packed(file.load_record(right))
    change(header, arrays)
    file._write_file(path, header, arrays)


def foreign(right, path):
    """Each kind of file that is none of a run: what it is called, how it is made."""
    whole = right.read_bytes()
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
    changes = [lambda h, a: a.pop("numbers1"), lambda h, a: a.update(numbers1=a["numbers1"][:0])]
    changes += [lambda h, a: h["rows"][1].update(node=99)]
    for name in ("format", "rows", "edges", "scopes", "devices", "circumstances"):
        changes.append(lambda h, a, name=name: h.pop(name))
    for change in changes:
        yield "a damaged file", lambda change=change: rewritten(right, path, change)
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


@pytest.mark.parametrize("version", [min(file.READABLE_FORMATS) - 1, file.RECORD_FORMAT + 1])
def test_a_file_of_another_format_is_said_to_be_one(version, right, tmp_path):
    path = tmp_path / "other.npz"
    rewritten(right, path, lambda header, arrays: header.update(format=version))
    readable = " or ".join(map(str, file.READABLE_FORMATS))
    expected = f"of format {version}, expected format {readable}, which this version"
    with pytest.raises(ValueError, match=expected):
        cg.compare(path, right)


def test_each_field_of_a_record_is_read_as_it_was_written(right, tmp_path):
    record, defaults = file.load_record(right), Record()
    others = {"framework": "torch", "rules": ["a rule"], "notes": ["a note"]}
    others |= {"argnums": (0, "w"), "devices": (2, 8)}
    same = {f.name for f in dataclasses.fields(Record) if is_same(record, defaults, f.name)}
    assert same <= others.keys(), "a further field needs another value than its default here"
    record = dataclasses.replace(record, **others)
    file.save_record(record, tmp_path / "x.npz")
    read = file.load_record(tmp_path / "x.npz")
    assert file._packed(read)[0] == file._packed(record)[0]
    assert read.argnums == record.argnums and read.devices == record.devices


def is_same(record, other, name):
    return getattr(record, name) == getattr(other, name)


def test_no_changed_byte_is_read_as_other_numbers(right, tmp_path):
    """Of 60 bytes all over the file: an error, or the numbers that were written."""
    whole, path = bytearray(right.read_bytes()), tmp_path / "x.npz"
    written, errors = file._packed(file.load_record(right)), 0
    for at in np.random.default_rng(0).integers(0, len(whole), 60):
        changed = whole.copy()
        changed[at] ^= 0x55
        path.write_bytes(changed)
        try:
            read = file._packed(file.load_record(path))
        except ValueError as error:
            assert "expected a file that save_run wrote" in str(error)
            errors += 1
        else:
            assert str(read[0]) == str(written[0])
            assert all(np.array_equal(written[1][k], read[1][k]) for k in written[1])
    assert errors > 30


def test_a_file_is_whole_or_as_before(right, tmp_path, monkeypatch):
    path, record = tmp_path / "run.npz", file.load_record(right)
    path.write_text("before")

    def killed(opened, **arrays):
        opened.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", killed)
    with pytest.raises(KeyboardInterrupt):
        file.save_record(record, path)
    assert path.read_text() == "before" and [p.name for p in tmp_path.iterdir()] == ["run.npz"]
    monkeypatch.undo()
    file.save_record(record, path)
    assert len(file.load_record(path).rows) == len(record.rows) and path.stat().st_mode & 0o400


@pytest.mark.parametrize("kinds", [("int32", "int8"), ("uint8", "int32"), ("bool", "int32")])
def test_integers_of_another_width_are_the_same_by_their_values(kinds, tmp_path):
    narrow, other = (np.array([0, 1, 1]).astype(kind) for kind in kinds)
    for name, x in (("own", narrow), ("other", other)):
        cg.save_run(lambda n: {"n": n}, (x,), tmp_path / name, argnums=None)
    comparison = cg.compare(tmp_path / "own", tmp_path / "other")
    assert comparison.ok and comparison.notes == (f"n: {kinds[0]} in fun, {kinds[1]} in other",), (
        str(comparison)
    )
    comparison = cg.compare(tmp_path / "own", lambda n: {"n": n[::-1]}, (other,), argnums=None)
    assert [(f.kind, f.path) for f in comparison.findings] == [("output", "n")], str(comparison)


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
from tests.compare.test_compare_runs import ARGS, loss

def changed(*args):
    return loss(*args, scale=1.1)

def make():
    return ARGS
"""


@pytest.mark.slow
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
    x = array(x, dtype)
    host = np.asarray(x).astype(np.complex128 if dtype == "complex64" else np.float64)
    np.testing.assert_allclose(host_sketch(host), sketch(x), rtol=2e-5, atol=1e-5)
    assert host_sketch(np.zeros(0)).shape == sketch(array(np.zeros(0))).shape
