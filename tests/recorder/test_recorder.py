"""The flight recorder: which step it captures, what it keeps, what it costs and what may fail."""

import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from clipgrad._commands.cli import main
from clipgrad._recorder import files
from clipgrad._recorder import recorder as recorder_module
from tests.helpers import array, assert_same

pytestmark = [pytest.mark.usefixtures("users_promotion")]


def loss(params, batch):
    return jnp.sum(jnp.log(batch * params["w"] ** 2))


def optimizer(inner=None, halt=True, **options):
    options = {"sigma": None} | options
    return cg.skip_spikes(optax.adam(0.1) if inner is None else inner, halt=halt, **options)


STEP = cg.train_step(loss, optimizer())
PARAMS = {"w": np.float32([1.0, 2.0])}
GOOD, BAD = np.float32([1.0, 2.0]), np.float32([1.0, 0.0])


def batches(count, *bad):
    """Batches that differ, of which some have a zero."""
    return [(BAD if i in bad else GOOD) * np.float32(i + 1) for i in range(count)]


def run(recorder, batches_of_run, step=STEP, state=None, **more):
    state = step.init(PARAMS) if state is None else state
    for i, batch in enumerate(batches_of_run):
        state, metrics = step(state, batch)
        recorder.record(state, batch, step=i, loss=metrics["loss"], **more)
    recorder.close()
    return state


def captured(recorder, batches_of_run, **options):
    with pytest.raises(cg.HaltedError) as error:
        run(recorder, batches_of_run, **options)
    return cg.load_capture(error.value.path)


@pytest.fixture
def recorder(tmp_path):
    return cg.FlightRecorder(tmp_path / "captures")


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    """Of a run whose step 7 is bad."""
    recorder = cg.FlightRecorder(tmp_path_factory.mktemp("captures"))
    with jax.numpy_dtype_promotion("standard"):
        return captured(recorder, batches(12, 7), key=jax.random.key(3), note="from shard 5")


# What a capture holds.


def test_a_capture_has_the_parameters_before_the_bad_step_and_its_batch(capture):
    state = STEP.init(PARAMS)
    for batch in batches(7):
        state, _ = STEP(state, batch)
    assert_same(capture.params, state.params)
    restored = capture.restore(STEP.init(PARAMS), "state")
    assert_same(restored.opt_state.inner_state, state.opt_state.inner_state)
    assert capture.state["opt_state"]["inner_state"][0]["count"] == 7
    assert capture.step == 7 and capture.meta["halted_at"] == 7
    assert_same(capture.batch, batches(12, 7)[7])
    assert capture.key == jax.random.key(3) and capture.extra["note"] == "from shard 5"
    assert capture.args == (capture.params, capture.batch)
    assert capture.meta["versions"]["jax"] == jax.__version__


@pytest.mark.slow
def test_a_loss_that_needs_a_model_says_what_to_do_with_a_capture(capture):
    with pytest.raises(TypeError, match="'dict' object is not callable") as error:
        cg.diagnose(lambda model, batch: model(batch).sum(), capture.args)
    advice = "write diagnose(loss, (capture.restore(model), capture.batch))"
    assert any(advice in note for note in error.value.__notes__)
    with pytest.raises(TypeError) as error:
        cg.diagnose(lambda model, batch: model(batch).sum(), tuple(capture.args))
    assert not any(advice in note for note in getattr(error.value, "__notes__", ()))


COMMAND = """
import jax.numpy as jnp

def loss(params, batch):
    return jnp.sum(jnp.log(batch * params["w"] ** 2))

def kept_positive(capture):
    return capture.params, jnp.maximum(capture.batch, 1)

def wrong(capture):
    return [capture]
"""


@pytest.mark.slow
def test_the_command_line_takes_a_capture(capture, tmp_path, monkeypatch, capsys):
    (tmp_path / "models_of_captures.py").write_text(COMMAND)
    monkeypatch.chdir(tmp_path)
    command = ["diagnose", "models_of_captures:loss", "--capture", str(capture.path)]
    assert main(command) == 1
    out = capsys.readouterr().out
    assert out.startswith("capture of step 7: ") and "models_of_captures.py:5: log at 0" in out
    assert "example 1: its loss is -inf" in out and "example 0" not in out
    assert main([*command, "--args", "models_of_captures:kept_positive"]) == 0
    assert main([*command, "--args", "models_of_captures:wrong"]) == 2
    assert main(["diagnose", "models_of_captures:loss", "--capture", "nowhere"]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].endswith("wrong: got a list from it, expected the tuple of arguments")
    assert "expected a capture" in shown[1]


