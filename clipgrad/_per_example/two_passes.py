"""Clipped sums with nothing kept: first the norms, then the gradients once more, weighted."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._numerics import accumulator
from clipgrad._per_example.batches import batch_size, each
from clipgrad._per_example.course import following
from clipgrad._per_example.delay import delay_flag, in_branch
from clipgrad._per_example.follow import Reduction, SquaredNorm, gradient_array
from clipgrad._per_example.one_pass import scaling_of
from clipgrad._per_example.scales import Weights
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._per_example.sums import (
    Contract,
    Summed,
    contracted_over_examples,
    summed_over_examples,
)
from clipgrad._per_example.terms import Products
from clipgrad._per_example.traced import ExampleGradient
from clipgrad._per_example.wanted import WantedGradient


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleSum(Reduction):
    """The sum over the examples in place of the gradient of one, each leaf with its weight."""

    weights: Weights
    ok: jax.Array | None
    like: jax.Array
    zero: frozenset[int]  # leaves that are arrays, with NaN and inf as 0

    def __call__(self, value: Any, want: WantedGradient) -> Any:
        """The sum, where what follows is the same for all examples."""
        if not self.adds(want) or isinstance(value, Summed):
            return value
        return self.of_leaf(value, min(want.leaves))

    def at_the_end(self, value: Any, leaf: int) -> jax.Array:
        """The sum of the gradient of a leaf."""
        with following([leaf]):
            return self.of_leaf(value, leaf).array

    def of_leaf(self, value: Any, leaf: int) -> Summed:
        """The sum of a gradient, or a part of one."""
        if isinstance(value, Summed):
            return value
        if isinstance(value, Products) and not value.terms:
            return Summed(jnp.zeros(value.shape, accumulator(value)))
        weight = self.weights.of(leaf)
        ok = None if weight is None else self.ok
        if leaf in self.zero:
            value = gradient_array(value)
        return Summed(summed_over_examples(value, weight, ok, self.like))

    def contracted(self, contract: Contract, factors: tuple, want: WantedGradient) -> Summed | None:
        """The sum as one product over examples, where what follows is the same for all of them."""
        if not self.adds(want):
            return None
        weight = self.weights.of(min(want.leaves))
        ok = None if weight is None else self.ok
        return Summed(contracted_over_examples(contract, factors, weight, ok, self.like))

    def adds(self, want: WantedGradient) -> bool:
        """Whether values are added up over examples here."""
        alike = len({self.weights.places[leaf] for leaf in want.leaves}) == 1
        return alike and want.is_summable and not want.leaves & self.zero


def two_passes_sums(
    subject: PerExampleSubject, gradient: ExampleGradient, params: Any, examples: Any
) -> tuple[Any, tuple[Any, Any]]:
    """The sum of the clipped gradients; what the loss function returned, and the statistics."""
    measured = functools.partial(_first_pass, subject, gradient)
    parts = _measured_parts(batch_size(examples))
    (weights, ok, stats), value = each(measured, params, examples, parts)

    zero = subject.zeroed(gradient.course.arrays)

    def of_one(params: Any, example: Any, weights: Any, ok: Any, like: Any) -> list[jax.Array]:
        total = ExampleSum(weights, ok, like, zero)
        grads, _ = gradient(params, example, total, delay_flag(weights.numbers))
        return [total.at_the_end(value, i) for i, value in enumerate(grads)]

    mapped = jax.vmap(of_one, in_axes=(None, 0, 0, 0, 0), out_axes=None)
    given = params, examples, weights, ok, jnp.zeros(batch_size(examples), bool)
    sums = in_branch(mapped, given, jnp.any(delay_flag(weights.numbers)))
    return jax.tree.structure(params).unflatten(sums), (value, stats)


def _first_pass(
    subject: PerExampleSubject, gradient: ExampleGradient, params: Any, examples: Any
) -> tuple[Any, Any]:
    """The first pass: weights, flags and statistics; and what the loss function returned."""
    squared = SquaredNorm(subject.zeroed(gradient.course.arrays), gradient.course.waiting)
    found = gradient.each(params, examples, squared)
    scaling = scaling_of(subject, params, found.gradients, squared.zero, batch_size(examples))
    return (scaling.weights, scaling.ok, scaling.stats), found.value


def _measured_parts(size: int) -> int:
    """In how many parts examples are measured.

    What measuring needs beside a plain gradient was at most 1.2 times that again, so half of the
    examples need about as much as the second pass. With less than 8 examples at a time dense layers
    and convolutions took longer. All are one part where a part might not have an example of its own
    for each device.
    """
    return 2 if size >= 16 and size % (2 * jax.device_count()) == 0 else 1
