"""No false alarm on right functions, float32 and float64, at default settings."""

import jax
import jax.numpy as jnp
import pytest
from clipgrad._check import check_grads

from tests import check_functions


@pytest.mark.exhaustive
@pytest.mark.ci("name", "dtype")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", check_functions.FUNCTIONS)
def test_a_right_function_passes(name, dtype):
    function, make = check_functions.FUNCTIONS[name]
    with jax.enable_x64(dtype == "float64"):
        report = check_grads(function, make(jnp.dtype(dtype)), raise_on_failure=False)
    assert report.ok, str(report)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", check_functions.MORE)
def test_one_more_right_function_passes(name):
    function, make = check_functions.MORE[name]
    report = check_grads(function, make(jnp.dtype("float32")), raise_on_failure=False)
    assert report.ok, str(report)


SMOOTH = ("tanh", "power", "softmax", "logsumexp", "attention", "var", "solve", "scan", "huber")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SMOOTH)
def test_a_right_function_passes_in_second_order(name):
    function, make = check_functions.FUNCTIONS[name]
    with jax.enable_x64(True):
        report = check_grads(function, make(jnp.dtype("float64")), order=2, raise_on_failure=False)
    assert report.ok, str(report)
