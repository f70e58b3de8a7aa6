"""`ClipStats`: sums that add up, and what is derived from them."""

import functools
import itertools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._arrays import root_of_sums
from clipgrad._arrays import sums as forms
from clipgrad._clip import stats as clip_stats
from tests.helpers import SCALING, array, assert_same, tree_of
from tests.registry.strategies import trees
from tests.rows import first_row


def norm(tree):
    parts = [np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)]
    return np.linalg.norm(np.concatenate([*parts, np.zeros(1)]))


@pytest.mark.slow
@hypothesis.given(tree=trees())
def test_norms_are_those_before_and_after(tree):
    clipped = cg.ClipByValue(0.5)(tree)
    stats = cg.types.ClipStats.of(tree, clipped)
    np.testing.assert_allclose(stats.norm, norm(tree), rtol=1e-6)
    np.testing.assert_allclose(stats.clipped_norm, norm(clipped), rtol=1e-6)
    scale = norm(clipped) / norm(tree) if norm(tree) else 1
    np.testing.assert_allclose(stats.scale, scale, rtol=1e-6)
    changed = sum(int(np.sum(np.abs(x) > 0.5)) for x in jax.tree.leaves(tree))
    size = sum(x.size for x in jax.tree.leaves(tree))
    assert (stats.changed, stats.size, stats.nonfinite) == (changed, size, 0)
    assert bool(stats.clipped) == (changed > 0)
    np.testing.assert_allclose(stats.fraction, changed / max(size, 1), rtol=1e-6)


def test_a_norm_is_right_in_the_whole_range_of_float32():
    @jax.jit
    def both(x):
        clipped = cg.clip_grads(x, cg.ClipByGlobalNorm(1e38))[1]
        return [(stats, stats.norm) for stats in (cg.types.ClipStats.of(x, x), clipped)]

    for exponent in range(-37, 39, 5):
        x = np.float32([3.0, 4.0]) * np.float32(10.0 ** (exponent - 1))
        for stats, computed in both(x):
            np.testing.assert_allclose(computed, norm(x), rtol=1e-6)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(stats))


@pytest.mark.slow
@hypothesis.settings(max_examples=10)
@hypothesis.given(tree=trees(), other=trees())
def test_statistics_add_up(tree, other):
    rule = cg.ClipByValue(0.1)
    stats = [cg.types.ClipStats.of(t, rule(t)) for t in (tree, other, [tree, other])]
    total = jax.tree.map(jnp.add, *stats[:2])
    for a, b in zip(total, stats[2], strict=True):
        # The third sum, of elements scaled up, is read where the total is small.
        np.testing.assert_allclose(
            jnp.atleast_1d(a)[..., :2], jnp.atleast_1d(b)[..., :2], rtol=1e-6
        )
    np.testing.assert_allclose(total.norm, stats[2].norm, rtol=1e-6)
    np.testing.assert_allclose(total.clipped_norm, stats[2].clipped_norm, rtol=1e-6)


SIZES = [0.0, 2e-38, 1e-30, 3e-10, 1e-9, 1.0, 1e14, 1e15, 2e15, 1e30, 1e38]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_a_cpu_measures_is_what_an_accelerator_does(dtype):
    """Whatever form the platform has, of numbers around the bounds of its ranges too."""

    terms, finish, groups = clip_stats._summands, clip_stats._stacked, forms.Groups.one(2)

    @jax.jit
    def measured(x):
        leaves = [x, 2 * x]
        measured_sums = [
            clip_stats._by_branch((), leaves),
            forms._together(terms, (), leaves, groups, finish, ()),
            forms.added_up_apart(terms, (), leaves, groups, finish),
        ]
        return [(root_of_sums(sums), nonfinite) for [(sums, nonfinite)] in measured_sums]

    rtol = 1e-6 if dtype == "float32" else 1e-14
    with jax.enable_x64(dtype == "float64"):
        for size, bad in itertools.product(SIZES, [None, np.nan, np.inf, -np.inf]):
            x = np.full((4, 5), size, dtype)
            x[1, 2] = size if bad is None else bad
            (expected, _), *_ = measured_sums = measured(x)
            for root, nonfinite in measured_sums:
                np.testing.assert_allclose(root, expected, rtol=rtol)
                assert float(nonfinite) == (0 if bad is None else 2)


def test_on_a_cpu_only_one_pass_is_made_over_ordinary_numbers():
    program = jax.make_jaxpr(functools.partial(clip_stats._by_branch, ()))(
        [array(np.ones(3))]
    ).jaxpr
    names = [equation.primitive.name for equation in program.eqns]
    assert names.count("reduce_sum") == names.count("cond") == 1


