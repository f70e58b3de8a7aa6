"""On one CPU device a norm is one sum, and a second one only out of its range."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import clipgrad as cg
import clipgrad._numerics as _numerics
from benchmarks.per_example_temporaries import EXAMPLES, PROGRAMS
from clipgrad._per_example import convolutions
from clipgrad._per_example.convolutions import CHEAPER
from tests.helpers import RELEASED, reductions, tree_of
from tests.test_bits import data, first_parameters, one_step
from tests.test_nan import (  # noqa: F401
    test_a_bad_element_makes_its_whole_group_nan,
    test_only_the_slice_that_holds_it_is_nan,
)
from tests.test_norms import (  # noqa: F401
    test_any_tree_has_the_norm_of_the_reference,
    test_each_slice_has_its_own_range,
    test_known_norms,
    test_nan_gives_nan_and_otherwise_inf_gives_inf,
    test_norms_under_vmap_are_per_lane_whatever_their_range,
    test_the_derivative_is_that_of_the_formula,
)
from tests.test_value_stats import (  # noqa: F401
    test_the_statistics_of_an_array_are_those_of_numpy,
)

pytestmark = pytest.mark.exhaustive


@pytest.fixture(autouse=True, scope="module")
def one_device():
    """The tests have eight, for which nothing that was traced before is valid here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_count", lambda: 1)
        jax.clear_caches()
        yield
    jax.clear_caches()


def branches(text):
    """The entry computation of a compiled program, and the other ones."""
    entry = text[text.index("ENTRY ") :]
    return entry, text[: text.index("ENTRY ")]


RULES = [cg.ClipByGlobalNorm, cg.ClipByNorm, cg.ClipByBlockRMS]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_clip_reads_each_leaf_once_more_than_it_scales_it(rule, key):
    tree = {name: x for name, x in tree_of(key).items() if x.size}
    compiled = jax.jit(rule(1.0)).lower(tree).compile(compiler_options=RELEASED)
    entry, _ = branches(compiled.as_text())
    assert entry.count(" conditional(") == 1
    assert reductions(compiled) <= 2 * len(tree) + 1  # one in the branch, and that all are in range


def test_the_second_pass_of_a_global_norm_joins_4_mb_of_small_leaves_at_most():
    leaves = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 66
    leaves += [jax.ShapeDtypeStruct((2**14 + 1,), jnp.float32)]
    parts = jax.eval_shape(_numerics.joined_leaves, leaves)
    assert [part.size for part in parts] == [2**20, 2**14, 2**14, 2**14 + 1]


def test_statistics_count_in_all_small_leaves_at_once():
    leaves = [jnp.ones(4)] * 20 + [jnp.ones(2**14 + 1), jnp.array([jnp.nan, jnp.inf, 1.0])]

    def nonfinite(leaves):
        return cg.clip_grads(leaves, cg.ClipByNorm(1.0))[1].nonfinite

    assert jax.jit(nonfinite).lower(leaves).as_text().count("stablehlo.is_finite") < len(leaves)
    assert jax.jit(nonfinite)(leaves) == 2


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_one_leaf_out_of_range_changes_no_bit_of_the_others(scale, key):
    leaves = [jax.random.normal(key, (64, 8)), jnp.array([3.0, 4.0]) * scale]
    alone = jax.jit(cg.ClipByNorm(0.5))(leaves[:1])
    together = jax.jit(cg.ClipByNorm(0.5))(leaves)
    np.testing.assert_array_equal(together[0], alone[0])
    np.testing.assert_allclose(together[1], leaves[1] * min(1, 0.1 / scale), rtol=1e-6)


def test_units_of_zeros_change_no_bit_of_a_step(users_promotion):
    """The first biases are zero, so that all is added up again, in another order."""
    params, batch = first_parameters(), data()

    def step(clip):
        tx = optax.chain(clip, optax.sgd(0.1, momentum=0.9))
        run = jax.jit(functools.partial(one_step, tx), compiler_options=RELEASED)
        return run(params, tx.init(params), batch)

    ours, theirs = step(cg.adaptive_grad_clip(0.01)), step(optax.adaptive_grad_clip(0.01))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(ours), jax.tree.leaves(theirs))


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


def recurrence(params, x):
    """The gradient of a weight is added up in the carry of a scan."""

    def step(h, x):
        gates = x @ params["in"] + h @ params["rec"]
        return jnp.tanh(gates) * jax.nn.sigmoid(gates) + 0.5 * h, None

    return jnp.sum(jax.lax.scan(step, 0 * x[0], x)[0] ** 2)


@pytest.fixture(scope="module")
def of_a_recurrence():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        n: jax.random.normal(k, (32, 32)) / 8 for n, k in zip(("in", "rec"), keys, strict=False)
    }
    return params, jax.random.normal(keys[2], (16, 64, 32))


def summed(method):
    rule = cg.ClipByGlobalNorm(1.0)
    per_example = cg.clip_per_example(recurrence, rule, reduce="sum", method=method)
    return lambda params, batch: per_example(params, batch)[1]


def test_two_passes_over_a_recurrence_need_the_memory_of_a_plain_gradient(of_a_recurrence):
    """Half of the examples at a time: what both backward passes hold is no more than one of all."""

    def plain(params, batch):
        return jax.grad(lambda p: jnp.sum(jax.vmap(recurrence, (None, 0))(p, batch)))(params)

    def compiled(function):
        return jax.jit(function).lower(*of_a_recurrence).compile(RELEASED)

    ours, direct = compiled(summed("two passes")), compiled(summed("direct"))
    taken, least = (p.memory_analysis().temp_size_in_bytes for p in (ours, compiled(plain)))
    assert taken <= 1.2 * least
    for path, expected in direct(*of_a_recurrence).items():
        found = ours(*of_a_recurrence)[path]
        np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def temporaries(program, method):
    return program.compiled(method, RELEASED).memory_analysis().temp_size_in_bytes


