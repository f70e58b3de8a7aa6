"""Tolerances by precision, and what rounding alone may do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipgrad as cg
from clipgrad._check.tolerances import PRECISIONS
from tests.check.check_zoo import custom, halved, normal
from tests.helpers import array

pytestmark = pytest.mark.slow


def report(function, *args, **options):
    return cg.check_grads(function, args, points=1, raise_on_failure=False, **options)


X3 = array([0.7, 1.1, 1.3])


OFF = {"float64": 1e-6, "float32": 5e-4, "float16": 1e-2, "bfloat16": 5e-2}


def test_each_type_with_a_row_is_tried():
    assert OFF.keys() == PRECISIONS.keys()


def square_off_by(part, dtype, rounded):
    """x * x, whose rule is off by a part of the tolerance: by rounding alone, or as written."""
    error = part * OFF[dtype]

    def backward(r, g):
        x, g = r[0].astype("float32"), g.astype("float32")
        near = 0 * x + np.float32(1 - error)
        factor = 1 + (lax.reduce_precision(near, 8, 1) - near if rounded else np.float32(error))
        return ((2 * factor * x * g).astype(dtype),)

    return custom(lambda x: x * x, backward), (jnp.asarray([0.5, 1.0, 2.0], dtype),)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("part", "ok"), [(0.5, True), (2.0, False)])
def test_rounding_by_half_the_tolerance_passes_and_by_twice_fails(dtype, part, ok):
    rule, args = square_off_by(part, dtype, rounded=True)
    assert report(rule, *args).ok == ok


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("part", [0.5, 0.01])
def test_a_rule_written_wrong_fails_however_little_of_the_tolerance_it_is_off(dtype, part):
    rule, args = square_off_by(part, dtype, rounded=False)
    (failure,) = report(rule, *args).failures
    assert failure.check == "value"
    np.testing.assert_allclose(failure.ratio - 1, part * OFF[dtype], rtol=0.05)


def test_a_rule_beyond_its_tolerance_fails_though_rounding_brings_its_gradient_within():
    def backward(r, g):
        x, g = r[0].astype("float32"), g.astype("float32")
        return ((np.float32(2 * 1.089) * x * g).astype("bfloat16"),)

    rule = custom(lambda x: x * x, backward)
    assert not report(rule, jnp.asarray([1.3], "bfloat16")).ok


@pytest.mark.parametrize(("part", "ok"), [(0.5, True), (2.0, False)])
def test_a_rule_in_float64_may_be_off_by_half_the_tolerance_and_not_by_twice(part, ok):
    with jax.enable_x64(True):
        factor = 1 + part * OFF["float64"]
        rule = custom(lambda x: x * x, lambda r, g: (2 * factor * r[0] * g,))
        checked = report(rule, jnp.asarray([0.5, 1.0, 2.0]))
    assert checked.ok == ok


def rounded(error, like):
    """A number that is lost to rounding: `error` as computed, zero in float64."""
    near = jnp.sum(0 * like.astype("float32")) + np.float32(1 - error)
    return lax.reduce_precision(near, 8, 1) - near


SOME = {"float32": 6e-6, "float16": 8e-3, "bfloat16": 3e-2}


@pytest.mark.parametrize("dtype", SOME)
@pytest.mark.parametrize(("part", "ok"), [(0.25, True), (4.0, False)])
def test_an_element_may_be_off_by_some_roundings_of_its_leaf(dtype, part, ok):
    """Of a gradient [1, 1, 1, 0], the last."""
    error = part * SOME[dtype]

    def backward(r, g):
        ones = jnp.asarray([1, 1, 1, 0], g.dtype)
        off = error if g.dtype == jnp.float64 else rounded(error, r[0]).astype(g.dtype)
        return (ones * g + (1 - ones) * g * off,)

    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray([0, 1, 2, 3], dtype)
        rule = custom(lambda x: jnp.asarray([1, 1, 1, 0], x.dtype) * x, backward)
        assert report(rule, x).ok == ok


def test_what_underflows_is_not_wrong_but_a_number_that_does_not_is():
    tiny = np.float32(1e-20)
    right = custom(lambda x: x * tiny * tiny, lambda r, g: (g * tiny * tiny,))
    zero = custom(lambda x: x * tiny, lambda r, g: (0 * g,))
    x = jnp.asarray([1.0, 2.0, 3.0])
    assert report(right, x).ok and not report(zero, x).ok


@pytest.mark.parametrize(("slope", "ok"), [(4e-4, True), (4e-3, False)])
def test_paddles_rule_is_absolute_for_slopes_below_a_thousandth_alone(slope, ok):
    rule = custom(lambda x: slope * x, lambda r, g: (1.1 * slope * g,))
    assert report(rule, jnp.asarray([1.0, 2.0, 3.0]), max_relative_error=0.005).ok == ok


@pytest.mark.parametrize(("off", "ok"), [(3e-7, True), (3e-6, False)])
def test_a_reference_that_is_wrong_itself_is_found_from_a_millionth_on(off, ok):
    with jax.enable_x64(True):
        checked = report(halved(1 + off), jnp.asarray([0.4, 1.2, 2.5]))
    assert ("value" not in {failure.check for failure in checked.failures}) == ok


def test_a_constant_may_be_rounded_but_not_by_many_roundings():
    def gelu(part):
        c = np.float32(0.7978845608 * (1 + part))

        def backward(r, g):
            t = jnp.tanh(c * (r[0] + np.float32(0.044715) * r[0] ** 3))
            inner = c * (1 + 3 * np.float32(0.044715) * r[0] ** 2)
            return (g * 0.5 * (1 + t + r[0] * (1 - t * t) * inner),)

        return custom(lambda x: jax.nn.gelu(x), backward)

    x = normal(44, 9, dtype=jnp.float32)
    assert report(gelu(0.0), x).ok and not report(gelu(1e-5), x).ok


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_a_constant_may_be_rounded_in_every_mode(mode):
    """10 pi, as one number and as two."""

    def backward(r, g):
        return (np.float32(10 * np.pi) * g * jnp.cos(np.float32(10) * (np.float32(np.pi) * r[0])),)

    wave = custom(lambda x: jnp.sin(np.float32(10 * np.pi) * x), backward)
    assert report(wave, jnp.asarray([0.37, 1.13, 2.71]), mode=mode).ok


def test_a_constant_may_be_rounded_each_time_it_is_used():
    def decay(x):
        y = x
        for _ in range(100):
            y = np.float32(0.999) * y
        return jnp.sin(x) + y

    rule = custom(decay, lambda r, g: (g * (jnp.cos(r[0]) + np.float32(0.999**100)),))
    assert report(rule, jnp.asarray([0.4, 1.2, 2.5])).ok


@pytest.mark.parametrize(("error", "fails"), [(3e-5, False), (3e-4, True)])
def test_a_compiled_gradient_may_differ_by_a_thousand_roundings_of_its_leaf(error, fails):
    """Of a gradient [1, 1, 1, 0], the last, under `jax.jit` alone."""
    ones = jnp.asarray([1.0, 1, 1, 0])

    def backward(r, g):
        traced = isinstance(g, jax.core.Tracer)
        return (ones * g + (1 - ones) * g * (error if traced else 0),)

    checked = report(custom(lambda x: ones * x, backward), jnp.arange(4.0))
    assert ("jit" in {failure.check for failure in checked.failures}) == fails
