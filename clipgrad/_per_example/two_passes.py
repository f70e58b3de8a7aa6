"""Clipped sums with nothing kept: first the norms, then the gradients once more, weighted."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._compat import by_platform
from clipgrad._numerics import accumulator
from clipgrad._per_example.batches import batch_size
from clipgrad._per_example.batches import sums as sums_of_parts
from clipgrad._per_example.course import following
from clipgrad._per_example.follow import Reduction, SquaredNorm, gradient_array
from clipgrad._per_example.scales import Weights, scaling_of
from clipgrad._per_example.split import seeds_after
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._per_example.sums import Contract, Summed, contracted, over_examples, weighted_sum
from clipgrad._per_example.terms import Products, apart, rejoined
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
        with following([leaf]):
            return self.of_leaf(value, leaf).array

    def of_leaf(self, value: Any, leaf: int) -> Summed:
        """The sum of a gradient, or a part of one."""
        if isinstance(value, Summed):
            return value
        if isinstance(value, Products) and not value.terms:
            return Summed(jnp.zeros(value.shape, accumulator(value)))
        value = gradient_array(value) if leaf in self.zero else value
        return self._over_examples(functools.partial(weighted_sum, zero=True), value, leaf)

    def contracted(self, contract: Contract, factors: tuple, want: WantedGradient) -> Summed | None:
        """The sum as one product over examples, where what follows is the same for all of them."""
        if not self.adds(want):
            return None
        total = functools.partial(contracted, contract)
        return self._over_examples(total, factors, min(want.leaves))

    def _over_examples(self, total: Any, value: Any, leaf: int) -> Summed:
        weight = self.weights.of(leaf)
        ok = None if weight is None else self.ok
        return over_examples(total, value, weight, ok, self.like)

    def adds(self, want: WantedGradient) -> bool:
        alike = len({self.weights.places[leaf] for leaf in want.leaves}) == 1
        return alike and want.is_summable and not want.leaves & self.zero


def two_passes_sums(
    subject: PerExampleSubject, gradient: ExampleGradient, params: Any, examples: Any
) -> tuple[Any, tuple[Any, Any]]:
    """The sum of the clipped gradients; what the loss function returned, and the statistics."""
    of_some = functools.partial(_sums_of_some, subject, gradient)

    def in_halves(params: Any, examples: Any) -> tuple[Any, tuple[Any, Any]]:
        return sums_of_parts(of_some, params, examples, 2)

    if not _are_halved(gradient, params, batch_size(examples)):
        return of_some(params, examples)
    return by_platform(params, examples, cpu=in_halves, gpu=of_some, default=of_some)


def _sums_of_some(
    subject: PerExampleSubject, gradient: ExampleGradient, params: Any, examples: Any
) -> tuple[Any, tuple[Any, Any]]:
    """One forward pass and two backward passes, the second one with the numbers of the first."""
    value, kept = gradient.forward(params, examples)
    zero = subject.zeroed(gradient.course.arrays)
    squared, one = SquaredNorm(zero), gradient.one

    def measured(params: Any, example: Any, kept: Any) -> Any:
        return apart(gradient.backward(params, example, kept, one, squared))

    def weighted(params: Any, example: Any, kept: Any, weights: Any, ok: Any, seed: Any) -> list:
        total = ExampleSum(weights, ok, seed, zero)
        grads = gradient.backward(params, example, kept, seed, total)
        return [total.at_the_end(value, i) for i, value in enumerate(grads)]

    axes = None, 0, gradient.kept_axes
    mapped = jax.vmap(measured, in_axes=axes, out_axes=(0, None))
    found = rejoined(*mapped(params, examples, kept))
    weights, ok, stats = scaling_of(subject, params, found, zero, batch_size(examples))
    seed = seeds_after(weights.numbers, jnp.broadcast_to(one, (batch_size(examples),)))
    summed = jax.vmap(weighted, in_axes=(*axes, 0, 0, 0), out_axes=None)
    total = summed(params, examples, kept, weights, ok, seed)
    return jax.tree.structure(params).unflatten(total), (value, stats)


def _are_halved(gradient: ExampleGradient, params: Any, size: int) -> bool:
    """Whether a CPU takes half of the examples at a time.

    XLA's CPU compiler runs what it can as early as it can, so that the cotangents of all layers are
    there at once: up to .8 times the temporaries of a plain gradient beside these. Other compilers
    order a program by its memory. Not if what is kept is no larger than the sum that two halves
    need beside, or with less than 8 examples, with which dense layers and convolutions took longer.
    """
    kept, sums = size * gradient.kept_bytes, sum(4 * jnp.size(p) for p in jax.tree.leaves(params))
    return size >= 16 and size % 2 == 0 and kept > sums
