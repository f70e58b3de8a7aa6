"""Convolutions in the form that XLA's CPU compiler runs fast."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._per_example.layouts import convolved
from tests.helpers import RELEASED

CHANNELS_LAST = ("NHWC", "HWIO", "NHWC")
# The shapes of input and kernel, strides, padding, the axes, and further options.
CASES = {
    "rank one, channels first": ((2, 6, 7), (4, 6, 3), 2, ((1, 0),), ("NCH", "OIH", "NCH"), {}),
    "as the gradient of an input": (
        *((2, 3, 3, 5), (3, 3, 4, 5), 1, ((1, 2), (2, -1)), ("NHWC", "HWOI", "NHWC")),
        {"lhs_dilation": (2, 3)},
    ),
    "as the gradient of a kernel": (
        *((8, 8, 2, 3), (4, 4, 2, 5), 1, ((1, 1), (1, 0)), ("HWCN", "HWIO", "NCHW")),
        {"rhs_dilation": (2, 2)},
    ),
    "groups": (
        *((2, 4, 4, 6), (3, 3, 2, 9), 2, ((1, 1), (1, 1)), CHANNELS_LAST),
        {"feature_group_count": 3},
    ),
    "zeros in between, and groups": (
        *((2, 4, 3, 6), (2, 1, 2, 9), 1, ((2, 1), (0, 4)), CHANNELS_LAST),
        {"lhs_dilation": (2, 3), "feature_group_count": 3},
    ),
    "zeros in between, and a kernel of one tap": (
        *((2, 5, 4), (6, 4, 1), 1, ((0, 2),), ("NHC", "OIH", "NHC")),
        {"lhs_dilation": (4,)},
    ),
    "groups of the batch": (
        *((4, 5, 5, 3), (3, 3, 3, 6), 1, ((1, 1), (1, 1)), CHANNELS_LAST),
        {"batch_group_count": 2},
    ),
    "smaller than the kernel": (
        *((2, 2, 5, 1), (5, 6, 3, 2), (2, 1), ((2, 3), (3, 2)), ("NCHW", "OHWI", "HWNC")),
        {"lhs_dilation": (1, 2), "rhs_dilation": (1, 2)},
    ),
    "rank three": (
        *((1, 2, 1, 2, 3), (2, 2, 2, 3, 4), 1, ((1, 1),) * 3, ("NHWDC", "HWDIO", "NCHWD")),
        {},
    ),
}


def case(name):
    shape, kernel, stride, padding, dims, options = CASES[name]
    keys = jax.random.split(jax.random.key(0))
    arrays = jax.random.normal(keys[0], shape), jax.random.normal(keys[1], kernel)
    strides = (stride,) * len(padding) if isinstance(stride, int) else stride

    def convolve(x, k):
        return jax.lax.conv_general_dilated(
            x, k, strides, padding, dimension_numbers=dims, **options
        )

    return convolve, arrays


@jax.jit
def both():
    found = {}
    for name in CASES:
        convolve, arrays = case(name)
        (equation,) = jax.make_jaxpr(convolve)(*arrays).eqns
        found[name] = convolve(*arrays), convolved(equation, *arrays)
    return found


def test_a_convolution_in_another_order_is_the_same():
    for name, (expected, found) in both().items():
        assert expected.size and np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=name)


def two_layers(p, x):
    dims = ("NCHW", "HWIO", "NCHW")
    x = jax.lax.conv_general_dilated(x[None], p[0], (2, 2), "SAME", dimension_numbers=dims)
    x = jax.lax.conv_general_dilated(x**2, p[1], (1, 1), "SAME", dimension_numbers=dims)
    return jnp.sum(x**2)


def test_all_convolutions_are_in_the_order_of_eigen_inside_of_loops_too():
    """The second has an image of 2 x 2, which XLA would swap with its kernel."""
    params, batch = [jnp.ones((3, 3, 3, 8)), jnp.ones((3, 3, 8, 8))], jnp.ones((32, 3, 4, 4))
    per_example = cg.clip_per_example(two_layers, cg.ClipByGlobalNorm(0.1), method="two passes")
    text = jax.jit(per_example).lower(params, batch).compile(RELEASED).as_text()
    orders = re.findall(r" convolution\(.*window=\{([^}]*)\}.* dim_labels=([\w>-]+)", text)
    assert len(orders) >= 6 and " while(" in text
    assert {labels for _, labels in orders} == {"b01f_01io->b01f"}
    assert not any("reversal" in window for window, _ in orders)


@pytest.mark.exhaustive
def test_the_norms_of_one_tap_after_the_other_are_those_of_the_gradient_in_64_bits_too():
    """In the first layer three taps are one product."""
    shapes = [(3, 3, 3, 12), (3, 3, 12, 8)]
    params = [jax.random.normal(jax.random.key(i), s) / 8 for i, s in enumerate(shapes)]
    batch = jax.random.normal(jax.random.key(1), (4, 3, 16, 16))
    with jax.enable_x64(True):
        norms = cg.per_example_norms(two_layers)
        lengths = re.findall(r"length=(\d+)", str(jax.make_jaxpr(norms)(params, batch)))
        assert sorted(lengths) == ["3", "9"]
        found = norms(params, batch)
        each = jax.vmap(jax.grad(two_layers), (None, 0))(params, batch)
    expected = np.sqrt(sum(np.sum(np.square(g), (1, 2, 3, 4)) for g in map(np.asarray, each)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def standardized(kernel, x):
    mean, spread = kernel.mean((1, 2, 3), keepdims=True), kernel.std((1, 2, 3), keepdims=True)
    whole = jax.lax.conv_general_dilated(
        x[None], (kernel - mean) / (spread + 0.01), (1, 1), "SAME", feature_group_count=2
    )
    return jnp.mean(whole**2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["one pass", "two passes"])
def test_an_infinite_pixel_stays_in_its_example_where_a_convolution_has_groups(method):
    keys = jax.random.split(jax.random.key(0))
    kernel = jax.random.normal(keys[0], (4, 2, 3, 3))
    x = jax.random.normal(keys[1], (4, 4, 6, 6))
    clip = cg.clip_per_example(standardized, None, reduce="sum", method=method, nonfinite="zero")
    _, grads, stats = clip(kernel, x.at[1, 0, 0, 0].set(jnp.inf))
    others = clip(kernel, x[jnp.array([0, 2, 3])])[1]
    assert np.asarray(stats.nonfinite > 0).tolist() == [False, True, False, False]
    # The other group of features of the second example is finite, and counts.
    np.testing.assert_allclose(grads[:2], others[:2], rtol=1e-5)
