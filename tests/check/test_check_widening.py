"""Programs widened: every type inside every program, custom rules stripped; which are plain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipgrad._programs as _programs
from clipgrad._check.checked_function import checked_function
from clipgrad._check.float64 import AXIS, Unsupported, Wide, held
from clipgrad._check.traced_again import has_rules
from clipgrad._check.vjp import differentiated
from tests.check.check_zoo import custom
from tests.helpers import array

X = array([0.3, -1.2, 2.0])


def wide(function, x=X):
    call = Wide(jax.make_jaxpr(lambda xs: [function(xs[0])])([x]))
    with jax.enable_x64(True):
        return np.asarray(jax.jit(call)([np.asarray(x, np.float64)])[0])


PROGRAMS = {
    "jit": jax.jit(jnp.sin),
    "remat": jax.checkpoint(jnp.sin),
    "custom_vjp": custom(lambda x: jnp.sin(x), lambda r, g: (g,)),
    "cond": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "scan": lambda x: lax.scan(lambda c, e: (c, jnp.sin(e)), x[0], x)[1],
    "while": lambda x: lax.fori_loop(0, 1, lambda i, c: jnp.sin(c), x),
    "cast": lambda x: jnp.sin(x.astype(jnp.float16)).astype(x.dtype),
    "reduce_precision": lambda x: jnp.sin(lax.reduce_precision(x, 5, 2)),
    "literal": lambda x: jnp.sin(x + jnp.float32(0)),
    "constant": lambda x: jnp.sin(x * jnp.ones(3)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_computes_in_float64_inside_every_program(name):
    value = wide(PROGRAMS[name])
    assert value.dtype == np.float64
    np.testing.assert_allclose(value, np.sin(np.asarray(X, np.float64)), rtol=1e-14)


def test_a_power_of_two_that_a_program_scales_by_stays_one():
    scale = lambda x: lax.reduce_precision(x, 8, 0)  # noqa: E731
    np.testing.assert_array_equal(wide(scale), np.asarray(scale(X)))


def test_products_are_taken_in_float64_whatever_their_precision():
    product = lambda x: jnp.dot(x, x, precision="default", preferred_element_type=jnp.float32)  # noqa: E731
    exact = np.asarray(X, np.float64)
    np.testing.assert_allclose(wide(product), exact @ exact, rtol=1e-15)


def test_integers_and_random_bits_stay_what_they_are():
    drop = lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape).astype(x.dtype)  # noqa: E731
    np.testing.assert_array_equal(wide(drop) != 0, np.asarray(drop(X)) != 0)
    bits = lambda x: x * lax.bitcast_convert_type(x, jnp.int32).astype(x.dtype)  # noqa: E731
    with pytest.raises(Unsupported, match="it looks at the bits of its numbers"):
        wide(bits)


@pytest.mark.parametrize("is_wide", [True, False])
def test_stopped_values_are_held_at_the_first_row(is_wide):
    function = lambda x: x * lax.stop_gradient(x)  # noqa: E731
    program = jax.make_jaxpr(lambda xs: [function(xs[0])])([X])
    hook = held(program, is_wide)
    assert hook is not None and held(jax.make_jaxpr(jnp.sin)(X), is_wide) is None
    rows = jnp.stack([X, 2 * X])
    run = lambda xs: _programs.evaluate(program, xs, hook)  # noqa: E731
    values = jax.vmap(run, axis_name=AXIS)([rows])[0]
    np.testing.assert_allclose(values[1], 2 * X * X, rtol=1e-6)


def test_a_stripped_program_rounds_as_the_function_does():
    function = lambda x: lax.reduce_precision(PROGRAMS["custom_vjp"](x), 5, 2)  # noqa: E731
    program = jax.make_jaxpr(lambda xs: [function(xs[0])])([X])
    stripped = lambda xs: _programs.evaluate(program, xs, _programs.NoRules(jnp.float64))  # noqa: E731
    (value,), pull = jax.vjp(stripped, [X])
    np.testing.assert_array_equal(value, function(X))
    np.testing.assert_allclose(pull([array(np.ones(3))])[0][0], np.cos(X), rtol=1e-6)


RULES = {
    "sin": (jnp.sin, False),
    "scan": (PROGRAMS["scan"], False),
    "custom_vjp": (PROGRAMS["custom_vjp"], True),
    "custom_vjp in a scan": (
        lambda x: lax.scan(lambda c, e: (c, PROGRAMS["custom_vjp"](e)), x[0], x)[1],
        True,
    ),
    "custom_jvp of jax": (jax.nn.relu, True),
    "a linear solve": (lambda x: jnp.linalg.solve(jnp.diag(x), x), True),
    "concrete": (lambda x: x if float(x[0]) > 0 else -x, True),
}


@pytest.mark.parametrize("name", RULES)
def test_a_function_with_rules_is_told_from_one_of_jaxs_own_operations(name):
    function, has = RULES[name]
    assert has_rules(checked_function(function, (X,))) == has


def test_rules_run_eagerly_outside_of_jit():
    seen = []
    watched = custom(lambda x: jnp.sin(x), lambda r, g: (seen.append(type(g)) or g * jnp.cos(*r),))
    pull = differentiated(checked_function(watched, (X,)), [X])
    np.testing.assert_allclose(pull(np.ones(3)), np.cos(X), rtol=1e-6)
    assert not issubclass(seen[0], jax.core.Tracer)
