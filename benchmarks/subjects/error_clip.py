"""Error clips by value on three models, beside the same models without a clip."""

from collections.abc import Callable
from typing import Any

import jax

import clipgrad as cg
from benchmarks import models
from benchmarks.peers import custom_vjp_clip
from benchmarks.rows import FLOOR, OURS, PEER, Absent, Row, Scale, Side, jitted, optional
from benchmarks.subjects.names import NARROW

TITLE = "Error clip by value"


def sides(
    model: Callable, args: tuple, limit: float, acts: bool, narrow: bool = False
) -> list[Side | Absent]:
    """Ours, the plain model where no element reaches the limit, and two peers."""
    dtype = models.in_bfloat16 if narrow else lambda fun: fun

    def side(name: str, kind: str, clip: Callable) -> Side:
        return jitted(name, kind, jax.value_and_grad(dtype(lambda *a: model(*a, clip))), *args)

    rule = cg.ErrorClipByValue(max=limit)
    plain = [] if acts else [side("plain", FLOOR, lambda x: x)]

    def of_rlax(rlax: Any) -> Side:
        return side("rlax", PEER, lambda x: rlax.clip_gradient(x, -limit, limit))

    return [
        side("clipgrad", OURS, lambda x: cg.clip_cotangent(x, rule)),
        *plain,
        side("custom_vjp by hand", PEER, custom_vjp_clip(limit)),
        optional("rlax", "rlax", of_rlax),
    ]


def rows(scale: Scale) -> list[Row]:
    """Each model with a limit out of reach, and with one that acts."""
    found = {
        f"LSTM, scan of {scale(256)}": (models.lstm, models.lstm_args(scale)),
        "transformer, scan + remat": (models.scanned_transformer, models.scanned_args(scale)),
        "MLP": (models.mlp_loss, models.mlp_args(scale)),
    }
    limits = {"": (1e6, False), ", acts": (1e-6, True)}
    wide = [
        Row(name + suffix, lambda m=model, a=args, c=limit: sides(m, a(), *c), 1e-5, 8.0)
        for name, (model, args) in found.items()
        for suffix, limit in limits.items()
    ]
    model, args = found["transformer, scan + remat"]
    narrow = lambda: sides(model, args(), 1e-6, True, narrow=True)  # noqa: E731
    return [*wide, Row("transformer, scan + remat, acts, in bfloat16", narrow, NARROW, 8.0)]
