"""Of a loss with several custom rules a failure names the line of the one that is wrong."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.helpers import array

X = array(np.linspace(0.3, 1.9, 5))


def rule(backward, function=jnp.sin):
    made = jax.custom_vjp(function)
    made.defvjp(lambda x: (function(x), x), backward)
    return made


def right_1(x, g):
    return (jnp.cos(x) * g,)


def right_2(x, g):
    return (jnp.cos(x) * g,)


def right_3(x, g):
    return (g * jnp.cos(x),)


def wrong_formula(x, g):
    return (1.01 * jnp.cos(x) * g,)


def wrong_arithmetic(x, g):
    return ((jnp.cos(x) * g).astype("float8_e4m3fn").astype(x.dtype),)


def wrong_linearity(x, g):
    return (jnp.cos(x) * jnp.clip(g, -1e3, 1e3),)


def other_wrong_formula(x, g):
    return (0.98 * jnp.cos(x) * g,)


RIGHT = [rule(b) for b in (right_1, right_2, right_3)]
# The check that fails, and the fault of its failure.
FAILURES = {
    wrong_formula: ("value", "formula"),
    wrong_arithmetic: ("value", "arithmetic"),
    wrong_linearity: ("linearity", ""),
}


def in_a_row(rules):
    def loss(x):
        for f in rules:
            x = f(x)
        return jnp.sum(x * x)

    return loss


def in_a_scan(rules):
    row = in_a_row(rules)
    return lambda x: jax.lax.scan(lambda c, row_of_x: (c + row(row_of_x), None), 0.0, x[:, None])[0]


def in_a_branch(rules):
    row = jax.jit(in_a_row(rules))
    return lambda x: jax.lax.cond(x[0] > 0, row, jnp.sum, x)


def beside(rules):
    return lambda x: sum(jnp.sum(f(x) * k) for k, f in enumerate(rules, 1))


def line(function):
    first = inspect.getsourcelines(function)[1]
    return f"{function.__name__} (tests/check/test_check_rules.py:{first})"


CORE = [(wrong_linearity, in_a_row)]
ROWS = [
    row if row in CORE else pytest.param(*row, marks=pytest.mark.slow)
    for row in itertools.product(FAILURES, (in_a_row, in_a_scan, in_a_branch, beside))
]


@pytest.mark.slow
@pytest.mark.parametrize(("backward", "around"), ROWS)
def test_the_line_of_the_wrong_rule_is_named(backward, around):
    first, second, third = RIGHT
    loss = around([first, second, rule(backward), third])
    report = cg.check_grads(loss, (X,), raise_on_failure=False, points=1)
    check, fault = FAILURES[backward]
    failures = [f for f in report.failures if f.check == check]
    assert failures and all(f.fault == fault for f in failures), str(report)
    assert all(f.detail.endswith(f"; rule: {line(backward)}") for f in failures), str(report)


MANY = [
    rule(lambda x, g: (jnp.cos(x) * g,)),
    rule(lambda x, g: (g * jnp.cos(x),)),
    rule(lambda x, g: (1.0 * jnp.cos(x) * g,)),
    rule(lambda x, g: (1 * jnp.cos(x) * g,)),
    rule(lambda x, g: (jnp.cos(x) * g * 1,)),
    rule(lambda x, g: (jnp.cos(x) * g * 1.0,)),
    rule(lambda x, g: (jnp.cos(x) * g / 1,)),
    rule(lambda x, g: (jnp.cos(x) * g / 1.0,)),
    rule(lambda x, g: (jnp.cos(x) * g + 0,)),
    rule(lambda x, g: (jnp.cos(x) * g + 0.0,)),
]


@pytest.mark.slow
def test_both_of_two_wrong_rules_are_named_among_many():
    loss = beside([rule(other_wrong_formula), *MANY, rule(wrong_formula)])
    report = cg.check_grads(loss, (X,), raise_on_failure=False, points=1)
    text = f"; rules: {line(other_wrong_formula)}, {line(wrong_formula)}"
    assert report.failures[0].detail.endswith(text), str(report)


@pytest.mark.slow
def test_a_wrong_rule_of_a_jvp_is_named_among_others():
    @jax.custom_jvp
    def square(x):
        return x * x

    @square.defjvp
    def wrong_tangent(primals, tangents):
        return square(*primals), 1.9 * primals[0] * tangents[0]

    report = cg.check_grads(beside([*RIGHT, square]), (X,), raise_on_failure=False, points=1)
    assert "; rule: wrong_tangent (tests/check/test_check_rules.py:" in report.failures[0].detail


@pytest.mark.parametrize("backward", [wrong_formula, wrong_arithmetic])
def test_one_number_of_each_witness_stands_in_a_failure(backward):
    """Those of one cotangent, at the worst element."""
    report = cg.check_grads(rule(backward), (X,), raise_on_failure=False, points=1)
    (failure, *_) = report.failures
    k = int(failure.where.split("[")[-1][:-1])
    cotangent = failure.plain / np.cos(np.asarray(X)[k])
    expected = {wrong_formula: 1.01, wrong_arithmetic: 1.0}[backward]
    assert abs(failure.rule / failure.plain - expected) < 1e-5
    assert abs(failure.slope / failure.plain - 1) < 1e-5 or failure.fault == "arithmetic"
    assert 0.5 <= abs(cotangent) <= 1.5 and failure.indices.size == 5
    computed = np.asarray(backward(X, jnp.float32(cotangent))[0])[k]
    assert abs(failure.computed / computed - 1) < 1e-5
