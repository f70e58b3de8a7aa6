"""Convolutions as products of matrices, against those of XLA, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from clipgrad._programs import convolutions
from clipgrad._programs.convolutions import convolved, takes_few_products

SPECS = {
    1: [("NCH", "OIH", "NCH"), ("NHC", "HIO", "NHC"), ("HNC", "IHO", "CNH")],
    2: [("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC"), ("CHWN", "IHWO", "HWNC")],
}


@st.composite
def cases(draw):
    """The shapes and the parameters of a convolution."""
    ndim, groups = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(ndim))  # noqa: E731
    channels = {"N": 2, "C": 2 * groups, "I": 2, "O": 3 * groups}
    sizes, taps = each(4, 7), each(1, 4)
    spec = draw(st.sampled_from(SPECS[ndim]))
    shapes = [
        [channels[c] if c in channels else lengths["HW".index(c)] for c in letters]
        for letters, lengths in zip(spec[:2], (sizes, taps), strict=True)
    ]
    options = dict(
        window_strides=each(1, 2), padding=list(zip(each(-1, 3), each(0, 3), strict=True)),
        lhs_dilation=each(1, 2), rhs_dilation=each(1, 2), dimension_numbers=spec,
        feature_group_count=groups,
    )  # fmt: skip
    return *shapes, options


@given(cases())
def test_a_convolution_is_products_of_matrices_forward_and_backward(case):
    x_shape, kernel_shape, options = case
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        x, kernel = random.normal(size=x_shape), random.normal(size=kernel_shape)
        whole = lambda x, kernel: lax.conv_general_dilated(x, kernel, **options)  # noqa: E731
        (equation,) = jax.make_jaxpr(whole)(x, kernel).eqns
        assert takes_few_products(equation) == bool(equation.outvars[0].aval.size)
        if not equation.outvars[0].aval.size:
            return

        def gradients(function):
            out, pull = jax.vjp(function, x, kernel)
            return out, *pull(jnp.resize(x, out.shape))

        products = functools.partial(convolved, equation)
        run = jax.jit(lambda: [gradients(f) for f in (products, whole)])
        for got, expected in zip(*run(), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(16, 16), (3, 3)])
def test_there_is_a_product_for_each_tap_or_for_each_place_if_these_are_fewer(shape, monkeypatch):
    """The gradient of a kernel is a convolution with many taps and few places."""
    x, kernel = np.ones((2, 1, 18, 18)), np.ones((1, 1, *shape))
    whole = jax.make_jaxpr(lambda *args: lax.conv(*args, (1, 1), "VALID"))(x, kernel)
    (equation,) = whole.eqns
    program = jax.make_jaxpr(functools.partial(convolved, equation))(x, kernel)
    assert str(program).count("dot_general") == 9 and takes_few_products(equation)
    monkeypatch.setattr(convolutions, "MOST", 8)
    assert not takes_few_products(equation)
