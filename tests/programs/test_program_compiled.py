"""How much a program is optimized: by what it computes, and how often."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clipgrad._programs import compiled, jit_by_size
from clipgrad._programs.compiled import element_count, low_jit, middle_jit

SMALL, LARGE = (8, 8), (1024, 1024)


def of(shape):
    return jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(jax.ShapeDtypeStruct(shape, jnp.float32))


def scanned(length):
    step = lambda x, _: (jnp.sin(x), None)  # noqa: E731
    return jax.make_jaxpr(lambda x: jax.lax.scan(step, x, length=length)[0])(np.ones(SMALL))


def convolution(kernel):
    """Of 32 by 32 numbers in 8 channels, into 16."""
    shapes = (4, 32, 32, 8), (kernel, kernel, 8, 16)
    run = lambda x, k: jax.lax.conv_general_dilated(  # noqa: E731
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


@pytest.mark.parametrize(
    ("program", "size", "how", "expected"),
    [
        (of, SMALL, {}, low_jit),
        (of, SMALL, {"runs": 64}, low_jit),
        (of, SMALL, {"runs": 10_000}, middle_jit),
        (of, LARGE, {}, middle_jit),
        (scanned, 10, {}, low_jit),
        (scanned, 100_000, {}, middle_jit),
        (convolution, 5, {}, low_jit),
        (convolution, 5, {"is_wide": True}, middle_jit),
    ],
)
def test_what_runs_for_longer_than_it_compiles_is_optimized(program, size, how, expected):
    assert jit_by_size(program(size), **how) is expected


def test_a_convolution_in_float64_has_the_work_of_its_products():
    whole, read = element_count(convolution(5)), 4 * 32 * 32 * 8 + 5 * 5 * 8 * 16
    assert whole == read + 4 * 32 * 32 * 16
    assert element_count(convolution(5), is_wide=True) == read + 4 * 32 * 32 * 16 * 5 * 5 * 8


def test_options_that_a_compiler_does_not_know_are_left_out():
    known = {"xla_backend_optimization_level": 0}
    assert compiled._those_known(known | {"xla_no_such_option": 1}) == known
    assert compiled._those_known(known) == known
    assert compiled.low_optimization() and compiled.some_optimization()
    assert compiled.low_optimization() != compiled.some_optimization()
