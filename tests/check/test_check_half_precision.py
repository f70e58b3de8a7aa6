"""Kernels in half precision and below, a wrong factor in their gradient, and what is said of it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import clipgrad as cg
from tests.check.check_zoo import custom, normal
from tests.rows import in_turn, some_of, this_turn


def in_a_kernel(function, dtype):
    """A function as a Pallas kernel, which has no float64."""

    def run(*xs):
        def kernel(*references):
            *ins, out = references
            out[...] = function(*[x[...].astype(jnp.float32) for x in ins]).astype(dtype)

        shape = jax.eval_shape(function, *xs).shape
        out = jax.ShapeDtypeStruct(shape, dtype)
        return pl.pallas_call(kernel, out_shape=out, interpret=True)(*xs)

    return run


def scaled_kernel(function, dtype, factor, which=0):
    """A kernel with the right rule, but for a factor of one gradient."""

    def backward(saved, g):
        wide = [x.astype(jnp.float32) for x in saved]
        gradients = jax.vjp(function, *wide)[1](g.astype(jnp.float32))
        factors = [factor if k == which else 1.0 for k in range(len(saved))]
        pairs = zip(factors, gradients, strict=True)
        return tuple((jnp.float32(k) * gradient).astype(dtype) for k, gradient in pairs)

    return custom(in_a_kernel(function, dtype), backward)


def standardized(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


KERNELS = {
    "sine": (jnp.sin, [(4, 4)]),
    "softmax": (lambda x: jax.nn.softmax(x, axis=-1), [(8, 16)]),
    "standardized": (standardized, [(8, 16)]),
    "product": (lambda a, b: jnp.dot(a, b), [(8, 16), (16, 4)]),
    "many": (jnp.tanh, [(64, 16)]),
    "one": (jnp.cos, [(1,)]),
}
FACTORS = [0.0, -1.0, 0.5, 2.0, 3.0, 5.0]
CORE = {("sine", "bfloat16", 2.0), ("sine", "bfloat16", 0.5)}  # and the right one, below
ROWS = this_turn(itertools.product(KERNELS, ("bfloat16", "float16"), (1.0, *FACTORS)), always=CORE)


def checked(name, dtype, factor, which=0):
    function, shapes = KERNELS[name]
    args = tuple(normal(k + 5, *shape, dtype=dtype) for k, shape in enumerate(shapes))
    kernel = scaled_kernel(function, jnp.dtype(dtype), factor, which)
    return cg.check_grads(kernel, args, raise_on_failure=False, points=1)


@pytest.mark.parametrize(("name", "dtype", "factor"), some_of(ROWS, CORE))
def test_a_kernel_in_half_precision_passes_with_the_right_gradient_alone(name, dtype, factor):
    report = checked(name, dtype, factor)
    assert report.ok == (factor == 1.0), str(report)
    assert report.precision == dtype
    if report.ok:
        assert report.verified == report.elements and 0 < report.judged_to <= 0.25


@pytest.mark.slow
@pytest.mark.parametrize("factor", FACTORS)
def test_the_second_operand_of_a_kernel_is_judged_too(factor):
    report = checked("product", "bfloat16", factor, which=1)
    assert {failure.where.partition("]")[0] for failure in report.failures} == {"args[1"}


@pytest.mark.parametrize("factor", [1.0, pytest.param(1.02, marks=pytest.mark.slow)])
def test_a_report_in_half_precision_says_first_to_what_share_it_checked(factor):
    report = checked("sine", "bfloat16", factor)
    share = f"{100 * report.judged_to:.0f}%"
    assert str(report).startswith(f"gradient check passed, checked to {share} (")
    assert any(
        f"bfloat16 alone show only errors of more than {share} of a gradient" in note
        for note in report.notes
    )


@pytest.mark.slow
def test_one_wrong_element_of_a_small_kernel_is_found():
    def backward(saved, g):
        return ((g * jnp.cos(saved[0])).at[2, 1].multiply(0.0),)

    kernel = custom(in_a_kernel(jnp.sin, jnp.bfloat16), backward)
    x = normal(5, 4, 4, dtype=jnp.bfloat16) / 2
    report = cg.check_grads(kernel, (x,), raise_on_failure=False, points=1)
    assert report.failures[0].where == "args[0][2, 1]", str(report)


FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
# All types of 8 bits and fewer that JAX has, but for those without a fraction or a zero.
FEW_BITS = [name for name in dir(jnp) if name.startswith(("float8", "float4"))]
FEW_BITS.remove("float8_e8m0fnu")
PLACES = {
    "output": lambda dtype: (lambda x: (x * x).astype(dtype), "float32"),
    "inside": lambda dtype: (lambda x: x.astype(dtype).astype(x.dtype) * x, "float32"),
    "input": lambda dtype: (lambda x: jnp.sin(x.astype("float32")), dtype),
}


@pytest.mark.slow
@in_turn
@pytest.mark.parametrize("factor", [0.5, 1.0])
@pytest.mark.parametrize(("place", "dtype"), itertools.product(PLACES, FEW_BITS))
def test_a_function_with_numbers_of_few_bits_is_judged_in_float64(place, dtype, factor):
    function, of = PLACES[place](jnp.dtype(dtype))

    def backward(saved, g):
        gradient = jax.vjp(function, *saved)[1](g)[0].astype("float32")
        return ((factor * gradient).astype(of),)

    x = jnp.linspace(0.5, 1, 24).astype(of)
    report = cg.check_grads(custom(function, backward), (x,), raise_on_failure=False)
    assert report.precision == "float64" and report.ok == (factor == 1.0), str(report)
    assert report.verified == 24 or factor != 1.0
    assert not report.failures or report.failures[0].check == "value"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOAT8)
def test_slopes_of_a_kernel_with_numbers_of_eight_bits_verify_nothing_and_say_so(dtype):
    kernel = scaled_kernel(jnp.sin, jnp.dtype(dtype), 1.0)
    x = jnp.linspace(0.3, 1, 16).astype(dtype)
    report = cg.check_grads(kernel, (x,), raise_on_failure=False, points=1)
    assert "nothing was verified" in str(report) and f"differences in {dtype} alone" in str(report)
    assert "finite differences " in report.notes[-1] and "%" in str(report).splitlines()[0]


HALVES = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "a", "b"),
    [
        pytest.param(dtype, *row, marks=() if k == 0 else pytest.mark.slow)
        for k, (dtype, row) in enumerate(
            (dtype, row) for dtype in HALVES for row in [(0.1, 6.0), (0.3, 7.0), (0.7, 3.0)]
        )
    ],
)
def test_constants_of_a_right_rule_may_be_rounded_apart(dtype, a, b):
    error = HALVES[dtype]
    rule = custom(lambda x: a * x / b, lambda r, g: (a / b * g,))
    x = jnp.asarray([0.3, -1.2, 2.5], dtype)
    assert cg.check_grads(rule, (x,), raise_on_failure=False, points=1).ok
    off = custom(lambda x: a * x / b, lambda r, g: ((1 + 16 * error) * a / b * g,))
    (failure,) = cg.check_grads(off, (x,), raise_on_failure=False, points=1).failures
    assert failure.fault == "formula"


@pytest.mark.slow
def test_a_rule_in_half_precision_that_is_off_by_some_roundings_names_the_tolerance():
    off = custom(lambda x: 0.1 * x / 6, lambda r, g: (1.03 * 0.1 / 6 * g,))
    x = jnp.asarray([0.3, -1.2, 2.5], jnp.bfloat16)
    (failure,) = cg.check_grads(off, (x,), raise_on_failure=False, points=1).failures
    assert "write tolerance=0.0" in failure.detail
    assert cg.check_grads(off, (x,), points=1, tolerance=0.06).ok


@pytest.mark.slow
def test_a_sum_that_bfloat16_loses_fails_with_its_numbers():
    """A sum in bfloat16, term by term, does not grow beyond 256."""
    total = lambda g: jax.lax.scan(lambda c, y: (c + y, None), jnp.zeros_like(g[0]), g)[0]  # noqa: E731
    shared = custom(lambda b: jnp.broadcast_to(b, (1067, 2)), lambda r, g: (total(g),))
    ones = jnp.ones((1067, 2))
    report = cg.check_grads(
        shared, (jnp.ones(2, jnp.bfloat16),), cotangent=ones, raise_on_failure=False, points=1,
        skip=("linearity", "outputs"),
    )  # fmt: skip
    assert "off by 76.01%; worst: numeric 1067 in float64, analytic 256" in str(report)


@pytest.mark.slow
def test_the_parts_of_a_failure_of_arithmetic():
    def backward(saved, g):
        return ((2 * saved[0].astype("bfloat16") * g.astype("bfloat16")).astype("float32"),)

    x = jnp.linspace(0.1, 1, 6)
    (failure,) = cg.check_grads(
        custom(lambda x: x * x, backward), (x,), raise_on_failure=False
    ).failures
    assert failure.fault == "arithmetic"
    assert "the formula is right, its arithmetic is not: as computed in" in failure.detail
    assert "tolerance=" in failure.detail
    np.testing.assert_allclose([failure.rule, failure.plain], failure.numeric, rtol=1e-6)
    assert failure.computed == failure.analytic != failure.numeric
