"""Every public function traces on models of more parameters than 32 bits count."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import checkify

import clipgrad as cg
from tests.rows import each_value


def leaf(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


TREES = {
    "2.4e9 parameters": {"layers": [leaf(8192, 8192)] * 36, "norm": leaf(8192)},
    "1e12 parameters": {"experts": [leaf(64, 256, 7168, 2048)] * 4, "embed": leaf(262144, 7168)},
    "a vector of 3e9 elements": {"w": leaf(3_000_000_000)},
    "a matrix of 3e9 elements": {"w": leaf(50_000, 60_000, dtype=jnp.float32)},
}


def first(function):
    """The first result of a function of the tree."""
    return lambda tree: function(tree)[0]


def before_the_optimizer(tx):
    """The updates, and then the whole state."""

    def run(tree):
        return tx.update(tree, tx.init(tree), tree)

    return run


def total(tree):
    return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(tree))


def in_the_backward_pass(rule):
    def loss(tree, probe):
        return total(cg.clip_cotangent(tree, rule, probe=probe))

    return lambda tree: jax.grad(loss, argnums=(0, 1))(tree, cg.types.ClipStats.zero())


RULES = {
    "ClipByValue": cg.ClipByValue(0.1),
    "ClipByNorm": cg.ClipByNorm(0.1),
    "ClipByNorm(axis=-1)": cg.ClipByNorm(0.1, axis=-1),
    "ClipByGlobalNorm(ord=3)": cg.ClipByGlobalNorm(0.1, ord=3),
    "ClipByBlockRMS": cg.ClipByBlockRMS(0.1),
    "AdaptiveClip": cg.AdaptiveClip(0.1),
}
THRESHOLDS = (
    cg.PercentileThreshold(90), cg.HistoryThreshold(), cg.ZScoreThreshold(), cg.EMAThreshold(),
)  # fmt: skip
# Each of these makes a tree like the one that it is given.
FUNCTIONS = {
    **{type(t).__name__: first(before_the_optimizer(cg.clip_by_norm(t))) for t in THRESHOLDS},
    "skip_spikes": first(before_the_optimizer(cg.skip_spikes(optax.adam(1e-3)))),
    "apply_gradient_clipping": lambda tree: cg.published.apply_gradient_clipping(
        tree, tree, clipping_type="adaptive", clipping_threshold=0.1
    ),
    **{
        name: first(before_the_optimizer(cg.gradient_clip(rule, stats="per_leaf")))
        for name, rule in RULES.items()
    },
    **{f"{name}, probe": first(in_the_backward_pass(rule)) for name, rule in RULES.items()},
}


@each_value
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_it_traces_on_trees_of_any_size(function, tree, users_promotion):
    result = jax.eval_shape(function, tree)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), result) == jax.tree.map(
        lambda x: (x.shape, x.dtype), tree
    )


@pytest.mark.slow
def test_the_count_of_nan_and_inf_does_not_wrap_at_32_bits():
    def run(tree):
        return cg.clip_grads(tree, cg.ClipByGlobalNorm(1.0), nonfinite="error")[0]

    for tree in TREES.values():
        program = str(jax.make_jaxpr(checkify.checkify(run))(tree))
        assert "reduce_sum" in program and not re.search(r":[iu]\d+\[\] = reduce_sum", program)
