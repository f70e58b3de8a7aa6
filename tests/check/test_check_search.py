"""The search for wrong elements: references that are wrong too, blocks, ties, noise, order two."""

import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.check.check_zoo import custom, halved, normal
from tests.helpers import array

pytestmark = pytest.mark.slow

X = array([0.4, 1.2, 2.5])


def report(function, *args, **options):
    return cg.check_grads(function, args, raise_on_failure=False, **options)


def test_a_transpose_that_the_reference_shares_is_judged_by_differences():
    assert report(halved(1.0), X).ok
    wrong = report(halved(0.9), X)
    assert {failure.check for failure in wrong.failures} == {"value"}
    assert wrong.not_run["vmap"] == "values are wrong"


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_many_wrong_elements_are_counted_or_said_to_be_at_least_so_many(mode):
    half = custom(lambda x: jnp.sin(x), lambda r, g: (g * jnp.cos(r[0]) / 2,))
    (failure,) = report(half, normal(1, 900, dtype=jnp.float32), mode=mode, points=1).failures
    assert "900 of 900 elements wrong" in failure.detail
    assert "analytic/numeric is 0.5 throughout" in failure.detail


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_ties_are_found_in_every_mode(mode):
    def share(k):
        return custom(lambda x: jnp.max(x), lambda r, g: (k * g * jnp.ones(3, g.dtype),))

    checked = report(share(1.0), jnp.ones(3), mode=mode, points=1)
    np.testing.assert_array_equal(checked.failures[0].indices, [0, 1, 2])
    assert report(share(1 / 3), jnp.ones(3), mode=mode, points=1).ok


def test_the_second_order_names_inputs_and_cotangents():
    double = custom(lambda g: 1.0 * g, lambda r, h: (2 * h,))
    wrong = custom(lambda x: jnp.sin(x), lambda r, g: (double(g) * jnp.cos(r[0]),))
    checked = report(wrong, X, order=2)
    assert checked.failures[0].check == "second order"
    assert checked.failures[0].where.startswith("cotangent of out[")


def test_the_second_order_takes_as_many_evaluations_at_any_size():
    counts = [report(jnp.sin, normal(3, n, dtype=jnp.float32), order=2) for n in (5, 5000)]
    assert counts[0].ok and counts[0].evaluations == counts[1].evaluations < 150


def test_kinks_of_one_output_that_bend_both_ways_are_left_to_themselves():
    def rule(r, g):
        return (g * jnp.asarray([0.5, 0.5], g.dtype),)

    difference = custom(lambda x: jnp.abs(x[0]) - jnp.abs(x[1]), rule)
    assert report(difference, jnp.zeros(2), points=1).ok


@pytest.mark.parametrize(("first", "second"), [(1, 1 / 3), (1 / 3, 1), (1, 1)])
def test_ties_are_looked_at_output_by_output(first, second):
    def rule(r, g):
        return (jnp.full(3, first * g[0] + second * g[1]),)

    ends = custom(lambda x: (jnp.max(x), jnp.min(x)), rule)
    checked = report(ends, jnp.ones(3), points=1, seed=2)
    assert not checked.ok
    np.testing.assert_array_equal(checked.failures[0].indices, [0, 1, 2])


def relu_with(zero, other=0.0):
    """relu with a gradient of its own at zeros, and another at the first element, halved."""
    weight = jnp.ones(400).at[0].set(0.5)

    def backward(r, g):
        gradient = jnp.where(r[0] == 0, zero, (r[0] > 0).astype(g.dtype)) * g * weight
        return (gradient.at[0].multiply(other),)

    return custom(lambda x: weight * jnp.maximum(x, 0), backward)


ZEROS = np.array(normal(8, 400, dtype=jnp.float32))
ZEROS[100:300], ZEROS[0] = 0, 0.8
ZEROS = array(ZEROS)


def test_a_dropped_element_does_not_hide_among_kinks_of_gradient_zero():
    few = ZEROS.at[150:].set(1)
    wrong = report(relu_with(0.0), few, points=1)
    assert wrong.failures[0].where == "args[0][0]"
    assert "1 of 400 elements wrong" in str(wrong)
    assert report(relu_with(0.0, 1.0), few, points=1).ok


def test_elements_that_were_not_looked_at_are_said_so_where_those_that_were_disagree():
    """Rounds down at the first hundred, by as much as counts, and is right at the others."""
    kinks = jnp.where(jnp.arange(400) < 300, 0.0, 1.0)
    wrong = custom(
        lambda x: jnp.maximum(x, 0),
        lambda r, g: (g * jnp.where(r[0] == 0, jnp.arange(400.0) / 400, 0.5),),
    )
    checked = report(wrong, kinks + jnp.arange(400.0) * jnp.where(kinks > 0, 1e-3, 0), points=1)
    assert "elements not verified: not looked at one by one" in str(checked)
