"""Slopes measured by one program: ranges, steps, batches, several cotangents, native types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clipgrad._check.differences import BATCH, BATCH_BYTES, Differences, Evaluation, Rows
from clipgrad._check.evaluation import wide_evaluation
from clipgrad._check.subject import make_subject
from clipgrad._check.session import Session
from clipgrad._check.tolerances import make_tolerance

X = [np.asarray([0.5, 1.0, 2.0]), np.asarray(3.0)]
COVECTORS = np.asarray([[1.0, -2.0, 0.5], [0.5, 1.0, -1.0]])


def function(xs):
    x, y = xs
    return [x**2 * y]


def like(*arrays, dtype=np.float64):
    return [jax.ShapeDtypeStruct(a.shape, dtype) for a in arrays]


def made(**options):
    return Differences(wide_evaluation(function, like(*X), "float64", **options), COVECTORS)


def rows(*entries):
    return Rows(*(np.asarray(column) for column in zip(*entries, strict=True)))


GRADIENT = np.concatenate([2 * X[0] * X[1] * COVECTORS, (COVECTORS @ X[0] ** 2)[:, None]], axis=1)
SINGLE = np.ones((1, 4))


@pytest.mark.parametrize("compiled", [True, False])
def test_the_slope_along_each_element_is_its_derivative(compiled):
    singles = rows(*((k, k + 1, 2.0**-10, 0) for k in range(4)))
    slopes = made(compiled=compiled).measure(X, SINGLE, GRADIENT, singles)
    np.testing.assert_allclose(slopes.central, GRADIENT.T, rtol=1e-10)
    np.testing.assert_allclose(slopes.analytic, GRADIENT.T, rtol=1e-10)


def test_a_range_moves_along_its_direction():
    direction = np.asarray([[1.0, -1.0, 0.5, 2.0]])
    slopes = made().measure(X, direction, GRADIENT, rows((0, 3, 2.0**-12, 0), (0, 4, 2.0**-12, 0)))
    expected = [GRADIENT[:, :3] @ direction[0, :3], GRADIENT @ direction[0]]
    np.testing.assert_allclose(slopes.central, expected, rtol=1e-6)
    np.testing.assert_allclose(slopes.analytic, expected, rtol=1e-12)
    np.testing.assert_allclose(slopes.norm[1], np.sqrt(GRADIENT**2 @ direction[0] ** 2))


def test_one_sided_slopes_differ_by_the_curvature():
    slopes = made().measure(X, SINGLE, GRADIENT, rows((0, 1, 0.5, 0)))
    bend = 2 * 0.5 * X[1] * COVECTORS[:, 0]
    np.testing.assert_allclose((slopes.ahead - slopes.behind)[0], bend, rtol=1e-12)
    np.testing.assert_allclose(slopes.width[0], np.abs(bend) / 2, rtol=1e-12)


def test_more_rows_than_a_batch_give_the_same_slopes():
    differences, told = made(), []
    many = rows(*((k % 4, k % 4 + 1, 2.0**-10, 0) for k in range(2 * BATCH)))
    slopes = differences.measure(X, SINGLE, GRADIENT, many, told.append)
    np.testing.assert_allclose(slopes.central, np.tile(GRADIENT.T, (BATCH // 2, 1)), rtol=1e-10)
    assert sum(told) == 2 * BATCH and len(told) > 1


def test_evaluations_are_counted_and_the_base_point_only_once():
    differences = made()
    differences.measure(X, SINGLE, GRADIENT, rows((0, 1, 0.5, 0)))
    assert differences.evaluations == 3
    differences.measure(X, SINGLE, GRADIENT, rows((1, 2, 0.5, 0)))
    assert differences.evaluations == 5
    np.testing.assert_allclose(differences.base, X[0] ** 2 * X[1])
    differences.measure(list(X), SINGLE, GRADIENT, rows((1, 2, 0.5, 0)))
    assert differences.evaluations == 8


def test_changes_are_those_of_each_output():
    shifts = np.asarray([[0.5, 0, 0, 0], [0, 0, 0, 1.0]])
    ahead, behind = made().changes(X, shifts)
    np.testing.assert_allclose(ahead, [[2.25, 0, 0], X[0] ** 2])
    np.testing.assert_allclose(behind, [[0.75, 0, 0], X[0] ** 2])


def test_a_step_that_the_type_cannot_hold_is_rounded_and_measured_as_taken():
    xs = [jnp.asarray([256.0], jnp.bfloat16)]
    native = Evaluation(
        lambda xs: [xs[0] * 2],
        like(xs[0], dtype=jnp.bfloat16),
        np.float32,
        "bfloat16",
        (2, 3),
        (1,),
    )
    slopes = Differences(native, np.ones((1, 1))).measure(
        xs, np.full((1, 1), 2.5), np.full((1, 1), 2.0), rows((0, 1, 1.0, 0))
    )
    np.testing.assert_array_equal(slopes.central, slopes.analytic)


@pytest.mark.parametrize(("size", "batch"), [(10, BATCH), (10_000, BATCH), (10_000_000, 2)])
def test_the_batch_is_bounded_by_its_memory(size, batch):
    large = like(np.broadcast_to(0.0, size))
    differences = Differences(wide_evaluation(function, large, "float64"), COVECTORS)
    assert differences._batch == min(batch, max(2, BATCH_BYTES // (8 * size)))


def test_leaves_of_unlike_effect_are_balanced_by_powers_of_two():
    problem = make_subject(lambda x, y: 1000 * jnp.sum(x) + jnp.sum(y), (jnp.ones(2), jnp.ones(2)))
    tolerance = make_tolerance(problem.leaf_ranges(), ["float64"] * 2)
    session = Session(problem, made(), tolerance, 0)
    gradient = np.asarray([[1000.0, 1000, 1, 1]])
    point = session.point(problem.inputs, gradient, None)
    sizes = np.abs(point.directions[0] * gradient[0])
    assert 0.2 < sizes[:2].mean() / sizes[2:].mean() < 5
    np.testing.assert_array_equal(point.scale, 1)


def test_a_reference_that_is_not_finite_in_a_leaf_leaves_that_leaf_to_differences():
    problem = make_subject(lambda x, y: jnp.sum(x) + jnp.sum(y), (jnp.ones(2), jnp.ones(2)))
    session = Session(problem, made(), make_tolerance(problem.leaf_ranges(), ["float64"] * 2), 0)
    reference = np.asarray([[1.0, np.nan, 1, 1]])
    point = session.point(problem.inputs, np.ones((1, 4)), reference)
    assert point.blind == [0] and np.isfinite(point.reference).all()
    none = session.point(problem.inputs, np.ones((1, 4)), np.full((1, 4), np.nan))
    assert none.reference is None and none.blind == [0, 1]
