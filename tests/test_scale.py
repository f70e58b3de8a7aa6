"""Every public function traces on models of more parameters than 32 bits count."""

import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import checkify

import clipgrad as cg


def leaf(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


TREES = {
    "2.4e9 parameters": {"layers": [leaf(4096, 4096)] * 144, "norm": leaf(4096)},
    "1e12 parameters": {"experts": [leaf(64, 256, 7168, 2048)] * 4, "embed": leaf(262144, 7168)},
    "a vector of 3e9 elements": {"w": leaf(3_000_000_000)},
    "a matrix of 3e9 elements": {"w": leaf(50_000, 60_000, dtype=jnp.float32)},
}
SIZES = [2.4e9, 9.6e11, 3e9, 3e9]


def follow(threshold):
    """A clip by an adaptive threshold."""

    def run(tree):
        tx = cg.clip_by_norm(threshold)
        return tx.update(tree, tx.init(tree), tree)[0]

    return run


def spikes(**options):
    def run(tree):
        tx = cg.skip_spikes(optax.adam(1e-3), **options)
        return tx.update(tree, tx.init(tree), tree)[0]

    return run


def composer(clipping_type, axis=None):
    return lambda tree: cg.apply_gradient_clipping(
        tree, tree, clipping_type=clipping_type, clipping_threshold=0.1, axis=axis
    )


def per_example(rule, microbatch=None):
    def loss(params, x):
        return x * sum(jnp.sum(p.astype(jnp.float32)) for p in jax.tree.leaves(params))

    def run(tree):
        return cg.clip_per_example(loss, rule, microbatch=microbatch)(tree, jnp.ones(8))[1]

    return run


# Each of these makes a tree like the one that it is given.
FUNCTIONS = {
    "PercentileThreshold": follow(cg.PercentileThreshold()),
    "HistoryThreshold": follow(cg.HistoryThreshold()),
    "ZScoreThreshold": follow(cg.ZScoreThreshold()),
    "EMAThreshold": follow(cg.EMAThreshold()),
    "skip_spikes": spikes(),
    "skip_spikes(sigma=None)": spikes(sigma=None, max_norm=1.0),
    "apply_gradient_clipping('norm')": composer("norm"),
    "apply_gradient_clipping('value')": composer("value"),
    "apply_gradient_clipping('adaptive')": composer("adaptive"),
    "apply_gradient_clipping(axis=-1)": composer("adaptive", axis=-1),
    "clip_per_example": per_example(cg.ClipByGlobalNorm(1.0)),
    "clip_per_example(microbatch=2)": per_example(cg.ClipByValue(1.0), microbatch=2),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_it_traces_on_trees_of_any_size(function, tree, users_promotion):
    result = jax.eval_shape(function, tree)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), result) == jax.tree.map(
        lambda x: (x.shape, x.dtype), tree
    )


def test_the_count_of_nan_and_inf_does_not_wrap_at_32_bits():
    def run(tree):
        return cg.clip_grads(tree, cg.ClipByGlobalNorm(1.0), nonfinite="error")[0]

    for tree in TREES.values():
        program = str(jax.make_jaxpr(checkify.checkify(run))(tree))
        assert "reduce_sum" in program and not re.search(r":[iu]\d+\[\] = reduce_sum", program)


def test_the_trees_are_as_large_as_they_are_said_to_be():
    for tree, size in zip(TREES.values(), SIZES, strict=True):
        total = sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
        assert total > 2**31 and abs(total / size - 1) < 0.05
