"""Which step a record is of: steps that are not recorded, several at once, a loop's own flag.

And what else names a step or a leaf: the folder of a capture, paths with slashes.
"""

import contextlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from tests.helpers import array

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.slow]
TX = cg.skip_spikes(optax.sgd(1e-6), sigma=None, halt=True)


# Of which steps a batch is.


def steps_of(tx, every, size, bad_step, **named):
    """What is captured by a loop that records each so many steps, or the error."""
    step = cg.train_step(lambda p, x: jnp.sum(jnp.log(p * x)), tx)
    with tempfile.TemporaryDirectory() as folder:
        state, recorder = step.init(jnp.ones(())), cg.FlightRecorder(folder)
        try:
            for i in range(4 * every):
                batch = np.full(size, 0.0 if i == bad_step else 1.0 + i, np.float32)
                state, _ = step(state, batch)
                if i % every == named.get("first", 0):
                    number = {"step": i} if named.get("numbers") else {}
                    recorder.record(state, batch, **number)
            recorder.close()
        except cg.HaltedError as error:
            return cg.load_capture(error.path)
        except ValueError as error:  # the loop ends here, and what has halted already is captured
            assert "step=range(i, i + " in str(error)
            recorder.raise_on_halt = False
            for _ in range(2):
                with contextlib.suppress(ValueError):
                    recorder.close()
            return next(map(cg.load_capture, recorder.captures), None)


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("bad_step", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("size", [3, 2, 1])
def test_every_third_step_is_never_taken_for_another(size, bad_step, first, numbers):
    captured_steps = steps_of(TX, 3, size, bad_step, first=first, numbers=numbers)
    if captured_steps is None:  # it was refused before the bad step was recorded
        assert size == 3 and bad_step > first
    else:
        assert "step_in_batch" not in captured_steps.meta and captured_steps.step == bad_step
        if bad_step % 3 == first or "no_batch" not in captured_steps.meta:
            np.testing.assert_array_equal(captured_steps.batch, np.zeros(size))


def several_steps(tx, count, bad_step, record, size=4):
    """What is captured of steps that one compiled function takes, so many at a time."""
    step = cg.train_step(lambda p, x: jnp.sum(jnp.log(p * x)), tx)
    run = jax.jit(lambda state, batches: jax.lax.scan(step.update, state, batches)[0])
    all_batches = np.arange(1.0, 1 + 3 * count, dtype=np.float32).reshape(3, count, 1)
    all_batches = np.repeat(all_batches, size, axis=2)
    all_batches[divmod(bad_step, count)] = 0
    with tempfile.TemporaryDirectory() as folder:
        state, recorder = step.init(jnp.ones(())), cg.FlightRecorder(folder, raise_on_halt=False)
        for i, batches in enumerate(all_batches):
            state = run(state, batches)
            record(recorder, state, batches, i * count)
        recorder.close()
        return cg.load_capture(*recorder.captures), all_batches


NUMBERS = {
    "range": lambda i, n: range(i, i + n),
    "list": lambda i, n: [*range(i, i + n)],
    "numpy": lambda i, n: np.arange(i, i + n),
    "jax": lambda i, n: jnp.arange(i, i + n),
    "from 100": lambda i, n: range(i + 100, i + n + 100),
}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("count", [1, 4])
def test_numbers_of_the_steps_say_that_a_batch_has_one_for_each(numbers, count):
    def record(recorder, state, batches, i):
        recorder.record(state, batches, step=NUMBERS[numbers](i, count))

    bad = count + count // 2
    loaded, all_batches = several_steps(TX, count, bad, record)
    assert loaded.step == bad + 100 * (numbers == "from 100")
    assert (loaded.meta["steps"], loaded.meta["step_in_batch"]) == (count, count // 2)
    np.testing.assert_array_equal(loaded.batch, all_batches[1])


@pytest.mark.parametrize("size", [3, 4])
def test_numbers_that_the_batch_does_not_have_are_refused(size, tmp_path):
    state = cg.train_step(lambda p, x: jnp.sum(p * x), TX).init(jnp.ones(()))
    recorder = cg.FlightRecorder(tmp_path)
    with pytest.raises(ValueError, match=rf"batch: got .* expected a leading axis of {size}"):
        recorder.record(state, {"x": np.ones((size, 2)), "y": np.ones(5)}, step=range(size))
    with pytest.raises(ValueError, match="batch: got .* expected a leading axis of 0"):
        recorder.record(state, np.ones((0, 2)), step=[])
    with pytest.raises(ValueError, match=rf"batch: got .* expected a leading axis of {size}"):
        recorder.record(state, 7, step=range(size))


def test_a_training_that_begins_anew_is_captured_too(tmp_path):
    step = cg.train_step(lambda p, x: jnp.sum(jnp.log(p * x)), TX)
    recorder = cg.FlightRecorder(tmp_path, raise_on_halt=False)
    for bad in (None, 0):
        state = step.init(jnp.ones(()))
        for i in range(5):
            batch = np.full(2, 0.0 if i == bad else i + 1.0, np.float32)
            state, _ = step(state, batch)
            recorder.record(state, batch)
    recorder.close()
    capture = cg.load_capture(*recorder.captures)
    assert capture.step == 0 and not capture.batch.any()


# A flag of the loop's own.


def own_loop(recorder, flag, bad_steps=(5,), donate=False, old=False, steps=8):
    """A loop whose optimizer does not halt, with a flag of its own."""

    def step(params, batch):
        value, grad = jax.value_and_grad(lambda p: jnp.sum(jnp.log(p * batch)))(params)
        return params - 0.01 * grad, jnp.isfinite(value)

    step = jax.jit(step, donate_argnums=(0,) if donate else ())
    params, seen = jnp.ones(()), []
    for i in range(steps):
        batch = np.full(3, 0.0 if i in bad_steps else 1.0 + i, np.float32)
        before = params
        params, ok = step(params, batch)
        seen.append((before, params) if not donate else None)
        more = {"params": before} if old else {}
        recorder.record({"params": params}, batch, step=i + 100, bad=flag(~ok), **more)
    recorder.close()
    return seen


FLAGS = {
    "array": lambda flag: flag,
    "bool": bool,
    "numpy": np.asarray,
    "integer": lambda flag: flag.astype("int32"),
    "one of several devices": lambda flag: jnp.stack([jnp.zeros_like(flag), flag]),
}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_of_the_loops_own_captures_the_step_and_its_state(flag, old, tmp_path):
    recorder = cg.FlightRecorder(tmp_path, raise_on_halt=False)
    seen = own_loop(recorder, FLAGS[flag], old=old)
    capture = cg.load_capture(*recorder.captures)  # of bad steps in a row the first
    assert (
        capture.step == 105 and capture.path.name == "step_105" and capture.meta["halted_at"] == 5
    )
    np.testing.assert_array_equal(capture.batch, np.zeros(3))
    np.testing.assert_array_equal(capture.params, seen[5][0 if old else 1])
    np.testing.assert_array_equal(capture.state["params"], seen[5][1])
    assert capture.meta["statistics"]["step"][-1] == 105 and capture.meta["nonfinite"] is None
    shown = str(cg.diagnose(lambda p, x: jnp.sum(jnp.log(p * x)), capture.args))
    assert ("log" in shown if old else "args[0]" in shown) and "not reproduced" not in shown


def test_a_flag_of_the_loops_own_raises_and_says_what_to_do(tmp_path):
    with pytest.raises(cg.HaltedError, match="step 105 is bad by the flag of the loop; ") as e:
        own_loop(cg.FlightRecorder(tmp_path), FLAGS["array"])
    assert "resume" not in str(e.value) and cg.load_capture(e.value.path).step == 105


def test_a_flag_that_has_not_arrived_is_not_waited_for(tmp_path, monkeypatch):
    """Each step keeps its own state until then."""
    recorder = cg.FlightRecorder(tmp_path, raise_on_halt=False)
    monkeypatch.setattr(type(recorder), "close", lambda self: None)
    monkeypatch.setattr("clipgrad._recorder.step_record.StepRecord.is_ready", False)
    seen = own_loop(recorder, FLAGS["array"])
    assert not recorder.captures
    monkeypatch.undo()
    recorder.close()
    capture = cg.load_capture(*recorder.captures)
    np.testing.assert_array_equal(capture.params, seen[5][1])
    np.testing.assert_array_equal(capture.batch, np.zeros(3))


def test_a_state_that_a_later_step_overwrites_is_said_to_be_gone(tmp_path, monkeypatch):
    recorder = cg.FlightRecorder(tmp_path / "late", raise_on_halt=False)
    with monkeypatch.context() as late:
        late.setattr("clipgrad._recorder.step_record.StepRecord.is_ready", False)
        own_loop(recorder, FLAGS["array"], donate=True)
    capture = cg.load_capture(*recorder.captures)
    np.testing.assert_array_equal(capture.batch, np.zeros(3))
    with pytest.raises(ValueError, match="params: got none, .* no later step has overwritten"):
        capture.params  # noqa: B018
    recorder = cg.FlightRecorder(tmp_path / "early", raise_on_halt=False)
    own_loop(recorder, bool, donate=True)
    assert not np.isfinite(cg.load_capture(*recorder.captures).params)


def test_each_run_of_bad_steps_is_captured_once(tmp_path):
    recorder = cg.FlightRecorder(tmp_path, raise_on_halt=False)
    bad = [False, True, True, False, True, False]
    for i, flag in enumerate(bad):
        recorder.record({"params": jnp.ones(2)}, np.full(2, i), bad=flag)
    assert [path.name for path in recorder.captures] == ["step_1", "step_4"]
    assert [*cg.load_capture(recorder.captures[1]).batch] == [4, 4]


def test_a_loops_own_flags_of_several_steps_say_which_is_bad(tmp_path):
    recorder = cg.FlightRecorder(tmp_path, raise_on_halt=False)
    for i in (0, 4):
        flags = jnp.arange(i, i + 4) >= 6
        recorder.record({"params": 1.0}, np.ones((4, 2)), step=range(i, i + 4), bad=flags)
    recorder.close()
    capture = cg.load_capture(*recorder.captures)
    assert (capture.step, capture.meta["step_in_batch"], capture.meta["steps"]) == (6, 2, 4)
    with pytest.raises(ValueError, match=r"bad: got the shape \(\), expected \(4,\), a flag for"):
        recorder.record(1.0, np.ones((4, 2)), step=range(4), bad=True)


def test_a_flag_beside_a_halting_optimizer_counts_as_well(tmp_path):
    step = cg.train_step(lambda p, x: jnp.sum(jnp.log(p * x)), TX)
    recorder = cg.FlightRecorder(tmp_path, raise_on_halt=False)
    state = step.init(jnp.ones(()))
    for i in range(6):
        state, metrics = step(state, np.full(2, 0.0 if i == 4 else i + 1.0, np.float32))
        recorder.record(state, np.full(2, i), bad=metrics["loss"] > 2)
    recorder.close()
    assert [cg.load_capture(path).step for path in recorder.captures][0] == 2
    capture = cg.load_capture(recorder.captures[-1])
    assert capture.step == 4 and np.isfinite(capture.params) and capture.meta["nonfinite"]
    assert [*capture.batch] == [4, 4]


@pytest.mark.parametrize("bad", [1.0, "yes", array(0), {"a": True, "b": False}, None])
def test_what_is_no_flag_is_refused_with_what_to_write(bad, tmp_path):
    error, match = (TypeError, r"bad: got .* write bad=~jnp.isfinite\(loss\)")
    if bad is None:
        error, match = ValueError, r"record\(state, batch\) .* record\(state, batch, bad=flag\)"
    recorder = cg.FlightRecorder(tmp_path)
    for _ in range(2):
        with pytest.raises(error, match=match):
            recorder.record({"w": jnp.ones(2)}, np.ones(2), bad=bad)
    recorder.record({"w": jnp.ones(2)}, np.ones(2), bad=False)


# Paths.


COLLIDING = {
    "a key with a slash": {"a/b": 0.0, "a": {"b": 1.0}},
    "keys of lists": {"a/0": 0.0, "a": [1.0, {"b/c": 2.0}, {"b": {"c": 3.0}}]},
    "slashes alone": {"/": 0.0, "": {"": 1.0}},
    "three": {"a/b/c": 0.0, "a/b": {"c": 1.0}, "a": {"b/c": 2.0, "b": {"c": 3.0}}},
}


@pytest.mark.parametrize("name", COLLIDING)
def test_keys_with_slashes_come_back_by_their_paths(name, tmp_path):
    tree = jax.tree.map(jnp.float32, COLLIDING[name])
    recorder = cg.FlightRecorder(tmp_path, raise_on_halt=False)
    recorder.record({"params": tree}, tree, bad=True)
    capture = cg.load_capture(recorder.captures[0])
    for restored in (
        capture.restore(tree),
        capture.restore(tree, "batch"),
        cg.load_capture(capture.path, tree).params,
        cg.load_capture(capture.path, (tree, tree)).batch,
    ):
        assert jax.tree.map(float, restored) == COLLIDING[name]


def test_the_home_is_where_a_shell_has_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    recorder = cg.FlightRecorder("~/captures", raise_on_halt=False)
    assert recorder.directory == tmp_path / "captures" and not (tmp_path / "~").exists()
    recorder.record({"params": jnp.ones(2)}, np.ones(2), bad=True)
    assert cg.load_capture("~/captures/step_0").path == recorder.captures[0]
    with pytest.raises(ValueError, match="nothing says where the home is"):
        cg.FlightRecorder("~nobody_of_this_name/captures")


def test_a_capture_that_is_not_there_names_those_that_are(tmp_path):
    recorder = cg.FlightRecorder(tmp_path, raise_on_halt=False)
    recorder.record({"params": jnp.ones(2)}, np.ones(2), bad=True)
    for path in (tmp_path, tmp_path / "step_99", tmp_path / "step_99" / "", tmp_path / "step_0.x"):
        with pytest.raises(FileNotFoundError, match="expected a capture; there is .*step_0$"):
            cg.load_capture(path)
    recorder.record({"params": jnp.ones(2)}, np.ones(2), bad=False)
    recorder.record({"params": jnp.ones(2)}, np.ones(2), bad=True)
    with pytest.raises(FileNotFoundError, match="there are .*step_0, .*step_2$"):
        cg.load_capture(tmp_path / "step_1")


@pytest.mark.parametrize("swapped", [False, True])
def test_record_of_metrics_or_the_batch_first_says_what_to_write(swapped, tmp_path):
    step = cg.train_step(lambda p, x: jnp.sum(p * x), TX)
    state, metrics = step(step.init(jnp.ones(2)), jnp.ones(2))
    with cg.FlightRecorder(tmp_path) as recorder:
        with pytest.raises(ValueError, match=r"write .*skip_spikes\(.*record\(state, batch\)"):
            recorder.record(*((jnp.ones(2), state) if swapped else (metrics, jnp.ones(2))))
