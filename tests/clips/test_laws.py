"""The semantics that hold for every rule, at both places."""

import functools

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import clipgrad as cg
from tests.helpers import (
    CASES,
    LIMITING,
    PLACES,
    RELEASED,
    SCALING,
    array,
    assert_close,
    assert_same,
    by_gradient_clip,
    float64,
    generator,
    tree_of,
)
from tests.rows import crossed, each_value, first_row, first_rows

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_limit = pytest.mark.parametrize("case", LIMITING, ids=lambda case: case.name)
every_scaling = pytest.mark.parametrize("case", SCALING, ids=lambda case: case.name)
everywhere = pytest.mark.parametrize("apply", PLACES.values(), ids=PLACES)
LIMIT = 0.3


def rule_of(case):
    return type(case.make(1.0))


@functools.cache
def compiled(make, apply):
    """One program for all laws whose trees have the same shapes and dtypes."""
    return jax.jit(lambda limit, grads, params: apply(make(limit), grads, params))


def clip(case, apply, grads, params, limit=LIMIT):
    return compiled(case.make, apply)(limit, grads, params)


def params_like(tree, seed=1):
    rng = np.random.default_rng(seed)
    return {k: array(rng.normal(size=x.shape), x.dtype) for k, x in tree.items()}


@each_value
@everywhere
@every_case
@pytest.mark.parametrize("scale", [1e-30, 0.01, 1.0, 30.0, 1e19, 1e30])
def test_the_result_is_that_of_the_reference_in_float64(case, apply, scale, key):
    grads, params = tree_of(key, scale=scale), tree_of(jax.random.fold_in(key, 1))
    clipped = clip(case, apply, grads, params)
    expected = case.reference(float64(grads), float64(params), np.float32(LIMIT))
    assert_close(clipped, expected, rtol=3e-6, atol=1e-44)


SHAPES = [(1,), (7,), (0,), (3, 4), (1, 5), (2, 3, 4), (2, 1, 3, 2)]


@pytest.mark.slow
@first_row
@every_case
@hypothesis.given(
    seed=st.integers(0, 2**16),
    exponents=st.lists(st.sampled_from([-30, -12, -3, 0, 2, 9, 20, 30]), min_size=7, max_size=7),
    limit=st.floats(1e-3, 1e3).map(lambda c: float(np.float32(c))),
)
def test_a_tree_of_any_scales_equals_the_reference(case, seed, exponents, limit):
    rng = np.random.default_rng(seed)
    pairs = enumerate(zip(SHAPES, exponents, strict=True))
    tree = {str(i): jnp.asarray(rng.normal(size=s) * 10.0**e, "float32") for i, (s, e) in pairs}
    params = params_like(tree)
    expected = case.reference(float64(tree), float64(params), limit)
    clipped = clip(case, by_gradient_clip, tree, params, limit)
    assert_close(clipped, expected, rtol=3e-6, atol=1e-30 * limit)


