"""Gradients followed to their products: against one example after the other in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.helpers import RELEASED
from tests.per_example_programs import PROGRAMS, arguments

FOLLOWED = ("one pass", "two passes")


def wide(tree):
    def cast(x):
        return np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)

    return jax.tree.map(cast, tree)


def one_by_one(loss, params, batch):
    """The gradient of each example in float64, one after the other."""
    with jax.enable_x64(True):
        params, batch = wide((params, batch))
        grad = jax.jit(lambda p, b: jax.lax.map(lambda x: jax.grad(loss)(p, x), b))
        return jax.tree.map(np.asarray, grad(params, batch))


def norms_of(each):
    return {k: np.sqrt(np.sum(np.square(g), axis=tuple(range(1, g.ndim)))) for k, g in each.items()}


def every_way(loss, rule, params, batch, **options):
    """The results of both methods, and the norms by leaf, compiled at once."""

    @jax.jit
    def run(params, batch):
        ways = {
            m: cg.clip_per_example(loss, rule, reduce="sum", method=m, **options)(params, batch)
            for m in FOLLOWED
        }
        return ways, cg.per_example_norms(loss, per_leaf=True)(params, batch)

    return run(params, batch)


def assert_clipped(result, each, limit, rtol=2e-5):
    _, grads, stats = result
    norm = np.sqrt(sum(n**2 for n in norms_of(each).values()))
    np.testing.assert_allclose(stats.norm, norm, rtol=rtol, atol=1e-30)
    factor = np.minimum(1, limit / np.maximum(norm, 1e-300))
    for path, g in each.items():
        expected = np.tensordot(factor, g, 1)
        np.testing.assert_allclose(
            np.float64(grads[path]), expected, atol=rtol * np.abs(expected).max(), err_msg=path
        )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_followed_and_clipped(name):
    loss = PROGRAMS[name].loss
    params, batch = arguments(name)
    each = one_by_one(loss, params, batch)
    norms = norms_of(each)
    limit = float(np.median(np.sqrt(sum(n**2 for n in norms.values()))))
    ways, by_leaf = every_way(loss, cg.ClipByGlobalNorm(limit), params, batch)
    for result in ways.values():
        assert_clipped(result, each, limit)
    for path, norm in norms.items():
        np.testing.assert_allclose(by_leaf[path], norm, rtol=2e-5, atol=1e-30, err_msg=path)
    plan = cg.clip_per_example(loss, cg.ClipByGlobalNorm(limit)).plan(params, batch)
    direct = {leaf.path for leaf in plan.leaves if leaf.norm == "direct"}
    assert direct == PROGRAMS[name].direct and all(
        leaf.reason for leaf in plan.leaves if leaf.norm == "direct"
    )


def test_the_table_is_as_wide_as_it_says():
    assert len(PROGRAMS) >= 40
