"""Cotangents, scales, further points, and trees as real vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clipgrad._check import vectors
from clipgrad._check.checked_function import checked_function
from clipgrad._check.points import cotangents, further, scale_of
from tests.helpers import array

Z = array([1 + 2j, 3 - 1j], np.complex64)
SEEDS = st.integers(0, 100)
NUMBERS = hnp.arrays(np.float32, st.integers(2, 12), elements=st.sampled_from([-2.0, 0, 0.5, 1, 3]))


def subject(*leaves):
    return checked_function(lambda *xs: [2 * x for x in xs], leaves)


def test_two_cotangents_are_never_alike_nor_one_hot():
    first, second = cotangents(subject(array(np.ones(50))), 0)
    assert (first != 0).all() and (second != 0).all()
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.5


@given(st.integers(2, 3), SEEDS)
def test_a_cotangent_of_few_outputs_is_not_the_same_for_all(size, seed):
    assert all(len(set(row)) > 1 for row in cotangents(subject(array(np.ones(size))), seed))


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [([0.0, 0.0], [1, 1]), ([8.0, 0.1], [8, 8]), ([1e-30, 1e-30], [2.0**-100] * 2)],
)
def test_scales_are_powers_of_two_of_the_size_of_the_element_or_its_leaf(leaf, expected):
    scale = scale_of(array(leaf))
    assert (np.log2(scale) % 1 == 0).all()
    np.testing.assert_allclose(scale, expected, rtol=0.5)


def test_the_garbage_of_a_padding_does_not_set_the_scale_of_its_leaf():
    assert scale_of(array([1.0, 1.0, 1.0, 1e30]))[0] == 1


@pytest.mark.slow
@given(NUMBERS, SEEDS)
def test_a_generic_point_has_no_equal_and_no_zero_elements_and_keeps_signs(values, seed):
    (point,) = further(subject(jnp.asarray(values)), seed, keeps=False)
    point = np.asarray(point)
    assert len(set(point)) == point.size and (point != 0).all()
    assert (np.sign(point) == np.sign(values))[values != 0].all()
    assert (np.abs(point - values) <= 0.09 * np.maximum(np.abs(values), 3)).all()


@given(NUMBERS, SEEDS)
def test_a_point_that_keeps_what_is_equal_keeps_zeros_and_the_order(values, seed):
    if (values == values[0]).all():
        return
    (point,) = further(subject(array(values)), seed, keeps=True)
    point = np.asarray(point)
    np.testing.assert_array_equal(
        np.argsort(point, kind="stable"), np.argsort(values, kind="stable")
    )
    assert len(set(point)) == len(set(values)) and ((point == 0) == (values == 0)).all()


def test_a_generic_point_is_not_symmetric_and_not_real_and_a_kept_one_is():
    matrix = array([[2.0, 1.0], [1.0, 3.0]])
    loose, kept = (np.asarray(further(subject(matrix), 0, k)[0]) for k in (False, True))
    assert (loose != loose.T).any() and (kept == kept.T).all() and (kept != matrix).any()
    (turned,) = further(subject(array([1, 3], np.complex64)), 0, keeps=False)
    assert (np.imag(turned) != 0).all()


def test_a_complex_gradient_is_the_conjugate_of_what_jax_hands_back():
    gradient = jax.jit(jax.grad(lambda z: jnp.real(z * (1 + 2j)).sum()))(Z)
    np.testing.assert_allclose(vectors.gradient_vector([gradient]), [1, -2, 1, -2])
