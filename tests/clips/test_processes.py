"""Several processes, joined by jax.distributed on this machine, clip as one process does."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.clips.process_worker import everything, loss, numbers
from tests.helpers import quick_flags

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 240


@contextlib.contextmanager
def reserved_port():
    """A port that nobody else is given; the server of JAX may listen on it all the same."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        s.bind(("127.0.0.1", 0))
        yield s.getsockname()[1]


def start(number, folder, port):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    environment["XLA_FLAGS"] = quick_flags()  # each process adds its two devices
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    for i in range(number):
        command = [sys.executable, "-m", "tests.clips.process_worker", port, number, i, folder]
        with open(folder / f"{i}.log", "w") as log:
            yield subprocess.Popen(
                [*map(str, command)], cwd=ROOT, env=environment, stdout=log, stderr=log
            )


def run_together(number, folder):
    """Waits for all processes; the first that fails, or hangs, ends them all."""
    with reserved_port() as port:
        wait_for(list(start(number, folder, port)), folder)


def wait_for(processes, folder):
    end = time.monotonic() + SECONDS
    try:
        while any(p.poll() is None for p in processes):
            if any(p.returncode for p in processes) or time.monotonic() > end:
                break
            time.sleep(0.1)
        codes = [p.poll() for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(code != 0 for code in codes):
        logs = [(folder / f"{i}.log").read_text()[-3000:] for i in range(len(processes))]
        pytest.fail(f"exit codes {codes} (None: ended after {SECONDS} s)\n" + "\n".join(logs))


@pytest.fixture(scope="module")
def one_process():
    entries, _ = jax.tree_util.tree_flatten_with_path(everything())
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) for p, x in entries}


def test_processes_give_the_result_of_one(one_process, tmp_path, number=4):
    run_together(number, tmp_path)
    assert np.linalg.norm(one_process["norm"]) > 100
    covered = {name: np.zeros(x.shape, bool) for name, x in one_process.items()}
    for i in range(number):
        with np.load(tmp_path / f"{i}.npz") as saved:
            for name in (n for n in saved.files if not n.endswith("@start")):
                leaf, part = name.split("@")[0], saved[name]
                where = tuple(
                    slice(a, a + n) for a, n in zip(saved[f"{name}@start"], part.shape, strict=True)
                )
                expected = one_process[leaf][where]
                np.testing.assert_allclose(part, expected, rtol=1e-5, atol=1e-6, err_msg=leaf)
                covered[leaf][where] = True
    assert all(mask.all() for mask in covered.values())
    assert_captured(number, tmp_path)
    assert_saved(number, tmp_path / "run")


def assert_captured(number, folder):
    """All processes stopped at the same step, and one process can read what they wrote."""
    for i in range(number):
        with np.load(folder / f"captured_{i}.npz") as saved:
            assert saved["seen"] == 4 and saved["step"] == 2
            assert saved["device"] == f"x={2 * number - 1}"
    capture = cg.load_capture(folder / "captures" / "step_2")
    np.testing.assert_array_equal(capture.batch[:, 0], [3] * 15 + [0])
    assert (np.asarray(capture.params["w"]) < 1).all() and capture.meta["processes"] == number


def assert_saved(number, path):
    """One process can compare with the file that all wrote together."""
    args = {"w": jnp.asarray(numbers((4, 3), 9) / 30)}, jnp.asarray(numbers((16, 4), 10) / 30)
    comparison = cg.compare(path, loss, args)
    assert comparison.ok and not comparison.findings, str(comparison)
    assert any(f"processes {number} in fun, 1 in other" in note for note in comparison.notes)
    comparison = cg.compare(path, lambda *args: 1.1 * loss(*args), args)
    assert [f.kind for f in comparison.findings] == ["value"]
