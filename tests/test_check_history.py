"""Every bug of the libraries' history is caught, and no corrected twin is rejected."""

import jax
import jax.numpy as jnp
import pytest

from clipgrad._check import check_grads
from tests.check_history import HISTORY
from tests.check_history_jax import OF_JAX
from tests.check_history_layers import LARGE, LAYERS
from tests.check_history_linalg import LINALG
from tests.check_history_right import IMPLICIT, RIGHT
from tests.check_zoo import normal

pytestmark = pytest.mark.exhaustive

BUGS = HISTORY | LINALG | LAYERS | LARGE | OF_JAX


# A bug that is one of float32 is one of float64, too.
ROWS = [
    (name, dtype)
    for name, bug in BUGS.items()
    for dtype in (("float32", "float64") if bug.dtype == "float32" else (bug.dtype,))
]


def run(bug, dtype, which):
    with jax.enable_x64(dtype == "float64"):
        *pair, args = bug.make(jnp.dtype(dtype))
        return check_grads(pair[which], args, order=bug.order, raise_on_failure=False)


@pytest.mark.ci("name", "dtype")
@pytest.mark.parametrize(("name", "dtype"), ROWS)
def test_a_bug_of_the_past_is_rejected(name, dtype):
    report = run(BUGS[name], dtype, 0)
    assert not report.ok, str(report)
    found = {failure.check for failure in report.failures}
    assert BUGS[name].check in {None, *found}, str(report)


@pytest.mark.ci("name", "dtype")
@pytest.mark.parametrize(("name", "dtype"), ROWS)
def test_its_corrected_twin_is_accepted(name, dtype):
    report = run(BUGS[name], dtype, 1)
    assert report.ok, str(report)


@pytest.mark.ci("name", "dtype")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_function_of_constrained_or_rounded_inputs_is_accepted(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        function, args = RIGHT[name](jnp.dtype(dtype))
        report = check_grads(function, args, raise_on_failure=False)
    assert report.ok, str(report)


def test_what_is_right_for_symmetric_matrices_alone_passes_with_a_note():
    function, args = RIGHT["eigenvalues_of_one_triangle"](jnp.float32)
    notes = check_grads(function, args).notes
    assert any(
        "right for symmetric matrices, such as this one, but not for others" in n for n in notes
    )


@pytest.mark.parametrize("name", IMPLICIT)
def test_a_sample_is_linear_in_its_parameter_as_jax_differentiates_it(name):
    draw, args = IMPLICIT[name](jnp.float32)
    shifted = lambda a, b: draw(a) + jnp.sin(b)  # noqa: E731
    args = *args, normal(1, 3, dtype=jnp.float32)
    report = check_grads(shifted, args, raise_on_failure=False)
    assert report.ok and report.verified == 6, str(report)
