"""Every wrong VJP of the zoo is caught, and no right twin is rejected, at default settings."""

import jax
import jax.numpy as jnp
import pytest

from clipgrad._check import check_grads
from tests import check_zoo

DTYPES = ["float32", "float64"]
TWINS = [name for name in check_zoo.RIGHT.values() if name in check_zoo.PAIRS]


def run(name, dtype, which):
    make, check = check_zoo.PAIRS[name]
    with jax.enable_x64(dtype == "float64"):
        *pair, args = make(jnp.dtype(dtype))
        order = 2 if check == "second order" else 1
        return check_grads(pair[which], args, order=order, raise_on_failure=False), check


@pytest.mark.exhaustive
@pytest.mark.kinds("dtype")
@pytest.mark.ci("name", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", check_zoo.PAIRS)
def test_a_wrong_vjp_is_caught_by_the_check_it_violates(name, dtype):
    report, check = run(name, dtype, 0)
    assert check in {failure.check for failure in report.failures}, str(report)


@pytest.mark.kinds("dtype")
@pytest.mark.ci("name", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", [name for name in check_zoo.RIGHT.values() if name in check_zoo.PAIRS]
)
def test_its_right_twin_passes(name, dtype):
    report, _ = run(name, dtype, 1)
    assert report.ok, str(report)
