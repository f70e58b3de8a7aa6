"""What a training step takes to trace and to compile, with clips of this library and of optax.

CPU seconds of loss, gradient, clip and adamw of a flax transformer of 12 layers, unrolled (196
leaves) or scanned (20). The clips take turns, each time with empty caches. Prints medians, with
multiples of the step with optax's clip, and how many instructions the compiled programs have. The
results are in benchmarks/RESULTS.md.

    python -m benchmarks.compilation_of_steps [--rounds 3] [--layers 12] [--scanned]

For a device that is not there, with the compilers of the extra accelerators:

    JAX_PLATFORMS=cpu python -m benchmarks.compilation_of_steps --device H200 (or "1 TPU")
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipgrad as cg
from benchmarks.flax_models import Transformer

CLIPS = {
    "global norm": (optax.clip_by_global_norm, cg.clip_by_global_norm, 1.0),
    "block RMS": (optax.clip_by_block_rms, cg.clip_by_block_rms, 1.0),
    "adaptive": (optax.adaptive_grad_clip, cg.adaptive_grad_clip, 0.01),
}
WIDTH = 256


class Taken(NamedTuple):
    """CPU seconds, and the instructions of the compiled program."""

    trace: float
    compile: float
    instructions: float

    @property
    def total(self) -> float:
        """All of the seconds."""
        return self.trace + self.compile


def step_of(model: Any, clip: optax.GradientTransformation) -> tuple[Callable, Any]:
    """A step of adamw behind a clip, and its optimizer."""
    tx = optax.chain(clip, optax.adamw(1e-3))

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda params: jnp.mean(model.apply(params, x) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, tx


def taken(model: Any, clip: optax.GradientTransformation, kind: str = "CPU") -> Taken:
    """What one step takes, nothing of which is known before."""
    jax.clear_caches()
    x = jax.ShapeDtypeStruct((4, 64, WIDTH), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    step, tx = step_of(model, clip)
    args = params, jax.eval_shape(tx.init, params), x
    if kind != "CPU":
        from benchmarks.accelerators import placed

        args = placed(args, kind)
    start = time.process_time()
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*args)
    traced = time.process_time()
    program = lowered.compile()
    done = time.process_time()
    return Taken(traced - start, done - traced, program.as_text().count(" = "))


def main() -> None:
    """Prints a row of Markdown for each clip."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--scanned", action="store_true", help="the layers are one scan")
    parser.add_argument("--device", choices=["CPU", "H200", "1 TPU"], default="CPU")
    options = parser.parse_args()
    model = Transformer(options.scanned, options.layers)
    taken(model, optax.identity(), options.device)  # what is imported and made once
    print("| step with | trace, s | compile, s | / optax: trace | compile | both | instructions |")
    for name, (theirs, ours, limit) in CLIPS.items():
        clips = {"optax": theirs(limit), "clipgrad": ours(limit)}
        clips["clipgrad, stats=True"] = ours(limit, stats=True)
        found: dict[str, list[Taken]] = {who: [] for who in clips}
        for _ in range(options.rounds):
            for who, clip in clips.items():
                found[who].append(taken(model, clip, options.device))
        medians = {who: Taken(*np.median(rounds, axis=0)) for who, rounds in found.items()}
        beside = medians["optax"]
        for who, m in medians.items():
            ratios = m.trace / beside.trace, m.compile / beside.compile, m.total / beside.total
            cells = [f"{x:.2f}" for x in (m.trace, m.compile, *ratios)]
            print(f"| {name}, {who} | {' | '.join(cells)} | {m.instructions:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
