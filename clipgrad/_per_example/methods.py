"""The ways to the clipped sum: one pass, two, or the gradient of each example."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._clip import clip_grads, nonfinite_counts
from clipgrad._numerics import accumulator, with_real_dtype
from clipgrad._per_example.batches import batch_size, shares_axes, with_auto_axes
from clipgrad._per_example.course import following
from clipgrad._per_example.follow import KeptFactors
from clipgrad._per_example.plan import method_for
from clipgrad._per_example.scales import scaling_of
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._per_example.sums import weighted_sum
from clipgrad._per_example.traced import ExampleGradient, followed
from clipgrad._per_example.two_passes import two_passes_sums
from clipgrad._trees import map_clippable, partition, selected

Sums = Callable[[Any, Any], tuple[Any, tuple[Any, ...]]]


def sums_of(subject: PerExampleSubject, params: Any, batch: Any) -> Sums:
    """The function of parameters and examples that gives the sum of the clipped gradients."""
    direct = subject.why_direct(params) is not None
    form = functools.partial(direct_sums if direct else _followed_sums, subject)
    if direct and not shares_axes(params, batch):
        return form  # the loss may name shardings itself
    return with_auto_axes(form, lambda whole, each: (whole, each))


def _followed_sums(
    subject: PerExampleSubject, params: Any, examples: Any
) -> tuple[Any, tuple[Any, Any]]:
    """The sum of the clipped gradients, from a program that is traced once."""
    run = functools.partial(sums_of_followed, subject)
    return followed(subject, params, examples, run)[0]


def sums_of_followed(
    subject: PerExampleSubject,
    gradient: ExampleGradient,
    shapes: Sequence[Any],
    params: Any,
    examples: Any,
) -> tuple[Any, tuple[Any, Any]]:
    """The sum of the clipped gradients by the method that fits these shapes of one of them."""
    method, _ = method_for(subject, params, shapes, batch_size(examples))
    if method == "direct":  # for its time
        total, (value, stats, _) = direct_sums(subject, params, examples)
        return total, (value, stats)
    form = one_pass_sums if method == "one pass" else two_passes_sums
    return form(subject, gradient, params, examples)


def one_pass_sums(
    subject: PerExampleSubject, gradient: ExampleGradient, params: Any, examples: Any
) -> tuple[Any, tuple[Any, Any]]:
    """The sum of the clipped gradients; what the loss function returned, and the statistics."""
    clipped = frozenset(i for i, flag in enumerate(subject.flags(params)) if flag)
    course = gradient.course
    factors = KeptFactors(subject.zeroed(course.arrays), clipped=clipped)
    gradients, value = gradient.each(params, examples, factors)
    scaling = scaling_of(subject, params, gradients, factors.zero, batch_size(examples))
    sums = []
    for i, of_leaf in enumerate(gradients):
        weight = scaling.weights.of(i)
        ok = None if weight is None else scaling.ok
        with following([i]):
            sums.append(weighted_sum(of_leaf, weight, ok, i in factors.zero))
    return jax.tree.structure(params).unflatten(sums), (value, scaling.stats)


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
