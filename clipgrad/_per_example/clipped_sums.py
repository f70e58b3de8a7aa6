"""The clipped sum of some examples: by norms, or from the elements of each one's gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._arrays import (
    accumulator,
    combine,
    count_nonfinite,
    map_clippable,
    partition,
    selected,
    with_real_dtype,
)
from clipgrad._clip import clip_grads, nonfinite_counts
from clipgrad._per_example.batches import batch_size
from clipgrad._per_example.gradients import ExampleProgram
from clipgrad._per_example.padding import Padding
from clipgrad._per_example.request import Request
from clipgrad._per_example.scaling import scaling_of
from clipgrad._per_example.uses import zero_unless


def sums_by_norms(
    request: Request, program: ExampleProgram, params: Any, examples: Any, padding: Padding
) -> tuple[Any, tuple[Any, Any]]:
    """The sum of the clipped gradients; what the loss function returned, and the statistics."""
    leaves, structure = jax.tree.flatten(params)
    value, gradients = program.gradients(params, examples)
    if padding is not None:  # of which no leaf is summed
        gradients = gradients.left_out(~padding)
    chosen = [i for i, flag in enumerate(request.flags(params)) if flag]
    norms = program.norms(chosen, gradients, batch_size(examples), padding)
    leave_out = request.nonfinite == "zero"
    scaling = scaling_of(request.rule, leave_out, [leaves[i] for i in chosen], norms)
    weights = dict(zip(chosen, scaling.weights, strict=True))
    clean = gradients.left_out(scaling.ok)
    sums = [
        program.total(i, clean if i in weights else gradients, weights.get(i))
        for i in range(len(leaves))
    ]
    return structure.unflatten(sums), (value, scaling.stats)


def sums_of_elements(
    request: Request, params: Any, examples: Any, padding: Padding
) -> tuple[Any, tuple[Any, Any, Any]]:
    """The sum of the clipped gradients; what the loss function returned, and the statistics.

    The last result counts for ``nonfinite="error"`` what is NaN or inf, in each leaf and example.
    """
    loss_and_grad = jax.value_and_grad(request.loss_fn, has_aux=request.has_aux)
    value, grads = jax.vmap(loss_and_grad, in_axes=(None, 0))(params, examples)
    grads = map_clippable(lambda g: with_real_dtype(g, accumulator(g)), grads)
    grads = _without(padding, grads)
    clip = functools.partial(_clipped, request)
    clipped, stats, counts = jax.vmap(clip, in_axes=(0, None))(grads, params)
    clipped = _without(padding, clipped)  # a function may make something of 0
    return jax.tree.map(lambda g: jnp.sum(g, axis=0), clipped), (value, stats, counts)


def _without(padding: Padding, grads: Any) -> Any:
    """The gradients of the examples, 0 for padding."""
    if padding is None:
        return grads
    return map_clippable(lambda g: zero_unless(~padding, g, 0), grads)


def _clipped(request: Request, grads: Any, params: Any) -> tuple[Any, Any, Any]:
    """The clipped gradient of one example, the statistics, and what is bad."""
    chosen, others = partition(grads, selected(request.where, grads))
    counts, bad = nonfinite_counts(chosen), count_nonfinite(chosen)
    if request.nonfinite == "zero":
        finite = jax.tree.map(lambda g: jnp.where(bad == 0, g, jnp.zeros_like(g)), chosen)
        grads = combine(finite, others)
    clipped, stats = clip_grads(grads, request.rule, params, where=request.where)
    if request.nonfinite == "zero":
        stats = stats._replace(nonfinite=bad.astype(stats.nonfinite.dtype))
    return clipped, stats, counts if request.nonfinite == "error" else {}
