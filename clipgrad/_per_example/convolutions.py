"""The gradients of convolution kernels: products of the patches under a kernel and cotangents."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._numerics import accumulator
from clipgrad._per_example.follow import (
    KeptFactors,
    SquaredNorm,
    follows,
    gradient_array,
    is_plain_array,
)
from clipgrad._per_example.layouts import convolved
from clipgrad._per_example.products import one_product
from clipgrad._per_example.squares import Squares
from clipgrad._per_example.sums import Contract
from clipgrad._per_example.terms import Factor, GradientAxis, Products, Term, Unfollowed, product

# Each tap is a slice in the program; larger kernels are rare, and would make it long.
_MOST_TAPS = 256

CHEAPER = "cheaper for each example than Gram matrices of its patches"


@follows("conv_general_dilated", wants=None)
def _convolution(hook, equation, inputs, wants):
    if not all(is_plain_array(x) and jnp.issubdtype(x.dtype, jnp.floating) for x in inputs):
        raise Unfollowed("a convolution of numbers that are not real")
    params, aval = equation.params, equation.outvars[0].aval
    contract, kept = _over_examples(equation), hook.reduction
    if kept and (summed := kept.contracted(contract, tuple(inputs), wants[0])) is not None:
        return [summed]
    numbers = params["dimension_numbers"]
    taps = [aval.shape[i] for i in numbers.out_spec[2:]]
    if math.prod(taps) > _MOST_TAPS:
        raise Unfollowed(f"a kernel with more than {_MOST_TAPS} taps")
    columns = inputs[1].shape[numbers.rhs_spec[0]]
    cheaper = taps_are_cheaper(aval.size, columns, inputs[1].size // columns)
    plain = params["feature_group_count"] == params["batch_group_count"] == 1
    if plain and cheaper and isinstance(kept, SquaredNorm) and wants[0].is_whole:
        squared = functools.partial(Squares.of, zero=wants[0].leaves <= kept.zero)
        return [_of_taps(inputs[0], inputs[1], taps, equation, squared).over_axis()]
    if plain and cheaper and wants[0].steps == 1:
        hook.course.note(wants[0].leaves, CHEAPER)
        made = _gradient_of_kernel(inputs[0], inputs[1], taps, equation)
        return [_arrays(hook.reduction, made, wants[0])]
    return one_product(hook, _of_patches(inputs[0], inputs[1], equation), aval, wants[0])


def _of_patches(lhs: jax.Array, rhs: jax.Array, equation: Any) -> Term:
    """The product of the patches of an image and what they meet, ``rhs``.

    Labels: the group if there are several, rows and columns of the kernel, channels that are
    summed, then the positions in the kernel, and those that are summed.
    """
    params, aval = equation.params, equation.outvars[0].aval
    numbers, batches = params["dimension_numbers"], params["batch_group_count"]
    taps = [aval.shape[i] for i in numbers.out_spec[2:]]
    window, places = _windows(lhs, rhs, equation), itertools.product(*map(range, taps))
    patches = jnp.stack([jnp.transpose(window(tap), numbers.lhs_spec) for tap in places])
    rhs = jnp.transpose(rhs, numbers.rhs_spec)
    group, row, column, channel, *others = range(4 + 2 * len(taps))
    first, second = others[: len(taps)], others[len(taps) :]
    count = params["feature_group_count"] * batches
    grouped = [group] if count > 1 else []
    rows, channels = (lhs.shape[i] for i in numbers.lhs_spec[:2])
    order = [(row, rows // batches), (channel, channels * batches // count)]
    place = 0 if batches > 1 else 1
    order[place:place] = [(k, count) for k in grouped]
    labels, sizes = zip(*order, strict=True)
    patches = patches.reshape(*taps, *sizes, *rhs.shape[2:])
    left = Factor(patches, (*first, *labels, *second))
    columns = [*(count for _ in grouped), rhs.shape[0] // count]
    right = Factor(rhs.reshape(*columns, *rhs.shape[1:]), (*grouped, column, channel, *second))
    axes: list[Any] = [None] * aval.ndim
    merged = [(row,), (*grouped, column), *((k,) for k in first)]
    for place, own in zip(numbers.out_spec, merged, strict=True):
        axes[place] = GradientAxis(own, 0, aval.shape[place])
    return Term((left, right), tuple(axes))


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


def _arrays(kept: Any, value: Products, want: Any) -> Products | jax.Array:
    """A gradient whose terms are arrays at places of their own, as it is kept."""
    if isinstance(kept, KeptFactors) and want.is_whole and want.leaves <= kept.clipped:
        return kept.arrays(value, want)
    return gradient_array(value)


def _gradient_of_kernel(lhs: jax.Array, rhs: jax.Array, taps: list[int], equation: Any) -> Products:
    """The gradient itself: of many examples XLA would make a convolution in as many groups.

    Each term is an array, of one tap: it is added up over the examples as it lies in memory, and
    put in its place afterwards.
    """
    numbers, aval = equation.params["dimension_numbers"], equation.outvars[0].aval
    channels, outputs = lhs.shape[numbers.lhs_spec[0]], rhs.shape[numbers.rhs_spec[0]]
    # XLA's CPU compiler transposes what comes first, and what meets the taps once for all of them.
    swapped = rhs.size <= aval.size
    row, column = (1, 0) if swapped else (0, 1)
    found = _of_taps(lhs, rhs, taps, equation, lambda made: made, swapped)
    arrays = [x for some in found for x in jnp.split(some, some.shape[row] // channels, row)]
    order = sorted(range(aval.ndim), key=numbers.out_spec.__getitem__)
    terms = []
    for array, place in zip(arrays, itertools.product(*map(range, taps)), strict=True):
        axes = [GradientAxis((row,), 0, channels), GradientAxis((column,), 0, outputs)]
        axes += [GradientAxis((), at, n) for at, n in zip(place, taps, strict=True)]
        terms.append(Term((Factor(array, (0, 1)),), tuple(axes[k] for k in order)))
    return Products(tuple(terms), tuple(aval.shape), aval.dtype)


def taps_are_cheaper(size: int, outputs: int, rows: int) -> bool:
    """Whether to make the gradient rather than Gram matrices of this many rows.

    These need patches: on a CPU they were slower with 0.85 of the products, and faster with 0.3.
    So the gradient of an example is less than twice as large as its factors.
    """
    return size < 2 * rows * (size // outputs + outputs)


def _of_taps(
    lhs: jax.Array,
    rhs: jax.Array,
    taps: list[int],
    equation: Any,
    function: Callable[[jax.Array], Any],
    swapped: bool = False,
) -> Any:
    """A function of the gradient of one tap after the other, stacked.

    Several taps are one product while their patches are no larger than what they meet. With two or
    three times as large patches two passes took longer, and with five times more memory. The edges
    of an image are made in each step: XLA's CPU compiler would make those of all layers at once.
    """
    numbers = equation.params["dimension_numbers"]
    starts = jnp.array(list(itertools.product(*map(range, taps))), jnp.int32)
    rows = numbers.lhs_spec[0]
    few = max(rhs.shape[numbers.rhs_spec[0]] // lhs.shape[rows], 1)
    count = max(n for n in range(1, len(starts) + 1) if len(starts) % n == 0 and n <= few)
    labels = []
    for spec, own in ((numbers.lhs_spec, -1), (numbers.rhs_spec, -2)):
        places = {axis: k for k, axis in enumerate(spec)}
        labels.append([places[axis] or own for axis in range(len(spec))])
    order = slice(None, None, -1 if swapped else 1)

    def of_some(nothing: None, some: jax.Array) -> tuple[None, Any]:
        image, some = jax.lax.optimization_barrier((lhs, some))
        window = _windows(image, rhs, equation)
        patches = jnp.concatenate([window(some[i]) for i in range(count)], axis=rows)
        return nothing, function(product([patches, rhs][order], labels[order], [-1, -2][order]))

    return jax.lax.scan(of_some, None, starts.reshape(-1, count, len(taps)))[1]


def _windows(lhs: jax.Array, rhs: jax.Array, equation: Any) -> Callable[[Any], jax.Array]:
    """A function of a tap: the elements of the image that it meets, at the positions of ``rhs``."""
    params, edges, sizes = equation.params, [(0, 0, 0)] * lhs.ndim, list(lhs.shape)
    space = params["dimension_numbers"].lhs_spec[2:]
    window = [rhs.shape[i] for i in params["dimension_numbers"].rhs_spec[2:]]
    steps = [1] * lhs.ndim
    for i, axis in enumerate(space):
        low, high = map(int, params["padding"][i])
        edges[axis] = low, high, params["lhs_dilation"][i] - 1
        sizes[axis] = (window[i] - 1) * params["rhs_dilation"][i] + 1
        steps[axis] = params["rhs_dilation"][i]
    padded = jax.lax.pad(lhs, jnp.zeros((), lhs.dtype), edges)

    def at(tap: Any) -> jax.Array:
        starts = [jnp.int32(0)] * lhs.ndim
        for i, axis in enumerate(space):
            starts[axis] = jnp.asarray(tap[i] * params["window_strides"][i], jnp.int32)
        part = jax.lax.dynamic_slice(padded, starts, sizes)
        return jax.lax.slice(part, [0] * part.ndim, part.shape, steps)

    return at
