"""NaN is never lost, not even in large leaves, for which XLA vectorizes its loops.

There a minimum or maximum with a constant drops NaN where it is fused into a reduction, and so
does a reduction by maximum.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.helpers import RELEASED, array
from tests.rows import first_row

SHAPE = (128, 128)
BAD = jnp.nan


pytestmark = pytest.mark.usefixtures("users_promotion")


def released(fun, *args):
    """The result of the function as a user's compiler compiles it."""
    return jax.jit(fun).lower(*args).compile(RELEASED)(*args)


def with_bad(value, at=(0, 0), dtype=jnp.float32):
    x = np.full(SHAPE, 0.5)
    x[at] = value
    return array(x, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
def test_a_norm_is_nan_and_not_inf_if_an_element_is(dtype):
    def norms(trees):
        return [[cg.global_norm(tree, ord) for tree in trees] for ord in (0.5, 1, 2, 3, jnp.inf)]

    nan, inf, minus = (with_bad(bad, dtype=dtype) for bad in (BAD, jnp.inf, -jnp.inf))
    for by_order in released(norms, [{"a": nan, "b": jnp.ones(3)}, [nan, inf], {"a": minus}]):
        np.testing.assert_array_equal(by_order, [np.nan, np.nan, np.inf])


@pytest.mark.usefixtures("devices")
@pytest.mark.slow
@first_row
@pytest.mark.parametrize("axis", [0, 1])
def test_only_the_slice_that_holds_it_is_nan(axis):
    for ord in (2, jnp.inf):
        clipped = released(cg.ClipByNorm(1.0, ord=ord, axis=axis), with_bad(BAD, (3, 5)))
        expected = np.zeros(SHAPE, bool)
        expected[(slice(None), 5) if axis == 0 else (3, slice(None))] = True
        np.testing.assert_array_equal(jnp.isnan(clipped), expected)


ONE_GROUP = [cg.ClipByGlobalNorm(1.0), cg.ClipByGlobalNorm(1.0, ord=jnp.inf)]
BY_LEAF = [cg.ClipByNorm(1.0), cg.ClipByNorm(1.0, ord=jnp.inf), cg.ClipByBlockRMS(0.1)]


@pytest.mark.usefixtures("devices")
@pytest.mark.slow
@pytest.mark.parametrize("rule", [*ONE_GROUP, *BY_LEAF], ids=repr)
def test_a_bad_element_makes_its_whole_group_nan(rule):
    each = [{"a": with_bad(bad), "b": jnp.ones(3)} for bad in (jnp.nan, jnp.inf, -jnp.inf)]
    results = released(lambda each: [cg.clip_grads(grads, rule) for grads in each], each)
    for (clipped, stats), norm in zip(results, (np.nan, np.inf, np.inf), strict=True):
        assert jnp.isnan(clipped["a"]).all()
        assert jnp.isnan(clipped["b"]).all() == (rule in ONE_GROUP)
        assert stats.nonfinite == 1 and jnp.isnan(stats.clipped_norm)
        np.testing.assert_array_equal(stats.norm, norm)


BOUNDS = {
    "numbers": lambda one: cg.ClipByValue(1.0),
    "traced": lambda one: cg.ClipByValue(one),
    "both traced": lambda one: cg.ClipByValue(one, -2 * one),
    "one side": lambda one: cg.ClipByValue(one, -jnp.inf),
    "arrays": lambda one: cg.ClipByValue(jnp.ones(128) * one),
}


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("name", BOUNDS)
def test_a_norm_clip_behind_a_value_clip_makes_the_group_nan(name):
    def clip(grads, one):
        return cg.ClipByGlobalNorm(1.0)(BOUNDS[name](one)(grads))

    clipped = released(clip, [with_bad(BAD), jnp.ones(128)], jnp.float32(1.0))
    assert all(jnp.isnan(leaf).all() for leaf in clipped)


def test_a_threshold_that_is_nan_gives_nan_and_no_gradient_that_is_not_clipped():
    clip = lambda x, limit: cg.ClipByValue(limit)(x)  # noqa: E731
    assert np.isnan(released(clip, with_bad(1.0), np.float32(np.nan))).all()


def test_composers_rule_leaves_the_unit_that_holds_it_as_it_is():
    def clip(grads):
        options = {"clipping_type": "adaptive", "clipping_threshold": 0.01}
        return cg.published.apply_gradient_clipping(grads, jnp.full_like(grads, 0.1), **options)

    grads = np.full((8192, 2), 0.5, np.float32)
    grads[7, 0] = BAD
    clipped = np.asarray(released(clip, grads))
    np.testing.assert_array_equal(clipped[:, 0], grads[:, 0])
    assert np.linalg.norm(clipped[:, 1]) < 1
