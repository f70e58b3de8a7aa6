"""Tolerances by precision, and what rounding alone may do."""

import clipgrad._check.check as check_module
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clipgrad._check.options import Options
from clipgrad._check.subject import make_subject
from clipgrad._check.tolerances import RELATIVE, make_tolerance, narrowest
from jax import lax

import clipgrad as cg
from tests.check_zoo import custom, normal
from tests.test_check_search import halved

pytestmark = pytest.mark.exhaustive

RANGES = [(0, 3), (3, 5)]
TOLERANCE, EPS = make_tolerance(RANGES, ["float32"] * 2), 2.0**-23


def report(function, *args, **options):
    return cg.check_grads(function, args, points=1, raise_on_failure=False, **options)


X3 = jnp.asarray([0.7, 1.1, 1.3])


def log():
    return check_module.Log(Options())


def floor(gradient, scale=1.0, exact=False, leaf=0, tolerance=TOLERANCE):
    gradient, scale = np.asarray([gradient]), scale * np.ones(5)
    sizes = tolerance.sizes(gradient, scale, exact)
    return tolerance.elements(sizes, leaf, scale[slice(*RANGES[leaf])]).floor[0]


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


OFF = {"float64": 1e-6, "float32": 5e-4, "float16": 1e-2, "bfloat16": 5e-2}


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
        found = report(rule, jnp.asarray([0.5, 1.0, 2.0]))
    assert found.ok == ok


def rounded(error, like):
    """A number that is lost to rounding: `error` as computed, zero in float64."""
    near = jnp.sum(0 * like.astype("float32")) + np.float32(1 - error)
    return lax.reduce_precision(near, 8, 1) - near


SOME = {"float64": 1e-14, "float32": 6e-6, "float16": 8e-3, "bfloat16": 3e-2}


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


BITS = {
    "float64": (1e-6, 4000),
    "float32": (1e-2, 4000),
    "float16": (1.0, 4000),
    "bfloat16": (1.0, 400),
}


@pytest.mark.parametrize("dtype", BITS)
def test_one_element_among_many_is_found_along_a_random_direction(dtype):
    """One that looks at bits, so that its rule is not evaluated in float64."""
    error, count = BITS[dtype]
    error = 4 * error if dtype == "float64" else error

    def backward(off):
        def rule(r, g):
            right = g * jnp.cos(r[0]) + 0 * lax.nextafter(r[0], r[0])
            return (right.at[17].multiply(np.asarray(1 - off, dtype)),)

        return rule

    with jax.enable_x64(dtype == "float64"):
        x = normal(0, count, dtype=dtype).at[17].set(0.5)
        right, wrong = (custom(lambda x: jnp.sin(x), backward(off)) for off in (0.0, error))
        assert report(right, x, mode="fast").ok
        found = report(wrong, x, mode="fast")
    assert [failure.where for failure in found.failures] == ["args[0][17]"]


@pytest.mark.parametrize(("slope", "ok"), [(4e-4, True), (4e-3, False)])
def test_paddles_rule_is_absolute_for_slopes_below_a_thousandth_alone(slope, ok):
    rule = custom(lambda x: slope * x, lambda r, g: (1.1 * slope * g,))
    assert report(rule, jnp.asarray([1.0, 2.0, 3.0]), max_relative_error=0.005).ok == ok


@pytest.mark.parametrize(("off", "ok"), [(3e-7, True), (3e-6, False)])
def test_a_reference_that_is_wrong_itself_is_found_from_a_millionth_on(off, ok):
    with jax.enable_x64(True):
        found = report(halved(1 + off), jnp.asarray([0.4, 1.2, 2.5]))
    assert ("value" not in {failure.check for failure in found.failures}) == ok


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


@pytest.mark.parametrize("mode", ["auto", "fast", "full"])
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

    found = report(custom(lambda x: ones * x, backward), jnp.arange(4.0))
    assert ("jit" in {failure.check for failure in found.failures}) == fails


