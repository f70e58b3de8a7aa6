"""Where people check: equal elements and inputs, identity and symmetric matrices, minima."""

import jax
import jax.numpy as jnp
import pytest
from clipgrad._check import check_grads

from tests.check_lazy import LAZY
from tests.check_zoo import VALUES_ALONE

pytestmark = pytest.mark.usefixtures("users_promotion")


def run(name, dtype, which, **options):
    with jax.enable_x64(dtype == "float64"):
        make, _ = LAZY[name]
        *pair, args = make(jnp.dtype(dtype))
        return check_grads(pair[which], args, raise_on_failure=False, **options)


@pytest.mark.exhaustive
@pytest.mark.kinds("dtype")
@pytest.mark.ci("name", "dtype")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", LAZY)
def test_a_vjp_that_is_right_at_the_point_alone_fails_and_its_twin_passes(name, dtype):
    report = run(name, dtype, 0, **VALUES_ALONE)
    assert report.failures, str(report)
    assert {failure.check for failure in report.failures} == {"value"}, str(report)
    report = run(name, dtype, 1)
    assert report.ok and report.verified == report.elements, str(report)
    if "one_triangle" not in name:  # some versions of JAX read both
        assert not any("is kept: without it" in note for note in report.notes), str(report)


KEPT = {
    "reads one triangle": lambda a: jnp.linalg.eigh(a, symmetrize_input=False)[0],
    "is not finite for others": lambda a: jnp.where(jnp.all(a == a.T), jnp.sum(a**3), jnp.nan),
}


@pytest.mark.parametrize("name", KEPT)
def test_structure_that_a_function_is_meant_for_is_kept_and_said(name):
    matrix = jnp.asarray([[2.0, 1.0], [1.0, 3.0]])
    report = check_grads(KEPT[name], (matrix,))
    assert any("the symmetry of matrices is kept: without it" in note for note in report.notes)
    assert any("what is wrong there alone was not seen" in note for note in report.notes)
