"""Long trainings with bad batches: killed, resumed, copied, shared by threads, and bounded."""

import functools
import gc
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import assert_same, environment_of_users

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.slow]

ROOT = pathlib.Path(__file__).parents[2]
LONG = 600  # steps, of which a process makes hundreds before it is killed


def optimizer() -> optax.GradientTransformation:
    """Every transformation of this library that has a state; all but the last see bad gradients."""
    return optax.chain(
        cg.clip_by_global_norm(cg.PercentileThreshold(90, window=32), stats=True),
        cg.clip_by_norm(cg.ZScoreThreshold(warmup=8), stats="per_leaf"),
        cg.clip_by_norm(cg.EMAThreshold(warmup=8)),
        cg.clip_by_global_norm(cg.HistoryThreshold(window=32)),
        cg.clip_by_global_norm(optax.linear_schedule(1.0, 0.5, 1000)),
        cg.skip_spikes(optax.sgd(0.01, momentum=0.9), window=32),
    )


Batch = tuple[np.int32, np.float32]


def batches(steps: int) -> list[Batch]:
    """The number of each step, and what its batch is multiplied by: NaN, inf, 1e30 or mostly 1."""
    rng = np.random.default_rng(1)
    factors = rng.choice([1, np.nan, np.inf, 1e30], steps, p=[0.9, 0.04, 0.03, 0.03])
    return [(np.int32(i), np.float32(f)) for i, f in enumerate(factors)]


class Training(NamedTuple):
    """A step, its first parameters, and one entry for each time that its loss was traced."""

    step: cg.types.TrainStep
    params: Any
    traces: list[int]

    def run(self, state: Any, some: list[Batch]) -> Any:
        """The state after these batches, each of which must leave it finite."""
        finite = jnp.array(True)
        for batch in some:
            state, metrics = self.step(state, batch)
            finite = and_finite(finite, state, metrics)
        assert finite
        return state


@jax.jit
def and_finite(before: jax.Array, state: Any, metrics: Any) -> jax.Array:
    """Whether all of a state is finite, but for statistics, which report of a NaN what it was.

    So does the norm that `skip_spikes` measured.
    """
    bad = metrics["nonfinite"] > 0
    is_skips = lambda x: isinstance(x, cg.types.SkipSpikesState)  # noqa: E731
    without_norm = lambda x: x._replace(raw_norm=jnp.zeros(())) if is_skips(x) else x  # noqa: E731
    state = jax.tree.map(without_norm, state, is_leaf=is_skips)
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, cg.types.ClipStats))
    kept = [x for x in leaves if not isinstance(x, cg.types.ClipStats)]
    stats = jax.tree.leaves([x for x in leaves if isinstance(x, cg.types.ClipStats)])
    finite = [jnp.isfinite(x).all() for x in kept]
    return before & jnp.stack(finite).all() & (bad | jnp.isfinite(jnp.hstack(stats)).all())


def small() -> Training:
    """An RNN of three units."""
    traces, x = [], jnp.asarray(np.random.default_rng(0).normal(size=(16, 4, 3)), jnp.float32)

    def loss(params, batch):
        traces.append(1)

        def cell(h, x):
            h = checkpoint_name(jnp.tanh(h @ params["rec"] + x), "h")
            return h, None

        index, factor = batch
        inputs = factor * x[index % 16]
        return jnp.sum((jax.lax.scan(cell, jnp.zeros(3), inputs)[0] @ params["out"] - 1) ** 2)

    rules = {"h": cg.ErrorClipByValue(0.5)}
    step = cg.train_step(loss, optimizer(), error_clip=rules)
    return Training(step, {"rec": 1.2 * jnp.eye(3), "out": jnp.ones(3)}, traces)


@pytest.fixture(scope="module")
def shared():
    """One program for all tests of the small training."""
    return small()


# Interrupted and resumed


def interruptions(steps: int, number: int) -> list[int]:
    """Random steps, in their order."""
    return sorted(np.random.default_rng(2).choice(np.arange(1, steps), number, False).tolist())


def test_a_training_that_is_interrupted_ends_with_the_bits_of_one_that_is_not(tmp_path):
    """Processes that train, are killed, and go on from a checkpoint."""
    whole, parts, (first, second) = tmp_path / "whole", tmp_path / "parts", interruptions(LONG, 2)
    starts, compiled = [], []
    for path, last in ((whole, None), (parts, first), (parts, second), (parts, None)):
        starts.append(ended(path, LONG, last))
        compiled.append(len(list((tmp_path / "cache").glob("jit_update-*-cache"))))
    assert 0 == starts[0] == starts[1] < starts[2] < starts[3] < LONG
    # What was restored has a place, so that the step is compiled once more, and never again.
    assert compiled == [1, 1, 2, 2]
    ends = [pickle.loads((path / "state").read_bytes()) for path in (parts, whole)]
    assert_same(*ends)
    assert ends[1].opt_state[-1].skipped_count > 0


