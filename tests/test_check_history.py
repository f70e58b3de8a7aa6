"""Every bug of the libraries' history is caught, and no corrected twin is rejected."""

import jax
import jax.numpy as jnp
import pytest

from clipgrad._check import check_grads
from tests.check_history import HISTORY

pytestmark = pytest.mark.exhaustive

# A bug that is one of float32 is one of float64, too.
ROWS = [
    (name, dtype)
    for name, bug in HISTORY.items()
    for dtype in (("float32", "float64") if bug.dtype == "float32" else (bug.dtype,))
]


def run(bug, dtype, which):
    with jax.enable_x64(dtype == "float64"):
        *pair, args = bug.make(jnp.dtype(dtype))
        return check_grads(pair[which], args, order=bug.order, raise_on_failure=False)


@pytest.mark.ci("name", "dtype")
@pytest.mark.parametrize(("name", "dtype"), ROWS)
def test_a_bug_of_the_past_is_rejected(name, dtype):
    report = run(HISTORY[name], dtype, 0)
    assert not report.ok, str(report)
    found = {failure.check for failure in report.failures}
    assert HISTORY[name].check in {None, *found}, str(report)


@pytest.mark.ci("name", "dtype")
@pytest.mark.parametrize(("name", "dtype"), ROWS)
def test_its_corrected_twin_is_accepted(name, dtype):
    report = run(HISTORY[name], dtype, 1)
    assert report.ok, str(report)
