"""What counts as different: the judgment, the ratios, the order of computation."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.extra import numpy as hnp
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._compare import judge as judging
from clipgrad._compare.judge import judge
from clipgrad._compare.ratios import factor_text, ratio
from clipgrad._compare.save_run import recorded

EPS = float(np.finfo(np.float32).eps)


def floor_of(exact, runs):
    return judging.floor_of({0: exact}, [{0: run} for run in runs])[0]


def reference(a, b, moves):
    """The definition of the docstring, element by element."""
    unequal = [i for i in range(len(a)) if a[i] != b[i]]
    size = math.hypot(*(b[i] for i in unequal))
    distance = math.hypot(*(a[i] - b[i] for i in unequal))
    floors = [math.hypot(*(m[i] - a[i] for i in unequal)) for m in moves]
    floor = math.hypot(*floors) / math.sqrt(len(moves))
    return distance, max(4 * EPS * size, floor, min(4 * floor, 2**-13 * size))


@hypothesis.given(st.data())
def test_the_judgment_is_that_of_its_definition(data):
    n = data.draw(st.integers(1, 6))
    arrays = hnp.arrays(np.float64, n, elements=st.floats(-1e6, 1e6, allow_subnormal=False))
    a = data.draw(arrays)
    b = a * (1 + EPS * np.round(data.draw(arrays) / 2e5))
    moves = [a * (1 + EPS * np.round(data.draw(arrays) / 5e5)) for _ in range(2)]
    distance, most = reference(a, b, moves)
    hypothesis.assume(abs(distance - most) > 1e-6 * most or distance == most == 0)
    assert judge(a, b, floor_of(a, moves), EPS, None).differs is (distance > most)


@pytest.mark.parametrize(
    "a, b, moves, differs",
    [
        ([1.0, 2.0], [1.0, 2.0 * (1 + 3 * EPS)], [[1.0, 2.0]], False),  # 4 roundings
        ([1.0, 2.0], [1.0, 2.0 * (1 + 5 * EPS)], [[1.0, 2.0]], True),
        ([1.0], [1.0009], [[1.001]], False),  # the floor
        ([1.0], [1.0011], [[1.001]], True),
        ([1.0], [1.0011], [[1.001], [1.0013]], False),  # the root mean square of the runs
        ([1.0], [1.0000035], [[1.000001]], False),  # less than 4 floors of float32
        ([1.0], [1.0000045], [[1.000001]], True),
        ([1.0], [1.00013], [[1.0001]], True),  # of half precision more than one
        ([1.0], [1.00012], [[1.0001]], False),
        ([-1e9, 1.0], [-1e9, 1.005], [[-1e9 - 100, 1.001]], True),  # judged by its own floor
        ([0.0], [0.0], [[0.0]], False),
        ([1e-9], [0.0], [[0.0]], False),  # nothing but rounding
        ([1e-30], [2e-30], [[1e-30]], True),
        ([1e300], [2e300], [[1e300]], True),
        ([np.nan], [np.nan], [[np.nan]], False),
        ([np.nan], [1.0], [[np.nan]], True),
        ([np.inf], [-np.inf], [[np.inf]], True),
        ([np.inf, 1.0], [np.inf, 1.0], [[np.inf, 1.0]], False),
        ([], [], [[]], False),
    ],
)
def test_known_judgments(a, b, moves, differs):
    arrays = [np.array(x, float) for x in (a, b, *moves)]
    floor = floor_of(arrays[0], arrays[2:])
    assert judge(arrays[0], arrays[1], floor, EPS, None).differs is differs


def test_what_rounding_moves_by_a_tenth_is_judged_by_clear_differences_alone():
    a = np.array([1.0, 1.0])

    def judgment_here(b, moved):
        judged = judge(a, np.array([b, 1.0]), floor_of(a, [np.array([moved, 1.0])]), EPS, None)
        return judged.is_judged, judged.differs

    assert judgment_here(1.7, 1.2) == (False, False)  # less than 4 times 0.2
    assert judgment_here(2.0, 1.2) == (True, True)
    assert judgment_here(1.07, 1.05) == (True, True)  # rounding moves it by 3.5 %
    assert judgment_here(1.0, 9.0) == (True, False)  # it agrees to the last bit
    assert judgment_here(2.0, np.nan) == (False, False)


def test_the_floor_is_the_root_mean_square_of_each_number():
    floor = floor_of(np.array([3.0, 4.0]), [np.array([3.0, 4.5]), np.array([4.0, 4.5])])
    np.testing.assert_allclose(floor, [math.sqrt(0.5), 0.5])
    odd = np.array([np.nan, np.inf, 1.0, 1e300])
    np.testing.assert_array_equal(floor_of(odd, [odd]), np.zeros(4))
    moved = np.array([np.nan, 0.0, np.nan, -1e300])
    np.testing.assert_array_equal(floor_of(odd, [moved])[:3], [0, np.inf, np.inf])
    assert math.isclose(floor_of(odd, [moved])[3], 2e300)


# ---- ratios ----


@pytest.mark.parametrize("factor", [8.0, -1.0, 0.125, 1e30, 1e-30])
def test_a_factor_is_found(factor):
    b = np.random.default_rng(0).normal(size=10)
    assert math.isclose(ratio(factor * b, b, 1e-6), factor, rel_tol=1e-12)


@pytest.mark.parametrize("factor", [8.0, -0.125])
def test_a_factor_that_is_the_number_of_devices_is_said_to_be_it_either_way(factor):
    assert factor_text(factor, (2, 8)) == (
        f"; fun is {factor:g} times other; 8 is the number of devices"
    )


@pytest.mark.parametrize(
    "a, b",
    [
        ([1.0, 2.0], [2.0, 1.0]),
        ([1.0, 2.0], [1.0, 2.002]),  # 1.001 leaves most of the difference
        ([1.0], [0.0]),
        ([0.0], [1.0]),
        ([np.nan], [1.0]),
        ([1e300, 2e300], [1e-300, 2e-300]),  # no number is as large
    ],
)
def test_no_factor_explains_this(a, b):
    assert ratio(np.array(a), np.array(b), 1e-6) is None


# ---- the largest numbers ----


@pytest.mark.parametrize("scale", [2.0**-1000, 1.0, 2.0**1023])
@pytest.mark.filterwarnings("error")
def test_differences_of_the_largest_numbers_are_judged(scale):
    a, b = (np.array(x) * scale for x in ([1.0, -1.5], [1.0, 1.5]))
    judged = judge(a, b, 0 * a, EPS, None)
    assert judged.differs and math.isclose(judged.difference, 2.0)
    assert not judge(a, a * (1 - EPS), 0 * a, EPS, None).differs


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_versions_at_the_largest_number_are_judged_without_a_warning():
    def loss(by):
        return lambda w: jnp.sum(jnp.clip(w, -1, 1)) + jnp.sum(checkpoint_name(w, "w") * 1e-37) * by

    w = jnp.array([jnp.finfo("float32").max, 0.5, -2.0])
    assert cg.compare(loss(1.0), loss(1.0), (w,)).ok
    assert cg.compare(loss(1.0), loss(1.1), (w,)).findings[0].kind == "value"
    assert cg.compare(lambda w: -w, lambda w: w * -1, (w,), argnums=None).ok


# ---- the order of computation ----


def test_an_output_is_older_than_those_it_is_computed_from():
    def step(x):
        a = jnp.tanh(x)

        def body(carry, _):
            return carry * a, carry

        b, stacked = jax.lax.scan(body, a, length=3)
        c = jax.jit(jnp.sin)(b) + 1
        return {"out": jax.checkpoint(jnp.exp)(c), "c": c, "b": b, "s": stacked, "a": a, "x": x}

    rows = recorded(step, (jnp.float32(1.0),), {}, None, False).record.rows
    positions = {row.name: row.position[0] for row in rows if row.kind == "output"}
    assert positions["x"] == 0 < positions["a"] < positions["b"] < positions["c"] < positions["out"]