@pytest.mark.slow
def test_a_healthy_replay_is_said_to_be_not_reproduced(capture):
    diagnosis = cg.diagnose(lambda p, x: jnp.sum(p["w"] * x), capture.args)
    assert diagnosis.ok and "not reproduced: step 7 was not finite on 8 devices (cpu, jax" in str(
        diagnosis
    )
    assert "not reproduced" not in str(cg.diagnose(lambda w: w**2, (1.0,)))


@pytest.mark.slow
@pytest.mark.parametrize("through", ["state", "params", "batch"])
def test_a_capture_whose_arrays_a_step_has_donated_says_so(tmp_path, through):
    capture_of_batch = captured(
        cg.FlightRecorder(tmp_path), [jnp.asarray(x) for x in batches(3, 1)]
    )
    args = capture_of_batch.args
    if through == "state":  # a second training step from the capture
        STEP(capture_of_batch.restore(STEP.init(PARAMS), "state"), GOOD)
    else:
        jax.jit(lambda x: jax.tree.map(jnp.negative, x), donate_argnums=0)(
            getattr(capture_of_batch, through)
        )
    name = "batch" if through == "batch" else "params"
    again = f"{name}: got an array.* that a step has overwritten.*load_capture"
    for read in (
        lambda: capture_of_batch.args,
        lambda: capture_of_batch.restore(getattr(capture_of_batch, name), name),
    ):
        with pytest.raises(ValueError, match=again):
            read()
    for run in (cg.diagnose, lambda loss, args: cg.compare(loss, loss, args)):
        where = "args[1]" if name == "batch" else "args[0]['w']"
        with pytest.raises(ValueError, match="^args: got an array .* overwritten, at ") as caught:
            run(loss, args)
        assert f"at {where}, expected" in str(caught.value)
    assert cg.diagnose(loss, cg.load_capture(capture_of_batch.path).args).findings


@pytest.mark.slow
def test_the_statistics_of_the_steps_before_are_kept(capture):
    statistics = capture.meta["statistics"]
    assert statistics["step"] == list(range(8))
    norms = [float(np.linalg.norm(x)) for x in statistics["skip_spikes/raw_norm"]]
    assert all(0 < norm < np.inf for norm in norms[:7]) and not np.isfinite(norms[7])
    assert np.isneginf(statistics["loss"][7]) and np.isfinite(statistics["loss"][:7]).all()


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 5])
def test_the_step_is_that_of_the_optimizer_where_none_is_given(first, tmp_path):
    with cg.FlightRecorder(tmp_path, raise_on_halt=False) as recorder:
        state = STEP.init(PARAMS)
        for batch in batches(8, first):
            state, _ = STEP(state, batch)
            recorder.record(state, batch)
    (path,) = recorder.captures
    assert cg.load_capture(path).step == first and path.name == f"step_{first}"


# The loop may be ahead, donate, reuse its buffers, skip records, accumulate.


class Late:
    """An array whose copy has not arrived yet."""

    def __init__(self, values):
        self.values = values

    def is_ready(self):
        return False

    def copy_to_host_async(self):
        pass

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values)


@pytest.mark.slow
def test_a_loop_that_is_far_ahead_still_captures_the_batch_of_the_bad_step(recorder, monkeypatch):
    """With ``keep=4`` and a halt that is seen 30 steps later."""
    of_state = recorder_module.copied_flag
    late = lambda *args: (Late(of_state(*args)[0]), {})  # noqa: E731
    monkeypatch.setattr(recorder_module, "copied_flag", late)
    bad_step = captured(recorder, batches(40, 9))
    assert bad_step.step == 9 and (bad_step.batch == batches(40, 9)[9]).all()
    state = STEP.init(PARAMS)
    for batch in batches(9):
        state, _ = STEP(state, batch)
    assert_same(bad_step.params, state.params)


