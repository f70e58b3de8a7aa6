"""What the recorder takes, it gives back: every leaf, key and container, in another process."""

import collections
import enum
import functools
import json
import operator
import pathlib
import subprocess
import sys
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import clipgrad as cg
from clipgrad._recorder import files
from clipgrad._recorder.files import MANIFEST
from tests.helpers import array, assert_same

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.slow]
TX = cg.skip_spikes(optax.sgd(0.1), sigma=None, halt=True)


class Pair(NamedTuple):
    up: jax.Array
    down: jax.Array


def leaves():
    """Every kind of leaf."""
    trees = {
        f"jax {dtype}": jnp.array([0, 1], dtype)
        for dtype in (
            "bool int2 int4 int8 uint8 int16 uint16 int32 uint32 float16 bfloat16 float32 "
            "float8_e3m4 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e4m3fnuz "
            "float8_e5m2fnuz complex64"
        ).split()
    }
    trees |= {f"numpy {dtype}": np.ones((2, 2), dtype) for dtype in "?bBhHiIlLqQefdFD"}
    trees |= {"0-d": np.ones((), "f4"), "empty": np.zeros((0, 3), "f8"), "none": jnp.zeros((0, 3))}
    trees["nan"] = np.uint32([0x7FC12345, 0xFF800000, 0x80000000]).view(np.float32)
    trees["fortran"] = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    trees |= {f"{d} of numpy": np.ones(3, jnp.dtype(d)) for d in ("bfloat16", "float8_e5m2")}
    for impl in ("threefry2x32", "rbg"):
        trees[impl] = jax.random.split(jax.random.key(3, impl=impl), 2)
    plain = [True, 0, -(2**80), 0.1, -0.0, float("inf"), "a\ud800b", ""]
    return trees | {f"python {i}": x for i, x in enumerate(plain)}


def everything():
    """A tree with all of it."""
    keyed = [{"b": 1, "a/b": 2, "": 3, "ü": 4}, {3: 1, -1: 2, 2**70: 3}, {"0": 1, "1": 2}]
    containers = [[], {}, None, [None, [1]], {"deep": [[[{"x": 1}]]]}, nested(300)]
    return {"leaves": leaves(), "keyed": keyed, "containers": containers}


def described(tree):
    """A tree as text in which equal text means equal bits and types."""
    if isinstance(tree, dict):
        items = [f"{type(k).__name__} {k!r}: {described(v)}" for k, v in tree.items()]
        return f"{type(tree).__name__}{{{', '.join(sorted(items))}}}"
    if type(tree) in (list, tuple):
        return f"{type(tree).__name__}[{', '.join(map(described, tree))}]"
    if isinstance(tree, jax.Array) and jnp.issubdtype(tree.dtype, jax.dtypes.prng_key):
        return f"{jax.random.key_impl(tree)} {described(jax.random.key_data(tree))}"
    if isinstance(tree, jax.Array | np.ndarray | np.generic):
        x = np.asarray(tree)
        kind = "jax" if isinstance(tree, jax.Array) else "numpy"
        return f"{kind} {x.dtype.str} {x.dtype} {x.shape} {x.tobytes().hex()}"
    return f"{type(tree).__name__} {ascii(tree)}"


def captured(folder, batch, state=None, **more):
    """The capture of a bad step."""
    params = {"w": jnp.ones(2)}
    if state is None:
        _, state = TX.update({"w": jnp.full(2, jnp.nan)}, TX.init(params), params)
        more = {"params": params} | more
    recorder = cg.FlightRecorder(folder, raise_on_halt=False)
    recorder.record(state, batch, **more)
    recorder.close()
    return recorder.captures[0]


def halted(params):
    """The state of an optimizer that has halted."""
    bad = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    return TX.update(bad, TX.init(params), params)[1]


