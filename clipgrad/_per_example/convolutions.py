"""The gradients of convolution kernels: products of the patches under a kernel and cotangents."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._numerics import accumulator
from clipgrad._per_example.follow import contracted, follows, is_plain_array
from clipgrad._per_example.products import SMALL, is_small, one_product
from clipgrad._per_example.sums import Contract
from clipgrad._per_example.terms import Factor, GradientAxis, Term, Unfollowed

# Each tap is a slice in the program; larger kernels are rare, and would make it long.
_MOST_TAPS = 256


@follows("conv_general_dilated")
def _convolution(hook, equation, inputs, wants):
    if not all(is_plain_array(x) and jnp.issubdtype(x.dtype, jnp.floating) for x in inputs):
        raise Unfollowed("a convolution of numbers that are not real")
    params, aval = equation.params, equation.outvars[0].aval
    if (summed := contracted(hook, _over_examples(params), tuple(inputs), wants[0])) is not None:
        return [summed]
    numbers = params["dimension_numbers"]
    taps = [aval.shape[i] for i in numbers.out_spec[2:]]
    if math.prod(taps) > _MOST_TAPS:
        raise Unfollowed(f"a kernel with more than {_MOST_TAPS} taps")
    lhs = jnp.transpose(inputs[0], numbers.lhs_spec)
    rhs = jnp.transpose(inputs[1], numbers.rhs_spec)
    slices = _slices(inputs[0], rhs.shape[2:], taps, params)
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    factors = sum(x.size for x in slices) + rhs.size
    if groups == batches == 1 and is_small(hook, aval, factors, wants[0]):
        hook.notes.add(wants[0], SMALL)
        return [_tap_by_tap(slices, inputs[1], taps, equation)]
    patches = jnp.stack([jnp.transpose(x, numbers.lhs_spec) for x in slices])
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
    made = [(row,), (group, column), *((k,) for k in first)]
    for place, labels in zip(numbers.out_spec, made, strict=True):
        axes[place] = GradientAxis(labels, 0, aval.shape[place])
    term = Term((left, right), tuple(axes), params["precision"])
    return one_product(hook, term if count > 1 else _ungrouped(term, group), aval, wants[0])


def _over_examples(params: Any) -> Contract:
    """The sum over examples of a convolution: their axis joins the features that are summed."""
    numbers = params["dimension_numbers"]

    def contract(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        kind = jnp.promote_types(accumulator(lhs), accumulator(rhs))
        lhs = _joined_features(lhs.astype(kind), numbers.lhs_spec[1], params["feature_group_count"])
        rhs = _joined_features(rhs.astype(kind), numbers.rhs_spec[1], 1)
        names = "window_strides padding lhs_dilation rhs_dilation dimension_numbers precision"
        counts = "feature_group_count batch_group_count"
        options = {name: params[name] for name in (*names.split(), *counts.split())}
        return jax.lax.conv_general_dilated(lhs, rhs, **options)

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
    return Term(tuple(factors), tuple(axes), term.precision)


def _tap_by_tap(slices: list, rhs: jax.Array, taps: list[int], equation: Any) -> jax.Array:
    """The gradient itself: of many examples XLA would make a convolution in as many groups."""
    numbers, aval = equation.params["dimension_numbers"], equation.outvars[0].aval
    summed = numbers.lhs_spec[1:], numbers.rhs_spec[1:]
    options: Any = {"precision": equation.params["precision"]}
    options["preferred_element_type"] = jnp.promote_types(accumulator(rhs), accumulator(slices[0]))
    each = [jnp.tensordot(x, rhs, summed, **options) for x in slices]
    whole = jnp.stack(each).reshape(*taps, *each[0].shape)
    made = *numbers.out_spec[2:], *numbers.out_spec[:2]
    order = sorted(range(aval.ndim), key=lambda i: made[i])
    return jnp.transpose(whole, order).astype(aval.dtype)


def _slices(lhs: jax.Array, window: Any, taps: list[int], params: Any) -> list[jax.Array]:
    """What each tap meets at each position, with axes as the array has them."""
    numbers = params["dimension_numbers"]
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    pairs = zip(params["padding"], params["lhs_dilation"], strict=True)

    def over_space(values: Any, rest: Any) -> list:
        """Values of the axes in space, at their places."""
        found = dict(zip(numbers.lhs_spec[2:], values, strict=True))
        return [found.get(i, rest(i)) for i in range(lhs.ndim)]

    edges = over_space(
        [(int(low), int(high), d - 1) for (low, high), d in pairs], lambda i: (0, 0, 0)
    )
    padded = jax.lax.pad(lhs, jnp.zeros((), lhs.dtype), edges)
    sizes = [(w - 1) * d + 1 for w, d in zip(window, dilation, strict=True)]
    slices = []
    for tap in itertools.product(*map(range, taps)):
        starts = [t * s for t, s in zip(tap, strides, strict=True)]
        stops = [a + n for a, n in zip(starts, sizes, strict=True)]
        steps = over_space(dilation, lambda i: 1)
        ends = over_space(stops, lambda i: lhs.shape[i])
        slices.append(jax.lax.slice(padded, over_space(starts, lambda i: 0), ends, steps))
    return slices
