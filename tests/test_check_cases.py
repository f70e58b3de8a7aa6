"""Solvers, samplers, kinks, ties, masked rows: each wrong gradient fails, each right one passes."""

import jax
import jax.numpy as jnp
import pytest
from clipgrad._check import check_grads

from tests.check_cases import RIGHT, UNKNOWN, WRONG

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("users_promotion")]

DTYPES = ["float32", "float64"]


def run(make, dtype):
    with jax.enable_x64(dtype == "float64"):
        function, args, *options = make(jnp.dtype(dtype))
        return check_grads(function, args, raise_on_failure=False, **(options or [{}])[0])


@pytest.mark.ci("name", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_gradient_fails(name, dtype):
    report = run(WRONG[name], dtype)
    assert report.failures, str(report)
    assert "nothing was verified" not in str(report)


@pytest.mark.ci("name", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_gradient_passes(name, dtype):
    report = run(RIGHT[name], dtype)
    assert report.ok, str(report)
    assert report.verified or report.at_kinks


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_known_is_not_called_wrong(name):
    (failure,) = run(UNKNOWN[name], "float32").failures
    assert "nothing was verified" in failure.detail


def test_what_is_right_for_symmetric_matrices_alone_passes_with_a_note():
    function, args = RIGHT["eigenvalues_of_one_triangle"](jnp.float32)
    notes = check_grads(function, args).notes
    assert any(
        "right for symmetric matrices, such as this one, but not for others" in n for n in notes
    )
