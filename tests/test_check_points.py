"""Cotangents, directions, steps, points and those nearby; real vectors of trees."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipgrad._check.further import NOTHING, SYMMETRY, nearby, symmetric_leaves
from clipgrad._check.points import (
    SINGLE,
    Scales,
    cotangents,
    dense_numbers,
    make_point,
    random_direction,
)
from clipgrad._check.subject import make_subject
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clipgrad._jaxpr import holds_floats
from clipgrad._trees import vectors as real

Z = jnp.asarray([1 + 2j, 3 - 1j])
SEEDS = st.integers(0, 100)


def subject(*leaves):
    return make_subject(lambda *xs: [2 * x for x in xs], leaves)


def test_dense_numbers_have_both_signs_and_magnitudes_between_a_half_and_one_and_a_half():
    numbers = dense_numbers(np.random.default_rng(1), 1000)
    assert np.abs(numbers).min() == 0.5 and np.abs(numbers).max() == 1.5
    assert 400 < (numbers > 0).sum() < 600
    assert (numbers * 8 == np.round(numbers * 8)).all()


def test_two_cotangents_are_never_alike_nor_one_hot():
    first, second = cotangents(subject(jnp.ones(50)), 0)
    assert (first != 0).all() and (second != 0).all()
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.5


@given(st.integers(2, 3), SEEDS)
def test_a_cotangent_of_few_outputs_is_not_the_same_for_all(size, seed):
    assert all(len(set(row)) > 1 for row in cotangents(subject(jnp.ones(size)), seed))


def test_a_leaf_has_its_own_numbers_whatever_stands_beside_it():
    alone, both = subject(jnp.ones(4)), subject(jnp.ones(4), jnp.ones(3))
    np.testing.assert_array_equal(random_direction(alone, 3, 0), random_direction(both, 3, 0)[:4])
    assert (random_direction(alone, 3, 0) != random_direction(alone, 4, 0)).any()
    assert (random_direction(alone, 3, 0) != random_direction(alone, 3, 1)).any()


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
    np.testing.assert_array_equal(Scales([jnp.asarray(leaf)]), expected)


def test_both_parts_of_a_complex_number_have_its_scale():
    np.testing.assert_array_equal(Scales([Z]), [2, 2, 4, 4])


def test_the_elements_of_a_leaf_that_are_all_the_same_are_told_apart():
    for x in (jnp.ones(4), jnp.zeros(4)):
        (moved,) = nearby(subject(x), 0)
        assert len(np.unique(moved)) == 4


# Leaves with zeros, ties, and numbers of every size; those that are all the same apart.
SOME = st.sampled_from([0.0, 1.0, 0.5, 1e-30, 3e7]) | st.floats(2.0**-100, 1, width=32)
VECTORS = hnp.arrays(np.float32, st.integers(2, 9), elements=st.builds(np.float32, SOME))


def moved_points(x, seed):
    return [np.asarray(leaf) for leaf in nearby(subject(*map(jnp.asarray, x)), seed)]


@pytest.mark.exhaustive
@given(VECTORS, SEEDS)
def test_a_nearby_point_keeps_zeros_equal_elements_and_their_order(values, seed):
    signed = np.concatenate([values, -values, [7]])
    (moved,) = moved_points([signed], seed)
    order = np.argsort(signed, kind="stable")
    assert (np.diff(moved[order]) >= 0).all()
    assert ((signed == 0) == (moved == 0)).all()
    assert (moved[: len(values)] == -moved[len(values) : -1]).all()
    _, kind = np.unique(signed, return_inverse=True)
    assert all(len(set(moved[kind == k])) == 1 for k in set(kind))


@pytest.mark.exhaustive
@given(VECTORS, SEEDS)
def test_a_nearby_point_keeps_what_is_between_zero_and_one_there(values, seed):
    unit = np.concatenate([np.minimum(values, 1), [0, 1]])
    (moved,) = moved_points([unit], seed)
    assert (moved >= 0).all() and (moved <= 1).all()
    assert (np.abs(moved - unit) <= 0.0801 * unit).all()


@given(hnp.arrays(np.float32, (3, 3), elements=st.builds(np.float32, SOME)), SEEDS)
def test_a_nearby_point_keeps_a_matrix_symmetric(matrix, seed):
    matrix = np.triu(matrix) + np.triu(matrix, 1).T
    matrix[0, 0] = 2.0
    (moved,) = moved_points([matrix], seed)
    np.testing.assert_array_equal(moved, moved.T)


@given(VECTORS, SEEDS)
def test_equal_elements_of_two_leaves_stay_equal(values, seed):
    first, second = moved_points([np.r_[values, 7.0], np.r_[7.0, 9.0, values]], seed)
    np.testing.assert_array_equal(first[:-1], second[2:])
    assert first[-1] == second[0] != 7


def further(leaves, seed=0, keeps=NOTHING, reach=1.0):
    return [np.asarray(x) for x in nearby(subject(*map(jnp.asarray, leaves)), seed, reach, keeps)]


def of_sizes(values):
    """Numbers that float32 can move apart: some equal, some zero, of both signs."""
    kept = np.where(np.abs(values) < 1e-3, 0, np.round(values, 2)).astype(np.float32)
    return np.concatenate([kept, -kept, kept])


@given(VECTORS, SEEDS)
def test_at_a_generic_point_no_elements_are_equal_or_zero_in_the_same_order(values, seed):
    leaf = of_sizes(values)
    first, second = further([leaf, leaf], seed)
    for moved in (first, second):
        size = np.abs(moved)
        assert len(np.unique(size)) == len(size) and size.min() > 0
        order = np.argsort(leaf, kind="stable")
        ends = np.flatnonzero(np.diff(leaf[order])) + 1  # of groups of equal elements
        groups = np.split(moved[order], ends)
        assert all(a.max() < b.min() for a, b in zip(groups, groups[1:], strict=False))
        assert (np.sign(moved) == np.where(leaf == 0, 1, np.sign(leaf))).all()
        assert (size <= np.maximum(np.abs(leaf), 0.07 * np.abs(leaf).max() + (leaf == 0))).all()
    assert (first != second).all()


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", ["identity", "symmetric", "hermitian", "antisymmetric", "ones"])
def test_at_a_generic_point_no_matrix_is_symmetric_unless_symmetry_is_kept(kind, n):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(n, n)).astype(np.float32)
    matrix = {
        "identity": np.eye(n, dtype=np.float32),
        "symmetric": a + a.T,
        "hermitian": a + a.T + 1j * (a - a.T),
        "antisymmetric": a - a.T,
        "ones": np.ones((n, n), np.float32),
    }[kind]
    (moved,) = further([matrix])
    adjoint = np.conj(moved.T)
    upper = np.triu_indices(n, 1)
    assert (np.abs(moved - adjoint) > 1e-5)[upper].all()
    assert (np.abs(moved + adjoint) > 1e-5)[upper].all()
    (kept,) = further([matrix], keeps=SYMMETRY)
    is_symmetric = (kept == np.conj(kept.T)).all()
    assert is_symmetric == (kind in ("identity", "symmetric", "hermitian"))
    assert (kept != 0).any(axis=0).all()


@pytest.mark.exhaustive
def test_a_generic_point_takes_few_arrays_of_its_size():
    """Also where some numbers are equal by accident, as among many in float32."""
    values = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    given = subject(jnp.asarray(values))
    tracemalloc.start()
    try:
        (moved,) = nearby(given, 0, keeps=NOTHING)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(np.unique(values)) < len(values)
    assert len(np.unique(moved)) > 0.999 * len(values)
    assert peak < 9 * moved.size * np.dtype(float).itemsize


@pytest.mark.parametrize(
    ("leaf", "is_found"),
    [
        (jnp.asarray([[2.0, 1], [1, 3]]), True),
        (jnp.eye(3), True),
        (jnp.asarray([[2.0, 1], [0, 3]]), False),
        (jnp.ones((2, 2)), False),
        (jnp.ones((2, 3)), False),
        (jnp.asarray([[2.0]]), False),
        (jnp.asarray([1.0, 2.0]), False),
        (jnp.asarray([[2.0, 1], [1, 3j]]), False),
    ],
)
def test_symmetric_leaves_are_found(leaf, is_found):
    both = subject(jnp.ones(2), leaf)
    assert symmetric_leaves(both.inputs) == ({1} if is_found else set())


def point_of(gradient, reference=None, exact=None, delta=None):
    both = subject(jnp.ones(2), jnp.ones(2))
    arrays = [None if g is None else np.asarray([g]) for g in (gradient, exact, reference)]
    return make_point(both, both.inputs, arrays, 0, delta)


def test_elements_that_are_not_finite_are_zero_and_known_and_such_a_rule_is_not_used():
    point = point_of([1.0, np.inf, np.nan, 2], exact=[1.0, 1, np.nan, 1])
    np.testing.assert_array_equal(point.gradient, [[1, 0, 0, 2]])
    np.testing.assert_array_equal(point.finite, [True, False, False, True])
    assert point.exact is None
    assert point_of([1.0] * 4, [1.0, np.nan, 1, 1]).reference is None
    assert point_of([1.0, 1, 1, 1], exact=[2.0] * 4).exact[0, 0] == 2


def test_a_step_of_ones_own_is_the_scale_of_every_element():
    point = point_of([1.0, 1, 1, 1], delta=0.005)
    np.testing.assert_array_equal(point.direction(SINGLE), 0.005)


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
    leaves = real.from_rows(np.arange(14.0).reshape(2, 7), LEAVES)
    assert [leaf.shape for leaf in leaves] == [(2, 1, 2), (2, 2), (2,)]
    np.testing.assert_array_equal(leaves[1], [[2 + 3j, 4 + 5j], [9 + 10j, 11 + 12j]])


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
    assert holds_floats(Z) and holds_floats(jnp.ones(1, jnp.bfloat16))
    assert not holds_floats(jnp.arange(2)) and not holds_floats(None)
    assert not holds_floats(jax.random.key(0))
    assert real.real_dtype(Z) == np.float32 and real.real_size(Z) == 4
