"""The checks beside the values: each fails alone, can be switched off, and says what it is."""

import jax
import jax.numpy as jnp
import pytest

import clipgrad as cg
from tests.check_zoo import PAIRS, custom

X = jnp.asarray([0.3, -0.7, 1.1])


def checks(function, args=(X,), **options):
    report = cg.check_grads(function, args, raise_on_failure=False, **options)
    return {failure.check for failure in report.failures}


@pytest.mark.parametrize(
    "name",
    [
        "wrong_only_under_jit",
        "wrong_only_under_vmap",
        "affine_backward",
        "stray_clip_of_the_cotangent",
        "stale_residual",
        "wrong_dtype",
        "forward_rule_that_disagrees",
        "nan_where_the_argument_is_zero",
    ],
)
def test_a_check_that_is_switched_off_finds_nothing(name):
    make, check = PAIRS[name]
    function, _, args = make(jnp.dtype("float32"))
    assert check in checks(function, args)
    assert check not in checks(function, args, skip=[check])


def test_a_gradient_that_raises_under_jit_fails_if_the_function_does_not():
    def backward(r, g):
        return (g * jnp.cos(r[0]) if float(g[0]) < 1e9 else g,)

    assert checks(custom(lambda x: jnp.sin(x), backward)) >= {"jit", "vmap"}


def test_the_pull_back_of_zero_must_be_zero():
    constant = custom(lambda x: jnp.sin(x), lambda r, g: (jnp.cos(r[0]) * g + 1e-4,))
    report = cg.check_grads(constant, (X,), raise_on_failure=False)
    assert "the cotangent zero pulled back" in report.failures[0].detail


def test_a_cotangent_of_another_shape_fails():
    wrong = custom(lambda x: jnp.sum(x), lambda r, g: (jnp.ones((3, 1)) * g,))
    assert "cotangent" in checks(wrong)


def test_a_forward_rule_of_another_dtype_fails():
    rule = jax.custom_jvp(lambda x: jnp.sin(x))
    rule.defjvp(lambda p, t: (jnp.sin(p[0]).astype(jnp.float16), t[0].astype(jnp.float16)))
    assert checks(rule) & {"primal", "cotangent", "forward"}


def test_forward_mode_that_a_function_lacks_is_not_run():
    report = cg.check_grads(custom(lambda x: jnp.sin(x), lambda r, g: (jnp.cos(r[0]) * g,)), (X,))
    assert report.not_run == {"forward": "a custom_vjp function has no forward rule"}


def test_outputs_differentiated_alone_must_agree_with_zero_cotangents():
    def forward(x):
        return (jnp.sin(x.value), x.value**2), x.value

    def backward(x, g):
        if _is_zero(g[0]):
            return (x * g[1],)
        return (jnp.cos(x) * g[0] + 2 * x * (0 if _is_zero(g[1]) else g[1]),)

    def _is_zero(g):
        return type(g).__name__ == "SymbolicZero"

    rule = jax.custom_vjp(lambda x: (jnp.sin(x), x**2))
    rule.defvjp(forward, backward, symbolic_zeros=True)
    assert "outputs" in checks(rule)


def test_a_second_point_stays_where_the_function_is_finite():
    assert cg.check_grads(jnp.arccos, (jnp.asarray([0.999, -0.99]),)).ok


def test_more_points_are_checked_on_request():
    one = cg.check_grads(jnp.sin, (X,), points=1)
    three = cg.check_grads(jnp.sin, (X,), points=3)
    assert three.evaluations > one.evaluations


def test_the_second_order_is_not_run_after_a_failure():
    function, _, args = PAIRS["wrong_sign"][0](jnp.dtype("float32"))
    report = cg.check_grads(function, args, order=2, raise_on_failure=False)
    assert report.not_run["second order"] == "the first order fails"


def test_a_vjp_that_cannot_be_differentiated_fails_the_second_order():
    @jax.custom_jvp
    def stubborn(x):
        return jnp.cos(x)

    @stubborn.defjvp
    def _(primals, tangents):
        raise NotImplementedError("no second derivative")

    once = custom(lambda x: jnp.sin(x), lambda r, g: (stubborn(r[0]) * g,))
    report = cg.check_grads(once, (X,), order=2, raise_on_failure=False)
    assert "cannot be differentiated: it raises NotImplementedError" in str(report)


def test_a_rule_that_raises_in_one_of_the_checks_fails_that_check():
    def backward(r, g):
        first, second = g
        return (jnp.cos(r[0]) * first + 2 * r[0] * second,)

    rule = jax.custom_vjp(lambda x: (jnp.sin(x), x**2))
    rule.defvjp(
        lambda x: ((jnp.sin(x.value), x.value**2), (x.value,)), backward, symbolic_zeros=True
    )
    report = cg.check_grads(rule, (X,), raise_on_failure=False)
    assert "[outputs] args[0]: raises TypeError" in str(report)
