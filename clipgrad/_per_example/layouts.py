"""Convolutions in the form that XLA's CPU compiler runs fast.

Two of its passes decide (openxla/xla): `cpu/conv_canonicalization.cc` moves the axes to the order
of Eigen's convolution, but only outside of loops, and `algebraic_simplifier.cc` swaps the image and
a kernel that is larger. What is left takes 4 to 13 times as long, without Eigen. A convolution over
an image with zeros in between, as the gradient of one with strides, is written without these.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._jaxpr import bind


def convolved(
    equation: Any, lhs: jax.Array, rhs: jax.Array, quick: bool = False, **changed: Any
) -> jax.Array:
    """The convolution of an equation, with its axes moved: (batch, space, features).

    ``quick``: without the zeros between the pixels of an image. With 256 examples one pass of a CNN
    took 0.79 of the time, and of a ResNet 0.82; two passes did not, and took a quarter more memory.
    """
    if quick and _is_spread(equation.params):
        return jax.lax.platform_dependent(
            lhs,
            rhs,
            cpu=lambda lhs, rhs: _without_zeros(equation, lhs, rhs),
            default=lambda lhs, rhs: _reordered(equation, lhs, rhs),
        )
    return _reordered(equation, lhs, rhs, **changed)


def _is_spread(params: Any) -> bool:
    """Whether there are zeros between the pixels, and neither strides nor gaps in the kernel."""
    others = *params["window_strides"], *params["rhs_dilation"], params["batch_group_count"]
    return max(params["lhs_dilation"], default=1) > 1 and set(others) == {1}


def _without_zeros(equation: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Every d-th position of the result is a convolution with every d-th tap of the kernel.

    With a dilation of 2 by 2 these are four, with a quarter of the products.
    """
    numbers, params = equation.params["dimension_numbers"], equation.params
    aval, dilation = equation.outvars[0].aval, params["lhs_dilation"]
    lengths = [aval.shape[axis] for axis in numbers.out_spec[2:]]
    counts = [-(-n // d) for n, d in zip(lengths, dilation, strict=True)]
    sizes = dict(zip(numbers.out_spec[2:], counts, strict=True))
    nothing = jnp.zeros([sizes.get(i, n) for i, n in enumerate(aval.shape)], aval.dtype)
    ones = (1,) * len(dilation)
    parts = []
    for phases in itertools.product(*map(range, dilation)):
        kernel, padding = rhs, []
        for i, (phase, d, n) in enumerate(zip(phases, dilation, counts, strict=True)):
            axis, (low, _) = numbers.rhs_spec[2 + i], params["padding"][i]
            first = (low - phase) % d
            before = (low - phase - first) // d
            kernel = jax.lax.slice_in_dim(kernel, min(first, kernel.shape[axis]), None, d, axis)
            image = lhs.shape[numbers.lhs_spec[2 + i]]
            padding.append((before, n - before + kernel.shape[axis] - 1 - image))
        options = {"lhs_dilation": ones, "padding": tuple(padding)}
        parts.append(_reordered(equation, lhs, kernel, **options) if kernel.size else nothing)
    return _interleaved(parts, dilation, numbers.out_spec[2:], lengths)


def _interleaved(
    parts: list[jax.Array], dilation: Sequence[int], axes: Sequence[int], lengths: Sequence[int]
) -> jax.Array:
    """The parts, one for each phase along these axes, as one array that is cut to these lengths."""
    for i in reversed(range(len(axes))):
        d, axis = dilation[i], axes[i]
        groups = [parts[k : k + d] for k in range(0, len(parts), d)]
        joined = [jnp.stack(group, axis + 1) for group in groups]
        parts = [x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]) for x in joined]
        parts = [jax.lax.slice_in_dim(x, 0, lengths[i], axis=axis) for x in parts]
    return parts[0]


def _reordered(equation: Any, lhs: jax.Array, rhs: jax.Array, **changed: Any) -> jax.Array:
    if (groups := equation.params["batch_group_count"]) > 1:
        # Of these XLA's CPU compiler multiplies all groups, and other groups by zeros: one inf
        # would be NaN in all of them.
        lhs = _as_groups_of_features(lhs, equation.params["dimension_numbers"], groups)
        changed |= {"batch_group_count": 1, "feature_group_count": groups}
    orders = _orders(equation.params["dimension_numbers"])
    specs = [_spec(order, kernel=i == 1) for i, order in enumerate(orders)]
    changed["dimension_numbers"] = type(equation.params["dimension_numbers"])(*specs)
    lhs, rhs = jnp.transpose(lhs, orders[0]), jnp.transpose(rhs, orders[1])
    lhs, padded = _no_smaller(lhs, rhs, equation.params | changed)
    (made,) = bind(equation, (lhs, rhs), **(changed | padded))
    order = orders[2]
    return jnp.transpose(made, sorted(range(made.ndim), key=order.__getitem__))


def _as_groups_of_features(x: jax.Array, numbers: Any, groups: int) -> jax.Array:
    """An image with the groups of its batch in front of its features."""
    batch, features = numbers.lhs_spec[:2]
    shape = list(x.shape)
    split = x.reshape(*shape[:batch], groups, -1, *shape[batch + 1 :])
    place = features + (features > batch)  # of the features, beside one more axis
    moved = jnp.moveaxis(split, batch, place - (place > batch))
    shape[batch] //= groups
    shape[features] *= groups
    return moved.reshape(shape)


def _orders(numbers: Any) -> list[Sequence[int]]:
    """The axes of the input, of the kernel and of the output, in the order of Eigen."""
    (n, c, *space), (o, i, *window) = numbers.lhs_spec, numbers.rhs_spec
    batch, features, *positions = numbers.out_spec
    return [(n, *space, c), (*window, i, o), (batch, *positions, features)]


def _spec(order: Sequence[int], kernel: bool) -> tuple[int, ...]:
    """The axes of the batch, the features and the space of an array in that order."""
    last = len(order) - 1
    return (last, last - 1, *range(last - 1)) if kernel else (0, last, *range(1, last))


def _no_smaller(
    lhs: jax.Array, rhs: jax.Array, params: Any
) -> tuple[jax.Array, dict[str, Sequence]]:
    """An image that is smaller than the kernel with its edges, and what changes by that."""
    dilation = params["lhs_dilation"]
    image = [(n - 1) * d + 1 for n, d in zip(lhs.shape[1:-1], dilation, strict=True)]
    if math.prod(image) >= math.prod(rhs.shape[:-2]):
        return lhs, {}
    edges = [(*p, d - 1) for p, d in zip(params["padding"], dilation, strict=True)]
    wide = jax.lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    without = {"padding": ((0, 0),) * len(edges), "lhs_dilation": (1,) * len(edges)}
    return wide, without
