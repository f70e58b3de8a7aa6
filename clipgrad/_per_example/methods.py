"""The ways to the clipped sum: by norms, or from the elements of each example's gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._numerics import accumulator, with_real_dtype
from clipgrad._per_example import rules
from clipgrad._per_example.batches import batch_size
from clipgrad._per_example.gradients import ExampleProgram
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._trees import combine, map_clippable, partition, selected


def sums_by_norms(
    subject: PerExampleSubject, program: ExampleProgram, params: Any, examples: Any
) -> tuple[Any, tuple[Any, Any]]:
    """The sum of the clipped gradients; what the loss function returned, and the statistics."""
    leaves, structure = jax.tree.flatten(params)
    value, found = program.gradients(params, examples)
    chosen = [i for i, flag in enumerate(subject.flags(params)) if flag]
    size, leave_out = batch_size(examples), subject.nonfinite == "zero"
    norms = [program.norms(i, found, size) for i in chosen]
    scaling = rules.scaling_of(subject.rule, leave_out, [leaves[i] for i in chosen], norms)
    weights = dict(zip(chosen, scaling.weights, strict=True))
    clean = program.left_out(found, scaling.ok)
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
    if subject.nonfinite == "propagate":
        return *rules.clipped(subject.rule, subject.where, grads, params), {}
    if subject.nonfinite == "error":
        found = rules.clipped(subject.rule, subject.where, grads, params)
        return *found, rules.bad_counts(chosen)
    finite = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(chosen)]
    ok = functools.reduce(jnp.logical_and, finite, jnp.ones((), bool))
    kept = combine(jax.tree.map(lambda g: jnp.where(ok, g, jnp.zeros_like(g)), chosen), rest)
    clipped, stats = rules.clipped(subject.rule, subject.where, kept, params)
    kind, pairs = stats.nonfinite.dtype, zip(jax.tree.leaves(chosen), finite, strict=True)
    bad = sum((jnp.where(f, 0.0, float(g.size)).astype(kind) for g, f in pairs), stats.nonfinite)
    return clipped, stats._replace(nonfinite=bad), {}
