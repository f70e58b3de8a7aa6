"""Slopes measured by one program: ranges, steps, batches, several cotangents, native types."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipgrad._check.differences import BATCH, BATCH_BYTES, Differences, Evaluation, Moves

X = [np.asarray([0.5, 1.0, 2.0]), np.asarray(3.0)]
COVECTORS = np.asarray([[1.0, -2.0, 0.5], [0.5, 1.0, -1.0]])


def function(constants, xs):
    x, y = xs
    return [x**2 * y]


def like(*arrays, dtype=np.float64):
    return [jax.ShapeDtypeStruct(a.shape, dtype) for a in arrays]


def evaluation(leaves, **options):
    return Evaluation(function, leaves, np.float64, "float64", (16, 18), (4, 8), **options)


def made(**options):
    return Differences(evaluation(like(*X), **options), COVECTORS)


def moves(*entries):
    return Moves(*(np.asarray(column) for column in zip(*entries, strict=True)))


GRADIENT = np.concatenate([2 * X[0] * X[1] * COVECTORS, (COVECTORS @ X[0] ** 2)[:, None]], axis=1)
SINGLE = np.ones(4)


@pytest.mark.kinds()
@pytest.mark.parametrize("compiled", [True, False])
def test_the_slope_along_each_element_is_its_derivative(compiled):
    singles = moves(*((k, k + 1, 2.0**-10) for k in range(4)))
    slopes = made(compiled=compiled).measure(X, SINGLE, GRADIENT, singles)
    np.testing.assert_allclose(slopes.central, GRADIENT.T, rtol=1e-10)
    np.testing.assert_allclose(slopes.analytic, GRADIENT.T, rtol=1e-10)


def test_a_range_moves_along_its_direction():
    direction = np.asarray([1.0, -1.0, 0.5, 2.0])
    slopes = made().measure(X, direction, GRADIENT, moves((0, 3, 2.0**-12), (0, 4, 2.0**-12)))
    expected = [GRADIENT[:, :3] @ direction[:3], GRADIENT @ direction]
    np.testing.assert_allclose(slopes.central, expected, rtol=1e-6)
    np.testing.assert_allclose(slopes.analytic, expected, rtol=1e-12)
    np.testing.assert_allclose(slopes.norm[1], np.sqrt(GRADIENT**2 @ direction**2))


def test_more_rows_than_a_batch_give_the_same_slopes(monkeypatch):
    differences, told = made(), []
    bar = lambda total: contextlib.nullcontext(told.append)  # noqa: E731
    monkeypatch.setattr("clipgrad._check.differences.progress_bar", bar)
    many = moves(*((k % 4, k % 4 + 1, 2.0**-10) for k in range(2 * BATCH)))
    slopes = differences.measure(X, SINGLE, GRADIENT, many)
    np.testing.assert_allclose(slopes.central, np.tile(GRADIENT.T, (BATCH // 2, 1)), rtol=1e-10)
    assert sum(told) == 2 * BATCH and len(told) > 1


def test_evaluations_are_counted_and_the_base_point_only_once():
    differences = made()
    differences.measure(X, SINGLE, GRADIENT, moves((0, 1, 0.5)))
    assert differences.evaluations == 3
    differences.measure(X, SINGLE, GRADIENT, moves((1, 2, 0.5)))
    assert differences.evaluations == 5
    np.testing.assert_allclose(differences.base, X[0] ** 2 * X[1])
    differences.measure(list(X), SINGLE, GRADIENT, moves((1, 2, 0.5)))
    assert differences.evaluations == 8


def test_a_step_that_the_type_cannot_hold_is_rounded_and_measured_as_taken():
    xs = [jnp.asarray([256.0], jnp.bfloat16)]
    native = Evaluation(
        lambda _, xs: [xs[0] * 2],
        like(xs[0], dtype=jnp.bfloat16),
        np.float32,
        "bfloat16",
        (2, 3),
        (1,),
    )
    slopes = Differences(native, np.ones((1, 1))).measure(
        xs, np.full(1, 2.5), np.full((1, 1), 2.0), moves((0, 1, 1.0))
    )
    np.testing.assert_array_equal(slopes.central, slopes.analytic)


COMPLEX = [np.asarray([1 + 2j, 3 - 1j])]


def test_the_parts_of_a_complex_leaf_are_moved_one_by_one():
    square = Evaluation(
        lambda _, xs: [xs[0] ** 2],
        like(*COMPLEX, dtype=np.complex128),
        np.float64,
        "float64",
        (16, 18),
        (4, 8),
    )
    covectors = np.asarray([[1.0, 0.5, -1.0, 2.0]])
    pull = jax.vjp(lambda z: z**2, COMPLEX[0])[1]
    cotangent = (covectors[0, ::2] - 1j * covectors[0, 1::2]).astype(np.complex64)
    (pulled,) = pull(jnp.asarray(cotangent))
    gradient = np.stack([pulled.real, -pulled.imag], axis=-1).reshape(1, 4)
    singles = moves(*((k, k + 1, 2.0**-10) for k in range(4)), (1, 3, 2.0**-10))
    slopes = Differences(square, covectors).measure(COMPLEX, SINGLE, gradient, singles)
    expected = np.r_[gradient[0], gradient[0, 1:3].sum()]
    np.testing.assert_allclose(slopes.central[:, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(slopes.analytic[:, 0], expected, rtol=1e-5)


@pytest.mark.parametrize(("outputs", "batch"), [(3, BATCH), (100_000, 20), (10_000_000, 1)])
def test_the_batch_is_bounded_by_the_memory_of_its_outputs(outputs, batch):
    differences = Differences(evaluation(like(*X)), np.ones((2, outputs)))
    assert differences._batch == batch
    assert 16 * batch * outputs <= BATCH_BYTES or batch == 1