def test_no_more_batches_are_kept_than_said(recorder):
    state = STEP.init(PARAMS)
    for batch in batches(20):
        state, _ = STEP(state, batch)
        jax.block_until_ready(state)
        recorder.record(state, batch)
    assert len(recorder._records) <= recorder.keep + 1
    run(recorder, batches(2), state=state)
    assert len(recorder._records) == recorder.keep


@pytest.mark.slow
def test_it_keeps_nothing_of_the_size_of_the_parameters(tmp_path):
    step = cg.train_step(lambda w, x: jnp.sum(w * x), optimizer(optax.sgd(1.0)), donate=False)
    state, recorder = step.init(jnp.ones(1000)), cg.FlightRecorder(tmp_path)
    for _ in range(3):
        state, _ = step(state, np.float32(1.0))
        recorder.record(state, 1, params=state.params)
    assert count_large() == 1 and recorder._newest()
    del state
    assert count_large() == 0 and not recorder._newest()


def count_large():
    gc.collect()
    return sum(x.shape == (1000,) for x in jax.live_arrays())


@pytest.mark.slow
def test_a_buffer_that_the_data_iterator_writes_into_again_is_copied(recorder):
    buffer, state = np.empty(2, np.float32), STEP.init(PARAMS)
    with pytest.raises(cg.HaltedError) as error:
        for i in range(6):
            buffer[:] = batches(6, 2)[i]
            state, _ = STEP(state, buffer.copy())
            record_unseen(recorder, state, {"x": buffer})
            buffer[:] = -1
        recorder.close()
    assert_same(cg.load_capture(error.value.path).batch["x"], batches(6, 2)[2])


@pytest.mark.slow
def test_a_batch_that_was_donated_is_refused_at_the_first_step(recorder):
    state, batch = STEP.init(PARAMS), jnp.ones(2)
    batch.delete()
    with pytest.raises(ValueError, match="batch: got buffers that the step has .*'x', expected"):
        recorder.record(state, {"x": batch})
    with pytest.raises(TypeError, match="batch: got object at '1', expected arrays"):
        recorder.record(state, [1, object()])
    recorder.record(state, {"index": 7, "name": "shard 3"})
    state.opt_state.count.delete()
    with pytest.raises(ValueError, match="state: got buffers that the .* returned; call state"):
        recorder.record(state, jnp.ones(2))


@pytest.mark.slow
def test_where_steps_are_not_recorded_there_is_no_batch_rather_than_a_wrong_one(tmp_path):
    recorder, state = cg.FlightRecorder(tmp_path, raise_on_halt=False), STEP.init(PARAMS)
    for i, batch in enumerate(batches(12, 5)):
        state, _ = STEP(state, batch)
        if i % 3 == 0:
            recorder.record(state, batch, step=i)
    recorder.close()
    without_batch = cg.load_capture(*recorder.captures)
    assert without_batch.step == 5 and np.isfinite(without_batch.params["w"]).all()
    with pytest.raises(ValueError, match="batch: got none: the first record after step 5 .* 6"):
        without_batch.args  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("around", [lambda tx: tx, cg.skip_spikes], ids=["alone", "inside"])
def test_a_capture_says_that_the_optimizer_made_it_and_replays_it(around, tmp_path):
    """Adam of a zero gradient in float16 is 0 / 0."""

    def linear(params, x):
        return jnp.sum(params["w"] * x) + jnp.sum(params["v"])

    tx = around(cg.skip_spikes(optax.adam(1e-3), halt=True))
    step = cg.train_step(linear, tx, donate=False)
    params = {"w": jnp.ones(2, jnp.float16), "v": jnp.ones(2, jnp.float16)}
    state, recorder = step.init(params), cg.FlightRecorder(tmp_path)
    match = "step 0: the gradient was finite, and the optimizer made an update of 'w' that is not; "
    with pytest.raises(cg.HaltedError, match=match) as raised:
        for x in ([0, 1], [1, 1], [1, 1]):
            state, _ = step(state, batch := jnp.array(x, jnp.float16))
            recorder.record(state, batch)
        recorder.close()
    loaded = cg.load_capture(raised.value.path)
    assert "an update of 'w'" in loaded.meta["optimizer"] and loaded.step == 0
    diagnosed = cg.diagnose(linear, loaded.args)
    assert diagnosed.ok and "the optimizer made an update of 'w'" in str(diagnosed)
    again, metrics = step(cg.resume(loaded.restore(state, "state")), loaded.batch)
    halting = again.opt_state if around is not cg.skip_spikes else again.opt_state.inner_state
    assert metrics["skipped"] and halting.nonfinite_leaves["w"]