def test_all_that_is_taken_comes_back_in_another_process(tmp_path):
    path = captured(tmp_path, everything(), note=everything()["keyed"])
    script = (
        "import sys, clipgrad as cg; from tests.recorder.test_recorder_files import *\n"
        "found = cg.load_capture(sys.argv[1])\n"
        "print(described(found.batch)); print(described(found.extra['note']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    expected = everything()
    assert done.stdout.splitlines() == [described(expected), described(expected["keyed"])]


def nested(levels):
    return 1 if levels == 0 else [nested(levels - 1)]


def test_sequences_are_lists_and_objects_dictionaries(tmp_path):
    batch = {
        "pair": Pair(jnp.ones(2), jnp.zeros(1)),
        "tuple": (1, (2.5,)),
        "numbered": {0: "a", 1: "b"},
        "complex": 1 - 2j,
        "optax": optax.EmptyState(),
    }
    loaded = cg.load_capture(captured(tmp_path, batch)).batch
    assert_same(loaded.pop("pair"), {"up": jnp.ones(2), "down": jnp.zeros(1)})
    assert loaded.pop("complex") == np.complex128(1 - 2j)
    assert loaded == {"tuple": [1, [2.5]], "numbered": ["a", "b"], "optax": {}}
    bare = cg.load_capture(captured(tmp_path / "bare", jnp.arange(3)))
    assert_same(bare.batch, jnp.arange(3))
    like = cg.load_capture(bare.path, ({"w": jnp.ones(2)}, np.zeros(3, np.int32)))
    assert_same(like.args, bare.args)


class Color(enum.IntEnum):
    """A number that would come back as another class."""

    RED = 1


class Key:
    """A key that can be sorted and hashed."""

    def __lt__(self, other):
        return id(self) < id(other)


@jax.tree_util.register_pytree_with_keys_class
class Twice:
    """A container whose two parts have one key."""

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey("x")
        return [(key, 1), (key, 2)], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls()


REFUSED = {
    "objects": ([np.array([object()])], TypeError, "batch: got ndarray at '0', expected arrays, n"),
    "function": ({"f": len}, TypeError, "batch: got builtin_function.* at 'f', expected"),
    "deque": (collections.deque([1]), TypeError, "batch: got deque, expected arrays, numbers or"),
    "enum": ([Color.RED], TypeError, "batch: got Color at '0', expected arrays, numbers or text"),
    "mask": (np.ma.masked_array([1, 2], [0, 1]), TypeError, "batch: got MaskedArray, expected"),
    "key": ([{Key(): 1}], TypeError, "batch: got the dictionary key .* of type Key, expected text"),
    "keys": ({1.5: 1}, TypeError, "batch: got the dictionary key 1.5 of type float, expected text"),
    "twice": (Twice(), ValueError, "batch: got several parts of one key at 'x'"),
    "bytes": ([b"a"], TypeError, "batch: got bytes at '0', expected arrays, numbers or text"),
    "text": ([np.array("a")], TypeError, "batch: got an array of dtype <U1 at '0', expected num"),
    "order": (np.ones(2, ">f4"), TypeError, "batch: got an array of dtype >f4, expected numbers"),
    "odd": (
        array(np.ones(2), "uint2"),
        TypeError,
        "batch: got an array of dtype uint2, expected num",
    ),
}


@pytest.mark.parametrize(("tree", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_written_is_refused_by_the_first_record(tree, error, match, tmp_path):
    recorder = cg.FlightRecorder(tmp_path)
    with pytest.raises(error, match=match):
        recorder.record(halted({"w": jnp.ones(2)}), tree)
    with pytest.raises(error, match=match.replace("batch", "more")):
        recorder.record(halted({"w": jnp.ones(2)}), 1, more=tree)


def test_a_step_is_a_number_or_text(tmp_path):
    for i, step in enumerate(["a", 3, np.int8(3), jnp.int32(3), jnp.bfloat16(3), 2.5]):
        capture = cg.load_capture(captured(tmp_path / str(i), 1, step=step))
        assert capture.step == step
    with pytest.raises(TypeError, match="step: got b'3' of type bytes, expected a number or text"):
        captured(tmp_path / "bytes", 1, step=b"3")


# Models in their own classes.


class Block(eqx.Module):
    up: jax.Array
    down: jax.Array
    name: str
    act: object = jnp.tanh


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.up = self.again = nnx.Linear(2, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.rngs = rngs


class Listed(nnx.Module):
    """A list, whose keys are numbers beside names; a variable at two places."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs), nnx.Linear(2, 2, rngs=rngs)])
        self.again = self.layers[0].kernel


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(3, kernel_init=init)(x)


def changed(tree):
    """The same tree with other numbers."""
    is_number = lambda x: eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)  # noqa: E731
    return jax.tree.map(lambda x: x + 1 if is_number(x) else x, tree)


def blocks():
    block = Block(jnp.arange(4.0), jnp.arange(4.0) + 10, "block")
    return {"b": [block, Pair(jnp.ones(2), jnp.zeros(2))]}


MODELS = {
    "nested": blocks,
    "nnx": lambda: Tied(nnx.Rngs(0)),
    "nnx list": lambda: Listed(nnx.Rngs(0)),
    "nnx state": lambda: nnx.state(Tied(nnx.Rngs(0))),
    "partitioned": lambda: Boxed().init(jax.random.key(0), jnp.ones((1, 2))),
    "optax": lambda: optax.chain(optax.adam(0.1), optax.ema(0.5)).init({"w": jnp.ones(2)}),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_comes_back_in_its_own_class_by_path(name, tmp_path):
    model = MODELS[name]()
    path = captured(tmp_path, 1, halted({"w": jnp.ones(2)}), params=model)
    kind = {"nnx": Tied, "nnx list": Listed}.get(name)
    like = kind(nnx.Rngs(5)) if kind else changed(MODELS[name]())
    capture = cg.load_capture(path).restore(like)
    assert jax.tree.structure(capture) == jax.tree.structure(model)
    for ours, theirs in zip(jax.tree.leaves(capture), jax.tree.leaves(model), strict=True):
        assert described(ours) == described(theirs) or ours is theirs
    assert kind is not Tied or capture.again is capture.up
    assert kind is not Listed or capture.again is capture.layers[0].kernel


def test_a_training_that_goes_on_keeps_the_model_and_its_shared_variables():
    model = Listed(nnx.Rngs(0))
    state = cg.resume({"model": model, "opt_state": halted({"w": jnp.ones(2)})})
    assert state["model"] is model and not state["opt_state"].halted
    optimizer = nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), TX, wrt=nnx.Param)
    assert not cg.resume(optimizer).opt_state.halted[...]


def test_another_path_shape_or_dtype_is_refused(tmp_path):
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    capture = cg.load_capture(captured(tmp_path, 1, halted({"w": jnp.ones(2)}), params=params))
    for like, match in (
        (
            {"a": jnp.ones(2)},
            "params of the capture: none only in .* tree, 'b' only in .* capture",
        ),
        (
            {"a": jnp.ones(2), "c": jnp.ones(3)},
            "capture: 'c' only in the tree, 'b' only in the capture; expected its",
        ),
        ({"a": jnp.ones(3), "b": jnp.ones(3)}, r"float32\[3\] at 'a', expected float32\[2\]"),
        ({"a": jnp.ones(2, int), "b": jnp.ones(3)}, r"int32\[2\] at 'a', expected float32\[2\]"),
    ):
        with pytest.raises(ValueError, match=match):
            capture.restore(like)
    with pytest.raises(ValueError, match="name: got 'model', expected 'params', 'state', 'batch'"):
        capture.restore(params, name="model")
    with pytest.raises(TypeError, match="path: got None, expected the folder of a capture"):
        cg.load_capture(None)


# Damage, and the worst moments.


def damaged(manifest):
    """Manifests with something taken out or replaced, at every place."""
    text = json.dumps(manifest)
    yield from (text[:-3], "[]", "3", "[" * 5000, '{"format": 3}', '{"format": "x"}')
    for *around, key in paths(manifest):
        for edit in ([], 3.5, [[]]):
            copy = json.loads(text)
            part = functools.reduce(operator.getitem, around, copy)
            if edit == []:
                del part[key]
            else:
                part[key] = edit
            yield json.dumps(copy)


def paths(data, path=()):
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items if isinstance(data, dict | list) else ():
        yield (*path, key)
        yield from paths(value, (*path, key)) if isinstance(value, dict | list) else ()


def test_a_damaged_manifest_is_an_error_that_says_so_or_does_no_harm(tmp_path):
    path = captured(tmp_path, {"x": np.ones(3), "y": [1, "c", jnp.ones(2)]})
    manifest = json.loads((path / MANIFEST).read_text())
    refused = 0
    for text in list(damaged(manifest))[::7]:
        (path / MANIFEST).write_text(text)
        try:
            cg.load_capture(path)
        except (ValueError, FileNotFoundError) as error:
            assert "path: got" in str(error)
            refused += 1
    assert refused > 5
    (path / MANIFEST).write_text(json.dumps(manifest))
    for file in (path / "arrays").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:5])
    with pytest.raises(ValueError, match="path: got .* whose arrays can't be read: "):
        cg.load_capture(path)


@pytest.mark.parametrize("moment", ["save", "rename"])
def test_a_capture_that_ctrl_c_interrupts_is_written_by_close(moment, tmp_path, monkeypatch):
    recorder, state = cg.FlightRecorder(tmp_path, raise_on_halt=False), halted({"w": jnp.ones(2)})

    def interrupted(*_, **__):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(*(json, "dumps") if moment == "save" else ("os.rename",), interrupted)
    with pytest.raises(KeyboardInterrupt):
        recorder.record(state, 1)
        recorder.close()
    assert recorder.captures == []
    recorder.close()
    assert cg.load_capture(*recorder.captures).batch == 1


def test_recorders_that_share_a_directory_write_at_the_same_time(tmp_path, monkeypatch):
    recorders = [cg.FlightRecorder(tmp_path, raise_on_halt=False) for _ in range(3)]
    state, others = halted({"w": jnp.ones(2)}), [1, 2]

    def write(i):
        recorders[i].record(state, np.full(2, i))
        recorders[i].close()

    def interleaved(_):
        """While one capture is written, before it has its name, another recorder writes its own."""
        if others:
            write(others.pop())

    monkeypatch.setattr(files, "_synchronize", interleaved)
    write(0)
    for i, recorder in enumerate(recorders):
        assert cg.load_capture(*recorder.captures).batch.tolist() == [i, i]
    assert len(list(tmp_path.iterdir())) == 3 and not others


def test_a_directory_whose_name_orbax_takes_for_a_pattern_is_refused(tmp_path):
    for name in ("run[1]", "run*", "run?"):
        with pytest.raises(ValueError, match=r"directory: got .*run.*, expected a path without \*"):
            cg.FlightRecorder(tmp_path / name)
    cg.FlightRecorder(tmp_path / "run (1) ü")


def test_the_batch_of_a_dispatch_of_several_steps_is_captured(tmp_path):
    step = cg.train_step(lambda p, x: jnp.sum(jnp.log(x * p["w"] ** 2)), TX)

    @jax.jit
    def several(state, batches):
        return jax.lax.scan(step.update, state, batches)[0]

    state = step.init({"w": jnp.float32([1.0, 2.0])})
    recorder = cg.FlightRecorder(tmp_path, raise_on_halt=False)
    batch = np.ones((3, 4, 2), np.float32) * np.arange(1, 4, dtype=np.float32)[:, None, None]
    batch[1, 2, 0] = 0
    for i, batches in enumerate(batch):
        state = several(state, batches)
        recorder.record(state, batches, key=jax.random.key(0), step=range(4 * i, 4 * i + 4))
    recorder.close()
    capture = cg.load_capture(*recorder.captures)
    assert capture.step == 6 and capture.meta["steps"] == 4 and capture.meta["step_in_batch"] == 2
    np.testing.assert_array_equal(capture.batch, batch[1])
    assert capture.key is not None
