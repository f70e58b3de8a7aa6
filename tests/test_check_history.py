"""Every bug of the libraries' history is caught, and no corrected twin is rejected."""

import jax
import jax.numpy as jnp
import pytest

from clipgrad._check import check_grads
from tests.check_history import HISTORY
from tests.check_history_layers import LARGE, LAYERS
from tests.check_history_linalg import LINALG
from tests.check_history_right import RIGHT
from tests.helpers import FEWER

BUGS = HISTORY | LINALG | LAYERS | LARGE
NAMES = list(BUGS)[::3] if FEWER else list(BUGS)


def run(bug, which):
    with jax.enable_x64(bug.dtype == "float64"):
        *pair, args = bug.make(jnp.dtype(bug.dtype))
        return check_grads(pair[which], args, order=bug.order, raise_on_failure=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_bug_of_the_past_is_rejected(name):
    report = run(BUGS[name], 0)
    assert not report.ok, str(report)
    found = {failure.check for failure in report.failures}
    assert BUGS[name].check in {None, *found}, str(report)


@pytest.mark.parametrize("name", NAMES)
def test_its_corrected_twin_is_accepted(name):
    report = run(BUGS[name], 1)
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_function_of_constrained_or_rounded_inputs_is_accepted(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        function, args = RIGHT[name](jnp.dtype(dtype))
        report = check_grads(function, args, raise_on_failure=False)
    assert report.ok, str(report)