class OwnStep:
    """The step of a loop of one's own: `train_step` refuses an average of what is skipped."""

    def __init__(self, tx):
        self.tx, self.update = tx, jax.jit(self._update)

    def init(self, params):
        return cg.types.TrainState(params, self.tx.init(params))

    def _update(self, state, batch):
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        updates, opt_state = self.tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return cg.types.TrainState(params, opt_state), {"loss": value}

    def __call__(self, state, batch):
        return self.update(state, batch)


@pytest.mark.slow
@pytest.mark.parametrize("outside", [False, True])
def test_an_accumulation_gives_its_microbatch_or_the_last_of_them(outside, tmp_path):
    inside = optimizer(optax.MultiSteps(optax.adam(0.1), 3))
    around = optax.MultiSteps(optimizer(), 3)
    step = OwnStep(around) if outside else cg.train_step(loss, inside)
    microbatches = batches(9, 4)
    bad_step = captured(cg.FlightRecorder(tmp_path), microbatches, step=step)
    assert bad_step.step == (5 if outside else 4)
    np.testing.assert_array_equal(bad_step.batch, microbatches[bad_step.step])
    assert ("optax.MultiSteps" in bad_step.meta.get("microbatch", "")) == outside
    if outside:  # whose bad microbatch is another one
        shown = " ".join(str(cg.diagnose(loss, bad_step.args)).split())
        assert "not reproduced" in shown and "the last of those that optax.MultiSteps" in shown


# A training that goes on; several captures.


@pytest.mark.slow
def test_after_resume_a_second_bad_step_is_a_second_capture(tmp_path):
    recorder = cg.FlightRecorder(tmp_path, raise_on_halt=False, max_captures=2)
    state = STEP.init(PARAMS)
    batches_of_run = batches(9, 2, 4, 7)
    with pytest.warns(RuntimeWarning, match="step 7; .* max_captures: got 2, but there are"):
        for batch in batches_of_run:
            state, _ = STEP(state, batch)
            jax.block_until_ready(state)
            recorder.record(state, batch)
            recorder._look(waiting=99)
            state = cg.resume(state)
    assert [path.name for path in recorder.captures] == ["step_2", "step_4"]
    assert [cg.load_capture(p).batch[1] for p in recorder.captures] == [0, 0]


@pytest.mark.slow
def test_a_capture_is_never_overwritten(tmp_path):
    for name in ("step_1", "step_1_1"):
        assert captured(cg.FlightRecorder(tmp_path), batches(3, 1)).path == tmp_path / name


@pytest.mark.slow
def test_a_state_that_has_halted_before_says_so(tmp_path, capture):
    recorder = cg.FlightRecorder(tmp_path, raise_on_halt=False)
    state = cg.load_capture(capture.path).restore(STEP.init(PARAMS), "state")
    run(recorder, batches(2), state=state)
    (loaded,) = map(cg.load_capture, recorder.captures)
    assert loaded.step == 7 and "clipgrad.resume" in loaded.meta["no_batch"]


@pytest.mark.slow
def test_leaving_the_loop_by_another_error_writes_the_capture_and_says_so(tmp_path):
    state = STEP.init(PARAMS)
    with pytest.raises(KeyError) as error, cg.FlightRecorder(tmp_path) as recorder:
        state, _ = STEP(state, BAD)
        record_unseen(recorder, state, BAD)
        raise KeyError("mine")
    assert "the training has halted at step 0; its capture is" in error.value.__notes__[0]


def record_unseen(recorder, *args, **extra):
    """As when the flag has not arrived."""
    recorder._look = lambda **_: None
    recorder.record(*args, **extra)
    del recorder._look


@pytest.mark.slow
def test_close_without_the_state_says_what_is_missing(tmp_path):
    recorder = cg.FlightRecorder(tmp_path)
    state, _ = STEP(STEP.init(PARAMS), BAD)
    record_unseen(recorder, state, BAD)
    del state
    gc.collect()
    with pytest.raises(cg.HaltedError) as error:
        recorder.close()
    loaded = cg.load_capture(error.value.path)
    assert (loaded.batch == BAD).all()
    with pytest.raises(ValueError, match="params: got none, expected a state with params, or rec"):
        loaded.params  # noqa: B018


