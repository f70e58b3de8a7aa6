"""Convolutions in the form that XLA's CPU compiler runs fast.

Two of its passes decide (openxla/xla): `cpu/conv_canonicalization.cc` moves the axes to the order
of Eigen's convolution, but only outside of loops, and `algebraic_simplifier.cc` swaps the image and
a kernel that is larger. What is left takes 4 to 13 times as long, without Eigen: two passes of a
CNN took 8 times the time, and one pass of a ResNet 1.2 times.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._jaxpr import bind


def convolved(equation: Any, lhs: jax.Array, rhs: jax.Array, **changed: Any) -> jax.Array:
    """The convolution of an equation, with its axes moved: (batch, space, features)."""
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
