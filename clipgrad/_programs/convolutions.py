"""A convolution as products of matrices: in float64 XLA has no kernel for one on a CPU.

XLA computes it by a loop over all that is multiplied, which takes some ten times as long.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import conv_general_dilated_p

MOST = 64  # products, of which each takes some milliseconds to compile


def is_convolution(equation: JaxprEqn) -> bool:
    return equation.primitive is conv_general_dilated_p


def takes_few_products(equation: JaxprEqn) -> bool:
    """Whether a convolution is few products of matrices.

    One for each tap of the kernel; or for each place of the output, if these are fewer, as in the
    gradient of a kernel.
    """
    shapes = [v.aval.shape for v in (*equation.invars, *equation.outvars)]
    if equation.params["batch_group_count"] != 1 or any(0 in shape for shape in shapes):
        return False
    return min(_taps_and_places(equation)) <= MOST


def convolved(equation: JaxprEqn, x: Any, kernel: Any) -> Any:
    """The result of a convolution that takes few products."""
    taps, places = _taps_and_places(equation)
    window = _Window(equation, x, kernel)
    return window.result(window.by_taps() if taps <= places else window.by_places())


def _taps_and_places(equation: JaxprEqn) -> tuple[int, int]:
    numbers, kernel, out = (
        equation.params["dimension_numbers"],
        equation.invars[1],
        equation.outvars[0],
    )
    taps = (kernel.aval.shape[axis] for axis in numbers.rhs_spec[2:])
    return math.prod(taps), math.prod(out.aval.shape[axis] for axis in numbers.out_spec[2:])


class _Window:
    """The input and the kernel, padded and with the axes in one order.

    `x` is (batch, groups, features, *positions), `kernel` (groups, out, features, *taps). Products
    are (groups, batch, *places, out).
    """

    def __init__(self, equation: JaxprEqn, x: Any, kernel: Any) -> None:
        params = equation.params
        numbers, groups = params["dimension_numbers"], params["feature_group_count"]
        self.strides, self.dilation = params["window_strides"], params["rhs_dilation"]
        self.out_spec = numbers.out_spec
        pads = zip(params["padding"], params["lhs_dilation"], strict=True)
        pads = [(low, high, dilation - 1) for (low, high), dilation in pads]
        x = jnp.transpose(x, numbers.lhs_spec)
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *pads])
        kernel = jnp.transpose(kernel, numbers.rhs_spec)
        self.x = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
        self.kernel = kernel.reshape(groups, -1, *kernel.shape[1:])
        self.taps = kernel.shape[2:]
        self.places = [equation.outvars[0].aval.shape[axis] for axis in self.out_spec[2:]]

    def by_taps(self) -> Any:
        """The sum of a product for each tap."""
        parts = self._parts(self.taps, self.dilation, self.places, self.strides)
        products = (
            lax.dot_general(part, self.kernel[..., *tap], (((2,), (2,)), ((1,), (0,))))
            for tap, part in parts
        )
        return sum(products)

    def by_places(self) -> Any:
        """A product for each place of the output."""
        axes = tuple(range(2, self.x.ndim))
        parts = self._parts(self.places, self.strides, self.taps, self.dilation)
        products = [
            lax.dot_general(part, self.kernel, ((axes, axes), ((1,), (0,)))) for _, part in parts
        ]
        groups, batch, features = products[0].shape
        return jnp.stack(products, axis=2).reshape(groups, batch, *self.places, features)

    def _parts(
        self,
        starts: Sequence[int],
        apart: Sequence[int],
        counts: Sequence[int],
        steps: Sequence[int],
    ) -> Iterator[tuple[tuple[int, ...], Any]]:
        """From each start, so far apart, so many positions with these steps."""
        for index in itertools.product(*map(range, starts)):
            first = [i * a for i, a in zip(index, apart, strict=True)]
            last = [f + (n - 1) * s + 1 for f, n, s in zip(first, counts, steps, strict=True)]
            ends = (*self.x.shape[:3], *last)
            yield index, lax.slice(self.x, (0, 0, 0, *first), ends, (1, 1, 1, *steps))

    def result(self, products: Any) -> Any:
        """The products in the order of the output's axes."""
        products = jnp.moveaxis(products, (0, -1), (1, 2))
        batch, groups, features = products.shape[:3]
        out = products.reshape(batch, groups * features, *self.places)
        return jnp.transpose(out, np.argsort(self.out_spec))