def work(folder: str, steps: str) -> None:
    """Trains on from the last checkpoint, and says at which step it is: a process to be killed."""
    import orbax.checkpoint as ocp

    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(folder).parent / "cache"))
    training, some, saves = small(), batches(int(steps)), interruptions(int(steps), 10)
    with ocp.CheckpointManager(f"{folder}/states") as manager:
        start = manager.latest_step() or 0
        state = training.step.init(training.params)
        if start:
            target = jax.eval_shape(training.step.init, training.params)
            state = manager.restore(start, args=ocp.args.StandardRestore(target))
        print("resumed", start, flush=True)
        for stop in (*(i for i in saves if i > start), int(steps)):
            while start < stop:
                state = training.run(state, some[start : min(start + 20, stop)])
                start = min(start + 20, stop)
                print("at", start, flush=True)
                input()  # until it is to go on
            manager.save(start, args=ocp.args.StandardSave(state))
    assert len(training.traces) == 1
    (pathlib.Path(folder) / "state").write_bytes(pickle.dumps(state))


def started(folder: pathlib.Path, steps: int) -> subprocess.Popen:
    """A process with the compiler's own defaults, which cost less here than those of the tests."""
    script = "import sys; from tests.training.test_soak import work; work(*sys.argv[1:])"
    command = [sys.executable, "-c", script, str(folder), str(steps)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    return subprocess.Popen(command, cwd=ROOT, env=environment_of_users(), **pipes)


def ended(folder: pathlib.Path, steps: int, last: int | None = None) -> int:
    """The step at which a process went on; it is killed at one, or ends by itself."""
    process = started(folder, steps)
    start = int(process.stdout.readline().removeprefix("resumed "))
    for line in process.stdout:
        if last is not None and int(line.removeprefix("at ")) >= last:
            os.kill(process.pid, signal.SIGKILL)
            break
        process.stdin.write("\n")
    process.stdin.close()
    process.stdout.close()
    assert process.wait() == (0 if last is None else -signal.SIGKILL)
    return start


# Bounded


def held() -> tuple[int, int]:
    """Arrays and objects of Python that this process holds."""
    gc.collect()
    return len(jax.live_arrays()), sys.getallocatedblocks()


def grown(training: Training, steps: int, after: int) -> tuple[int, int]:
    """By how many arrays and objects of Python a training grows after the first steps.

    The least growth of three runs of as many steps: a training that grows does so in all, and what
    is made once is made in one.
    """
    more = steps - after
    some = batches(after + 3 * more)
    state = training.run(training.step.init(training.params), some[:after])
    sizes = [held()]
    for start in range(after, len(some), more):
        for batch in some[start : start + more]:
            state = training.step(state, batch)[0]
        jax.block_until_ready(state)
        sizes.append(held())
    return tuple(int(least) for least in np.diff(sizes, axis=0).min(axis=0))


def test_the_memory_of_a_training_does_not_grow(shared, steps=450, after=150):
    arrays, objects = grown(shared, steps, after)
    assert arrays <= 0
    assert objects < (steps - after) / 3
    assert len(shared.traces) == 1


# Shared


def in_threads(number: int, work: Callable[[], Any]) -> list[Any]:
    """What a function returns in each of so many threads that call it at once."""
    barrier, results = threading.Barrier(number), [None] * number

    def run(i: int) -> None:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            barrier.wait()
            results[i] = work()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_may_share_one_step(shared):
    some = batches(40)
    expected = shared.run(shared.step.init(shared.params), some)
    for state in in_threads(8, lambda: shared.run(shared.step.init(shared.params), some)):
        assert_same(state, expected)
    assert len(shared.traces) == 1


def test_threads_may_trace_one_step_at_once():
    def loss(params, batch):
        return jnp.sum(checkpoint_name(params * batch, "h") ** 2)

    tx = optax.chain(cg.clip_by_global_norm(1.0, stats=True), optax.sgd(0.1))
    make = functools.partial(cg.train_step, loss, tx, error_clip={"h": cg.ClipByNorm(0.5)})
    step, alone, x = make(), make(), jnp.arange(3.0)
    for result in in_threads(8, lambda: step(step.init(jnp.ones(3)), x)):
        assert_same(result, alone(alone.init(jnp.ones(3)), x))
