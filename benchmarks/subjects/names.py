"""Clips and statistics by name, beside the plain gradient of the same models."""

from collections.abc import Callable
from typing import Any

import jax

import clipgrad as cg
from benchmarks import models
from benchmarks.rows import FLOOR, OURS, Row, Scale, Side, jitted

TITLE = "Clips and statistics by name"
# Out of reach: the gradient must be the plain one.
RULE = cg.ErrorClipByValue(max=1e6)
NARROW = 0.02  # how far gradients in bfloat16 may be apart: sums of its roundings, of 0.004 each


def variants(fun: Callable, names: list[str]) -> dict[str, Callable]:
    """What this library makes of a model, each as a function that returns the gradient first."""

    def norms(*args: Any) -> tuple[Any, Any]:
        value, grads, stats = cg.value_and_grad_with_stats(fun, watch=names)(*args)
        return (value, grads), {name: s.norm for name, s in stats.items()}

    def everything(*args: Any) -> tuple[Any, Any]:
        value, grads, stats = cg.value_and_grad_with_stats(fun, watch=names)(*args)
        return (value, grads), stats

    def clipped(changed: Callable) -> Callable:
        gradient = jax.value_and_grad(changed)
        return lambda *args: (gradient(*args), ())

    return {
        "clipped": clipped(cg.error_clip_by_name(fun, dict.fromkeys(names, RULE))),
        "watched, norms used": norms,
        "watched, all used": everything,
        "clipped everywhere": clipped(cg.error_clip_everywhere(fun, RULE)),
    }


def sides(model: Callable, narrow: bool = False) -> list[Side]:
    """The variants, and the plain gradient; also computed in bfloat16."""
    fun, *args, names = model()
    fun = models.in_bfloat16(fun) if narrow else fun

    def side(name: str, kind: str, changed: Callable) -> Side:
        return jitted(name, kind, changed, *args, numbers=lambda result: result[0])

    plain = jax.value_and_grad(fun)
    ours = [side(name, OURS, changed) for name, changed in variants(fun, names).items()]
    return [*ours, side("plain", FLOOR, lambda *args: (plain(*args), ()))]


def rows(scale: Scale) -> list[Row]:
    """Models with tags, and models whose modules have names."""
    found = {
        f"decoder, {4 * scale(22)} tags": lambda: models.tagged_decoder(scale),
        f"RNN of {scale(200)} steps, 1 tag": lambda: models.tagged_rnn(scale),
        "unrolled transformer, all modules": lambda: models.flax_transformer(scale, False),
        "scanned transformer, all modules": lambda: models.flax_transformer(scale, True),
    }
    plain = [
        Row(name, lambda m=model: sides(m), rtol=1e-5, budget=12.0) for name, model in found.items()
    ]
    narrow = lambda: sides(lambda: models.flax_transformer(scale, True), narrow=True)  # noqa: E731
    name = "scanned transformer in bfloat16, all modules"
    return [*plain, Row(name, narrow, rtol=NARROW, budget=12.0)]
