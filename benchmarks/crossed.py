"""Counts the functions and files of the library that one call goes through.

    python -m benchmarks.crossed

Each call is the first of its kind in a process of its own, so that nothing has been traced before.
"""

import pathlib
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg

LIBRARY = str(pathlib.Path(cg.__file__).parent)


def update() -> None:
    """One update of a clip by global norm."""
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    optimizer = optax.chain(cg.clip_by_global_norm(1.0), optax.sgd(0.1))
    optimizer.update(params, optimizer.init(params), params)


def by_name() -> None:
    """The gradient of a function with one clip by name."""

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(checkpoint_name(x * 2.0, "h")))

    jax.grad(cg.error_clip_by_name(loss, {"h": cg.ErrorClipByValue(max=0.5)}))(jnp.ones(3))


def check() -> None:
    """A check of one function."""
    cg.check_grads(jnp.tanh, (jnp.arange(3.0),))


def diagnosis() -> None:
    """The diagnosis of a loss with a VJP that is not finite."""
    cg.diagnose(lambda x: jnp.sum(jnp.sqrt(x)), (jnp.array([4.0, 0.0]),))


def per_example() -> None:
    """The clipped gradients of a batch of four."""

    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(batch @ params["w"]) ** 2)

    clipped = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0))
    clipped({"w": jnp.ones((3, 2))}, jnp.ones((4, 3)))


CALLS = {run.__name__: run for run in (update, by_name, check, diagnosis, per_example)}


def crossed(run: Callable[[], None]) -> tuple[int, int]:
    """The number of functions and of files that are entered; comprehensions are no functions."""
    found: set[tuple[str, int, str]] = set()

    def enter(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(LIBRARY):
            if not code.co_name.startswith("<"):
                found.add((code.co_filename, code.co_firstlineno, code.co_name))

    sys.setprofile(enter)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(found), len({file for file, *_ in found})


def main(names: list[str]) -> None:
    """Count one call, or each in a process of its own."""
    for name in names:
        functions, files = crossed(CALLS[name])
        print(f"{name}: {functions} functions in {files} files", flush=True)
    for name in () if names else CALLS:
        subprocess.run([sys.executable, "-m", "benchmarks.crossed", name], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