# Which states.


@pytest.mark.slow
def test_a_state_without_the_flag_or_with_two_is_refused(recorder):
    params = {"w": jnp.ones(2)}
    plain, halting = cg.skip_spikes(optax.sgd(1.0)), optimizer()
    both = {"a": halting.init(params), "b": halting.init(params)}
    for state, got in (
        (optax.adam(0.1).init(params), "0 states of skip_spikes"),
        (plain.init(params), "a state of skip_spikes without halt"),
        (both, "2 states of skip_spikes"),
    ):
        with pytest.raises(ValueError, match=rf"state: got {got}.*skip_spikes\(optimizer, halt="):
            recorder.record(state, 1)
    twice = cg.skip_spikes(optimizer())
    recorder.record(optax.chain(optax.identity(), twice).init(params), 1)


@pytest.mark.slow
def test_of_several_lanes_the_largest_norm_is_kept(tmp_path):
    tx = optimizer(cg.clip_by_global_norm(1.0, stats=True))
    state, recorder = jax.vmap(tx.init)(jnp.ones((2, 1))), cg.FlightRecorder(tmp_path)
    with pytest.raises(cg.HaltedError) as error, recorder:
        for grads in ([[2.0], [3.0]], [[np.nan], [1.0]]):
            _, state = jax.vmap(tx.update)(jnp.array(grads), state)
            recorder.record(state, grads)
    assert cg.load_capture(error.value.path).meta["statistics"]["clip/norm"][0] == 3


# The first step may show that a leaf has no gradient.


def gated(params, batch):
    return jnp.sum(params["w"] * batch + params["gate"] * 0)


ZEROS = {
    "one leaf": (gated, GOOD, "per_leaf", {}, "'gate' was exactly zero .* clipgrad.diagnose"),
    "a loss of 0": (gated, GOOD, "per_leaf", {"loss": 0.0}, None),
    "all leaves": (gated, 0 * GOOD, "per_leaf", {}, None),
    "nothing shows it": (gated, GOOD, True, {}, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ZEROS)
def test_the_first_record_warns_of_leaves_without_a_gradient(case, tmp_path):
    loss, batch, stats, more, match = ZEROS[case]
    tx = optimizer(optax.chain(cg.clip_by_global_norm(1.0, stats=stats), optax.adam(0.1)))
    step = cg.train_step(loss, tx)
    state, recorder = step.init(PARAMS | {"gate": np.float32(1.0)}), cg.FlightRecorder(tmp_path)
    for first in (True, False):  # later warnings would be errors
        state, _ = step(state, batch)
        with pytest.warns(UserWarning, match=match) if match and first else nullcontext():
            recorder.record(state, batch, **more)


# What the halt costs.


@pytest.mark.slow
def test_the_compiled_step_has_no_transfer_and_no_memory_of_the_size_of_the_parameters():
    def compiled(halt):
        step = cg.train_step(lambda w, x: jnp.sum(jnp.tanh(x @ w)), optimizer(halt=halt))
        state = jax.eval_shape(step.init, jnp.ones((256, 256)))
        return step.update.lower(state, jnp.ones((8, 256))).compile()

    plain, halting = compiled(False), compiled(True)
    for transfer in ("outfeed", "send(", "recv(", "custom-call-start", "callback"):
        assert transfer not in halting.as_text()
    a, b = (x.memory_analysis() for x in (plain, halting))
    assert b.temp_size_in_bytes - a.temp_size_in_bytes < 1024
    assert b.output_size_in_bytes - a.output_size_in_bytes < 128


@pytest.mark.slow
def test_only_the_flag_is_sent_to_the_host(recorder):
    state, batch = STEP.init(PARAMS), jnp.ones(2)
    recorder.record(state, batch)
    recorder.close()
    with jax.transfer_guard_device_to_host("disallow"):
        state, _ = STEP(state, batch)
        recorder.record(state, batch, key=jax.random.key(0))
    assert recorder._records[-1].copy.shape == (6,)


# The disk, and other machines.


@pytest.mark.slow
def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        cg.FlightRecorder(tmp_path / "file" / "captures")
    for kwargs in ({"keep": 0}, {"max_captures": True}):
        ((name, value),) = kwargs.items()
        with pytest.raises(ValueError, match=f"{name}: got {value}, expected a positive integer"):
            cg.FlightRecorder(tmp_path, **kwargs)


ADDRESSES = {
    "gs://bucket/run": "as by gcsfuse for gs://",
    "GS://bucket": "an address, expected the path of a folder",
    "hdfs://host:9000/run": "an address",
    "file:///tmp/run": "write the path alone, '/tmp/run'",
}


class FakePath:
    """A path of a store, as of etils or of the client of a bucket."""

    def __init__(self, address):
        self.address = address

    def __fspath__(self):
        return self.address


@pytest.mark.slow
def test_an_address_is_refused_at_once_and_a_colon_in_a_name_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for address, match in ADDRESSES.items():
        for path in (address, pathlib.Path(address), FakePath(address)):
            for name, call in (("directory", cg.FlightRecorder), ("path", cg.load_capture)):
                with pytest.raises(ValueError, match=f"^{name}: got .*{match}"):
                    call(path)
    assert not list(tmp_path.iterdir())
    for name in ("gs", "a:b", "run:1/x", "gs:", "./gs:/x", "c:/x", "x/gs://y"):
        for path in (name, str(tmp_path / name)):
            assert cg.FlightRecorder(path).directory == pathlib.Path(path).absolute()


@pytest.mark.slow
def test_without_orbax_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r'need orbax.*pip install "clipgrad\[recorder\]"'):
        cg.FlightRecorder(tmp_path)


