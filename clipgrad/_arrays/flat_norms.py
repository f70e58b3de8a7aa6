"""The norms of many leaves, or of slices of them, in one array.

As in `sums_in_range`, a norm comes from the sum of squares that is in range. But here each leaf is
summed up in one place of the program: in a loop that runs a second time if a sum is out of range.
So XLA compiles nearly as little as for plain sums.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from clipgrad._arrays.norms import AxisName, mapped_names
from clipgrad._arrays.numbers import real_or_absolute, widest
from clipgrad._arrays.ranges import in_range, scale_of_plain, three_squares
from clipgrad._arrays.reductions import Arrays, Axes, Groups, reduced_together
from clipgrad._compat import by_platform, is_local, on_every_device


def flat_norms(
    leaves: Sequence[jax.Array], axes: Sequence[Axes], axis_name: AxisName = None
) -> jax.Array:
    """The norms of each leaf over its axes (``None``: all), one behind the other.

    They are constants to differentiation, in the widest dtype that a norm of a leaf has.
    """
    if not leaves:
        return jnp.zeros(0, jnp.float32)
    groups = Groups(tuple(axes), mapped_names(axis_name))
    fixed = [jax.lax.stop_gradient(leaf) for leaf in leaves]

    def in_a_loop(*leaves: jax.Array) -> jax.Array:
        return _in_a_loop(groups, leaves)

    def together(*leaves: jax.Array) -> jax.Array:
        return _of_three(groups, leaves, _three_together)

    def apart(*leaves: jax.Array) -> jax.Array:
        return _of_three(groups, leaves, _three_apart)

    gpu = together if all(map(is_local, fixed)) else apart
    return by_platform(*fixed, cpu=in_a_loop, gpu=gpu, default=apart)


def _in_a_loop(groups: Groups, leaves: Arrays) -> jax.Array:
    """Plain sums, and once more, scaled, if one of them is out of range."""
    shapes = [x.shape for x in jax.eval_shape(lambda *x: groups.sums_of(_scaled, x), *leaves)]
    sizes = list(map(math.prod, shapes))
    ones = jnp.ones(sum(sizes), widest(leaves))

    def sums(scales: jax.Array) -> jax.Array:
        parts, start = [], 0
        for shape, size in zip(shapes, sizes, strict=True):
            parts.append(scales[start : start + size].reshape(shape))
            start += size
        return _flat(groups.totals(groups.sums_of(_scaled, leaves, parts), leaves), leaves)

    def again(carried: tuple[jax.Array, ...]) -> jax.Array:
        count, scales, _, _ = carried
        return (count == 0) | (count == 1) & jnp.any(scales != 1)

    def summed(carried: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        count, scales, _, _ = carried
        totals = sums(scales)
        return count + 1, scale_of_plain(totals), totals, scales

    first = jnp.zeros((), jnp.int32), ones, 0 * ones, ones
    *_, totals, scales = jax.lax.while_loop(again, summed, first)
    return jnp.sqrt(totals) / scales


def _of_three(groups: Groups, leaves: Arrays, three: Callable[..., list[jax.Array]]) -> jax.Array:
    """Three sums of each leaf, and the one in range."""
    columns = zip(*groups.sums_of(three, leaves), strict=True)
    sums = [_flat(groups.totals(column, leaves), leaves) for column in columns]
    total, scale = in_range(*sums)
    return jnp.sqrt(total) / scale


def _scaled(
    axes: tuple[int, ...], keep: bool, leaf: jax.Array, scale: jax.Array | float = 1.0
) -> jax.Array:
    # A bound between the factors, of which XLA might make a product that is out of range.
    size = jnp.maximum(real_or_absolute(leaf) * scale, jnp.finfo(leaf.dtype).min)
    return jnp.sum(jnp.square(size), axis=axes, keepdims=keep)


def _three_apart(axes: tuple[int, ...], keep: bool, leaf: jax.Array) -> list[jax.Array]:
    down, plain, up = three_squares(real_or_absolute(leaf))
    return [jnp.sum(x, axis=axes, keepdims=keep) for x in (down, plain, up)]


def _three_together(axes: tuple[int, ...], keep: bool, leaf: jax.Array) -> list[jax.Array]:
    del keep
    front = tuple(i % leaf.ndim for i in axes)
    sums, _ = reduced_together(three_squares(real_or_absolute(leaf)), (), front)
    return [jnp.expand_dims(x, front) for x in sums]


def _flat(sums: Arrays, leaves: Arrays) -> jax.Array:
    dtype = widest(leaves)
    return jnp.concatenate([jnp.ravel(on_every_device(x)).astype(dtype) for x in sums])
