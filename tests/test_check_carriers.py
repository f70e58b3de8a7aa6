"""Functions that carry numbers as integers: their rules are judged by steps that show them."""

import jax
import jax.numpy as jnp
import pytest
from clipgrad._check import check_grads
from clipgrad._check.carriers import grain
from jax import lax

from tests.check_carriers import CARRIERS, RIGHT
from tests.check_zoo import VALUES_ALONE

pytestmark = pytest.mark.usefixtures("users_promotion")


def run(function, args, **options):
    return check_grads(function, args, raise_on_failure=False, **options)


@pytest.mark.kinds("dtype")
@pytest.mark.ci("name", "dtype")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", CARRIERS)
def test_a_rule_that_is_zero_in_part_fails_and_its_twin_passes(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        wrong, right, args = CARRIERS[name](jnp.dtype(dtype))
        report = run(wrong, args, **VALUES_ALONE)
        assert any(f.check == "value" and f.indices.size for f in report.failures), str(report)
        report = run(right, args)
        assert report.ok and 2 * report.verified >= report.elements - report.at_kinks, str(report)


@pytest.mark.kinds("dtype")
@pytest.mark.ci("name", "dtype")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_held_or_only_looked_at_passes(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        report = run(*RIGHT[name](jnp.dtype(dtype)))
        assert report.ok and report.verified == report.elements, str(report)


def test_a_function_without_a_rule_whose_gradient_is_lost_in_its_bits_fails():
    there_and_back = lambda x: lax.bitcast_convert_type(  # noqa: E731
        lax.bitcast_convert_type(x, jnp.int32), jnp.float32
    )
    report = run(there_and_back, (jnp.ones(3) + jnp.arange(3.0),))
    assert "analytic is 0 throughout" in report.failures[0].detail


def in_a_rule(function):
    rule = jax.custom_vjp(function)
    rule.defvjp(lambda x: (function(x), None), lambda _, g: (g,))
    return rule


def as_integer(x):
    return x.astype(jnp.int32)


BY_BITS = {
    "by bits": (lambda x: lax.bitcast_convert_type(x, jnp.int32).astype(x.dtype), "float32"),
    "of half precision": (
        lambda x: lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(x.dtype),
        "bfloat16",
    ),
    "in a loop": (
        lambda x: lax.fori_loop(
            0, 2, lambda _, y: lax.bitcast_convert_type(y.view(jnp.int32), y.dtype), x
        ),
        "float32",
    ),
    "by a cast in a rule": (in_a_rule(lambda x: as_integer(x).astype(x.dtype)), "float32"),
    "by a cast alone": (lambda x: as_integer(x).astype(x.dtype), None),
    "as an index": (in_a_rule(lambda x: jnp.arange(9.0)[as_integer(x)]), None),
    "compared": (lambda x: jnp.where(lax.bitcast_convert_type(x, jnp.int32) < 0, x, 2 * x), None),
    "random bits": (lambda x: x * jax.random.uniform(jax.random.key(0), x.shape), None),
}


@pytest.mark.parametrize("name", BY_BITS)
def test_integers_that_become_floats_again_are_carriers(name):
    function, expected = BY_BITS[name]
    assert grain(jax.make_jaxpr(function)(jnp.ones(3))) == expected