def test_nan_and_inf_are_counted_and_show_in_the_norm():
    x = array([jnp.nan, jnp.inf, 1.0])
    for after in (x, jnp.array(x)):  # the same array, and one of the same numbers
        stats = cg.types.ClipStats.of(x, after)
        assert stats.nonfinite == 2 and jnp.isnan(stats.norm) and not stats.clipped
    infinite = cg.types.ClipStats.of(x[1:], x[1:])
    assert infinite.norm == jnp.inf and infinite.nonfinite == 1


L2 = [case for case in SCALING if "ord" not in case.name]
every_l2_rule = pytest.mark.parametrize("case", L2, ids=lambda case: case.name)


def assert_equal_statistics(closed, measured):
    for name in ("norm", "clipped_norm", "scale", "changed", "nonfinite", "size"):
        np.testing.assert_allclose(getattr(closed, name), getattr(measured, name), rtol=2e-6)


@pytest.mark.slow
@every_l2_rule
def test_the_closed_form_equals_the_sums(case, key):
    joint = case.make(1.0).acts_on == "tree"  # these scale zeros too, and count them

    @jax.jit
    def both(grads):
        grads = grads | {"n": None, "i": jnp.arange(3)} | ({} if joint else {"zero": jnp.zeros(3)})
        tx = cg.gradient_clip(case.make(0.5), stats="per_leaf")
        clipped, state = tx.update(grads, tx.init(grads), grads)
        of = {path: (grads[path], clipped[path]) for path in state.leaf_stats}
        measured = {path: cg.types.ClipStats.of(*pair) for path, pair in of.items()}
        return (state.stats, state.leaf_stats), (cg.types.ClipStats.of(grads, clipped), measured)

    for scale in (1e-20, 0.01, 1.0, 1e18):
        (closed, by_leaf), (measured, each) = both(tree_of(key, scale=scale))
        assert_equal_statistics(closed, measured)
        for path, of_leaf in by_leaf.items():
            assert_equal_statistics(of_leaf, each[path])


@first_row
@every_l2_rule
def test_the_closed_form_counts_what_is_not_finite(case):
    grads = {"a": array([jnp.nan, 1.0]), "b": array([-jnp.inf]), "c": array(np.ones(3))}
    tx = cg.gradient_clip(case.make(9.0), stats="per_leaf")
    ones = jax.tree.map(np.ones_like, grads)
    _, state = jax.device_get(jax.jit(tx.update)(grads, tx.init(grads), ones))
    assert state.stats.nonfinite == 2 and np.isnan(state.stats.clipped_norm)
    assert state.stats.clipped
    assert [state.leaf_stats[name].nonfinite for name in "abc"] == [1, 1, 0]
    is_joint = case.make(9.0).acts_on == "tree"
    assert state.leaf_stats["c"].clipped == is_joint


@first_row
@every_l2_rule
def test_statistics_of_a_norm_rule_sum_nothing_over_the_elements(case, key):
    grads = tree_of(key)

    def update(g, stats):
        tx = cg.gradient_clip(case.make(0.5), stats=stats)
        clipped, state = tx.update(g, tx.init(g), g)
        return (clipped, state.stats.clipped_norm, state.stats.changed) if stats else clipped

    with_stats, without = (jax.jit(update, static_argnums=1).lower(grads, s) for s in (True, False))
    elements = re.compile(r"stablehlo.reduce\(%\w+ init.*tensor<(?:5|2x3x4|4x5)xf32>")
    assert len(elements.findall(with_stats.as_text())) == len(elements.findall(without.as_text()))


@pytest.mark.parametrize("rule", [cg.ClipByBlockRMS(0.5), cg.ClipByNorm(0.5), cg.AdaptiveClip(0.5)])
def test_elements_that_are_zero_count_as_changed_where_their_group_is_scaled(rule):
    grads = {"a": array([3.0, 0.0]), "b": array([0.1, 0.0])}
    ones = jax.tree.map(np.ones_like, grads)
    stats = jax.jit(lambda grads: cg.clip_grads(grads, rule, ones)[1])(grads)
    assert int(stats.changed) == 2


@pytest.mark.parametrize("after, match", [
    ({"a": np.ones(2), "b": np.ones(2)}, r"after: got the leaves \['a', 'b'\], expected .*\['a'\]"),
    ({"b": np.ones(2)}, r"after: got the leaves \['b'\], expected those of before, \['a'\]"),
    ({"a": np.ones(3)}, r"after: got a leaf of shape \(3,\), expected that of before, \(2,\)"),
])  # fmt: skip
def test_trees_that_are_not_before_and_after_the_same_clip_are_refused(after, match):
    before = {"a": np.ones(2)}
    with pytest.raises(ValueError, match=match):
        cg.types.ClipStats.of(before, after)
    assert cg.types.ClipStats.of(before | {"n": 3}, {"a": np.zeros(2), "n": None}).changed == 2


