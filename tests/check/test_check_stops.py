"""Values under `stop_gradient` in every evaluation, and what the slopes do not see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import clipgrad as cg
from tests.check.check_zoo import custom
from tests.helpers import array

X = array(np.linspace(-3.0, 3.0, 8) + 0.1)


def mantissa(x):
    part, exponent = jnp.frexp(x)
    return jnp.ldexp(jnp.round(part * 8) / 8, exponent)


def by_bits(x):
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
    return lax.bitcast_convert_type(bits, jnp.float32)


def called_back(vmap_method):
    def call(x):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        quarter = lambda x: np.round(np.asarray(x) * 4) / 4  # noqa: E731
        return jax.pure_callback(quarter, out, x, vmap_method=vmap_method)

    return custom(call, lambda r, g: (0 * g,))


def kernel(x):
    def run(source, target):
        target[...] = jnp.round(source[...] * 4) / 4

    return pl.pallas_call(run, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


KINDS = {
    "jnp": lambda x: jnp.round(x * 4) / 4,
    "frexp": mantissa,
    "bitcast": by_bits,
    "callback": called_back(None),
    "callback by rows": called_back("sequential"),
    "kernel": custom(kernel, lambda r, g: (0 * g,)),
}
stop = lax.stop_gradient
USES = {
    "straight through": lambda q: lambda x: jnp.tanh(x + stop(q(x) - x)),
    "scale": lambda q: lambda x: jnp.sin(x) / (1 + stop(jnp.abs(q(x)).max())),
    "in a scan": lambda q: (
        lambda x: lax.scan(
            lambda c, y: (c / 2 + jnp.tanh(y + stop(q(y) - y)), None), jnp.float32(0), x
        )[0]
    ),
    "in a jit": lambda q: jax.jit(lambda x: (x - stop(q(x))) ** 2),
}
CORE = {("kernel", "straight through"), ("callback", "scale")}
ROWS = [
    pytest.param(*row, marks=() if row in CORE else pytest.mark.slow)
    for kind in KINDS
    for use in USES
    for row in [(kind, use)]
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "use"), ROWS)
def test_stopped_values_are_held_in_each_kind_of_evaluation(kind, use):
    report = cg.check_grads(USES[use](KINDS[kind]), (X,), points=1, raise_on_failure=False)
    assert report.ok and report.verified == X.size, str(report)
    assert report.precision == ("float64" if kind == "jnp" else "float32")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_gradient_beside_a_stopped_value_fails(kind):
    double = custom(lambda x: jnp.tanh(x), lambda r, g: (2 * g * (1 - jnp.tanh(r[0]) ** 2),))
    wrong = lambda x: double(x) + stop(KINDS[kind](x))  # noqa: E731
    assert not cg.check_grads(wrong, (X,), points=1, raise_on_failure=False).ok


@pytest.mark.slow
def test_numerical_grad_holds_stopped_values_in_each_evaluation():
    for quantize in (KINDS["jnp"], mantissa):
        (gradient,) = cg.numerical_grad(lambda x, q=quantize: x * stop(q(x)), (X,))
        np.testing.assert_allclose(gradient, quantize(X), rtol=2e-3, atol=1e-5)


def notes_of(function, *args, **options):
    return [*cg.check_grads(function, args, points=1, **options).notes]


@pytest.mark.slow
def test_stopped_values_of_the_user_are_noted_with_their_lines():
    (note,) = notes_of(lambda x: stop(x) * x, X)
    assert note.startswith("1 value under stop_gradient was held fixed, at ")
    assert "test_check_stops.py:" in note
    (note,) = notes_of(lambda x: stop(x) * x + stop(2 * x), X)
    assert note.startswith("2 values under stop_gradient were held fixed, at ")
    assert notes_of(jax.nn.softmax, X) == []  # it stops its maximum, which is nothing to a user


@pytest.mark.slow
def test_a_derivative_that_stops_itself_names_the_second_order():
    cube = custom(lambda x: x**3, lambda r, g: (stop(3 * r[0] ** 2 * g),))
    derivative = jax.grad(lambda x: cube(x).sum())
    assert "write order=2" in str(cg.check_grads(derivative, (X,), raise_on_failure=False))


def sine(k):
    def backward(saved, g):
        return (k * g * jnp.cos(saved[0]),)

    return custom(lambda x: jnp.sin(x), backward)


def some_of(table, core):
    """The names of a table; one of them runs by default."""
    return [n if n == core else pytest.param(n, marks=pytest.mark.slow) for n in table]


UNTESTED = {
    "in a branch that is not taken": lambda f: (
        lambda x: lax.cond(jnp.sum(x) > 100, f, lambda x: jnp.tanh(x), x)
    ),
    "in another branch than its twin": lambda f: lambda x: lax.switch(0, [sine(1.0), f], x),
    "with cotangents of zero": lambda f: lambda x: 0 * f(x) + x,
    "of a result that is not used": lambda f: lambda x: jnp.where(x > -9, x, f(x)),
}
TESTED = {
    "alone": lambda f: f,
    "in one of two branches": lambda f: (
        lambda x: lax.cond(jnp.sum(x) < 100, f, lambda x: f(2 * x), x)
    ),
    "in a branch that is taken": lambda f: lambda x: lax.cond(jnp.sum(x) < 100, f, jnp.tanh, x),
    "in a scan": lambda f: lambda x: lax.scan(lambda c, y: (c + f(y), None), jnp.float32(0), x)[0],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some_of(UNTESTED, "in a branch that is not taken"))
def test_a_rule_that_no_point_ran_is_noted_with_its_line(name):
    (note,) = notes_of(UNTESTED[name](sine(2.0)), X)
    assert "was not tested" in note and "backward (" in note and "test_check_stops.py:" in note


@pytest.mark.slow
@pytest.mark.parametrize("name", some_of(TESTED, "in one of two branches"))
def test_a_rule_that_ran_is_not_noted(name):
    assert not any("not tested" in note for note in notes_of(TESTED[name](sine(1.0)), X))


def slow(*cases):
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("around", [jax.jit, *slow(jax.checkpoint, lambda f: f)])
def test_the_line_of_the_wrong_rule_among_several_is_named(around):
    def halved(saved, g):
        return (g * saved[0],)

    square = custom(lambda x: x * x, halved)
    both = lambda x: square(sine(1.0)(x))  # noqa: E731
    (failure,) = cg.check_grads(around(both), (X,), raise_on_failure=False).failures
    assert "; rule: halved (" in failure.detail and "test_check_stops.py:" in failure.detail
    assert "backward" not in failure.detail


@pytest.mark.slow
def test_the_line_of_a_wrong_jvp_is_that_of_its_rule_or_function():
    cube = jax.custom_jvp(lambda x: x**3)

    @cube.defjvp
    def tangent(primals, tangents):
        return primals[0] ** 3, 2 * primals[0] ** 2 * tangents[0]

    (failure,) = cg.check_grads(lambda x: cube(jnp.sin(x)), (X,), raise_on_failure=False).failures
    assert "test_check_stops.py:" in failure.detail
