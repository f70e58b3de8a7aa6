"""Adaptive clipping by unit, against NumPy, in the layouts of models; and where optax is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from tests.helpers import stable_id

pytestmark = pytest.mark.slow

# Path, shape, and the axes that one unit spans.
LAYOUTS = {
    "dense/kernel": ((4, 6), (0,)),
    "dense/bias": ((6,), None),
    "norm/scale": ((6,), None),
    "scalar": ((), None),
    "one_input/kernel": ((1, 4), (0,)),
    "one_output/kernel": ((4, 1), (0,)),
    "conv1d/kernel": ((3, 4, 6), (0, 1)),
    "conv2d/kernel": ((3, 3, 2, 5), (0, 1, 2)),
    "conv3d/kernel": ((2, 2, 2, 3, 4), (0, 1, 2, 3)),
    "attention/out/kernel": ((2, 4, 3), (0, 1)),
    "six": ((1, 2, 1, 2, 2, 3), (0, 1, 2, 3, 4)),
    "embedding": ((7, 4), (1,)),
    "attention/query/kernel": ((5, 2, 4), (0,)),
    "layers/dense/kernel": ((3, 4, 6), (1,)),
    "layers/dense/bias": ((3, 6), (1,)),
    "layers/conv/kernel": ((3, 2, 2, 4, 5), (1, 2, 3)),
    "experts/kernel": ((4, 5, 3), (1,)),
    "layers/experts/kernel": ((3, 4, 5, 2), (2,)),
    "torch/linear/weight": ((6, 4), (1,)),
    "torch/conv/weight": ((5, 2, 3, 3), (1, 2, 3)),
}


def trees(seed=0):
    """Gradients and weights, both over several orders of magnitude, and some weights 0."""
    rng = np.random.default_rng(seed)

    def tree(spread):
        return {
            path: np.float32(rng.normal(size=s) * 10.0 ** rng.uniform(-spread, spread, size=s))
            for path, (s, _) in LAYOUTS.items()
        }

    grads, params = tree(2), tree(1)
    params["dense/kernel"][:, 0] = 0
    return grads, params


def reference(grad, weight, axes, clipping, eps=1e-3):
    g, w = np.float64(grad), np.float64(weight)
    norms = [np.sqrt(np.sum(x**2, axis=axes, keepdims=True)) for x in (g, w)]
    limit = clipping * np.maximum(norms[1], eps)
    return np.where(norms[0] > limit, g * limit / norms[0], g)


def test_units_of_every_layout_in_one_tree():
    grads, params = trees()
    axis = lambda path, leaf: LAYOUTS[path][1]  # noqa: E731
    clip = jax.jit(lambda c: cg.clip_grads(grads, cg.AdaptiveClip(c, axis=axis), params)[0])
    for clipping in (0.01, 1.0, 30.0):
        clipped = clip(clipping)
        for path, (_, axes) in LAYOUTS.items():
            expected = reference(grads[path], params[path], axes, clipping)
            np.testing.assert_allclose(clipped[path], expected, rtol=2e-6, err_msg=path)


@pytest.mark.parametrize(
    "axis, match",
    [
        (1, r"axis: got 1 for dense/bias of shape \(6,\)"),
        (
            lambda path, leaf: (0, -2)[: leaf.ndim],
            r"got \(0, -2\) for dense/kernel of shape \(4, 6\)",
        ),
        (lambda path, leaf: 9, "axis: got 9 for"),
    ],
    ids=range(3),
)
def test_units_that_the_tree_has_not_are_refused(axis, match):
    grads, params = ({k: t[k] for k in ("dense/kernel", "dense/bias")} for t in trees())
    with pytest.raises(ValueError, match=match):
        cg.adaptive_grad_clip(0.1, axis=axis).update(grads, optax.EmptyState(), params)


@pytest.mark.parametrize("axis", ["rows", 1.5, {"kernel": 0}, lambda p, x: "last"], ids=stable_id)
def test_axes_that_are_none_are_refused(axis):
    x = {"kernel": jnp.ones((2, 2))}
    with pytest.raises(TypeError, match="axis: got .* expected an int, a tuple of them or None"):
        cg.AdaptiveClip(axis=axis)(x, x)
