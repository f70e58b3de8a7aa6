"""Rules where a gradient vanishes, or nearly so: what is right passes, what is wrong fails."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from clipgrad._check import check_grads

from tests.check_vanishing import POINTS, VANISHING, function, point
from tests.check_zoo import VALUES_ALONE, custom

ATTENTION, LOGSUMEXP = "causal attention", "difference of logsumexp"
CORE = [
    (ATTENTION, "float32", "ones"),
    (ATTENTION, "float32", "nearly one"),
]


def rows(dtypes):
    """All functions at all points in each type; of some, or `None` for all, points."""
    found = [
        (name, dtype, where)
        for name, (dtype, points) in itertools.product(VANISHING, dtypes.items())
        for where in points or POINTS
        # Of this difference itself, half precision leaves nothing but rounding.
        if (name, dtype) != (LOGSUMEXP, "bfloat16")
    ]
    return [
        pytest.param(*row, marks=[] if row in CORE else pytest.mark.exhaustive) for row in found
    ]


@pytest.fixture(scope="module", autouse=True)
def programs_of_this_file():
    """Programs that serve no other test, of which JAX keeps 8,192 in a process."""
    yield
    jax.clear_caches()


def run(name, dtype, where, bug=0, **options):
    with jax.enable_x64(dtype == "float64"):
        args = jnp.int32(bug), *point(where, VANISHING[name], dtype)
        return check_grads(function(name), args, raise_on_failure=False, **options)


@pytest.mark.usefixtures("users_promotion")
@pytest.mark.ci("name", "dtype", "where")
@pytest.mark.parametrize(
    ("name", "dtype", "where"), rows({"float32": None, "float64": None, "bfloat16": None})
)
def test_a_right_rule_passes_where_its_gradient_vanishes(name, dtype, where):
    """In half precision rounding leaves so little that less than a half may be verified."""
    in_half = dtype == "bfloat16"
    report = run(name, dtype, where, min_verified=0.1 if in_half else None)
    assert report.ok and (in_half or report.verified == report.elements), str(report)


FEW = ("ones", "nearly one")


@pytest.mark.usefixtures("users_promotion")
@pytest.mark.ci("name", "dtype", "where")
@pytest.mark.parametrize(
    ("name", "dtype", "where"), rows({"float32": None, "float64": FEW, "bfloat16": FEW})
)
def test_a_wrong_rule_fails_where_the_gradient_of_the_right_one_vanishes(name, dtype, where):
    for bug, what in enumerate(VANISHING[name].bugs, start=1):
        report = run(name, dtype, where, bug, **VALUES_ALONE)
        assert any(failure.check == "value" for failure in report.failures), (what, str(report))


@pytest.mark.parametrize(("loses", "ok"), [(10.0, True), (1000.0, False)])
def test_a_rule_may_lose_some_roundings_of_a_larger_leaf_but_no_more(loses, ok):
    """The gradient of x is 1e-4 of the one of y, and is computed beside a larger number."""

    def backward(r, g):
        x, y = r
        return g * ((loses + 2e-4 * x) - loses), g * jnp.cos(y)

    rule = custom(lambda x, y: 1e-4 * jnp.sum(x * x) + jnp.sum(jnp.sin(y)), backward)
    args = jnp.asarray([0.3, 0.7, 1.1]), jnp.asarray([0.2, 0.5, 0.8])
    report = check_grads(rule, args, points=1, raise_on_failure=False)
    assert report.ok == ok, str(report)
    assert not ok or any("the rule's operations lose as much" in note for note in report.notes)
