"""Clipped sums of gradients that are made for each example."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._gradient_clip import clip_grads
from clipgrad._numerics import accumulator, with_real_dtype
from clipgrad._per_example.explicit import with_auto_axes
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._trees import map_clippable


def direct_sums(
    subject: PerExampleSubject, params: Any, examples: Any
) -> tuple[Any, tuple[Any, Any]]:
    """The sum of the clipped gradients; what the loss function returned, and the statistics."""
    loss_and_grad = jax.value_and_grad(subject.loss_fn, has_aux=subject.has_aux)
    value, grads = jax.vmap(loss_and_grad, in_axes=(None, 0))(params, examples)
    # A norm sums over axes that a parameter may be sharded over.
    clip = with_auto_axes(functools.partial(_clipped, subject), lambda whole, each: (whole, each))
    total, stats = clip(params, grads)
    return total, (value, stats)


def _clipped(subject: PerExampleSubject, params: Any, grads: Any) -> tuple[Any, Any]:
    """The sum of stacked gradients, each clipped on its own, and the statistics."""

    def of_one(grads: Any) -> Any:
        wide = map_clippable(lambda g: with_real_dtype(g, accumulator(g)), grads)
        options = {"where": subject.where, "nonfinite": subject.nonfinite}
        return clip_grads(wide, subject.rule, params, **options)

    clipped, stats = jax.vmap(of_one)(grads)
    return jax.tree.map(lambda g: jnp.sum(g, axis=0), clipped), stats
