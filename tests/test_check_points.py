"""Cotangents, directions, steps and nearby points; real vectors of trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clipgrad._check import vectors as real
from clipgrad._check.subject import make_subject
from clipgrad._check.points import cotangents, dense, directions, nearby, scales

KEY = np.random.default_rng(0)
Z = jnp.asarray([1 + 2j, 3 - 1j])


def problem(*leaves):
    return make_subject(lambda *xs: [2 * x for x in xs], leaves)


def test_dense_numbers_have_both_signs_and_magnitudes_between_a_half_and_one_and_a_half():
    numbers = dense(np.random.default_rng(1), 1000)
    assert np.abs(numbers).min() == 0.5 and np.abs(numbers).max() == 1.5
    assert 400 < (numbers > 0).sum() < 600
    assert (numbers * 8 == np.round(numbers * 8)).all()


def test_two_cotangents_are_never_alike_nor_one_hot():
    first, second = cotangents(problem(jnp.ones(50)), 0)
    assert (first != 0).all() and (second != 0).all()
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.5


def test_a_leaf_has_its_own_numbers_whatever_stands_beside_it():
    alone, both = problem(jnp.ones(4)), problem(jnp.ones(4), jnp.ones(3))
    np.testing.assert_array_equal(directions(alone, 3, 0), directions(both, 3, 0)[:4])
    assert (directions(alone, 3, 0) != directions(alone, 4, 0)).any()
    assert (directions(alone, 3, 0) != directions(alone, 3, 1)).any()


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        ([0.0, 0.0], [1, 1]),
        ([4.0, 4.0], [4, 4]),
        ([0.0, 8.0], [4, 8]),
        ([1e-20, 1e-20], [2.0**-66, 2.0**-66]),
        ([1000.0, 0.001], [1024, 512]),
        (3.0, [4]),
    ],
)
def test_steps_are_powers_of_two_of_the_size_of_the_element_or_its_leaf(leaf, expected):
    np.testing.assert_array_equal(scales([jnp.asarray(leaf)]), expected)


def test_both_parts_of_a_complex_number_have_its_scale():
    np.testing.assert_array_equal(scales([Z]), [2, 2, 4, 4])


def test_a_nearby_point_moves_every_element_a_little_and_keeps_single_zeros():
    x = jnp.asarray([1.0, -100.0, 0.0])
    (moved,) = nearby(problem(x), 0)
    part = np.asarray(moved / jnp.where(x == 0, 1, x)) - 1
    assert moved[2] == 0
    assert ((0.019 < np.abs(part[:2])) & (np.abs(part[:2]) < 0.081)).all()
    assert moved.dtype == x.dtype


def test_a_leaf_of_zeros_moves_too_and_a_smaller_reach_moves_less():
    (moved,) = nearby(problem(jnp.zeros(5)), 0)
    assert ((0.019 < np.abs(moved)) & (np.abs(moved) < 0.081)).all()
    (less,) = nearby(problem(jnp.zeros(5)), 0, reach=2.0**-6)
    np.testing.assert_allclose(less, moved / 64, rtol=1e-5)


LEAVES = [jnp.asarray([[1.0, 2.0]]), Z, jnp.asarray(5.0, jnp.bfloat16)]


def test_leaves_become_a_real_vector_and_back():
    vector = real.to_numpy(LEAVES)
    np.testing.assert_array_equal(vector, [1, 2, 1, 2, 3, -1, 5])
    assert vector.dtype == np.float64
    for again, leaf in zip(real.from_rows(vector, LEAVES), LEAVES, strict=True):
        assert again.shape == leaf.shape and again.dtype == leaf.dtype
        np.testing.assert_array_equal(again, np.asarray(leaf))
    assert list(real.offsets(LEAVES)) == [0, 2, 6, 7]


def test_rows_of_vectors_become_leaves_with_a_leading_axis():
    rows = np.arange(14.0).reshape(2, 7)
    leaves = real.from_rows(rows, LEAVES)
    assert [leaf.shape for leaf in leaves] == [(2, 1, 2), (2, 2), (2,)]
    np.testing.assert_array_equal(real.to_rows(leaves, 1), rows)


def test_the_traced_vector_is_that_of_numpy():
    np.testing.assert_array_equal(real.to_vector(LEAVES, jnp.float32), real.to_numpy(LEAVES))
    assert real.to_vector([], jnp.float32).shape == real.to_numpy([]).shape == (0,)


def test_a_complex_gradient_is_the_conjugate_of_what_jax_hands_back():
    np.testing.assert_array_equal(real.gradient_vector([Z]), [1, -2, 3, 1])
    (cotangent,) = real.cotangent_leaves(np.asarray([1.0, 2.0]), [Z[0]])
    assert cotangent == 1 - 2j


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        ("float16", np.float64),
        ("bfloat16", np.float64),
        ("complex64", np.complex128),
        ("int32", np.int32),
    ],
)
def test_floating_types_widen_and_integers_stay(dtype, wide):
    assert real.wide_dtype(jnp.dtype(dtype)) == wide


def test_floats_are_told_from_integers_and_from_what_is_no_array():
    assert real.is_float(Z) and real.is_float(jnp.ones(1, jnp.bfloat16))
    assert not real.is_float(jnp.arange(2)) and not real.is_float(None)
    assert not real.is_float(jax.random.key(0))
    assert real.real_dtype(Z) == np.float32 and real.real_size(Z) == 4
