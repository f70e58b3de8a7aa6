"""Tolerances by precision, and what rounding alone may do."""

import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._check.tolerances import RELATIVE, make_tolerance, narrowest
from tests.check_zoo import custom

RANGES = [(0, 3), (3, 5)]


@pytest.mark.parametrize(
    ("dtype", "relative"),
    [("float64", 1e-6), ("float32", 5e-4), ("float16", 1e-2), ("bfloat16", 5e-2)],
)
def test_the_relative_tolerance_is_that_of_the_documentation(dtype, relative):
    assert make_tolerance(RANGES, [dtype, "float64"]).relative[0] == relative
    assert f"{relative:g} for {dtype}".replace("0.0005", "5e-4").replace("1e-06", "1e-6") in (
        cg.check_grads.__doc__.replace("\n", " ")
        .replace("    ", "")
        .replace("1e-2", "0.01")
        .replace("5e-2", "0.05")
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("part", "ok"), [(0.5, True), (2.0, False)])
def test_an_error_of_half_the_tolerance_passes_and_of_twice_fails(dtype, part, ok):
    x, factor = jnp.asarray([0.5, 1.0, 2.0], dtype), 1 + part * RELATIVE[dtype]
    rule = custom(
        lambda x: x * x,
        lambda r, g: ((2 * factor * r[0].astype("float32") * g.astype("float32")).astype(dtype),),
    )
    assert cg.check_grads(rule, (x,), points=1, raise_on_failure=False).ok == ok


def test_the_narrowest_type_inside_counts():
    assert narrowest(["float64", "float16", "float32"]) == "float16"
    assert narrowest(["float32", "float8_e4m3fn"]) == "bfloat16"
    tolerance = make_tolerance(RANGES, ["float64", "float32"], ["float16"])
    assert (tolerance.relative == RELATIVE["float16"]).all()


def test_each_leaf_has_its_own_typical_size():
    tolerance = make_tolerance(RANGES, ["float32"] * 2)
    gradient = np.asarray([[3.0, 4.0, 0.0, 100.0, 100.0]])
    typical = tolerance.typical(gradient)[0]
    np.testing.assert_allclose(typical, [np.sqrt(25 / 3)] * 3 + [100] * 2)
    assert tolerance.overall(gradient, np.ones(5)) == [100.0]


def test_the_floor_is_fifty_roundings_of_the_leaf_and_a_little_of_the_others():
    tolerance, eps = make_tolerance(RANGES, ["float32"] * 2), 2.0**-23
    gradient = np.asarray([[1.0, 1.0, 1.0, 100.0, 100.0]])
    floor = tolerance.floor(gradient, np.ones(5))[0]
    np.testing.assert_allclose(floor, 50 * eps * np.asarray([2.0] * 3 + [101.0] * 2), rtol=1e-6)


def test_beside_an_exact_gradient_only_a_vanishing_leaf_gets_the_others_rounding():
    tolerance, eps = make_tolerance(RANGES, ["float32"] * 2), 2.0**-23
    small = np.asarray([[1e-6] * 3 + [100.0] * 2])
    np.testing.assert_allclose(tolerance.floor(small, np.ones(5), exact=True)[0, 0], 5e-5 * eps)
    for residue in (0.0, 1e-15):
        gone = np.asarray([[residue] * 3 + [100.0] * 2])
        floor = tolerance.floor(gone, np.ones(5), exact=True)[0]
        np.testing.assert_allclose(floor[0], 50 * eps * 100, rtol=1e-6)


def test_the_floor_follows_the_scale_of_each_element():
    tolerance = make_tolerance(RANGES, ["float32"] * 2)
    gradient = np.asarray([[0.0] * 3 + [1.0] * 2])
    scale = np.asarray([1.0, 10.0, 100.0, 1.0, 1.0])
    floor = tolerance.floor(gradient, scale)[0]
    np.testing.assert_allclose(floor[:3] / floor[0], [1, 0.1, 0.01], rtol=1e-6)
