"""`global_norm`: right in every dtype and range, on every kind of leaf."""

import functools
import pathlib
import traceback

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from clipgrad._arrays import norms as order_2
from clipgrad._arrays import sums as forms
from clipgrad._arrays.by_leaf import for_each
from clipgrad._arrays.norms import slice_norms
from clipgrad._arrays.ranges import three_squares
from clipgrad._arrays.sums import Groups
from tests.helpers import RELEASED, array, float64, reductions, tree_of
from tests.registry.strategies import trees
from tests.rows import each_value, first_row

ORDERS = [0.5, 1, 2, 3, 7.5, jnp.inf]
every_order = pytest.mark.parametrize("ord", ORDERS)


def reference(tree, ord=2):
    parts = [np.ravel(x) for x in jax.tree.leaves(float64(tree))]
    x = np.abs(np.concatenate(parts)) if parts else np.zeros(0)
    top = x.max(initial=0)
    return top if ord == np.inf or top == 0 else top * np.sum((x / top) ** ord) ** (1 / ord)


@pytest.mark.usefixtures("devices")
@pytest.mark.slow
@every_order
@hypothesis.given(tree=trees())
def test_any_tree_has_the_norm_of_the_reference(ord, tree):
    np.testing.assert_allclose(cg.global_norm(tree, ord), reference(tree, ord), rtol=2e-5)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    "tree, expected",
    [
        (np.full(4, 300.0, np.float16), 600.0),
        (np.full(2**20, 1e-4, np.float16), 1024 * float(np.float16(1e-4))),
        ([np.ones(1, jnp.bfloat16)] * 16, 4.0),
        (np.float32([1e20, 1e20]), 1.4142136e20),
        (np.float32([3e-30, 4e-30]), 5e-30),
        ({"a": np.float32([3.0]), "b": np.full(1, 4.0, jnp.bfloat16)}, 5.0),
        (np.float32([3e38]), 3e38),
        (np.float32([3e38, 3e38]), np.inf),
        (np.float32([2e-38]), 2e-38),
        ([np.float32([1e25]), np.float32([1e-25])], 1e25),
        (np.complex64([3 + 4j]), 5.0),
        (np.float32(-2.0), 2.0),
        (-3.0, 3.0),
    ],
    ids=lambda x: str(x) if np.ndim(x) == 0 and np.isscalar(x) else "tree",
)
def test_known_norms(tree, expected):
    norm = (cg.global_norm if isinstance(tree, float) else jax.jit(cg.global_norm))(tree)
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, expected, rtol=1e-6)


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("ord", [1, 2, 3, 4, jnp.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_a_leaf_of_subnormal_numbers_has_a_finite_norm(dtype, ord):
    """A dead layer, as the norms of each order see it: XLA may take such numbers for 0."""
    dead = jnp.asarray(np.full((3, 4), 1e-39), dtype)
    for run in (
        cg.global_norm,
        jax.jit(cg.global_norm, static_argnums=1, compiler_options=RELEASED),
    ):
        assert 0 <= run(dead, ord) < 2e-38
        np.testing.assert_allclose(
            run([dead, jnp.full(4, 2.0)], ord), reference(jnp.full(4, 2.0), ord), rtol=1e-6
        )


@pytest.mark.slow
def test_a_float64_leaf_makes_the_norm_float64():
    with jax.enable_x64(True):
        tree = [jnp.array([3e200]), jnp.array([4.0], jnp.float32)]
        assert cg.global_norm(tree) == 3e200 and cg.global_norm(tree).dtype == jnp.float64
        assert cg.global_norm(jnp.array([3e-200, 4e-200])) == pytest.approx(5e-200, rel=1e-15)
        assert cg.global_norm(jnp.array([3e200 + 4e200j])) == pytest.approx(5e200, rel=1e-15)


@each_value
@every_order
@pytest.mark.parametrize("empty", [{}, [], None, {"a": None}, array(np.zeros((0, 3)))], ids=str)
def test_an_empty_tree_has_norm_zero(ord, empty):
    assert cg.global_norm(empty, ord) == 0


def test_leaves_without_gradients_count_nowhere():
    tree = {
        "bool": array([True], bool),
        "float0": np.zeros(3, jax.dtypes.float0),
        "int": array(np.arange(5), np.int32),
        "key": jax.random.key(0),
        "none": None,
        "real": array([3.0, 4.0]),
    }
    assert cg.global_norm(tree) == 5


@pytest.mark.usefixtures("devices")
@every_order
def test_nan_gives_nan_and_otherwise_inf_gives_inf(ord):
    norm = jax.jit(lambda x: cg.global_norm(x, ord))
    assert np.isnan(norm(array([jnp.nan, jnp.inf, 1.0])))
    assert float(norm(array([1.0, -jnp.inf, 1.0]))) == jnp.inf


@pytest.mark.usefixtures("devices")
@pytest.mark.slow
@first_row
@every_order
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e19, 1e30])
def test_the_derivative_is_that_of_the_formula(ord, scale):
    x = np.array([3.0, -4.0, 0.5, 1.0]) * scale
    if ord == np.inf:
        expected = np.array([0.0, -1.0, 0.0, 0.0])
    else:
        expected = np.sign(x) * (np.abs(x) / reference(x, ord)) ** (ord - 1)
    actual = jax.grad(lambda x: cg.global_norm(x, ord))(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-7)
    tangent = jax.jvp(lambda x: cg.global_norm(x, ord), (jnp.float32(x),), (jnp.ones(4),))[1]
    np.testing.assert_allclose(tangent, expected.sum(), rtol=2e-5)


