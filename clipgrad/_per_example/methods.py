"""The ways to the clipped sum: by norms, or from the elements of each example's gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._arrays import (
    accumulator,
    combine,
    map_clippable,
    partition,
    selected,
    with_real_dtype,
)
from clipgrad._clip import clip_grads, count_nonfinite, nonfinite_counts
from clipgrad._per_example.batches import batch_size
from clipgrad._per_example.gradients import ExampleProgram
from clipgrad._per_example.rules import scaling_of
from clipgrad._per_example.subject import PerExampleSubject


def sums_by_norms(
    subject: PerExampleSubject, program: ExampleProgram, params: Any, examples: Any
) -> tuple[Any, tuple[Any, Any]]:
    """The sum of the clipped gradients; what the loss function returned, and the statistics."""
    leaves, structure = jax.tree.flatten(params)
    value, found = program.gradients(params, examples)
    chosen = [i for i, flag in enumerate(subject.flags(params)) if flag]
    size, leave_out = batch_size(examples), subject.nonfinite == "zero"
    norms = [program.norms(i, found, size) for i in chosen]
    scaling = scaling_of(subject.rule, leave_out, [leaves[i] for i in chosen], norms)
    weights = dict(zip(chosen, scaling.weights, strict=True))
    clean = found.left_out(scaling.ok)
    sums = [
        program.total(i, clean if i in weights else found, weights.get(i))
        for i in range(len(leaves))
    ]
    return structure.unflatten(sums), (value, scaling.stats)


def sums_of_elements(
    subject: PerExampleSubject, params: Any, examples: Any
) -> tuple[Any, tuple[Any, Any, Any]]:
    """The sum of the clipped gradients; what the loss function returned, and the statistics.

    The last result counts for ``nonfinite="error"`` what is NaN or inf, in each leaf and example.
    """
    loss_and_grad = jax.value_and_grad(subject.loss_fn, has_aux=subject.has_aux)
    value, grads = jax.vmap(loss_and_grad, in_axes=(None, 0))(params, examples)
    grads = map_clippable(lambda g: with_real_dtype(g, accumulator(g)), grads)
    clip = functools.partial(_clipped, subject)
    clipped, *rest = jax.vmap(clip, in_axes=(0, None))(grads, params)
    return jax.tree.map(lambda g: jnp.sum(g, axis=0), clipped), (value, *rest)


def _clipped(subject: PerExampleSubject, grads: Any, params: Any) -> tuple[Any, Any, Any]:
    """The clipped gradient of one example, the statistics, and what is bad."""
    chosen, rest = partition(grads, selected(subject.where, grads))
    counts, bad = nonfinite_counts(chosen), count_nonfinite(chosen)
    if subject.nonfinite == "zero":
        kept = jax.tree.map(lambda g: jnp.where(bad == 0, g, jnp.zeros_like(g)), chosen)
        grads = combine(kept, rest)
    clipped, stats = clip_grads(grads, subject.rule, params, where=subject.where)
    if subject.nonfinite == "zero":
        stats = stats._replace(nonfinite=bad.astype(stats.nonfinite.dtype))
    return clipped, stats, counts if subject.nonfinite == "error" else {}
