"""Clipped sums with nothing kept: first the norms, then the gradients once more, weighted."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._numerics import accumulator
from clipgrad._per_example.after import in_branch, never
from clipgrad._per_example.batches import batch_size, each
from clipgrad._per_example.follow import End, Measure, Notes
from clipgrad._per_example.one_pass import scaling_of
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._per_example.sums import (
    Contract,
    Summed,
    contracted_over_examples,
    summed_over_examples,
)
from clipgrad._per_example.terms import Products
from clipgrad._per_example.traced import ExampleGradient
from clipgrad._per_example.wanted import Want


@dataclasses.dataclass(frozen=True, eq=False)
class Add(End):
    """The sum over the examples in place of the gradient of one, each leaf with its weight."""

    weights: Sequence[jax.Array | None]
    ok: jax.Array | None
    like: jax.Array

    def __call__(self, value: Any, want: Want) -> Any:
        """The sum, where what follows is the same for all examples."""
        if not self.adds(want) or isinstance(value, Summed):
            return value
        (leaf,) = want.leaves
        return self.of_leaf(value, leaf)

    def of_leaf(self, value: Any, leaf: int) -> Summed:
        """The sum of a gradient, or a part of one."""
        if isinstance(value, Summed):
            return value
        if isinstance(value, Products) and not value.terms:
            return Summed(jnp.zeros(value.shape, accumulator(value)))
        weight = self.weights[leaf]
        ok = None if weight is None else self.ok
        return Summed(summed_over_examples(value, weight, ok, self.like))

    def contracted(self, contract: Contract, factors: tuple, want: Want) -> Summed | None:
        """The sum as one product over examples, where what follows is the same for all of them."""
        if not self.adds(want):
            return None
        (leaf,) = want.leaves
        weight = self.weights[leaf]
        ok = None if weight is None else self.ok
        return Summed(contracted_over_examples(contract, factors, weight, ok, self.like))

    def adds(self, want: Want) -> bool:
        """Whether values are added up over examples here."""
        return want.final


def two_passes_sums(
    subject: PerExampleSubject, gradient: ExampleGradient, params: Any, examples: Any
) -> tuple[Any, tuple[Any, Any]]:
    """The sum of the clipped gradients; what the loss function returned, and the statistics."""
    measured = functools.partial(_first_pass, subject, gradient)
    parts = _measured_parts(batch_size(examples))
    (weights, ok, stats), value = each(measured, params, examples, parts)

    def of_one(params: Any, example: Any, weights: Any, ok: Any, like: Any) -> list[jax.Array]:
        end, after = Add(weights, ok, like), never(weights)
        grads, _ = gradient(params, example, end, Notes(), after)
        return [end.of_leaf(value, i).array for i, value in enumerate(grads)]

    mapped = jax.vmap(of_one, in_axes=(None, 0, 0, 0, 0), out_axes=None)
    given = params, examples, weights, ok, jnp.zeros(batch_size(examples), bool)
    sums = in_branch(mapped, given, jnp.any(never(weights)))
    return jax.tree.structure(params).unflatten(sums), (value, stats)


def _first_pass(
    subject: PerExampleSubject, gradient: ExampleGradient, params: Any, examples: Any
) -> tuple[Any, Any]:
    """The first pass: weights, flags and statistics; and what the loss function returned."""
    found = gradient.each(params, examples, Measure(subject.nonfinite == "zero"), Notes())
    scaling = scaling_of(subject, params, found.gradients, batch_size(examples))
    return (scaling.weights, scaling.ok, scaling.stats), found.value


def _measured_parts(size: int) -> int:
    """In how many parts examples are measured.

    What measuring needs beside a plain gradient was at most 1.2 times that again, so half of the
    examples need about as much as the second pass. With less than 8 examples at a time dense layers
    and convolutions took longer. All are one part where a part might not have an example of its own
    for each device.
    """
    return 2 if size >= 16 and size % (2 * jax.device_count()) == 0 else 1