@pytest.fixture
def full_disk():
    """No file may be longer than a kilobyte."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    free = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)  # noqa: E731
    yield free
    free()
    signal.signal(signal.SIGXFSZ, handler)


# A thread of orbax's own fails as well, and what it leaves when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_on_a_full_disk_nothing_is_lost(tmp_path, full_disk):
    recorder = cg.FlightRecorder(tmp_path)
    step = cg.train_step(lambda w, x: jnp.sum(jnp.log(w * x)), optimizer(optax.sgd(0.1)))
    state = step.init(array(np.ones(4096)))
    state, _ = step(state, np.float32(0.0))
    with pytest.raises(cg.HaltedError, match="could not be written.*tries again") as error:
        record_unseen(recorder, state, np.float32(0.0))
        recorder.close()
    assert error.value.path is None and error.value.__cause__ is not None
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    recorder.raise_on_halt = False
    with pytest.warns(RuntimeWarning, match="could not be written"):
        recorder.close()
    full_disk()
    recorder.close()
    (path,) = recorder.captures
    assert np.all(np.asarray(cg.load_capture(path).params) == 1)
    del error
    gc.collect()


KILLED = """
import os, sys
import jax.numpy as jnp, optax, clipgrad as cg
tx = cg.skip_spikes(optax.sgd(1.0), halt=True)
_, state = tx.update(jnp.array([jnp.nan]), tx.init(jnp.ones(1)))
os.rename = lambda *names: os.kill(os.getpid(), 9) if "step" in str(names[1]) else None
cg.FlightRecorder(sys.argv[1]).record(state, 1)
"""


@pytest.mark.slow
def test_what_a_process_leaves_that_is_killed_while_it_writes_is_never_loaded(tmp_path):
    killed(tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".")
    with pytest.raises(FileNotFoundError, match="expected a capture"):
        cg.load_capture(left)
    bad_step = captured(cg.FlightRecorder(tmp_path), batches(1, 0))
    with pytest.raises(FileNotFoundError, match="expected a capture; there is .*step_0"):
        cg.load_capture(tmp_path)
    assert bad_step.path.name == "step_0"


def killed(folder):
    command = [sys.executable, "-c", KILLED, str(folder)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, check=False, env=environment).returncode == -signal.SIGKILL


def with_manifest(capture, folder, edit):
    """A capture of other content, in the same files."""
    manifest = json.loads((capture.path / files.MANIFEST).read_text())
    edit(manifest)
    (folder / files.MANIFEST).write_text(json.dumps(manifest))
    if not (folder / "arrays").exists():
        (folder / "arrays").symlink_to(capture.path / "arrays")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("version", [2, 4])
def test_a_capture_of_another_version_is_refused(version, capture, tmp_path):
    other = with_manifest(capture, tmp_path, lambda manifest: manifest.update(format=version))
    age = "an earlier" if version == 2 else "a later"
    match = f"got a capture of format {version}, written by {age} version .*, expected format 3"
    with pytest.raises(ValueError, match=match):
        cg.load_capture(other)


@pytest.mark.slow
def test_a_class_that_a_capture_names_is_neither_imported_nor_called(capture, tmp_path):
    def edit(manifest):
        manifest["leaves"].append({"path": ["extra", "os"], "left_out": "os.system"})
        manifest["leaves"].append({"path": ["extra", "command"], "value": "touch here"})

    loaded = cg.load_capture(with_manifest(capture, tmp_path, edit))
    assert loaded.extra["command"] == "touch here" and loaded.extra["os"] is None
    text = "".join(p.read_text() for p in pathlib.Path(files.__file__).parent.glob("*.py"))
    assert "pickle" not in text and "import_module" not in text


@pytest.mark.slow
def test_float64_is_not_made_narrower_without_a_word(tmp_path):
    with jax.enable_x64(True):
        bad_step = captured(cg.FlightRecorder(tmp_path), [np.array([1.0, 0.0]) * jnp.ones(())])
        assert bad_step.batch.dtype == np.float64
    with pytest.raises(ValueError, match=r'dtype .*64, which .*"jax_enable_x64", True\)'):
        cg.load_capture(bad_step.path)


def sharded_like(shape=(4, 2)):
    """The state and the batch of a run, on a mesh."""
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, ("data", "model"), (AxisType.Auto,) * 2, devices=devices)
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    params = {"w": place(jnp.ones((8, 4)), None, "model")}
    state = jax.jit(optimizer(optax.sgd(0.1)).init)(params)
    return {"params": params, "opt": state}, place(jnp.ones((8, 8)), "data")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A capture of a run on eight devices."""

    @jax.jit
    def step(state, batch):
        params, opt = state["params"], state["opt"]
        grads = jax.grad(lambda p, x: jnp.sum(jnp.log(x @ p["w"])))(params, batch)
        updates, opt = optimizer(optax.sgd(0.1)).update(grads, opt, params)
        return {"params": optax.apply_updates(params, updates), "opt": opt}

    state, batch = sharded_like()
    with cg.FlightRecorder(tmp_path_factory.mktemp("sharded"), raise_on_halt=False) as recorder:
        for i in range(3):
            batch_of_step = batch.at[5].set(0 if i == 1 else 1)
            state = step(state, batch_of_step)
            recorder.record(state, batch_of_step)
    return recorder.captures[0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 2), (2, 1)])
