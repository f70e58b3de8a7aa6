"""What is no slope of the function: a failure where it is smooth, a note elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import special

import clipgrad as cg
from tests.check.check_zoo import custom, normal
from tests.helpers import array

X = array([0.0, 0.4, 1.2])
# Functions at 0: their slopes there are not 0.
AT_ZERO = {
    "smooth": jnp.sin,
    "curved": lambda x: jnp.exp(2 * x),
    "kink": lambda x: jnp.abs(x) + 3 * x,
    "jump": lambda x: jnp.sign(x) + x,
    "noise": lambda x: jnp.sin(1e9 * x + 1) / 3,
}
SMOOTH = {"smooth", "curved"}


def without_slope(function):
    """The function, whose derivative by JAX is 0 at 0."""
    return lambda x: jnp.where(x == 0, function(jnp.zeros_like(x)), function(x))


def with_its_own_rule(function):
    """A rule that is what JAX would have: rule and plain AD agree."""
    return custom(lambda x: function(x), lambda r, g: jax.vjp(function, r[0])[1](g))


def checked(function, *args, **options):
    return cg.check_grads(function, args, raise_on_failure=False, **{"points": 1, **options})


CORE = {("smooth", False), ("kink", False)}


@pytest.mark.parametrize(
    ("name", "is_ruled"),
    [
        pytest.param(*row, marks=() if row in CORE else pytest.mark.slow)
        for name in AT_ZERO
        for row in [(name, False), (name, True)]
    ],
)
def test_a_derivative_that_is_no_slope_fails_where_the_function_is_smooth(name, is_ruled):
    function = without_slope(AT_ZERO[name])
    report = checked(with_its_own_rule(function) if is_ruled else function, X)
    if name in SMOOTH:
        (failure,) = report.failures
        assert failure.where == "args[0][0]" and failure.fault == "formula"
        text = (
            "plain autodiff has the gradient of the rule" if is_ruled else "JAX's derivative of its"
        )
        assert text in failure.detail
    else:
        assert report.verified <= 2 and "not verified" in str(report), str(report)
        assert all("nothing was verified" in failure.detail for failure in report.failures)


MATRIX = array([[2.0, 0.5], [0.5, 1.0]])


def coordinates(at):
    """Linear interpolation by the distances to two neighbors, as several libraries had it."""
    lower = jnp.floor(at)
    distance = lambda a, b: jnp.maximum(a - b, b - a)  # noqa: E731
    near, far = 1 - distance(at, lower), 1 - distance(at, lower + 1)
    return near * (3 * lower) + far * (3 * lower + 3)


def twins(x):
    """The maximum of two copies by comparisons, which at equality hands both the whole."""
    left, right = x, x * jnp.float32(1.0)
    tied = jnp.where(x == 1, 1.0, left)
    return jnp.where(left > right, left, jnp.where(right > left, right, tied))


HISTORICAL = {
    "i0": (special.i0, (X,)),
    "xlogy": (lambda x, y: jnp.where(x == 0, 0.0, x * jnp.log(y)), (X, array([2.0, 2.4, 3.2]))),
    "twins": (twins, (array([1.0, 2.0]),)),
    "map_coordinates": (coordinates, (array([1.0, 2.5]),)),
    "cholesky": (lambda a: lax.linalg.cholesky(a, symmetrize_input=False), (MATRIX,)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [n if n == "i0" else pytest.param(n, marks=pytest.mark.slow) for n in HISTORICAL],
)
def test_a_historical_derivative_that_is_no_slope_fails_without_a_rule(name):
    function, args = HISTORICAL[name]
    report = checked(function, *args, points=2)
    assert {f.check for f in report.failures} == {"value"}, str(report)
    assert "is wrong there, the function is smooth" in str(report)


@pytest.mark.slow
def test_a_disputed_element_is_never_verified_whatever_rounding_does():
    q, w = jnp.linalg.qr(normal(0, 5, 5, dtype=jnp.float32))[0], normal(1, 5, 5, dtype=jnp.float32)
    read = lambda a: jnp.sum(lax.linalg.cholesky(a, symmetrize_input=False) * w)  # noqa: E731
    for condition in (1e1, 1e6):
        a = (q * jnp.logspace(0, -np.log10(condition), 5)[None]) @ q.T
        report = checked(read, (a + a.T) / 2)
        assert not report.ok and report.verified <= 5


@pytest.mark.slow
def test_a_stair_is_not_judged_by_the_slopes_of_larger_steps():
    report = checked(lambda x: jnp.round(x * 2**23) / 2**23 + 0 * x, jnp.asarray([0.3, 0.7, 1.2]))
    assert all("wrong" not in failure.detail for failure in report.failures)


def straight_through(k):
    steps = lambda x: jnp.round(4 * x) / 4  # noqa: E731
    return custom(steps, lambda r, g: (k * g,))


@pytest.mark.slow
def test_of_a_staircase_it_is_said_that_slopes_cannot_judge_it():
    (failure,) = checked(straight_through(1.0), jnp.asarray([0.3, -1.2, 2.4])).failures
    assert "flat there" in failure.detail and "surrogate" in failure.detail
    parabola = custom(lambda x: x * x, lambda r, g: (g,))
    (failure,) = checked(parabola, jnp.zeros(3)).failures
    assert "flat" not in failure.detail
