"""What counts as different: the judgment, the ratios and their meanings, copies."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.extra import numpy as hnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from clipgrad._compare.differences import floor_of, judge, judge_exactly, relative_floor
from clipgrad._compare.ratios import Counts, meaning, ratio
from clipgrad._compare.step_runs import ages
from clipgrad._compare.versions import copied
from tests.compare_trainers import AXIS, mesh

EPS = float(np.finfo(np.float32).eps)
FINITE = st.floats(-1e30, 1e30, allow_subnormal=False)
ARRAYS = hnp.arrays(np.float64, st.integers(0, 8), elements=FINITE)


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


@hypothesis.given(ARRAYS)
def test_a_value_does_not_differ_from_itself(x):
    found = judge(x, x, floor_of(x, [x, x]), EPS, None)
    assert found.difference == 0 and not found.differs


USUAL = st.just(0.0) | st.floats(1e-3, 1e3) | st.floats(-1e3, -1e-3)


@hypothesis.given(
    hnp.arrays(np.float64, st.integers(0, 8), elements=USUAL), st.sampled_from([1e-30, 1e30])
)
def test_the_judgment_does_not_depend_on_the_scale(x, scale):
    plain, scaled = (judge(s * x, s * x * 1.01, None, EPS, None) for s in (1.0, scale))
    assert plain.differs is scaled.differs is bool(np.any(x))
    assert math.isclose(plain.difference, scaled.difference, rel_tol=1e-9)


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
        ([1j], [-1j], [[1j]], True),
        ([], [], [[]], False),
    ],
)
def test_known_judgments(a, b, moves, differs):
    dtype = complex if a and isinstance(a[0], complex) else float
    arrays = [np.array(x, dtype) for x in (a, b, *moves)]
    floor = floor_of(arrays[0], arrays[2:])
    assert judge(arrays[0], arrays[1], floor, EPS, None).differs is differs


def test_what_rounding_moves_by_a_tenth_is_judged_by_clear_differences_alone():
    a = np.array([1.0, 1.0])

    def found(b, moved):
        judged = judge(a, np.array([b, 1.0]), floor_of(a, [np.array([moved, 1.0])]), EPS, None)
        return judged.is_judged, judged.differs

    assert found(1.7, 1.2) == (False, False)  # less than 4 times 0.2
    assert found(2.0, 1.2) == (True, True)
    assert found(1.07, 1.05) == (True, True)  # rounding moves it by 3.5 %
    assert found(1.0, 9.0) == (True, False)  # it agrees to the last bit
    assert found(2.0, np.nan) == (False, False)


def test_integers_differ_by_the_share_of_those_that_are_not_equal():
    a = np.array([1, 2, 3, 4])
    found = judge_exactly(a, np.array([1, 2, 3, 5]), floor_of(a, [a]))
    assert (found.difference, found.differs) == (0.25, True)
    assert not judge_exactly(a, a + 1, floor_of(a, [a, a + 1])).is_judged


def test_the_floor_is_the_root_mean_square_of_each_number_and_relative_to_the_value():
    a = np.array([3.0, 4.0])
    floor = floor_of({"a": a}, [{"a": np.array([3.0, 4.5])}, {"a": np.array([4.0, 4.5])}])["a"]
    np.testing.assert_allclose(floor, [math.sqrt(0.5), 0.5])
    assert math.isclose(relative_floor(a, np.array([0.0, 0.5])), 0.1)
    assert relative_floor(np.zeros(2), np.zeros(2)) == 0
    assert relative_floor(np.zeros(2), np.ones(2)) == math.inf
    odd = np.array([np.nan, np.inf, 1.0, 1e300])
    np.testing.assert_array_equal(floor_of(odd, [odd]), np.zeros(4))
    moved = np.array([np.nan, 0.0, np.nan, -1e300])
    np.testing.assert_array_equal(floor_of(odd, [moved])[:3], [0, np.inf, np.inf])
    assert math.isclose(floor_of(odd, [moved])[3], 2e300)


# ---- ratios ----

DEVICES = Counts((8,), ())


@pytest.mark.parametrize("factor", [8.0, -1.0, 0.125, 1e30, 1e-30])
def test_a_factor_is_found(factor):
    b = np.random.default_rng(0).normal(size=10)
    assert math.isclose(ratio(factor * b, b, 1e-6), factor, rel_tol=1e-12)
    assert math.isclose(ratio(factor * b * 1j, b * 1j, 1e-6), factor, rel_tol=1e-12)


@pytest.mark.parametrize(
    "a, b",
    [
        ([1.0, 2.0], [2.0, 1.0]),
        ([1.0, 2.0], [1.0, 2.002]),  # 1.001 leaves most of the difference
        ([1.0], [0.0]),
        ([0.0], [1.0]),
        ([np.nan], [1.0]),
        ([1j], [1.0]),
        ([1e300, 2e300], [1e-300, 2e-300]),  # no number is as large
    ],
)
def test_no_factor_explains_this(a, b):
    assert ratio(np.array(a), np.array(b), 1e-6) is None


@pytest.mark.parametrize(
    "factor, known, words",
    [
        (8.0, DEVICES, "a sum over the 8 devices in fun gives where other takes the mean"),
        (0.125, DEVICES, "a sum over the 8 devices in other gives where fun takes the mean"),
        (math.sqrt(8), DEVICES, "adding the norms of the parts on the 8 devices in fun"),
        (1 / 2.75, DEVICES, "adding the norms of the parts on the 8 devices in other"),
        (64.0, DEVICES, "two sums over the 8 devices in fun"),
        (4.0, Counts((8,), (4,)), "a sum over the 4 microbatches"),
        (2.0, Counts((8,), (4,)), "adding the norms of the 4 microbatches"),
        (32.0, Counts((8,), (4,)), "a sum over the 8 devices and the 4 microbatches"),
        (4.0, Counts((2, 4, 8), (4,)), "the 4 devices"),
        (-1.0, DEVICES, "the sign is the opposite"),
        (1.0, DEVICES, None),
        (0.0, DEVICES, None),
        (1.3, DEVICES, None),
        (-8.0, DEVICES, None),
        (1000.0, DEVICES, None),
    ],
)
def test_the_meaning_of_a_ratio(factor, known, words):
    found = meaning(factor, known)
    assert found is None if words is None else words in found


# ---- copies ----


@pytest.mark.parametrize("scale", [2.0**-1000, 1.0, 2.0**1023])
@pytest.mark.filterwarnings("error")
def test_differences_of_the_largest_numbers_are_judged(scale):
    a, b = (np.array(x) * scale for x in ([1.0, -1.5], [1.0, 1.5]))
    found = judge(a, b, None, EPS, None)
    assert found.differs and math.isclose(found.difference, 2.0)
    assert not judge(a, a * (1 - EPS), None, EPS, None).differs


@pytest.mark.filterwarnings("error")
def test_versions_at_the_largest_number_are_judged_without_a_warning():
    def loss(by):
        return lambda w: jnp.sum(jnp.clip(w, -1, 1)) + jnp.sum(checkpoint_name(w, "w") * 1e-37) * by

    w = jnp.array([jnp.finfo("float32").max, 0.5, -2.0])
    assert cg.compare(loss(1.0), loss(1.0), (w,)).ok
    assert cg.compare(loss(1.0), loss(1.1), (w,)).findings[0].kind == "value"
    assert cg.compare(lambda w: -w, lambda w: w * -1, (w,), argnums=None).ok


def test_copies_keep_type_and_layout():
    spread = NamedSharding(mesh(), P(AXIS))
    tree = {
        "weak": jnp.asarray(0.1),
        "spread": jax.device_put(jnp.arange(16.0), spread),
        "same": jax.device_put(jnp.arange(1.0, 5.0), NamedSharding(mesh(), P())),
        "here": jnp.ones(3),
        "there": jax.device_put(jnp.ones(3), jax.devices()[3]),
        "numpy": np.ones(3, np.float32),
        "count": jnp.arange(3),
        "key": jax.random.key(0),
        "text": "a",
        "number": 1.0,
        "empty": jnp.zeros((0, 2)),
    }
    new = copied(tree)
    for name, x in tree.items():
        assert type(new[name]) is type(x), name
        if isinstance(x, jax.Array):
            assert new[name].dtype == x.dtype and new[name].shape == x.shape
            assert new[name].committed == x.committed, name
            assert new[name].sharding.is_equivalent_to(x.sharding, x.ndim), name
            assert getattr(new[name], "weak_type", None) == getattr(x, "weak_type", None)


# ---- the order of computation ----


def test_an_output_is_older_than_those_it_is_computed_from():
    def step(x):
        a = jnp.tanh(x)

        def body(carry, _):
            return carry * a, carry

        b, stacked = jax.lax.scan(body, a, length=3)
        c = jax.jit(jnp.sin)(b) + 1
        return {"out": jax.checkpoint(jnp.exp)(c), "c": c, "b": b, "s": stacked, "a": a, "x": x}

    shapes = jax.make_jaxpr(step)(1.0)
    found = dict(zip(["a", "b", "c", "out", "s", "x"], ages(shapes), strict=True))
    assert found["x"] == 0 < found["a"] < found["b"] < found["c"] < found["out"]
