"""What the first check of programs that take long to compile costs, beside `jax.test_util`.

CPU seconds of `check_grads` of this library and of `jax.test_util` in reverse mode, each in a
process of its own in which nothing is compiled. The checkers take turns. Prints medians, the ratio,
the verdicts, and how many programs were compiled in how many seconds. The results are in
benchmarks/RESULTS.md.

    python -m benchmarks.slow_checks [--rounds 3] [--only NAME ...]
"""

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

COMPILED = "/jax/core/compile/backend_compile_duration"


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Normal numbers in float32."""
    numbers = np.random.default_rng(seed).normal(size=shape) * scale
    return jnp.asarray(numbers, jnp.float32)


def matrix_exponential() -> tuple[Callable, tuple]:
    """A rule of a 3 x 3 matrix exponential: a block of the exponential of the transpose."""
    expm = jax.scipy.linalg.expm
    fun = jax.custom_vjp(lambda a: expm(a))

    def backward(a: jax.Array, g: jax.Array) -> tuple:
        blocks = jnp.block([[a.T, g], [jnp.zeros((3, 3)), a.T]])
        return (expm(blocks)[:3, 3:],)

    fun.defvjp(lambda a: (expm(a), a), backward)
    return fun, (normal(9, 3, 3, scale=0.5),)


def ctc(wrong: bool = False) -> tuple[Callable, tuple]:
    """The CTC loss of optax, of eight frames, four classes and three labels, with a rule."""
    import optax

    labels, none = jnp.asarray([[2, 2, 1]]), jnp.zeros((1, 8))
    loss = lambda z: optax.ctc_loss(z[None], none, labels, jnp.zeros((1, 3)))[0]  # noqa: E731
    fun, part = jax.custom_vjp(loss), 0.5 if wrong else 1.0
    weights = jnp.asarray([part, 1.0, 1.0, 1.0])  # of the blank, and of the labels
    fun.defvjp(lambda z: (loss(z), z), lambda z, g: (g * weights * jax.grad(loss)(z),))
    return fun, (normal(121, 8, 4),)


def odeint() -> tuple[Callable, tuple]:
    """`jax.experimental.ode.odeint` of two numbers and a parameter, at three times."""
    from jax.experimental.ode import odeint

    times = jnp.linspace(0.0, 1.0, 3)
    solve = lambda a, y: odeint(lambda y, t, a: -a * y**2 + jnp.sin(t), y, times, a)  # noqa: E731
    return solve, (jnp.asarray(0.7), jnp.asarray([1.0, 0.3]))


def lstm_steps(w: jax.Array, u: jax.Array, b: jax.Array, x: jax.Array) -> list[tuple]:
    """Gates, cell and output of each step."""
    h, c, steps = jnp.zeros(4), jnp.zeros(4), []
    for t in range(5):
        i, f, g, o = jnp.split(w @ x[t] + u @ h + b, 4)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        before, c = (h, c), f * c + i * g
        h = o * jnp.tanh(c)
        steps.append((i, f, g, o, c, h, *before))
    return steps


def lstm(wrong: bool = False) -> tuple[Callable, tuple]:
    """Five steps of an LSTM, one after the other, with a rule for all of them."""
    run = jax.custom_vjp(lambda *args: lstm_steps(*args)[-1][5])

    def forward(*args: jax.Array) -> tuple:
        steps = lstm_steps(*args)
        return steps[-1][5], (args, steps)

    def backward(kept: tuple, dh: jax.Array) -> tuple:
        (w, u, b, x), steps = kept
        dw, du, db, dx, dc = 0 * w, 0 * u, 0 * b, 0 * x, jnp.zeros(4)
        for t in range(5)[::-1]:
            i, f, g, o, c, _, h_before, c_before = steps[t]
            dc += dh * o * (1 - jnp.tanh(c) ** 2)
            parts = [dc * g * i * (1 - i), dc * c_before * f * (1 - f), dc * i * (1 - g**2)]
            d = jnp.concatenate([*parts, dh * jnp.tanh(c) * o * (1 - o)])
            dw, du, db = dw + jnp.outer(d, x[t]), du + jnp.outer(d, h_before), db + d
            dx, dh, dc = dx.at[t].set(w.T @ d), u.T @ d, dc if wrong else dc * f
        return dw, du, db, dx

    run.defvjp(forward, backward)
    sizes = ((16, 3), (16, 4), (16,), (5, 3))
    return run, tuple(normal(k, *size, scale=0.5) for k, size in enumerate(sizes))


PROGRAMS = {
    "matrix exponential": matrix_exponential,
    "CTC": ctc,
    "CTC, half of the blank's gradient": functools.partial(ctc, wrong=True),
    "odeint": odeint,
    "LSTM": lstm,
    "LSTM, without a forget gate": functools.partial(lstm, wrong=True),
}


def by_clipgrad(fun: Callable, args: tuple) -> str:
    """`clipgrad.check_grads`."""
    import clipgrad as cg

    report = cg.check_grads(fun, args, raise_on_failure=False)
    return "passes" if report.ok else f"fails: {report.failures[0].check}"


def by_jax(fun: Callable, args: tuple) -> str:
    """`jax.test_util.check_grads` in reverse mode."""
    from jax.test_util import check_grads

    try:
        check_grads(fun, args, 1, modes=("rev",))
    except AssertionError:
        return "fails"
    return "passes"


CHECKERS = {"clipgrad": by_clipgrad, "jax.test_util": by_jax}


def run(name: str, checker: str) -> dict[str, Any]:
    """One check in this process."""
    compiled: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        del kwargs
        if event == COMPILED:
            compiled.append(duration_secs)

    import clipgrad  # noqa: F401, before the clock starts

    fun, args = PROGRAMS[name]()
    jax.monitoring.register_event_duration_secs_listener(listen)
    started = time.process_time()
    verdict = CHECKERS[checker](fun, args)
    seconds = time.process_time() - started
    counts = {"programs": len(compiled), "compilation": sum(compiled)}
    return {"seconds": seconds, "verdict": verdict, **counts}


def in_a_process(name: str, checker: str) -> dict[str, Any]:
    """One check in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.slow_checks", "--one", name, checker]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """All programs by both checkers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--one", nargs=2)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(*options.one)))
        return
    print("| program | clipgrad | jax.test_util | ratio | programs | verdicts |")
    print("|---|---:|---:|---:|---:|---|", flush=True)
    for name in options.only:
        rounds = [{c: in_a_process(name, c) for c in CHECKERS} for _ in range(options.rounds)]
        medians = {c: float(np.median([r[c]["seconds"] for r in rounds])) for c in CHECKERS}
        ratio = medians["clipgrad"] / medians["jax.test_util"]
        counts = ", ".join(str(rounds[0][c]["programs"]) for c in CHECKERS)
        verdicts = "; ".join(rounds[0][c]["verdict"] for c in CHECKERS)
        cells = [f"{seconds:.2f}" for seconds in medians.values()]
        print("|", " | ".join([name, *cells, f"{ratio:.1f}", counts, verdicts]), "|", flush=True)


if __name__ == "__main__":
    main()
