"""The gradient of a convolution's kernel as an array, tap by tap."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clipgrad._compat import by_platform
from clipgrad._per_example.course import Course
from clipgrad._per_example.squares import Squares
from clipgrad._per_example.sums import with_examples
from clipgrad._per_example.terms import Factor, GradientAxis, Products, Term, product

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
    window = [rhs.shape[i] for i in equation.params["dimension_numbers"].rhs_spec[2:]]
    return Windows.of(lhs, window, equation.params)


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
