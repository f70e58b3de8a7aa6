"""Clips of the gradient of each example."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import clipgrad as cg
from benchmarks import models, per_example_models
from benchmarks.per_example_models import Model
from benchmarks.rows import FLOOR, OURS, PEER, Absent, Row, Scale, Side, jitted, optional
from benchmarks.subjects.names import NARROW

TITLE = "Clip of each example's gradient"


def clipped(model: Model, microbatch: int | None = None) -> Callable:
    """The sum of the clipped gradients by this library."""
    rule = cg.ClipByGlobalNorm(model.limit)
    per_example = cg.clip_per_example(model.loss, rule, reduce="sum", microbatch=microbatch)
    return lambda params, batch: per_example(params, batch)[1]


def optax_sum(model: Model) -> Callable:
    """The sum by the means of optax, from the stacked gradients of all examples."""

    def clip(params: Any, batch: Any) -> Any:
        stacked = jax.vmap(jax.grad(model.loss), (None, 0))(params, batch)
        return optax.per_example_global_norm_clip(stacked, model.limit)[0]

    return clip


def unclipped(model: Model) -> Callable:
    """The plain gradient of the sum of all losses."""

    def total(params: Any, batch: Any) -> jax.Array:
        return jnp.sum(jax.vmap(model.loss, (None, 0))(params, batch))

    return jax.grad(total)


def privacy(model: Model, batch: Any, microbatch: int | None) -> Side | Absent:
    """The sum by jax-privacy."""

    def make(clipping: Any) -> Side:
        theirs = clipping.clipped_grad(
            model.loss,
            l2_clip_norm=model.limit,
            keep_batch_dim=False,
            microbatch_size=microbatch,
        )
        return jitted("jax-privacy", PEER, theirs, model.params, batch, numbers=model.to_torch)

    return optional("jax-privacy", "jax_privacy.clipping", make)


def in_torch(model: Model, batch: Any) -> list[Side | Absent]:
    """Opacus, fastDP and the plain gradient of PyTorch."""

    def make(torch: Any) -> Any:
        del torch
        from benchmarks import per_example_torch

        return per_example_torch.sides(model, batch)

    found = optional("Opacus", "opacus", make)
    return found if isinstance(found, list) else [found]


def sides(
    make: Callable[[], Model], size: int, microbatch: int | None = None
) -> list[Side | Absent]:
    """Our clip and norms, optax's without microbatches, the plain gradient, and all other peers."""
    model = make()
    batch = model.batch(size)

    def side(name: str, kind: str, fun: Callable, numbers: Any = model.to_torch) -> Side:
        return jitted(name, kind, fun, model.params, batch, numbers=numbers)

    return [
        side("clipgrad", OURS, clipped(model, microbatch)),
        side("clipgrad, norms", OURS, cg.per_example_norms(model.loss), None),
        side("optax, all at once", PEER, optax_sum(model)),
        side("no clip", FLOOR, unclipped(model), None),
        privacy(model, batch, microbatch),
        *(in_torch(model, batch) if microbatch is None and model.twin else []),
    ]


# The model, its batches, and where sides that sum in another order may differ: of a group norm's
# and an attention's sums many digits cancel. Of the language models 256 gradients are 4.4 GB, and
# their logits 1.1 GB.
WORK = (
    ("MLP of 0.67M", per_example_models.mlp, (64, 16, 256), 1e-5),
    ("CNN of 56k", per_example_models.cnn, (16, 256), 1e-5),
    ("ResNet-18 of 0.7M", per_example_models.resnet, (16, 256), 2e-5),
    ("transformer of 0.8M, scan + remat", per_example_models.transformer, (16, 256), 2e-5),
    ("LSTM of 0.13M, scan of 64", per_example_models.lstm, (16, 256), 1e-5),
    (
        "language model, 32k tokens",
        functools.partial(per_example_models.language_model, tied=False),
        (16, 64),
        2e-5,
    ),
    (
        "language model, 32k tokens, tied",
        functools.partial(per_example_models.language_model, tied=True),
        (16, 64),
        2e-5,
    ),
)


def narrow_transformer(scale: Scale) -> Model:
    """The transformer in bfloat16, without a twin."""
    model = per_example_models.transformer(scale)
    return model._replace(loss=models.in_bfloat16(model.loss), twin="")


def rows(scale: Scale) -> list[Row]:
    """Each model in a small and a large batch; the MLP in microbatches as well."""
    found = [
        Row(
            f"{name}, batch {size}",
            lambda m=model, b=size: sides(lambda: m(scale), b),
            rtol,
            10.0,
        )
        for name, model, sizes, rtol in WORK
        for size in sizes
    ]
    parts = Row(
        "MLP of 0.67M, batch 64 in parts of 16",
        lambda: sides(lambda: per_example_models.mlp(scale), 64, 16),
        1e-5,
    )
    narrow = Row(
        "transformer of 0.8M, scan + remat, in bfloat16, batch 16",
        lambda: sides(lambda: narrow_transformer(scale), 16),
        NARROW,
        20.0,
    )
    return [found[0], parts, *found[1:], narrow]
