"""Clipped sums of gradients that are made for each example."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._gradient_clip import clip_grads, nonfinite_counts
from clipgrad._numerics import accumulator, with_real_dtype
from clipgrad._per_example.explicit import with_auto_axes
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._trees import map_clippable, partition, selected


def direct_sums(
    subject: PerExampleSubject, params: Any, examples: Any
) -> tuple[Any, tuple[Any, Any, Any]]:
    """The sum of the clipped gradients; what the loss function returned, and the statistics.

    The last result counts for ``nonfinite="error"`` what is NaN or inf, in each leaf and example.
    """
    loss_and_grad = jax.value_and_grad(subject.loss_fn, has_aux=subject.has_aux)
    value, grads = jax.vmap(loss_and_grad, in_axes=(None, 0))(params, examples)
    # A norm sums over axes that a parameter may be sharded over.
    clip = with_auto_axes(functools.partial(_clipped, subject), lambda whole, each: (whole, each))
    total, (stats, counts) = clip(params, grads)
    return total, (value, stats, counts)


def _clipped(subject: PerExampleSubject, params: Any, grads: Any) -> tuple[Any, tuple[Any, Any]]:
    """The sum of stacked gradients, each clipped on its own, the statistics, and what is bad."""
    raises = subject.nonfinite == "error"
    policy = "propagate" if raises else subject.nonfinite

    def of_one(grads: Any) -> Any:
        wide = map_clippable(lambda g: with_real_dtype(g, accumulator(g)), grads)
        options = {"where": subject.where, "nonfinite": policy}
        clipped, stats = clip_grads(wide, subject.rule, params, **options)
        if not raises:
            return clipped, stats, {}
        chosen, _ = partition(wide, selected(subject.where, wide))
        return clipped, stats, nonfinite_counts(chosen)

    clipped, *rest = jax.vmap(of_one)(grads)
    return jax.tree.map(lambda g: jnp.sum(g, axis=0), clipped), tuple(rest)