def test_zero_is_neutral_and_has_the_structure_of_all_others():
    stats = cg.types.ClipStats.of(array([3.0]), array([1.0]))
    assert_same(jax.tree.map(jnp.add, stats, cg.types.ClipStats.zero()), stats)
    zero = cg.types.ClipStats.zero((5,))
    assert zero.norm.shape == zero.clipped.shape == (5,) and zero.before.shape == (5, 3)
    assert (zero.norm == 0).all() and (zero.scale == 1).all() and (zero.fraction == 0).all()


def test_a_norm_is_read_off_by_one_program(compiled):
    stats = jax.device_put(cg.types.ClipStats(*[np.zeros((11, 3), np.float32)] * 5))
    np.testing.assert_array_equal(stats.norm, np.zeros(11))
    assert list(compiled) == ["jit(root_of_sums)"]


def test_what_is_not_asked_for_is_not_computed(key):
    grads = array(np.linspace(-1, 1, 64))

    def clip(g, name=None):
        clipped, stats = cg.clip_grads(g, cg.ClipByValue(0.5))
        return clipped if name is None else (clipped, getattr(stats, name))

    plain = jax.jit(lambda g: jnp.clip(g, -0.5, 0.5)).lower(grads).compile()
    ours = jax.jit(clip).lower(grads).compile()
    assert ours.cost_analysis()["bytes accessed"] == plain.cost_analysis()["bytes accessed"]
    counted = jax.jit(lambda g: clip(g, "changed")).lower(grads).compile()
    assert counted.as_text().count(" reduce(") == 1


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_norms_can_be_differentiated(scale):
    x = jnp.array([3.0, 4.0]) * scale
    gradient = jax.grad(lambda x: cg.types.ClipStats.of(x, x).norm)(x)
    np.testing.assert_allclose(gradient, [0.6, 0.8], rtol=1e-6)
    at_zero = jax.grad(
        lambda x: cg.types.ClipStats.of(x, x).norm + cg.types.ClipStats.of(x, x).scale
    )(0 * x)
    np.testing.assert_array_equal(at_zero, np.zeros(2))


STEPS = np.float32([[3, 4], [0, 0], [0.3, 0.4]])
SHOWN = {
    "numbers": (lambda clip: clip(STEPS[0]),
                "norm=5.0, clipped_norm=1.0, changed=2, nonfinite=0, size=2"),
    "numpy": (lambda clip: jax.device_get(clip(STEPS[0])),
              "norm=5.0, clipped_norm=1.0, changed=2, nonfinite=0, size=2"),
    "nan": (lambda clip: clip(STEPS[0] * np.float32(np.nan)),
            "norm=nan, clipped_norm=nan, changed=2, nonfinite=2, size=2"),
    "steps": (lambda clip: jax.lax.map(clip, STEPS),
              "norm=[5. 0. 0.5], clipped_norm=[1. 0. 0.5], changed=[2. 0. 0.], "
              "nonfinite=[0. 0. 0.], size=[2. 2. 2.]"),
    "many": (lambda clip: cg.types.ClipStats.zero((100,)), "norm=[0. 0. 0. ... 0. 0. 0.], "),
    "none": (lambda clip: jax.tree.map(lambda x: None, clip(STEPS[0])), "before=None, after=None"),
    "abstract": (lambda clip: jax.eval_shape(clip, STEPS[0]),
                 "norm=float32[], clipped_norm=float32[], changed=float32[]"),
    "traced": (lambda clip: traced(jax.jit, clip, STEPS[0]), "norm=float32[], "),
    "lanes": (lambda clip: traced(jax.vmap, clip, STEPS), "norm=float32[], "),
    "lanes of rows": (lambda clip: jax.eval_shape(jax.vmap(clip), STEPS), "norm=float32[3], "),
    "known in a trace": (lambda clip: shown_in_a_trace(clip(STEPS[0])), "norm=5.0, "),
    "donated": (lambda clip: deleted(clip(STEPS[0])), "norm=float32[], "),
}  # fmt: skip


def traced(transform, clip, x):
    """What is shown inside of a transformation."""
    shown = []
    transform(lambda x: shown.append(repr(clip(x))))(x)
    return shown[0]


def shown_in_a_trace(stats):
    return traced(jax.jit, lambda x: stats, 1.0)


def deleted(stats):
    for field in stats:
        field.delete()
    return stats


@jax.jit
def clip_of_norm_one(x):
    return cg.clip_grads(x, cg.ClipByNorm(1.0))[1]


@pytest.mark.parametrize("kind", SHOWN)
def test_norms_are_shown_and_shapes_where_there_are_no_numbers(kind):
    make, shown = SHOWN[kind]
    with jax.debug_nans(False):
        stats = make(clip_of_norm_one)
    with jax.debug_nans(True):
        text = stats if isinstance(stats, str) else repr(stats)
    assert text.startswith(f"ClipStats({shown}") and "\n" not in text
