"""Statistics that follow from the norms of a clip, beside statistics measured before and after it.

    python -m benchmarks.statistics_of_clips

A rule of this library that scales by L2 norms says what it limited them to (``l2_limits``). Without
that its statistics would be two more reads of the gradients. Each row has both, and no statistics.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import optax

import clipgrad as cg
from benchmarks import rows, trees
from benchmarks.subjects.steps import step_of

CLIPS = {
    "global norm": (cg.clip_by_global_norm, 1.0),
    "norm of each leaf": (cg.clip_by_norm, 1.0),
    "block RMS": (cg.clip_by_block_rms, 0.5),
    "adaptive": (cg.adaptive_grad_clip, 0.01),
}
RULES = (cg.ClipByGlobalNorm, cg.ClipByNorm, cg.ClipByBlockRMS, cg.AdaptiveClip)
WIDTH, LAYERS = 512, 12


@contextlib.contextmanager
def measured() -> Iterator[None]:
    """Where this is entered no rule says what it limited."""
    with contextlib.ExitStack() as stack:
        for rule in RULES:
            stack.enter_context(mock.patch.object(rule, "l2_limits", lambda *_: None))
        yield


def sides(make: Callable, fun_of: Callable[[Any], Callable], *args: Any) -> list[rows.Side]:
    """Statistics from norms, measured statistics, and none."""
    with measured():
        slow = make("measured", rows.OURS, *fun_of(True), *args)
    fast = make("from norms", rows.OURS, *fun_of(True), *args)
    return [fast, slow, make("no statistics", rows.FLOOR, *fun_of(False), *args)]


def alone(name: str) -> list[rows.Side]:
    """A clip of the gradients of a transformer."""
    grads, params = (trees.normal(trees.transformer(WIDTH, LAYERS), 0.05, s) for s in (0, 1))
    clip, limit = CLIPS[name]

    def fun_of(stats: bool) -> tuple[Callable]:
        tx = clip(limit, stats=stats)
        state = tx.init(params)
        return (lambda grads, params: tx.update(grads, state, params),)

    def make(*args: Any) -> rows.Side:
        return rows.jitted(*args, numbers=lambda result: result[0])

    return sides(make, fun_of, grads, params)


def update(name: str) -> list[rows.Side]:
    """The clip and adamw, with donated state."""
    params, grads = (trees.normal(trees.transformer(WIDTH, LAYERS), 0.05, s) for s in (0, 1))
    clip, limit = CLIPS[name]

    def fun_of(stats: bool) -> tuple[Callable, Any]:
        tx = optax.chain(clip(limit, stats=stats), optax.adamw(1e-3))
        return step_of(tx, lambda _, grads: grads), (params, tx.init(params))

    def make(*args: Any) -> rows.Side:
        return rows.donated(*args, numbers=lambda state: state[0])

    return sides(make, fun_of, grads)


def main() -> None:
    """Prints a row of a table for each clip, alone and in an update of adamw."""
    for name in CLIPS:
        for title, build in (("alone", alone), ("with adamw", update)):
            result = rows.measure(rows.Row(name, lambda b=build, n=name: b(n), 1e-5))
            facts = {side["name"]: side["facts"] for side in result["sides"]}
            memory = {side: f"{f['temporaries'] / 1e6:.0f} MB" for side, f in facts.items()}
            print(f"{name}, {title}: temporaries {memory}")
            for pair in result["ratios"]:
                r = pair["ratio"]["run"]
                times = f"{r['median']:.2f} [{r['low']:.2f}, {r['high']:.2f}]"
                print(f"    {pair['ours']} / {pair['theirs']}: {times}", flush=True)


if __name__ == "__main__":
    main()