@pytest.mark.parametrize(("off", "fails"), [(5e-5, False), (3e-3, True)])
def test_forward_mode_may_differ_from_reverse_by_ten_times_the_tolerance_along(off, fails):
    found = report(halved(1 + off), jnp.asarray([0.4, 1.2, 2.5]), skip="value")
    assert ("forward" in {failure.check for failure in found.failures}) == fails


def test_the_narrowest_type_inside_counts():
    assert narrowest(["float64", "float16", "float32"]) == "float16"
    assert narrowest(["float32", "float8_e4m3fn"]) == "bfloat16"
    tolerance = make_tolerance(RANGES, ["float64", "float32"], ["float16"])
    assert (tolerance.relative == RELATIVE["float16"]).all()


def test_the_rule_in_float64_has_the_tolerance_of_float64_and_the_rule_of_paddle():
    narrow = make_tolerance(RANGES, ["float16", "float32"], max_relative_error=0.1)
    wide = narrow.in_float64()
    assert (wide.relative == RELATIVE["float64"]).all() and (wide.eps == 2.0**-52).all()
    assert wide.paddle == 0.1


@pytest.mark.parametrize(("exact", "small", "gone"), [(True, 1e-6, 1e-13), (False, 1e-3, 1e-5)])
def test_only_a_vanishing_leaf_gets_the_rounding_of_the_others(exact, small, gone):
    """What vanishes is a matter of the precision of the gradient."""
    found = floor([small] * 3 + [100.0] * 2, exact=exact)
    np.testing.assert_allclose(found, 50 * EPS * small, rtol=1e-6)
    for residue in (0.0, gone):
        found = floor([residue] * 3 + [100.0] * 2, exact=exact)
        np.testing.assert_allclose(found, 50 * EPS * 100, rtol=1e-6)


def noise_at(check):
    return check.noise(check.subject.inputs)(np.arange(check.gradient.shape[1]))


def test_rounding_explains_three_times_the_own_and_three_times_the_median_of_the_leaf(monkeypatch):
    """Of the gradient, rule or plain AD, that it moves most."""
    check = check_module.prepare(make_subject(lambda x: jnp.sin(x), (X3,)), log())
    moved = np.asarray([1e-6, 3e-6, 2e-6])
    monkeypatch.setattr(check_module, "gradient_movement", lambda *_: moved.copy())
    np.testing.assert_allclose(noise_at(check), 3 * (moved + 2e-6))


def test_rounding_explains_each_of_a_million_elements_of_any_size():
    """As it is measured by eight runs, of which a few elements have eight small ones by chance."""
    rng, count = np.random.default_rng(0), 2**20
    sizes = np.exp(rng.normal(size=count))
    moved = sizes * np.sqrt(np.mean([rng.normal(size=count) ** 2 for _ in range(8)], axis=0))
    error = np.abs(sizes * rng.normal(size=count))
    explained = make_tolerance([(0, count)], ["float32"]).explained(moved)(np.arange(count))
    assert (error <= explained).all() and (explained < 11 * (moved + np.median(moved))).all()


def test_operations_of_a_rule_explain_what_vanishes_beside_the_largest_effect():
    """Where plain AD loses nothing, the rounding of a rule that cancels is bounded."""

    def noise(offset):
        careless = lambda r, g: (g * ((offset + 2 * r[0]) - offset),)  # noqa: E731
        subject = make_subject(custom(lambda x: x * x, careless), (X3,))
        return noise_at(check_module.prepare(subject, log()))

    little, much = noise(np.float32(1.0)), noise(np.float32(1e4))
    assert (little < 100 * EPS).all() and (20 * EPS < much).all() and (much < 1000 * EPS).all()


def test_native_slopes_widen_the_tolerance():
    native = TOLERANCE.of_slopes_in(np.float32)
    np.testing.assert_allclose(native.relative, 10 * TOLERANCE.relative)
    np.testing.assert_allclose(native.along, 10 * TOLERANCE.along)
    assert TOLERANCE.of_slopes_in(np.float64) is TOLERANCE
