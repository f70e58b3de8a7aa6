"""On one CPU device a norm is one sum, and a second one only out of its range.

What holds on any number of devices stands in other files, with the fixture `devices`.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._arrays.sums import joined_leaves
from tests.helpers import RELEASED, array, reductions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("devices"),
    pytest.mark.parametrize("devices", ["one"], indirect=True),
]


def branches(text):
    """The entry computation of a compiled program, and the other ones."""
    entry = text[text.index("ENTRY ") :]
    return entry, text[: text.index("ENTRY ")]


def branches_and_sums(rule, *trees):
    """The branches of a clip compiled for one device, and its reductions."""
    compiled = jax.jit(rule).lower(*trees).compile(compiler_options=RELEASED)
    return branches(compiled.as_text())[0].count(" conditional("), reductions(compiled)


@pytest.mark.parametrize("size", [12, 4096], ids=["small leaves", "large leaves"])
@pytest.mark.parametrize("rule", [cg.ClipByGlobalNorm, cg.ClipByNorm, cg.ClipByBlockRMS])
def test_a_clip_reads_each_leaf_once_more_than_it_scales_it(rule, size):
    tree = [jax.ShapeDtypeStruct((size, n), jnp.float32) for n in (1, 2, 3)]
    count, sums = branches_and_sums(rule(1.0), tree)
    if rule is cg.ClipByBlockRMS and size == 12:  # one sum of each in float64
        assert (count, sums) == (0, 3)
    else:
        assert count == 1 and sums <= 2 * 3 + 1  # one in the branch, and that all are in range


def test_units_of_small_leaves_have_one_sum_and_no_branch():
    tree = [jax.ShapeDtypeStruct((4, n), jnp.float32) for n in (1, 2, 3)]
    assert branches_and_sums(cg.AdaptiveClip(0.1), tree, tree) == (0, 6)


SCALES = [0.0, 1e-37, 1e-30, 1.0, 1e30, 3e38, np.inf, np.nan]


@pytest.mark.parametrize("clip", ["rms", "columns", "rows"])
def test_small_and_large_leaves_in_every_range_are_clipped_as_numpy_clips_them(clip, key):
    rule = {"rms": cg.ClipByBlockRMS(1e-3), "columns": cg.ClipByNorm(1e-3, axis=0)}
    rule = rule.get(clip, cg.ClipByNorm(1e-3, axis=-1))
    units = [np.array(jax.random.normal(key, (n, 5)) / 4) for n in (7, 900)]
    tree = [np.float32(unit * scale) for scale in SCALES for unit in units]
    clipped = jax.jit(rule)(tree)
    axis = {"rms": None, "columns": 0, "rows": -1}[clip]
    with np.errstate(invalid="ignore", over="ignore"):
        for x, y in zip(tree, clipped, strict=True):
            wide, sums = np.float64(x), np.mean if clip == "rms" else np.sum
            norm = np.sqrt(sums(wide**2, axis=axis, keepdims=True))
            limited = np.where(norm <= 1e-3, wide, wide / np.where(norm > 0, norm, 1) * 1e-3)
            expected = np.where(np.isfinite(norm), limited, np.nan)
            np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-37)


def test_the_second_pass_of_a_global_norm_joins_4_mb_of_small_leaves_at_most():
    leaves = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 66
    leaves += [jax.ShapeDtypeStruct((2**14 + 1,), jnp.float32)]
    parts = jax.eval_shape(joined_leaves, leaves)
    assert [part.size for part in parts] == [2**20, 2**14, 2**14, 2**14 + 1]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_one_leaf_out_of_range_changes_no_bit_of_the_others(scale, key):
    leaves = [jax.random.normal(key, (64, 8)), jnp.array([3.0, 4.0]) * scale]
    alone = jax.jit(cg.ClipByNorm(0.5))(leaves[:1])
    together = jax.jit(cg.ClipByNorm(0.5))(leaves)
    np.testing.assert_array_equal(together[0], alone[0])
    np.testing.assert_allclose(together[1], leaves[1] * min(1, 0.1 / scale), rtol=1e-6)


def test_a_leaf_of_zeros_with_an_unlimited_threshold_stops_no_eager_loop():
    leaves, threshold = {"one": jnp.ones(4), "two": jnp.zeros(4)}, jnp.finfo("float32").max
    with jax.debug_infs(True), jax.debug_nans(True):
        clipped, _ = cg.clip_grads(leaves, cg.ClipByNorm(threshold))
    jax.tree.map(np.testing.assert_array_equal, clipped, leaves)


def test_a_norm_in_a_scan_may_leave_the_range_at_some_steps():
    scales = jnp.array([1.0, 1e30, 1e-30, 0.0])
    norms = jax.lax.scan(lambda c, s: (c, cg.global_norm(s * jnp.array([3.0, 4.0]))), 0, scales)[1]
    np.testing.assert_allclose(norms, 5 * scales, rtol=1e-6)


@pytest.mark.parametrize("rule", [cg.AdaptiveClip(0.1), cg.ClipByNorm(0.1, axis=0)], ids=repr)
def test_units_of_explicit_shardings_are_clipped_and_watched(rule, key):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    grads = {"w": jax.random.normal(key, (4, 8)), "b": jnp.ones(8)}
    expected, stats = cg.clip_grads(grads, rule, grads)
    with jax.set_mesh(mesh):
        spread = jax.tree.map(
            lambda x: jax.device_put(x, jax.P(*[None] * (x.ndim - 1), "x")), grads
        )
        clipped, theirs = jax.jit(lambda g: cg.clip_grads(g, rule, g))(spread)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), clipped, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), theirs, stats)


@pytest.mark.parametrize("size", [0.0, 1e-25, 1.0, 1e30])
@pytest.mark.parametrize("rule", [cg.ClipByGlobalNorm, cg.ClipByNorm, cg.ClipByBlockRMS])
def test_derivatives_of_a_clip_are_finite_in_its_whole_range(rule, size):
    def first(x):
        return jnp.sum(rule(jnp.maximum(size / 10, 1e-12))([x])[0])

    x = size * jnp.linspace(0.5, 1.0, 8)
    assert jnp.all(jnp.isfinite(jax.jit(jax.grad(first))(x)))
    assert jnp.all(jnp.isfinite(jax.jit(jax.hessian(first))(x)))


RULES_OVER_DEVICES = [cg.ClipByGlobalNorm, cg.ClipByNorm, cg.ClipByBlockRMS, cg.AutoNorm]


@pytest.mark.parametrize("with_stats", [False, True])
@pytest.mark.parametrize("around", [lambda f: f, jax.vmap], ids=["plain", "vmap"])
@pytest.mark.parametrize("axis_name", [(), "d"])
@pytest.mark.parametrize("make", RULES_OVER_DEVICES)
def test_inside_of_shard_map_on_one_device_a_clip_is_as_outside(
    make, axis_name, around, with_stats
):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    grads = jnp.linspace(50, 100, 64, dtype=jnp.float32)[None]

    def clip(axis_name):
        rule = make(1.0, axis_name=axis_name)
        return around(lambda x: cg.clip_grads(x, rule)[0] if with_stats else rule(x))

    spec = jax.P(None, "d")
    inside = jax.shard_map(clip(axis_name), mesh=mesh, in_specs=spec, out_specs=spec)
    for size in (1.0, 1e-30, 1e30):
        expected = jax.jit(clip(()))(grads * size)
        np.testing.assert_allclose(jax.jit(inside)(grads * size), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "complex64"])
def test_statistics_of_a_global_norm_count_nan_and_inf_in_the_branch_of_the_norm(dtype):
    with jax.enable_x64(dtype == "float64"):
        good = np.ones((4, 3), jnp.dtype(dtype))
        bad = good.copy()
        bad[0, :2], bad[3, 1] = np.nan, -np.inf
        tx = cg.clip_by_global_norm(1.0, stats=True)
        program = (
            jax.jit(tx.update)
            .lower([good, good], tx.init([good, good]))
            .compile(compiler_options=RELEASED)
        )
        for tree, count in (([good, good], 0), ([bad, good], 3), ([bad, bad], 6)):
            state = program(tree, tx.init(tree))[1]
            assert state.stats.nonfinite == count
            assert np.isnan(state.stats.norm) == np.isnan(state.stats.clipped_norm) == (count > 0)
        if dtype != "float16":  # whose norm needs no branch
            assert branches(program.as_text())[0].count(" conditional(") == 1


def test_the_numbers_of_a_unit_are_computed_once_and_not_for_each_element():
    leaf = jax.ShapeDtypeStruct((400, 30), jnp.float32)
    program = jax.jit(cg.AdaptiveClip(0.1)).lower(leaf, leaf).compile(compiler_options=RELEASED)
    (loop,) = [
        part
        for part in program.as_text().split("\n\n")
        if re.search(r"ROOT .*f32\[400,30\]", part) and "ENTRY" not in part
    ]
    operations = re.findall(
        r"f32\[400,30\]\{1,0\} (multiply|divide|select|maximum|minimum)\(", loop
    )
    assert sorted(operations) == ["multiply", "multiply", "select"]
    assert len(re.findall(r"f32\[1,30\]\S* (\w+)\(", loop)) <= 3  # two arrays of parameters


def test_a_complex_number_whose_absolute_value_is_out_of_range_is_scaled_by_the_global_norm():
    grads = {"z": array([3e38 + 3e38j, 1.0], np.complex64)}
    clipped = jax.jit(cg.ClipByGlobalNorm(1.0))(grads)["z"]
    np.testing.assert_allclose(clipped, [(1 + 1j) / 2**0.5, 0], rtol=1e-6, atol=1e-37)