def test_a_sharded_capture_has_the_shardings_of_a_tree_that_is_like_it(sharded, shape):
    here, (state, batch) = cg.load_capture(sharded), sharded_like(shape)
    assert here.step == 1 and not here.batch[5].any() and here.batch[4].all()
    assert all(x.devices() == {jax.devices()[0]} for x in jax.tree.leaves(here.args))
    of_params = cg.load_capture(sharded, (state["params"], batch))
    of_state = cg.load_capture(sharded, like=jax.eval_shape(lambda: state))
    assert of_params.batch.sharding == batch.sharding
    for loaded in (of_params, of_state, cg.load_capture(sharded, state)):
        assert_same(jax.device_get(loaded.args), jax.device_get(here.args))
        if loaded is not of_state:
            assert loaded.params["w"].sharding == state["params"]["w"].sharding
        if loaded is not of_params:
            assert isinstance(loaded.state["opt"], cg.types.SkipSpikesState)
            assert not cg.resume(loaded.state)["opt"].halted
    assert_same(jax.device_get(here.restore(state, "state")), jax.device_get(of_state.state))
    assert here.restore(state["params"])["w"].sharding == state["params"]["w"].sharding


@pytest.mark.slow
def test_a_tree_that_is_not_like_the_capture_is_refused(sharded):
    state, batch = sharded_like()
    for like, match in (
        ({"v": 1}, r"like: got a tree with the paths 'v'; expected .* state, 'opt/raw_.*, 'w', or"),
        ((state["params"], [batch]), "like: got a tree with the paths '0/w', '1/0'; expected"),
        ({"w": jnp.ones((8, 3))}, r"like: got float32\[8, 3\] at 'w', expected float32\[8, 4\]"),
    ):
        with pytest.raises(ValueError, match=match):
            cg.load_capture(sharded, like)
