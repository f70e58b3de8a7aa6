"""Gradients of examples one after the other in float64, and what a clip makes of them."""

import jax
import jax.numpy as jnp
import numpy as np

import clipgrad as cg

METHODS = ("auto", "direct")


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
            for m in METHODS
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


OF_INPUT = [1.0, 1e30, 1e-30, 1e30, 1e-30, 1e18, 3e38, 1e-37, 0.0, 1.0, np.inf, 1.0, np.nan]
OF_COTANGENT = [1.0, 1e-30, 1e30, 1e7, 1e-7, 1e18, 1e-3, 1e2, 1.0, 0.0, 1.0, np.inf, 1.0]
