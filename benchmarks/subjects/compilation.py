"""Tracing and compiling clips of more and more leaves."""

import functools
from typing import Any

import optax

import clipgrad as cg
from benchmarks import trees
from benchmarks.peers import by_leaf, update_of
from benchmarks.rows import OURS, PEER, Row, Scale, Side, traced

TITLE = "Tracing and compiling"
LONG = 1000  # leaves
LARGE = "20 large leaves"
CLIPS = {
    "global norm": (cg.clip_by_global_norm, optax.clip_by_global_norm, (10, 100, 1000, 5000)),
    "global norm with statistics": (
        functools.partial(cg.clip_by_global_norm, stats=True),
        optax.clip_by_global_norm,
        (10, 100),
    ),
    "value": (cg.clip_by_value, optax.clip, (1000,)),
    "norm of each leaf": (cg.clip_by_norm, by_leaf, (10, 100, 1000)),
    "block RMS": (cg.clip_by_block_rms, optax.clip_by_block_rms, (10, 100, 1000)),
    "adaptive": (cg.adaptive_grad_clip, optax.adaptive_grad_clip, (10, 100, 1000)),
}
MANY = ("global norm", "block RMS", "adaptive")


def sides(name: str, shapes: list[tuple[int, ...]]) -> list[Side]:
    """Ours, whose state is an argument since it may hold statistics, and optax's."""
    ours, theirs, _ = CLIPS[name]
    grads = trees.normal(shapes)
    tx, params = ours(0.1), (grads,) if name == "adaptive" else ()
    args = (grads, tx.init(grads), *params)
    return [
        traced("clipgrad", OURS, tx.update, *args, compared=lambda results: results[0]),
        traced("optax", PEER, update_of(theirs(0.1)), grads, *params),
    ]


def rows(scale: Scale) -> list[Row]:
    """Each clip by the number of leaves."""

    def row(name: str, count: int, shape: tuple[int, ...] = (32, 32), label: str = "") -> Row:
        facts: dict[str, Any] = {"leaves": count, "clip": name}
        return Row(
            f"{name}, {label or f'{count:,} leaves'}",
            lambda: sides(name, trees.leaves(count, shape)),
            1e-5,
            6.0,
            facts,
            long=count > LONG,
        )

    counts = {name: {scale(n, 2): None for n in found} for name, (_, _, found) in CLIPS.items()}
    large = [row(name, scale(20, 2), (1600, 1000), LARGE) for name in MANY]
    return [*(row(name, count) for name, found in counts.items() for count in found), *large]