@crossed(6)
@everywhere
@every_case
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("threshold", [0.3, np.float64(0.3), "array"], ids=str)
def test_structure_shapes_and_dtypes_are_kept(case, apply, dtype, threshold, key):
    threshold = jnp.float32(0.3) if isinstance(threshold, str) else threshold
    grads, params = tree_of(key, dtype), tree_of(jax.random.fold_in(key, 1), dtype)
    clipped = jax.jit(lambda g, p: apply(case.make(threshold), g, p))(grads, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(clipped, grads)
    expected = case.reference(float64(grads), float64(params), 0.3)
    assert_close(clipped, expected, rtol=4 * float(jnp.finfo(dtype).eps))


@each_value
@everywhere
@every_case
def test_float64_is_clipped_in_float64(case, apply):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        grads = {"a": jnp.asarray(rng.normal(size=(4, 3)) * 1e90)}
        params = {"a": jnp.asarray(rng.normal(size=(4, 3)))}
        clipped = clip(case, apply, grads, params)
        assert clipped["a"].dtype == jnp.float64
        expected = case.reference(float64(grads), float64(params), LIMIT)
        assert_close(clipped, expected, rtol=1e-13)


@each_value
@everywhere
@every_limit
def test_what_is_within_the_limits_or_at_them_is_unchanged_bit_for_bit(case, apply, key):
    params = tree_of(jax.random.fold_in(key, 1))
    for scale, limit in ((1e-4, LIMIT), (1e10, jnp.inf)):
        grads = tree_of(key, scale=scale)
        assert_same(clip(case, apply, grads, params, limit), grads)
    grads = {"a": array([[3.0, -4.0]])}
    params = {"a": array([[6.0, 8.0]])}
    (ratios,) = case.ratios(float64(grads), float64(params), 1.0)
    assert_same(clip(case, apply, grads, params, float(np.max(ratios))), grads)


@each_value
@everywhere
@every_case
def test_the_result_is_within_the_limits(case, apply, key):
    for i in range(10):
        k = jax.random.fold_in(key, i)
        grads, params = tree_of(k, scale=10.0**i), tree_of(jax.random.fold_in(k, 1))
        clipped = float64(clip(case, apply, grads, params))
        limit = float(np.float32(LIMIT))
        for ratio in case.ratios(clipped, float64(params), limit):
            assert np.max(ratio, initial=0) <= 1 + 4e-7 * (1 + 4 * ("ord" in case.name))


@every_scaling
@hypothesis.given(seed=st.integers(0, 999))
def test_directions_are_kept(case, seed):
    grads = {"a": array(np.random.default_rng(seed).normal(size=6) * 9)}
    clipped = clip(case, by_gradient_clip, grads, grads)
    a, b = (np.asarray(t["a"], np.float64) for t in (grads, clipped))
    np.testing.assert_allclose(a / np.linalg.norm(a), b / np.linalg.norm(b), atol=3e-7)


@each_value
@everywhere
@every_case
def test_a_threshold_of_zero_or_a_traced_negative_one_gives_exact_zeros(case, apply, key):
    params = tree_of(jax.random.fold_in(key, 1))
    for scale, limit in ((1.0, 0.0), (1e-30, 0.0), (0.0, 0.0), (1.0, -1.0)):
        for leaf in jax.tree.leaves(clip(case, apply, tree_of(key, scale=scale), params, limit)):
            np.testing.assert_array_equal(leaf, 0)


def subnormal_like(tree):
    """Numbers that XLA may take for 0 when it computes."""
    return jax.tree.map(lambda x: array(np.full(x.shape, 1e-39, np.float32)), tree)


@first_row
@everywhere
@every_case
def test_subnormal_numbers_become_exact_zeros_at_zero_and_never_nan(case, apply, key):
    params = tree_of(key)
    grads = subnormal_like(params)
    released = jax.jit(lambda c: apply(case.make(c), grads, params), compiler_options=RELEASED)
    for clip in (released, lambda c: apply(case.make(c), grads, params)):
        for leaf in jax.tree.leaves(clip(0.0)):
            np.testing.assert_array_equal(np.float64(leaf), 0)
        for leaf in jax.tree.leaves([clip(1e-39), clip(LIMIT)]):
            assert (np.abs(np.float64(leaf)) < 2e-39).all()


NO_NUMBERS = [
    "one", None, True, [], 1j, np.bool_(True), np.array([True]), array(False, bool),
    np.array([1 + 0j]), array(1j, np.complex64), np.array([1.0], object), np.array("1.0"),
]  # fmt: skip


@every_case
def test_a_threshold_that_is_negative_nan_or_no_number_is_refused(case, key):
    for bad in (-1.0, float("nan"), np.float32(-2), jnp.array(-1.0)):
        with pytest.raises(ValueError, match=r"got .*expected a threshold that is not"):
            case.make(bad)
    for bad in NO_NUMBERS:
        with pytest.raises(TypeError, match="expected a number, an array or a schedule"):
            case.make(bad)
    for traced in (True, 1j):
        with pytest.raises(TypeError, match="expected a number, an array or a schedule"):
            jax.jit(lambda c: case.make(c)(tree_of(key)))(traced)


def test_a_bound_may_be_the_text_of_a_number_as_in_paddle():
    assert cg.ErrorClipByValue("5.0") == cg.ErrorClipByValue(5.0)
    assert cg.ClipByValue("2", "-1").min == -1.0
    with pytest.raises(ValueError, match="max: got -5.0, expected a threshold that is not neg"):
        cg.ErrorClipByValue("-5.0")


@pytest.mark.parametrize(
    "name, make",
    [
        ("min", lambda c: cg.ClipByValue(1.0, min=c)),
        ("nan", lambda c: cg.ClipByValue(1.0, nan=c)),
        ("eps", lambda c: cg.AdaptiveClip(1.0, eps=c)),
        ("max", cg.clip_by_value),
        ("max_norm", cg.clip_by_norm),
        ("max_norm", cg.clip_by_global_norm),
        ("threshold", cg.clip_by_block_rms),
        ("clipping", cg.adaptive_grad_clip),
        ("clipping_threshold", lambda c: cg.published.apply_gradient_clipping(
            array(np.ones(2)), clipping_type="norm", clipping_threshold=c)),
    ],
    ids=range(9),
)  # fmt: skip
def test_complex_numbers_and_booleans_are_refused_under_the_name_of_the_argument(name, make):
    for bad in (True, 1j, np.bool_(True), jnp.array(1j)):
        with pytest.raises(TypeError, match=f"^{name}: got .*expected a number, an array or"):
            make(bad)


# Numbers of 8 bits and fewer.

NARROW = [
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float4_e2m1fn",
]  # fmt: skip


@first_row
@every_case
@pytest.mark.parametrize("dtype", NARROW)
def test_a_narrow_dtype_is_clipped_in_float32_and_rounded_once(case, dtype, key):
    grads, params = tree_of(key, dtype, 4.0), tree_of(jax.random.fold_in(key, 1), dtype)
    wide, wide_params = (jax.tree.map(lambda x: array(x), t) for t in (grads, params))
    narrow = compiled(case.make, by_gradient_clip)
    for limit in (0.0, 0.5, 2.0):
        expected = jax.tree.map(lambda x: array(x, dtype), narrow(limit, wide, wide_params))
        assert_same(narrow(limit, grads, params), expected)
    for leaf in jax.tree.leaves(narrow(0.0, grads, params)):
        np.testing.assert_array_equal(np.float32(leaf), 0)
    if case.limits:
        assert_same(narrow(jnp.inf, grads, params), grads)


@functools.cache
def derivatives_through(make, apply):
    """Of the sum of what a clip returns, by its input and its threshold: one for every scale."""

    def total(grads, limit, params):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(apply(make(limit), grads, params)))

    return jax.jit(jax.grad(total, argnums=(0, 1)))


