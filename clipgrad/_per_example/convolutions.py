"""The gradients of convolution kernels: products of the patches under a kernel and cotangents."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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
from clipgrad._per_example.squares import Squares
from clipgrad._per_example.sums import Contract
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
    cheaper = _taps_are_cheaper(aval.size, rhs.shape[0], rhs[0].size)
    plain, reduction = groups == batches == 1, hook.reduction
    if plain and cheaper and isinstance(reduction, SquaredNorm) and wants[0].is_whole:
        zero = wants[0].leaves <= reduction.zero
        return [_squares_of_taps(inputs[0], inputs[1], taps, equation, zero)]
    slices = _slices(inputs[0], rhs.shape[2:], taps, params)
    if plain and cheaper and wants[0].steps == 1:
        hook.course.notes.add(wants[0].leaves, CHEAPER)
        return [_arrays(hook, _tap_by_tap(slices, inputs[1], taps, equation), wants[0])]
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


def _over_examples(equation: Any) -> Contract:
    """The sum over examples of a convolution: their axis joins the features that are summed."""
    numbers, groups = equation.params["dimension_numbers"], equation.params["feature_group_count"]

    def contract(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        kind = jnp.promote_types(accumulator(lhs), accumulator(rhs))
        lhs = _joined_features(lhs.astype(kind), numbers.lhs_spec[1], groups)
        rhs = _joined_features(rhs.astype(kind), numbers.rhs_spec[1], 1)
        return convolved(equation, lhs, rhs, preferred_element_type=None)

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


def _tap_by_tap(slices: list, rhs: jax.Array, taps: list[int], equation: Any) -> Products:
    """The gradient itself: of many examples XLA would make a convolution in as many groups.

    Each term is an array, of one tap or of several: it is added up over the examples as it lies in
    memory, and put in its place afterwards.
    """
    numbers, aval = equation.params["dimension_numbers"], equation.outvars[0].aval
    rows, columns = numbers.lhs_spec[0], numbers.rhs_spec[0]
    channels, outputs = slices[0].shape[rows], rhs.shape[columns]
    joined = next(k for k in range(len(taps) + 1) if _fits(taps[k:], channels, outputs))
    count, rank = math.prod(taps[joined:]), len(taps)
    swapped = len(slices) * channels > outputs
    row, column = rank, rank + 1
    terms = []
    for i, place in enumerate(itertools.product(*map(range, taps[:joined]))):
        patches = jnp.stack(slices[i * count : (i + 1) * count], axis=rows)
        patches = patches.reshape(*patches.shape[:rows], -1, *patches.shape[rows + 2 :])
        array = _of_tap(patches, rhs, equation, equation.params["precision"], swapped)
        split = *taps[joined:], channels
        array = array.reshape(outputs, *split) if swapped else array.reshape(*split, outputs)
        names = *range(joined, rank), row
        factor = Factor(array, (column, *names) if swapped else (*names, column))
        made: list[Any] = [GradientAxis((row,), 0, channels), GradientAxis((column,), 0, outputs)]
        made += [GradientAxis((), at, n) for at, n in zip(place, taps, strict=False)]
        made += [GradientAxis((k,), 0, taps[k]) for k in range(joined, rank)]
        order = sorted(range(aval.ndim), key=numbers.out_spec.__getitem__)
        terms.append(Term((factor,), tuple(made[k] for k in order)))
    return Products(tuple(terms), tuple(aval.shape), aval.dtype)


def _fits(taps: Sequence[int], channels: int, outputs: int) -> bool:
    """Whether patches of these taps are no larger than what they meet."""
    return not taps or math.prod(taps) * channels <= outputs


def _arrays(hook: Any, value: Products, want: Any) -> Products | jax.Array:
    """A gradient whose terms are arrays at places of their own, as the hook keeps it."""
    kept = hook.reduction
    if isinstance(kept, KeptFactors) and want.is_whole and want.leaves <= kept.clipped:
        return kept.arrays(value, want)
    return gradient_array(value)


def _taps_are_cheaper(size: int, outputs: int, rows: int) -> bool:
    """Whether to make the gradient rather than Gram matrices of this many rows.

    These need patches: on a CPU they were slower with 0.85 of the products, and faster with 0.3.
    So the gradient of an example is less than twice as large as its factors.
    """
    return size < 2 * rows * (size // outputs + outputs)


def _of_tap(
    x: jax.Array, rhs: jax.Array, equation: Any, precision: Any, swapped: bool = False
) -> jax.Array:
    """The gradient of one tap, from what it meets; ``swapped``: with its rows last.

    XLA's CPU compiler transposes what comes first.
    """
    numbers = equation.params["dimension_numbers"]
    kind = jnp.promote_types(accumulator(rhs), accumulator(x))
    options: Any = {"precision": precision, "preferred_element_type": kind}
    if swapped:
        return jnp.tensordot(rhs, x, (numbers.rhs_spec[1:], numbers.lhs_spec[1:]), **options)
    return jnp.tensordot(x, rhs, (numbers.lhs_spec[1:], numbers.rhs_spec[1:]), **options)


def _squares_of_taps(
    lhs: jax.Array, rhs: jax.Array, taps: list[int], equation: Any, zero: bool
) -> Squares:
    """The squares of the gradient, of one tap after the other: it is never there as a whole.

    Several taps are one product while their patches are no larger than what they meet. With two or
    three times as large patches two passes took longer, and with five times more memory.
    """
    numbers = equation.params["dimension_numbers"]
    window = [rhs.shape[i] for i in numbers.rhs_spec[2:]]
    found = Windows.of(lhs, window, equation.params)
    starts = jnp.array(list(itertools.product(*map(range, taps))), jnp.int32)
    rows = numbers.lhs_spec[0]
    few = max(rhs.shape[numbers.rhs_spec[0]] // lhs.shape[rows], 1)
    count = max(n for n in range(1, len(starts) + 1) if len(starts) % n == 0 and n <= few)

    def squares(nothing: None, some: jax.Array) -> tuple[None, Squares]:
        patches = jnp.concatenate([found.at(some[i]) for i in range(count)], axis=rows)
        return nothing, Squares.of(_of_tap(patches, rhs, equation, "highest"), zero=zero)

    _, each = jax.lax.scan(squares, None, starts.reshape(-1, count, len(taps)))
    return each.over_axis()


class Windows(NamedTuple):
    """The elements that each tap of a kernel meets, with axes as the array has them."""

    padded: jax.Array
    space: tuple[int, ...]  # the axes of space
    sizes: tuple[int, ...]
    params: Any

    @classmethod
    def of(cls, lhs: jax.Array, window: Sequence[int], params: Any) -> "Windows":
        """The windows in an array that is padded and dilated first."""
        space = params["dimension_numbers"].lhs_spec[2:]
        pairs = zip(space, params["padding"], params["lhs_dilation"], strict=True)
        edges = [(0, 0, 0)] * lhs.ndim
        for axis, (low, high), dilation in pairs:
            edges[axis] = int(low), int(high), dilation - 1
        sizes = list(lhs.shape)
        for axis, size, dilation in zip(space, window, params["rhs_dilation"], strict=True):
            sizes[axis] = (size - 1) * dilation + 1
        padded = jax.lax.pad(lhs, jnp.zeros((), lhs.dtype), edges)
        return cls(padded, space, tuple(sizes), params)

    def at(self, tap: Any) -> jax.Array:
        """The elements that one tap meets, a tuple of integers or an array of them."""
        starts: list[Any] = [0] * self.padded.ndim
        steps = [1] * self.padded.ndim
        strides, dilation = self.params["window_strides"], self.params["rhs_dilation"]
        for i, axis in enumerate(self.space):
            starts[axis], steps[axis] = tap[i] * strides[i], dilation[i]
        if isinstance(tap, tuple):
            stops = [a + n for a, n in zip(starts, self.sizes, strict=True)]
            return jax.lax.slice(self.padded, starts, stops, steps)
        alike = [jnp.asarray(start, jnp.int32) for start in starts]
        part = jax.lax.dynamic_slice(self.padded, alike, self.sizes)
        return jax.lax.slice(part, [0] * part.ndim, part.shape, steps)


def _slices(lhs: jax.Array, window: Any, taps: list[int], params: Any) -> list[jax.Array]:
    """The elements that each tap meets at each position."""
    found = Windows.of(lhs, window, params)
    return [found.at(tap) for tap in itertools.product(*map(range, taps))]
