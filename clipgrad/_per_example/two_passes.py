"""Clipped sums with nothing kept: first the norms, then the gradients once more, weighted."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._numerics import accumulator
from clipgrad._per_example.batches import batch_size
from clipgrad._per_example.follow import Measure, Notes
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


class Add(NamedTuple):
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
    subject: PerExampleSubject, params: Any, examples: Any
) -> tuple[Any, tuple[Any, Any]]:
    """The sum of the clipped gradients; what the loss function returned, and the statistics."""
    measure = Measure(subject.nonfinite == "zero")

    def of_one(params: Any, example: Any, like: Any) -> tuple[list[jax.Array], tuple[Any, Any]]:
        gradient = ExampleGradient.of(subject.loss_fn, subject.has_aux, params, example, Notes())
        found, value = gradient(jnp.ones(()), measure)
        scaling = scaling_of(subject, params, found)
        end = Add(scaling.weights, scaling.ok, like)
        grads, _ = gradient(_one_after(scaling.weights), end)
        sums = [end.of_leaf(each, i).array for i, each in enumerate(grads)]
        return sums, (value, scaling.stats)

    mapped = jax.vmap(of_one, in_axes=(None, 0, 0), out_axes=(None, 0))
    sums, rest = mapped(params, examples, jnp.zeros(batch_size(examples), bool))
    return jax.tree.structure(params).unflatten(sums), rest


def _one_after(weights: Sequence[jax.Array | None]) -> jax.Array:
    """The number 1, which no compiler knows before it has these numbers.

    So the second backward pass begins when the first one has ended, and shares nothing with it:
    `jax.lax.optimization_barrier` is gone when XLA orders a program.
    """
    never = [jnp.isnan(w) & jnp.isinf(w) for w in weights if w is not None]
    return jnp.where(functools.reduce(jnp.logical_or, never, jnp.array(False)), 0.0, jnp.ones(()))
