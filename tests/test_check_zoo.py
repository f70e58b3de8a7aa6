"""Every wrong VJP of the zoo and of libraries is caught, and no right twin is rejected."""

import jax
import jax.numpy as jnp
import pytest
from clipgrad._check import check_grads

from tests.check_history import HISTORY
from tests.check_zoo import PAIRS, RIGHT, VALUES_ALONE

DTYPES = ["float32", "float64"]
OF_HISTORY = [
    (name, dtype)
    for name, bug in HISTORY.items()
    for dtype in (DTYPES if bug.dtype == "float32" else [bug.dtype])
]
WRONG = [(name, dtype) for name in PAIRS for dtype in DTYPES] + OF_HISTORY
TWINS = [(name, dtype) for name in RIGHT.values() if name in PAIRS for dtype in DTYPES]


def run(name, dtype, which):
    """With default settings in one of the types; in float64 wrong values beside no other check."""
    make, check = (PAIRS | HISTORY)[name][:2]
    with jax.enable_x64(dtype == "float64"):
        *pair, args = make(jnp.dtype(dtype))
        order = 2 if check == "second order" else 1
        again = dtype == "float64" and (name in PAIRS or HISTORY[name].dtype == "float32")
        options = VALUES_ALONE if again and check == "value" and not which else {}
        report = check_grads(pair[which], args, order=order, raise_on_failure=False, **options)
        return report, check


@pytest.mark.exhaustive
@pytest.mark.kinds("dtype")
@pytest.mark.ci("name", "dtype")
@pytest.mark.parametrize(("name", "dtype"), WRONG)
def test_a_wrong_vjp_is_caught_by_the_check_it_violates(name, dtype):
    report, check = run(name, dtype, 0)
    found = {failure.check for failure in report.failures}
    assert found and check in {None, *found}, str(report)


def rare(row):
    return pytest.param(*row, marks=pytest.mark.exhaustive)


@pytest.mark.kinds("dtype")
@pytest.mark.ci("name", "dtype")
@pytest.mark.parametrize(("name", "dtype"), [*TWINS, *map(rare, OF_HISTORY)])
def test_its_right_twin_passes(name, dtype):
    report, _ = run(name, dtype, 1)
    assert report.ok, str(report)