@crossed(4)
@everywhere
@every_case
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e20])
def test_derivatives_through_a_clip_are_finite(case, apply, scale, key):
    grads, params = tree_of(key, scale=scale), tree_of(jax.random.fold_in(key, 1))
    chex.assert_tree_all_finite(derivatives_through(case.make, apply)(grads, LIMIT, params))


@pytest.mark.slow
@every_case
def test_a_hessian_at_zero_is_that_of_the_identity(case):
    factor = 1.0 if case.limits else float(case.make(LIMIT)(1e-6)) / 1e-6

    def half_square(grads):
        return jnp.sum(case.make(LIMIT)(grads, jnp.ones((2, 2))) ** 2) / 2

    hessian = jax.hessian(half_square)(jnp.zeros((2, 2))).reshape(4, 4)
    np.testing.assert_allclose(hessian, factor**2 * np.eye(4), rtol=1e-4)


@each_value
@everywhere
@every_scaling
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_element_makes_its_whole_group_nan(case, apply, bad, key):
    grads = {"a": array([[1.0, bad], [0.1, 0.2]]), "b": array([[0.3, 0.4]])}
    params = params_like(grads)
    clipped = clip(case, apply, grads, params)
    bad_ratio = [~np.isfinite(r) for r in case.ratios(float64(grads), float64(params), LIMIT)]
    bad_ratio = bad_ratio * (len(clipped) // len(bad_ratio))
    for leaf, where in zip(clipped.values(), bad_ratio, strict=True):
        where = (
            np.broadcast_to(where, leaf.shape) if where.ndim == 2 else np.full(leaf.shape, where)
        )
        np.testing.assert_array_equal(np.isnan(leaf), where)


@everywhere
def test_value_clip_turns_inf_into_the_bounds_and_lets_nan_through(apply):
    grads = {"a": array([jnp.inf, -jnp.inf, jnp.nan, 0.5])}
    rule = cg.ClipByValue(2.0, -1.0)
    np.testing.assert_array_equal(apply(rule, grads, grads)["a"], [2, -1, np.nan, 0.5])
    rule = cg.ClipByValue(2.0, -1.0, nan=0.25)
    np.testing.assert_array_equal(apply(rule, grads, grads)["a"], [2, -1, 0.25, 0.5])
    rule = cg.ClipByValue(2.0, -1.0, nan=7.0)
    np.testing.assert_array_equal(apply(rule, grads, grads)["a"], [2, -1, 2, 0.5])


def mixed_tree():
    return {
        "bool": array([True], bool),
        "float": array([30.0, 40.0]),
        "float0": np.zeros((2,), jax.dtypes.float0),
        "int": array([1000, -1000], np.int32),
        "key": jax.random.key(0),
        "none": None,
        "text": "a string",
    }


@every_case
def test_leaves_that_hold_no_gradient_pass_through_untouched(case):
    tree = mixed_tree()
    clipped, stats = cg.clip_grads(tree, case.make(LIMIT), tree)
    alone, _ = cg.clip_grads({"float": tree["float"]}, case.make(LIMIT), {"float": tree["float"]})
    assert_same(clipped["float"], alone["float"])
    assert all(clipped[k] is tree[k] for k in tree if k != "float")
    assert stats.norm == 50 and stats.size == 2


@each_value
@everywhere
@every_case
@pytest.mark.parametrize("empty", [{}, [], {"a": None}, {"a": array(np.zeros((0, 2)))}], ids=str)
def test_empty_trees_are_kept(case, apply, empty):
    clipped = apply(case.make(LIMIT), empty, empty)
    assert jax.tree.structure(clipped) == jax.tree.structure(empty)


@each_value
@everywhere
@every_case
def test_complex_gradients_are_measured_by_their_absolute_values(case, apply, key):
    a, b = generator(key).normal(size=(2, 4, 3)) * 5
    grads, params = ({"z": array(z, np.complex64)} for z in (a + 1j * b, b + 1j * a))
    clipped = clip(case, apply, grads, params)["z"]
    assert clipped.dtype == jnp.complex64
    wide = float64(grads)
    if case.name == "ClipByValue":
        size = np.abs(wide["z"])
        expected = wide["z"] * np.minimum(1, LIMIT / size)
    else:
        expected = case.reference(wide, float64(params), LIMIT)["z"]
    np.testing.assert_allclose(clipped, expected, rtol=3e-6)


@every_limit
def test_clipping_twice_is_clipping_once(case, key):
    grads, params = tree_of(key, scale=10), tree_of(jax.random.fold_in(key, 1))
    once = clip(case, by_gradient_clip, grads, params)
    twice = clip(case, by_gradient_clip, once, params)
    assert_close(twice, once, rtol=1e-6)


@crossed(1)
@everywhere
@every_case
def test_compiled_and_eager_agree(case, apply, key):
    grads, params = tree_of(key, scale=10), tree_of(jax.random.fold_in(key, 1))
    eager = apply(case.make(LIMIT), grads, params)
    fused = jax.jit(lambda g, p: apply(case.make(LIMIT), g, p))(grads, params)
    assert_close(fused, eager, rtol=1e-6)


@every_case
def test_a_rule_is_a_pytree_of_its_thresholds(case):
    rule = case.make(LIMIT)
    doubled = jax.tree.map(lambda c: 2 * c, rule)
    assert type(doubled) is type(rule) and isinstance(rule, cg.ClipRule)
    assert jax.tree.leaves(doubled)[0] == 2 * LIMIT
    negative = jax.tree.map(lambda c: -c, rule)  # a gradient with respect to a rule, say
    assert jax.tree.leaves(negative)[0] == -LIMIT


@crossed(3)
@everywhere
@every_case
def test_new_thresholds_retrace_nothing(case, apply, key):
    grads, params = tree_of(key), tree_of(jax.random.fold_in(key, 1))
    traces = []

    @jax.jit
    def clip(rule):
        traces.append(rule)
        return apply(rule, grads, params)

    for limit in (0.1, 0.2, 0.3):
        clip(case.make(limit))
    assert len(traces) == 1


@everywhere
def test_python_numbers_as_gradients_are_clipped_or_constants(apply):
    clipped = apply(cg.ClipByValue(1.0), {"a": 3.0}, {"a": 2.0})
    assert clipped == {"a": 1.0}


@first_rows(2)
@every_case
def test_squares_out_of_range_raise_nothing_under_debug_infs(case):
    grads = {"w": array([[3e25, 4e25]])}
    with jax.debug_infs(True):
        clipped, stats = cg.clip_grads(grads, case.make(LIMIT), {"w": array(np.ones((1, 2)))})
        assert np.isfinite(clipped["w"]).all() and np.isfinite(stats.scale)


@pytest.mark.parametrize("size", [0.0, 1e-35])
def test_the_limits_of_slices_raise_nothing_under_debug_infs(size):
    grads, params = array(np.full((4, 2), size)), array(np.full((4, 2), 1e30))
    with jax.debug_infs(True):
        assert np.isfinite(cg.AdaptiveClip(1.0)(grads, params)).all()


@first_row
@everywhere
@every_case
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e-30, 1e30])
def test_a_healthy_clip_raises_nothing_under_debug_nans_and_infs(case, apply, scale, key):
    grads, params = tree_of(key, scale=scale), tree_of(jax.random.fold_in(key, 1))
    with jax.debug_nans(True), jax.debug_infs(True):
        clipped = apply(case.make(LIMIT), grads, params)
        stats = cg.clip_grads(grads, case.make(LIMIT), params)[1]
        assert all(np.isfinite(x) for x in (stats.norm, stats.clipped_norm, stats.scale))
    chex.assert_tree_all_finite(clipped)
