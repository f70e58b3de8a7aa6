"""Clipped sums with the factors of all leaves kept until the norms are known."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._per_example.batches import batch_size
from clipgrad._per_example.course import following
from clipgrad._per_example.follow import KeptFactors
from clipgrad._per_example.measured import bad_elements, squares_of_leaves
from clipgrad._per_example.scales import Weights, example_scales
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._per_example.sums import weighted_sum
from clipgrad._per_example.traced import ExampleGradient
from clipgrad._stats import ClipStats
from clipgrad._trees import partition


def one_pass_sums(
    subject: PerExampleSubject, gradient: ExampleGradient, params: Any, examples: Any
) -> tuple[Any, tuple[Any, Any]]:
    """The sum of the clipped gradients; what the loss function returned, and the statistics."""
    clipped = frozenset(i for i, flag in enumerate(subject.flags(params)) if flag)
    course = gradient.course
    factors = KeptFactors(subject.zeroed(course.arrays), clipped=clipped)
    found = gradient.each(params, examples, factors)
    scaling = scaling_of(subject, params, found.gradients, factors.zero, batch_size(examples))
    sums = []
    for i, value in enumerate(found.gradients):
        weight = scaling.weights.of(i)
        ok = None if weight is None else scaling.ok
        with following([i]):
            sums.append(weighted_sum(value, weight, ok, i in factors.zero))
    return jax.tree.structure(params).unflatten(sums), (found.value, scaling.stats)


class Scaling(NamedTuple):
    """By what the gradients of the examples are scaled."""

    weights: Weights
    ok: jax.Array | None  # which examples are not left out
    stats: ClipStats


def scaling_of(
    subject: PerExampleSubject,
    params: Any,
    values: Sequence[Any],
    zero: frozenset[int],
    size: int,
) -> Scaling:
    """The scales of the leaves of ``size`` examples, from their products, squares or arrays.

    With ``nonfinite="zero"`` an example is left out whose gradient of a leaf is NaN or inf, unless
    it is one of the leaves ``zero``, in which these count as 0.
    """
    flags, ok = subject.flags(params), None
    parameters, structure = jax.tree.flatten(params)
    leaves = squares_of_leaves({i: v for i, v in enumerate(values) if flags[i]}, size, zero)
    sizes = [jnp.size(p) for p, flag in zip(parameters, flags, strict=True) if flag]
    bad = bad_elements(leaves, sizes)
    if subject.nonfinite == "zero":
        ok = jnp.all(jnp.isfinite(leaves.total), axis=0)
        leaves = leaves._replace(
            total=jnp.where(ok, leaves.total, 0), exponent=jnp.where(ok, leaves.exponent, 0)
        )
    chosen = structure.unflatten(partition(parameters, flags)[0])
    weights, stats = example_scales(subject.rule, chosen, leaves, bad)
    return Scaling(weights.among(flags), ok, stats)
