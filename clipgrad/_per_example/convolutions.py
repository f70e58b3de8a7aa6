"""The gradients of convolution kernels: products of the patches under a kernel and cotangents."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._compat import by_platform
from clipgrad._numerics import accumulator
from clipgrad._per_example.course import Course
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
from clipgrad._per_example.sums import Contract, with_examples
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
        zero = wants[0].leaves <= kept.zero
        return [squares_of_taps(inputs[0], inputs[1], taps, equation, zero)]
    if plain and cheaper and wants[0].steps == 1:
        hook.course.note(wants[0].leaves, CHEAPER)
        made = tap_by_tap(inputs[0], inputs[1], taps, equation, hook.course)
        return [_arrays(hook, made, wants[0])]
    return one_product(hook, _of_patches(inputs[0], inputs[1], equation), aval, wants[0])


def _of_patches(lhs: jax.Array, rhs: jax.Array, equation: Any) -> Term:
    """The product of the patches of an image and what they meet, ``rhs``.

    Labels: the group if there are several, rows and columns of the kernel, channels that are
    summed, then the positions in the kernel, and those that are summed.
    """
    params, aval = equation.params, equation.outvars[0].aval
    numbers, batches = params["dimension_numbers"], params["batch_group_count"]
    taps = [aval.shape[i] for i in numbers.out_spec[2:]]
    windows = _windows(lhs, rhs, equation).all(taps)
    patches = jnp.stack([jnp.transpose(x, numbers.lhs_spec) for x in windows])
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


def _arrays(hook: Any, value: Products, want: Any) -> Products | jax.Array:
    """A gradient whose terms are arrays at places of their own, as the hook keeps it."""
    kept = hook.reduction
    if isinstance(kept, KeptFactors) and want.is_whole and want.leaves <= kept.clipped:
        return kept.arrays(value, want)
    return gradient_array(value)


# How many numbers of images are copied at once where a part is, in multiples of the numbers of all
# images and of what they meet. Convolutions of 8 channels over 16 x 16 pixels held 3.6 times the
# temporaries of each example's gradient when all were copied, 1.19 times with 1, 1.09 with a half,
# which took 1.08 times the time.
_COPIES = 0.5


def tap_by_tap(
    lhs: jax.Array, rhs: jax.Array, taps: list[int], equation: Any, course: Course
) -> Products:
    """The gradient itself: of many examples XLA would make a convolution in as many groups.

    Each term is an array, of one tap or of several: it is added up over the examples as it lies in
    memory, and put in its place afterwards.
    """
    numbers, aval = equation.params["dimension_numbers"], equation.outvars[0].aval
    rows, columns = numbers.lhs_spec[0], numbers.rhs_spec[0]
    channels, outputs = lhs.shape[rows], rhs.shape[columns]
    joined = next(k for k in range(len(taps) + 1) if _fits(taps[k:], channels, outputs))
    count, rank = math.prod(taps[joined:]), len(taps)
    swapped = math.prod(taps) * channels > outputs
    row, column = rank, rank + 1

    def products(lhs: jax.Array, rhs: jax.Array) -> list[jax.Array]:
        slices = _windows(lhs, rhs, equation).all(taps)
        made = []
        for i in range(0, len(slices), count):
            patches = jnp.stack(slices[i : i + count], axis=rows)
            patches = patches.reshape(*patches.shape[:rows], -1, *patches.shape[rows + 2 :])
            made.append(_of_tap(patches, rhs, equation, swapped))
        return made

    positions = math.prod(rhs.shape[i] for i in numbers.rhs_spec[2:])
    copied = math.prod(taps) * positions * channels * lhs.shape[numbers.lhs_spec[1]]
    if not course.is_settled:
        course.copied += copied
    arrays = (
        _some_at_a_time(products, copied, lhs, rhs) if course.copies_a_part else products(lhs, rhs)
    )
    split = *taps[joined:], channels
    names = *range(joined, rank), row
    terms = []
    for array, place in zip(arrays, itertools.product(*map(range, taps[:joined])), strict=True):
        array = array.reshape(outputs, *split) if swapped else array.reshape(*split, outputs)
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


def _some_at_a_time(
    function: Callable[..., list[jax.Array]], copied: int, lhs: jax.Array, rhs: jax.Array
) -> list[jax.Array]:
    """Arrays of an image and what it meets, made of ``copied`` numbers of each example.

    XLA's CPU compiler runs what it can as early as it can: the slices of all images would be there
    from the forward pass on, one for each tap. As a step of a loop they begin with ``rhs``, and
    there are those of some of the examples. Several devices would exchange examples there.
    """
    run = jax.custom_batching.custom_vmap(function)
    parts = max(math.ceil(copied / (_COPIES * (lhs.size + rhs.size))), 1)

    @run.def_vmap
    def _mapped(size: int, mapped: Any, *pair: jax.Array) -> tuple[list[jax.Array], list[bool]]:
        pair = with_examples(size, mapped, pair)
        some, whole = _part_size(size, parts), jax.vmap(function)

        def in_parts(*pair: jax.Array) -> list[jax.Array]:
            return jax.lax.map(lambda one: function(*one), pair, batch_size=some)

        form = whole
        if some < size:
            form = functools.partial(by_platform, cpu=in_parts, gpu=whole, default=whole)
        made = form(*pair)
        return made, [True] * len(made)

    return run(lhs, rhs)


def _part_size(size: int, parts: int) -> int:
    """The size of so many equal parts, or of up to twice as many, or of parts and a rest."""
    even = next((n for n in range(parts, 2 * parts) if size % n == 0), parts)
    return max(size // even, 1)


def taps_are_cheaper(size: int, outputs: int, rows: int) -> bool:
    """Whether to make the gradient rather than Gram matrices of this many rows.

    These need patches: on a CPU they were slower with 0.85 of the products, and faster with 0.3.
    So the gradient of an example is less than twice as large as its factors.
    """
    return size < 2 * rows * (size // outputs + outputs)


def _of_tap(x: jax.Array, rhs: jax.Array, equation: Any, swapped: bool = False) -> jax.Array:
    """The gradient of one tap, from what it meets; ``swapped``: with its rows last.

    XLA's CPU compiler transposes what comes first.
    """
    numbers = equation.params["dimension_numbers"]
    arrays, labels = [x, rhs], []
    for array, spec, own in ((x, numbers.lhs_spec, -1), (rhs, numbers.rhs_spec, -2)):
        places = {axis: k for k, axis in enumerate(spec)}
        labels.append([places[axis] or own for axis in range(array.ndim)])
    order = slice(None, None, -1 if swapped else 1)
    return product(arrays[order], labels[order], [-1, -2][order])


def squares_of_taps(
    lhs: jax.Array, rhs: jax.Array, taps: list[int], equation: Any, zero: bool
) -> Squares:
    """The squares of the gradient, of one tap after the other: it is never there as a whole.

    Several taps are one product while their patches are no larger than what they meet. With two or
    three times as large patches two passes took longer, and with five times more memory.
    """
    numbers = equation.params["dimension_numbers"]
    found = _windows(lhs, rhs, equation)
    starts = jnp.array(list(itertools.product(*map(range, taps))), jnp.int32)
    rows = numbers.lhs_spec[0]
    few = max(rhs.shape[numbers.rhs_spec[0]] // lhs.shape[rows], 1)
    count = max(n for n in range(1, len(starts) + 1) if len(starts) % n == 0 and n <= few)

    def squares(nothing: None, some: jax.Array) -> tuple[None, Squares]:
        patches = jnp.concatenate([found.at(some[i]) for i in range(count)], axis=rows)
        return nothing, Squares.of(_of_tap(patches, rhs, equation), zero=zero)

    _, each = jax.lax.scan(squares, None, starts.reshape(-1, count, len(taps)))
    return each.over_axis()


def _windows(lhs: jax.Array, rhs: jax.Array, equation: Any) -> "Windows":
    """The windows of a kernel in an image, for the positions of what they meet, ``rhs``."""
    params, edges, sizes = equation.params, [(0, 0, 0)] * lhs.ndim, list(lhs.shape)
    space = params["dimension_numbers"].lhs_spec[2:]
    window = [rhs.shape[i] for i in params["dimension_numbers"].rhs_spec[2:]]
    for i, axis in enumerate(space):
        low, high = map(int, params["padding"][i])
        edges[axis] = low, high, params["lhs_dilation"][i] - 1
        sizes[axis] = (window[i] - 1) * params["rhs_dilation"][i] + 1
    padded = jax.lax.pad(lhs, jnp.zeros((), lhs.dtype), edges)
    return Windows(padded, space, tuple(sizes), params)


class Windows(NamedTuple):
    """The elements that each tap of a kernel meets, with axes as the array has them."""

    padded: jax.Array  # and dilated
    space: tuple[int, ...]  # the axes of space
    sizes: tuple[int, ...]
    params: Any

    def all(self, taps: Sequence[int]) -> list[jax.Array]:
        """The elements that each tap meets at each position."""
        return [self.at(tap) for tap in itertools.product(*map(range, taps))]

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
