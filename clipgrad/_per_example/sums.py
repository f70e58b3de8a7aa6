"""Sums over examples of weighted gradients, from factors: one product over examples and rows."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._numerics import accumulator, times, with_real_dtype
from clipgrad._per_example.blocks import dense_gradient
from clipgrad._per_example.terms import Factor, Products, Term, apart, rejoined

Each = jax.Array | None  # a number or flag of each example; None: 1, or true
# Takes two factors with the examples in front, and sums their products over these as well.
Contract = Callable[[jax.Array, jax.Array], jax.Array]


class Summed(NamedTuple):
    """A sum over the examples, inside of a program that is mapped over them."""

    array: jax.Array


def over_examples(
    total: Callable[[Any, Each, Each], jax.Array], value: Any, weight: Each, ok: Each, like: Any
) -> Summed:
    """Inside of one `jax.vmap` over the examples: the total of values that have them in front.

    What all examples share stays as it is. ``like`` is any array that examples have, so that there
    is one.
    """

    @jax.custom_batching.custom_vmap
    def run(own: Any, shared: list, weight: Each, ok: Each, like: jax.Array) -> jax.Array:
        del like
        own, weight, ok = jax.tree.map(lambda x: x[None], (own, weight, ok))
        return total(rejoined(own, shared), weight, ok)

    @run.def_vmap
    def _mapped(size: int, mapped: Any, own: Any, shared: list, *each: Any) -> Any:
        flags = mapped[0], *mapped[2:4]
        own, weight, ok = with_examples(size, flags, (own, *each[:2]))
        return total(rejoined(own, shared), weight, ok), False

    return Summed(run(*apart(value), weight, ok, like))


def with_examples(size: int, mapped: Any, values: Any) -> Any:
    """Arrays with an axis for the examples in front, those too that all examples share."""
    leaves, structure = jax.tree.flatten(values)
    each = [
        x if flag else jnp.broadcast_to(x, (size, *x.shape))
        for x, flag in zip(leaves, jax.tree.leaves(mapped), strict=True)
    ]
    return structure.unflatten(each)


def contracted(contract: Contract, factors: Any, weight: Each, ok: Each) -> jax.Array:
    """A weighted sum over examples that is one product of two factors."""
    first, second = (_where_ok(ok, x) for x in factors)
    return contract(first, _times(second, weight))


def weighted_sum(value: jax.Array | Products, weights: Each, ok: Each, zero: bool) -> jax.Array:
    """The sum of the gradients of the examples times their weights, of those that are ``ok``.

    Where some may not be, ``zero`` says that NaN and inf in an array count as 0.
    """
    if isinstance(value, Products):
        terms = tuple(_weighted(term, weights, ok) for term in value.terms)
        return dense_gradient(dataclasses.replace(value, terms=terms))
    wide = _where_ok(ok, with_real_dtype(value, accumulator(value)))
    if zero and ok is not None:
        wide = jnp.where(jnp.isfinite(wide), wide, jnp.zeros_like(wide))
    return jnp.sum(_times(wide, weights), axis=0)


def _weighted(term: Term, weights: Each, ok: Each) -> Term:
    """A term that sums over examples, whose smallest factor has the weights."""
    (examples,) = term.fresh()
    term = term.stacked(None).map(_steps_in_front)
    smallest = min(term.arrays, key=lambda i: term.factors[i].values.size)

    def change(i: int, factor: Factor) -> Factor:
        values = factor.values
        if factor.is_shared:
            # As numbers: where a weight is NaN, what a mask leaves out is NaN as well.
            numbers = values.astype("float32") if values.dtype == bool else values
            return dataclasses.replace(factor, values=numbers)
        axis = factor.labels.index(examples)
        if factor.hot is None:
            values = _where_ok(ok, values, axis)
        if i == smallest:
            values = _times(with_real_dtype(values, accumulator(values)), weights, axis)
        return dataclasses.replace(factor, values=values)

    factors = tuple(change(i, factor) for i, factor in enumerate(term.factors))
    return dataclasses.replace(term, factors=factors).tidied()


def _steps_in_front(factor: Factor) -> Factor:
    """The factor with the examples behind the steps of the scan that has stacked it.

    So it lies in memory: with the examples in front XLA's CPU compiler would copy it.
    """
    examples, *others = factor.labels
    if factor.is_shared or factor.hot is not None or not others or others[0] != factor.steps:
        return factor
    labels = (others[0], examples, *others[1:])
    return dataclasses.replace(factor, values=jnp.swapaxes(factor.values, 0, 1), labels=labels)


def _where_ok(ok: Each, x: jax.Array, axis: int = 0) -> jax.Array:
    return x if ok is None else jnp.where(_beside(ok, x, axis), x, jnp.zeros_like(x))


def _times(x: jax.Array, weights: Each, axis: int = 0) -> jax.Array:
    """The values times the weights of the examples.

    XLA would multiply a weight with the constants in ``x`` first: where the gradient is 1e20 and
    the loss divides by 1e20, to 1e-40, which is 0 on a CPU.
    """
    if weights is None:
        return x
    x = jax.lax.optimization_barrier(x)
    return times(x, _beside(weights.astype(accumulator(x)), x, axis))


def _beside(numbers: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """The numbers of the examples, along their axis."""
    return numbers.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
