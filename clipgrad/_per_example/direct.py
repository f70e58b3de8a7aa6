"""Clipped sums of gradients that are made for each example."""

from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._gradient_clip import clip_grads
from clipgrad._numerics import accumulator, with_real_dtype
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._trees import map_clippable


def direct_sums(
    subject: PerExampleSubject, params: Any, examples: Any
) -> tuple[Any, tuple[Any, Any]]:
    """The sum of the clipped gradients; what the loss function returned, and the statistics."""
    loss_and_grad = jax.value_and_grad(subject.loss_fn, has_aux=subject.has_aux)

    def of_one(params: Any, example: Any) -> tuple[Any, tuple[Any, Any]]:
        value, grads = loss_and_grad(params, example)
        wide = map_clippable(lambda g: with_real_dtype(g, accumulator(g)), grads)
        options = {"where": subject.where, "nonfinite": subject.nonfinite}
        clipped, stats = clip_grads(wide, subject.rule, params, **options)
        return clipped, (value, stats)

    grads, rest = jax.vmap(of_one, in_axes=(None, 0))(params, examples)
    return jax.tree.map(lambda g: jnp.sum(g, axis=0), grads), rest