def copied(program):
    """The bytes of one example's images under the taps of a kernel, where an image is largest."""
    kernels = [shape for shape in program.shapes.values() if len(shape) == 4]
    pixels = math.prod(program.example[0][0][:2])
    return max((4 * pixels * math.prod(shape[:3]) for shape in kernels), default=0)


def drawn():
    """The programs of four seeds, each once."""
    found = {}
    for name in sorted(PROGRAMS):
        for seed in range(4):
            program = PROGRAMS[name](np.random.default_rng(seed))
            found.setdefault((name, str(program.shapes), str(program.example)), (name, seed))
    return list(found.values())


@pytest.mark.usefixtures("users_promotion")
@pytest.mark.exhaustive
@pytest.mark.ci("name")
@pytest.mark.parametrize(("name", "seed"), drawn())
def test_auto_holds_no_more_than_other_ways(name, seed):
    """Where factors need more than the gradients of all examples, no more than any way.

    Elsewhere it takes one pass for its time, and holds no more than the larger of the others.
    """
    program = PROGRAMS[name](np.random.default_rng(seed))
    plan = program.clip("auto").plan(*program.arguments())
    found = {method: temporaries(program, method) for method in ("auto", "two passes", "direct")}
    auto = found.pop("auto")
    if plan.bytes > plan.direct_bytes:
        most = min(*found.values(), temporaries(program, "one pass"))
    else:
        most = max(found.values())
    # A square, its exponent and a count of NaN and inf, for each leaf and example; and a fiftieth:
    # one pass of scanned layers has 1.5 % more temporaries than the gradients of all examples. A
    # convolution has the slices of one example's image, one for each tap, and half as much beside.
    small = 12 * EXAMPLES * len(program.shapes) + most / 50 + 1.5 * copied(program)
    assert auto <= most + small


def of_kernel(rng, side):
    """A loss of a kernel and an image, drawn with a kernel and a batch."""
    count, pixels = int(rng.choice([2, 5, 12, 13])), int(rng.integers(side, side + 6))
    channels, outputs = int(rng.integers(1, 5)), int(rng.choice([2, 8, 64]))
    strides = tuple(int(n) for n in rng.integers(1, 3, 2))

    def loss(kernel, x):
        dims = ("NHWC", "HWIO", "NHWC")
        options = {"dimension_numbers": dims, "rhs_dilation": (1, int(side < 3) + 1)}
        y = jax.lax.conv_general_dilated(x[None], kernel, strides, [(1, 1), (0, 2)], **options)
        return jnp.sum(jnp.sin(y))

    given = (side, side, channels, outputs), (count, pixels, pixels + 1, channels)
    return loss, *(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in given)


def test_the_gradient_of_a_kernel_is_the_same_for_some_examples_at_a_time(monkeypatch):
    """Any convolution, on both sides of the decision."""
    found, part_size = [], convolutions._part_size

    def noted(size, parts):
        some = part_size(size, parts)
        found.append("even" if size % some == 0 else "with a rest")
        return some

    monkeypatch.setattr(convolutions, "_part_size", noted)
    rng = np.random.default_rng(0)
    drawn = [of_kernel(rng, n) for n in (1, 2, 2, 3, 3, 3, 4, 4)]

    @jax.jit
    def run():
        results = {}
        for method in ("one pass", "direct"):
            for i, (loss, kernel, batch) in enumerate(drawn):
                clip = cg.clip_per_example(loss, cg.ClipByGlobalNorm(2.0), method=method)
                _, grads, stats = clip(kernel, batch)
                results.setdefault(i, []).append((grads, stats.norm))
        return results

    kinds = set()
    for loss, kernel, batch in drawn:
        found.clear()
        (leaf,) = cg.clip_per_example(loss, None).plan(kernel, batch).leaves
        assert leaf.reason == CHEAPER  # what goes wrong would be direct
        kinds.update(found or ["all"])
    assert kinds == {"all", "even", "with a rest"}
    for ours, direct in run().values():
        for one, other in zip(ours, direct, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(other).max())


def test_gram_matrices_of_long_rows_are_summed_in_pieces():
    """Rows of 32768 numbers, of 1e-25 and of 1e25, of a weight that is used twice."""

    def loss(w, example):
        x, scale = example
        return scale * (jnp.sum(jnp.sin(x @ w)) + jnp.sum(x[:2] @ w))

    keys = jax.random.split(jax.random.key(0), 2)
    w = jax.random.normal(keys[0], (8, 32768))
    batch = jax.random.normal(keys[1], (3, 4, 8)), jnp.array([1e-25, 1.0, 1e25])
    mesh = jax.make_mesh((1,), ("x",), (AxisType.Auto,), devices=jax.devices()[:1])

    def norms_by(method):
        found = cg.per_example_norms(loss, method=method)
        apart = jax.shard_map(found, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
        return jax.jit(lambda w, x: (found(w, x), apart(w, x))).lower(w, batch).compile()

    ours, direct = norms_by("auto"), norms_by("direct")
    assert "while" in ours.as_text() and "while" not in direct.as_text()
    for found, expected in zip(ours(w, batch), direct(w, batch), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5)
        assert np.all(np.isfinite(found)) and np.all(np.asarray(found) > 0)


def test_rows_that_are_multiplied_with_themselves_are_read_once():
    norms = cg.per_example_norms(lambda w, x: jnp.sum(jnp.sin(x @ w)))
    program = str(jax.make_jaxpr(norms)(jnp.ones((8, 32768)), jnp.ones((3, 4, 8))))
    assert program.count("slice_sizes=(3, 4, 2048)") == 1