@pytest.mark.slow
@every_order
def test_the_derivative_at_zero_is_zero(ord):
    def norm(tree):
        return cg.global_norm(tree, ord)

    zeros = {"a": jnp.zeros(3), "z": jnp.zeros(2, jnp.complex64)}
    for leaf in jax.tree.leaves(jax.grad(norm)(zeros)):
        np.testing.assert_array_equal(leaf, 0)
    assert np.isfinite(jax.hessian(lambda x: cg.global_norm(x, ord))(jnp.zeros(3))).all()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e6])
def test_it_equals_the_norm_of_optax_bit_by_bit(scale, key):
    for i in range(10):
        tree = tree_of(jax.random.fold_in(key, i), scale=scale)
        assert float(jax.jit(cg.global_norm)(tree)) == float(jax.jit(optax.tree.norm)(tree))


@pytest.mark.usefixtures("devices")
def test_norms_under_vmap_are_per_lane_whatever_their_range():
    x = array(np.ones((4, 4)) * [[1e-30], [1.0], [0.0], [1e30]])
    np.testing.assert_allclose(jax.vmap(cg.global_norm)(x), [2e-30, 2, 0, 2e30], rtol=1e-6)


@pytest.mark.usefixtures("devices")
def test_each_slice_has_its_own_range():
    x = array([[1e-30, 1e-30], [3, 4], [3e30, 4e30], [0, 0]])
    norm = jax.jit(lambda x: slice_norms([x], [(1,)])[0].value)(x)
    np.testing.assert_allclose(np.ravel(norm), [1.4142136e-30, 5, 5e30, 0], rtol=1e-6)


def test_on_several_devices_a_norm_is_three_sums_per_leaf_without_loop_or_branch(key):
    tree = tree_of(key)
    del tree["empty"]
    compiled = jax.jit(cg.global_norm).lower(tree).compile()
    assert reductions(compiled) == 3 * len(tree)
    assert not any(op in compiled.as_text() for op in (" while(", " conditional("))


@pytest.mark.parametrize("bad", [0, -1, float("nan"), "2", None, True])
def test_an_order_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match=r"ord: got .*expected a number in \(0, inf\]"):
        cg.global_norm(array(np.ones(2)), bad)


def test_a_traced_order_is_refused():
    with pytest.raises(ValueError, match="static_args"):
        jax.jit(lambda ord: cg.global_norm(jnp.ones(2), ord))(2)


