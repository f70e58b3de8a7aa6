"""The other clips, on the trees of two models."""

from typing import Any

import jax.numpy as jnp
import optax

import clipgrad as cg
from benchmarks import torch_peers, trees
from benchmarks.peers import by_leaf, update_of
from benchmarks.rows import OURS, PEER, Absent, Row, Scale, Side, jitted
from benchmarks.subjects.names import NARROW

TITLE = "Clips by value, leaf, block and unit"
CLIPS = {
    "value": (cg.clip_by_value, optax.clip, torch_peers.by_value, 0.5),
    "norm of each leaf": (cg.clip_by_norm, by_leaf, torch_peers.by_leaf, 1.0),
    "block RMS": (cg.clip_by_block_rms, optax.clip_by_block_rms, None, 0.5),
    "adaptive": (cg.adaptive_grad_clip, optax.adaptive_grad_clip, torch_peers.adaptive, 0.01),
}


def sides(name: str, shapes: Any, dtype: Any = jnp.float32) -> list[Side | Absent]:
    """Ours, optax's, and in float32 torch's where it has one."""
    ours, theirs, of_torch, limit = CLIPS[name]
    grads = trees.normal(shapes, dtype=dtype)
    params = trees.normal(shapes, 0.05, seed=1, dtype=dtype)
    args = (grads, params) if name == "adaptive" else (grads,)
    found: list[Side | Absent] = [
        jitted("clipgrad", OURS, update_of(ours(limit)), *args),
        jitted("optax", PEER, update_of(theirs(limit)), *args),
    ]
    if of_torch is not None and dtype == jnp.float32:
        label = "torch, timm's formula" if name == "adaptive" else "torch"
        found.append(torch_peers.torch_clip(label, of_torch(limit), grads, params))
    return found


def rows(scale: Scale) -> list[Row]:
    """Each clip on each tree."""
    models = {
        "ResNet-50": trees.resnet(scale(64, 4), tuple(map(scale, (3, 4, 6, 3)))),
        f"{scale(12)}-layer transformer": trees.transformer(scale(512, 16), scale(12)),
    }
    found = [
        Row(f"{clip}, {model}", lambda c=clip, s=shapes: sides(c, s))
        for clip in CLIPS
        for model, shapes in models.items()
    ]
    return found + [
        Row(f"{clip}, {model}, bfloat16", lambda c=clip, s=s: sides(c, s, jnp.bfloat16), NARROW)
        for clip in CLIPS
        for model, s in list(models.items())[1:]
    ]
