"""Clipped sums with the factors of all leaves kept until the norms are known."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._per_example.batches import batch_size
from clipgrad._per_example.follow import Keep, Notes
from clipgrad._per_example.grams import squares
from clipgrad._per_example.scales import example_scales
from clipgrad._per_example.squares import Squares
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._per_example.sums import weighted_sum
from clipgrad._per_example.terms import Products
from clipgrad._per_example.traced import ExampleGradient
from clipgrad._stats import ClipStats
from clipgrad._trees import partition


def one_pass_sums(
    subject: PerExampleSubject, gradient: ExampleGradient, params: Any, examples: Any
) -> tuple[Any, tuple[Any, Any]]:
    """The sum of the clipped gradients; what the loss function returned, and the statistics."""
    clipped = frozenset(i for i, flag in enumerate(subject.flags(params)) if flag)
    keep = Keep(subject.nonfinite == "zero", clipped)
    found = gradient.each(params, examples, keep, Notes())
    scaling = scaling_of(subject, params, found.gradients, batch_size(examples))
    sums = [
        weighted_sum(value, weight, None if weight is None else scaling.ok, scaling.zero)
        for value, weight in zip(found.gradients, scaling.weights, strict=True)
    ]
    return jax.tree.structure(params).unflatten(sums), (found.value, scaling.stats)


class Scaling(NamedTuple):
    """By what the gradients of the examples are scaled."""

    weights: list[jax.Array | None]  # of each leaf; None where it is not clipped
    ok: jax.Array | None  # which examples are not left out
    zero: bool  # whether NaN and inf in arrays count as 0
    stats: ClipStats


def scaling_of(
    subject: PerExampleSubject, params: Any, values: Sequence[Any], size: int
) -> Scaling:
    """The scales of the leaves of ``size`` examples, from their products, squares or arrays.

    With ``nonfinite="zero"`` an example is left out whose gradient of a leaf is NaN or inf, unless
    it is an array in which these count as 0.
    """
    zero, flags = subject.nonfinite == "zero", subject.flags(params)
    leaves = [each_squares(v, size, zero) for v, flag in zip(values, flags, strict=True) if flag]
    ok = None
    if zero:
        ok = jnp.all(jnp.stack([jnp.isfinite(leaf.total) for leaf in leaves]), axis=0)
        leaves = [
            leaf._replace(
                total=jnp.where(ok, leaf.total, 0), exponent=jnp.where(ok, leaf.exponent, 0)
            )
            for leaf in leaves
        ]
    parameters, structure = jax.tree.flatten(params)
    chosen = structure.unflatten(partition(parameters, flags)[0])
    weights, stats = example_scales(subject.rule, chosen, leaves)
    each = iter(weights)
    return Scaling([next(each) if flag else None for flag in flags], ok, zero, stats)


def each_squares(value: Any, size: int, zero: bool = False) -> Squares:
    """The squares of a leaf for each example."""
    if isinstance(value, Squares):
        return value
    if isinstance(value, Products) and value.squares is not None:
        return value.squares
    if isinstance(value, Products):
        return jax.vmap(squares, axis_size=size)(value)
    return jax.vmap(lambda x: Squares.of(x, zero=zero))(value)