def test_an_axis_name_outside_of_a_mapped_context_is_refused():
    with pytest.raises(ValueError, match="axis_name: got 'batch', which is not a mapped axis"):
        cg.global_norm(array(np.ones(2)), axis_name="batch")


@pytest.mark.slow
@first_row
@every_order
def test_vmap_and_pmap_with_an_axis_name_give_the_norm_of_the_whole(ord, key):
    x = jax.random.normal(key, (8, 3))
    for mapping in (jax.vmap, jax.pmap):
        norms = mapping(lambda x: cg.global_norm(x, ord, axis_name=P("i")), axis_name="i")(x)
        np.testing.assert_allclose(norms, [reference(x, ord)] * 8, rtol=2e-6)


# The forms of a sum, all of which a CPU can run.

# Each with others of its kind, some of another size of numbers.
UNITS = [(5, 7), (5, 7), (40, 30), (9,), (9,), (2, 2, 3, 8), (200, 300), (200, 300), (5, 7)]
SCALES = [1, 1e30, 1e-30, 1e36, 1, 1e-30, 1, 1e30, 1e-20]


def by_size(groups, counts, plain, leaves, values_from=None):
    kind = order_2._Kind(2, values_from=values_from)
    form = order_2._one_by_branch if groups.joint else order_2._by_size
    return form(groups, kind, plain, leaves)


def in_float64(groups, counts, plain, leaves):
    return order_2._by_wide_sums(groups, [(False, n) for n in counts], leaves)


OF_SQUARES = {
    "a branch": order_2._by_branch,
    "by size": by_size,
    "by size, mere values": functools.partial(by_size, values_from=2),
    "columns on a GPU": order_2._of_columns_on_gpu,
}
FORMS = OF_SQUARES | {
    "one reduction": functools.partial(forms._together, three_squares),
    "apart": functools.partial(forms.added_up_apart, three_squares),
    "apart, in few": functools.partial(forms.added_up_apart, three_squares, launched=True),
}
OF_SLICES = {"in float64": in_float64}


def norms_by(form, groups, leaves):
    plain = order_2._plain_sums(groups, leaves)
    counts = (1.0,) * len(plain)
    if form in OF_SQUARES | OF_SLICES:
        norms = (OF_SQUARES | OF_SLICES)[form](groups, counts, plain, leaves)
    else:
        norms = FORMS[form](plain, leaves, groups, order_2._of_three, counts)
    return [norm.value for norm in norms]


def units_of_every_size(dtype):
    rng = np.random.default_rng(3)
    pairs = zip(UNITS, SCALES, strict=True)
    leaves = [np.float32(rng.standard_normal(shape) * scale) for shape, scale in pairs]
    leaves[2][:, ::3] *= np.float32(1e-30)
    leaves[6][3, 4:6] = np.nan, np.inf
    return [np.asarray(x, jnp.dtype(dtype)) for x in leaves]


@each_value
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("by", ["leaf", "column", "row"])
@pytest.mark.parametrize("form", FORMS | OF_SLICES)
def test_each_of_many_sums_has_its_own_range_in_every_form(form, by, dtype):
    leaves = units_of_every_size(dtype)
    axes = [None if by == "leaf" or x.ndim < 2 else (0 if by == "column" else -1,) for x in leaves]
    axes = [a if a is None else (a[0] % x.ndim,) for a, x in zip(axes, leaves, strict=True)]
    groups = Groups.slices(axes)

    found = jax.jit(functools.partial(norms_by, form, groups))(leaves)
    for x, axis, root in zip(leaves, axes, found, strict=True):
        wide = np.abs(x.astype(np.complex128))
        with np.errstate(invalid="ignore"):
            expected = np.sqrt(np.sum(wide * wide, axis, keepdims=True)).astype(np.float32)
        # A CPU adds up several operands of one reduction one by one: 2e-5 of 60,000 squares.
        rtol = 3e-5 if form == "one reduction" else 2e-6
        np.testing.assert_allclose(root, expected, rtol=rtol)


