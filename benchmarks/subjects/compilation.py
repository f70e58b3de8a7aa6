"""Tracing and compiling clips of more and more leaves."""

from typing import Any

import optax

import clipgrad as cg
from benchmarks import trees
from benchmarks.peers import by_leaf, update_of
from benchmarks.rows import OURS, PEER, Row, Scale, Side, traced

TITLE = "Tracing and compiling"
LONG = 1000  # leaves
CLIPS = {
    "global norm": (cg.clip_by_global_norm, optax.clip_by_global_norm, (10, 100, 1000, 5000)),
    "value": (cg.clip_by_value, optax.clip, (1000,)),
    "norm of each leaf": (cg.clip_by_norm, by_leaf, (10, 100, 1000)),
    "adaptive": (cg.adaptive_grad_clip, optax.adaptive_grad_clip, (10, 100, 1000)),
}


def sides(name: str, count: int) -> list[Side]:
    """Ours and optax's."""
    ours, theirs, _ = CLIPS[name]
    grads = trees.normal(trees.leaves(count, (32, 32)))
    args = (grads, grads) if name == "adaptive" else (grads,)
    return [
        traced("clipgrad", OURS, update_of(ours(0.1)), *args),
        traced("optax", PEER, update_of(theirs(0.1)), *args),
    ]


def rows(scale: Scale) -> list[Row]:
    """Each clip by the number of leaves."""

    def row(name: str, count: int) -> Row:
        facts: dict[str, Any] = {"leaves": count, "clip": name}
        return Row(
            f"{name}, {count:,} leaves",
            lambda: sides(name, count),
            1e-5,
            6.0,
            facts,
            long=count > LONG,
        )

    counts = {name: {scale(n, 2): None for n in found} for name, (_, _, found) in CLIPS.items()}
    return [row(name, count) for name, found in counts.items() for count in found]
