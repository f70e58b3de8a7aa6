"""The global norm clip of few large and of many small leaves."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import clipgrad as cg
from benchmarks import torch_peers, trees
from benchmarks.peers import update_of
from benchmarks.rows import FLOOR, OURS, PEER, Absent, Row, Scale, Side, donated, jitted
from benchmarks.subjects.names import NARROW

TITLE = "Global norm clip"
LIMIT = 1.0


def sides(shapes: Any) -> list[Side | Absent]:
    """Ours, optax's, torch's in place, and a copy of the same bytes."""
    grads = trees.normal(shapes)
    return [
        jitted("clipgrad", OURS, update_of(cg.clip_by_global_norm(LIMIT)), grads),
        jitted("optax", PEER, update_of(optax.clip_by_global_norm(LIMIT)), grads),
        torch_peers.torch_clip("torch", torch_peers.by_global_norm(LIMIT), grads),
        torch_peers.torch_clip("torch, foreach", torch_peers.by_global_norm(LIMIT, True), grads),
        jitted(
            "a copy of the bytes", FLOOR, lambda g: jax.tree.map(jnp.copy, g), grads, numbers=None
        ),
    ]


def narrow(shapes: Any) -> list[Side | Absent]:
    """Ours, optax's and a copy in bfloat16."""
    grads = trees.normal(shapes, dtype=jnp.bfloat16)
    copy = lambda g: jax.tree.map(jnp.copy, g)  # noqa: E731
    return [
        jitted("clipgrad", OURS, update_of(cg.clip_by_global_norm(LIMIT)), grads),
        jitted("optax", PEER, update_of(optax.clip_by_global_norm(LIMIT)), grads),
        jitted("a copy of the bytes", FLOOR, copy, grads, numbers=None),
    ]


def in_place(shapes: Any) -> list[Side | Absent]:
    """The same in the memory of the gradients."""
    grads = trees.normal(shapes)
    return [
        donated("clipgrad, donated", OURS, update_of(cg.clip_by_global_norm(LIMIT)), grads),
        donated("optax, donated", PEER, update_of(optax.clip_by_global_norm(LIMIT)), grads),
        torch_peers.torch_clip("torch", torch_peers.by_global_norm(LIMIT), grads),
        torch_peers.torch_clip("torch, foreach", torch_peers.by_global_norm(LIMIT, True), grads),
    ]


def rows(scale: Scale) -> list[Row]:
    """The three trees, the first of them also in place and in bfloat16."""
    large = trees.leaves(20, (scale(1600), 1000))
    whole = trees.leaves(1, (scale(10_000_000),))
    many = trees.leaves(scale(1000), (32, 32))
    # The picture's line by number of leaves ends here.
    facts = {"axis": "leaves", "leaves": len(many), "leaf bytes": 4096}
    return [
        Row("128 MB in 20 leaves", lambda: sides(large)),
        Row("1,000 leaves of 4 KB", lambda: sides(many), facts=facts),
        Row("10M elements in one leaf", lambda: sides(whole)),
        Row("128 MB in 20 leaves, in place", lambda: in_place(large)),
        Row("64 MB in 20 leaves of bfloat16", lambda: narrow(large), NARROW),
    ]