@pytest.mark.parametrize("form", FORMS)
def test_one_sum_of_all_leaves_is_right_in_every_range_and_form(form):
    units = np.array([[3, 4, 0]] * 7).T * np.array([1e-37, 1e-25, 1e-9, 1, 1e10, 1e20, 5e37])
    groups = Groups.one(2)
    run = jax.jit(jax.vmap(functools.partial(norms_by, form, groups), in_axes=1))
    for bad in (0.0, np.nan, np.inf):
        units[2] = bad
        (found,) = run([array(x) for x in (units[:2], units[2:])])
        np.testing.assert_allclose(found, np.sqrt(np.sum(units**2, axis=0)), rtol=1e-6)


@pytest.mark.parametrize("largest", [65504.0, 6e-8], ids=["largest", "smallest"])
def test_a_float16_leaf_needs_one_sum(largest):
    leaf = array(np.full(4, largest), jnp.float16)
    np.testing.assert_allclose(cg.global_norm(leaf), reference(leaf), rtol=1e-6)
    assert reductions(jax.jit(cg.global_norm).lower(leaf).compile()) == 1


def test_what_is_done_for_each_leaf_is_traced_once_for_a_shape():
    traced = []

    def scaled(factor, leaf):
        traced.append(leaf.shape)
        return factor * leaf

    leaves = [np.full(2 + (i == 4), i, np.float32) for i in range(10)]
    run = jax.jit(lambda xs: for_each(scaled, [(3,)] * 10, xs))
    found = run(leaves)
    assert traced == [(2,), (3,)]
    assert [x.tolist() for x in found] == [(3 * x).tolist() for x in leaves]
    text = run.lower(leaves).as_text()
    assert text.count("call @") == 10 and text.count("stablehlo.multiply") == 2


@pytest.mark.slow
def test_the_gradient_of_a_complex_norm_follows_jax():
    z = jnp.array([3 + 4j, 1 - 2j])
    plain = jax.grad(lambda z: jnp.sqrt(jnp.sum(jnp.abs(z) ** 2)))(z)
    np.testing.assert_allclose(jax.grad(cg.global_norm)(z), plain, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 5])
def test_elements_that_are_the_largest_alike_share_the_gradient_of_the_largest_norm(count):
    x = jnp.concatenate([jnp.full(count, -3.0), jnp.array([1.0, 2.0])])
    gradient = jax.grad(cg.global_norm)([x, jnp.ones(2)], jnp.inf)
    np.testing.assert_allclose(gradient[0], [-1 / count] * count + [0, 0], rtol=1e-6)
    assert not gradient[1].any()


def test_the_docstring_says_what_becomes_of_subnormal_elements():
    tiny = array(np.full(10**6, 1e-38, np.float32))
    assert cg.global_norm(tiny) in (0, np.float32(1e-35)) and "subnormal" in cg.global_norm.__doc__


@pytest.mark.slow
def test_the_largest_element_has_the_whole_gradient_of_the_largest_norm_in_every_row():
    rows = jax.random.uniform(jax.random.key(0), (64, 4), minval=1.0, maxval=4.0)
    rows = rows / jnp.asarray([[1.0, 1.5, 2.0, 2.5]])
    gradients = jax.vmap(jax.grad(lambda row: cg.global_norm(row, jnp.inf)))(rows)
    np.testing.assert_array_equal(gradients, rows == rows.max(axis=1, keepdims=True))


def test_the_road_from_an_update_to_the_squares_goes_through_four_files(monkeypatch):
    root, square, road = pathlib.Path(cg.__file__).parent, order_2.square, []

    def seen(leaf):
        places = [pathlib.Path(frame.filename) for frame in traceback.extract_stack()]
        road.extend(dict.fromkeys(p.name for p in places if p.is_relative_to(root)))
        return square(leaf)

    monkeypatch.setattr(order_2, "square", seen)
    grads, tx = [np.ones(3, np.float32)], cg.clip_by_global_norm(1.0)
    jax.jit(tx.update)(grads, tx.init(grads))
    assert road == ["gradient_clip.py", "clipping.py", "global_norm.py", "norms.py"]
