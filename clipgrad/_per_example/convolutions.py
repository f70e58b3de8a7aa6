"""The gradients of convolution kernels: products of the patches under a kernel and cotangents."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._numerics import accumulator
from clipgrad._per_example.follow import (
    KeptFactors,
    SquaredNorm,
    contracted,
    follows,
    gradient_array,
    is_plain_array,
)
from clipgrad._per_example.layouts import convolved
from clipgrad._per_example.products import one_product
from clipgrad._per_example.sums import Contract
from clipgrad._per_example.taps import Windows, squares_of_taps, tap_by_tap, taps_are_cheaper
from clipgrad._per_example.terms import Factor, GradientAxis, Products, Term, Unfollowed

# Each tap is a slice in the program; larger kernels are rare, and would make it long.
_MOST_TAPS = 256

CHEAPER = "cheaper for each example than Gram matrices of its patches"


@follows("conv_general_dilated", wants=None)
def _convolution(hook, equation, inputs, wants):
    if not all(is_plain_array(x) and jnp.issubdtype(x.dtype, jnp.floating) for x in inputs):
        raise Unfollowed("a convolution of numbers that are not real")
    params, aval = equation.params, equation.outvars[0].aval
    if (summed := contracted(hook, _over_examples(equation), tuple(inputs), wants[0])) is not None:
        return [summed]
    numbers = params["dimension_numbers"]
    taps = [aval.shape[i] for i in numbers.out_spec[2:]]
    if math.prod(taps) > _MOST_TAPS:
        raise Unfollowed(f"a kernel with more than {_MOST_TAPS} taps")
    lhs = jnp.transpose(inputs[0], numbers.lhs_spec)
    rhs = jnp.transpose(inputs[1], numbers.rhs_spec)
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    cheaper = taps_are_cheaper(aval.size, rhs.shape[0], rhs[0].size)
    plain, reduction = groups == batches == 1, hook.reduction
    if plain and cheaper and isinstance(reduction, SquaredNorm) and wants[0].is_whole:
        zero = wants[0].leaves <= reduction.zero
        return [squares_of_taps(inputs[0], inputs[1], taps, equation, zero)]
    if plain and cheaper and wants[0].steps == 1:
        hook.course.note(wants[0].leaves, CHEAPER)
        made = tap_by_tap(inputs[0], inputs[1], taps, equation, hook.course)
        return [_arrays(hook, made, wants[0])]
    windows = Windows.of(inputs[0], rhs.shape[2:], params)
    patches = jnp.stack([jnp.transpose(x, numbers.lhs_spec) for x in windows.all(taps)])
    rank = len(taps)
    # Labels: the group, rows and columns of the kernel (both with it in front), channels that are
    # summed, then the positions in the kernel, and those that are summed.
    group, row, column, channel = range(4)
    first, second = list(range(4, 4 + rank)), list(range(4 + rank, 4 + 2 * rank))
    count = groups * batches
    n, c, f = lhs.shape[0] // batches, lhs.shape[1] // groups, rhs.shape[0] // count
    order = (group, row, channel) if batches > 1 else (row, group, channel)
    sizes = (batches, n, c) if batches > 1 else (n, groups, c)
    left = Factor(patches.reshape(*taps, *sizes, *rhs.shape[2:]), (*first, *order, *second))
    right = Factor(rhs.reshape(count, f, *rhs.shape[1:]), (group, column, channel, *second))
    axes: list[Any] = [None] * aval.ndim
    merged = [(row,), (group, column), *((k,) for k in first)]
    for place, labels in zip(numbers.out_spec, merged, strict=True):
        axes[place] = GradientAxis(labels, 0, aval.shape[place])
    term = Term((left, right), tuple(axes))
    return one_product(hook, term if count > 1 else _ungrouped(term, group), aval, wants[0])


def _over_examples(equation: Any) -> Contract:
    """The sum over examples of a convolution: their axis joins the features that are summed."""
    numbers, groups = equation.params["dimension_numbers"], equation.params["feature_group_count"]

    def contract(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        kind = jnp.promote_types(accumulator(lhs), accumulator(rhs))
        lhs = _joined_features(lhs.astype(kind), numbers.lhs_spec[1], groups)
        rhs = _joined_features(rhs.astype(kind), numbers.rhs_spec[1], 1)
        highest = (jax.lax.Precision.HIGHEST,) * 2
        return convolved(equation, lhs, rhs, preferred_element_type=None, precision=highest)

    return contract


def _joined_features(x: jax.Array, axis: int, groups: int) -> jax.Array:
    """An array whose first axis, of the examples, is merged with another, inside of its groups."""
    shape = x.shape[1:]
    split = x.reshape(x.shape[0], *shape[:axis], groups, -1, *shape[axis + 1 :])
    moved = jnp.moveaxis(split, 0, axis + 1)
    return moved.reshape(*shape[:axis], -1, *shape[axis + 1 :])


def _ungrouped(term: Term, group: int) -> Term:
    """The term without the label of a single group."""
    factors = []
    for factor in term.factors:
        i = factor.labels.index(group)
        labels = tuple(k for k in factor.labels if k != group)
        factors.append(Factor(jnp.squeeze(factor.values, i), labels))
    axes = [axis._replace(labels=tuple(k for k in axis.labels if k != group)) for axis in term.axes]
    return Term(tuple(factors), tuple(axes))


def _arrays(hook: Any, value: Products, want: Any) -> Products | jax.Array:
    """A gradient whose terms are arrays at places of their own, as the hook keeps it."""
    kept = hook.reduction
    if isinstance(kept, KeptFactors) and want.is_whole and want.leaves <= kept.clipped:
        return kept.arrays(value, want)
    return gradient_array(value)
