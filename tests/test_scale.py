"""Every public function traces on models of more parameters than 32 bits count."""

import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify

import clipgrad as cg
from clipgrad import _stats
from clipgrad._clip import _countable


def leaf(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


TREES = {
    "2.4e9 parameters": {"layers": [leaf(8192, 8192)] * 36, "norm": leaf(8192)},
    "1e12 parameters": {"experts": [leaf(64, 256, 7168, 2048)] * 4, "embed": leaf(262144, 7168)},
    "a vector of 3e9 elements": {"w": leaf(3_000_000_000)},
    "a matrix of 3e9 elements": {"w": leaf(50_000, 60_000, dtype=jnp.float32)},
}


def per_example(rule, microbatch=None):
    def loss(params, x):
        return x * sum(jnp.sum(p.astype(jnp.float32)) for p in jax.tree.leaves(params))

    def run(tree):
        return cg.clip_per_example(loss, rule, microbatch=microbatch)(tree, jnp.ones(8))[1]

    return run


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


def tagged(tree, x):
    return x * total(checkpoint_name(tree, "h"))


def train(tx, **options):
    def run(tree):
        step = cg.train_step(tagged, tx, **options)
        state, metrics = step.update(cg.types.TrainState(tree, tx.init(tree)), jnp.ones(()))
        return state.params, metrics

    return run


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
    "clip_per_example": per_example(cg.ClipByGlobalNorm(1.0)),
    **{
        name: first(before_the_optimizer(cg.gradient_clip(rule, stats="per_leaf")))
        for name, rule in RULES.items()
    },
    **{f"{name}, probe": first(in_the_backward_pass(rule)) for name, rule in RULES.items()},
    "error_clip_everywhere": jax.grad(cg.error_clip_everywhere(total, cg.ClipByNorm(0.1))),
    "train_step": first(
        train(cg.clip_by_value(0.1, stats="per_leaf"), error_clip={"h": cg.ClipByNorm(0.1)})
    ),
}
# Each of these makes numbers, or what the clip did.
MEASURES = {
    "global_norm": cg.global_norm,
    "ClipStats.of": lambda tree: cg.types.ClipStats.of(tree, tree),
    **{
        f"{name}, statistics": lambda tree, r=rule: cg.clip_grads(tree, r, tree)[1]
        for name, rule in RULES.items()
    },
    "a probe": lambda tree: in_the_backward_pass(cg.ClipByNorm(0.1))(tree)[1],
    "nonfinite='zero'": lambda tree: cg.clip_grads(tree, cg.ClipByNorm(0.1), nonfinite="zero")[1],
    "value_and_grad_with_stats": lambda tree: cg.value_and_grad_with_stats(tagged)(tree, 1.0)[2],
    "train_step": lambda tree: train(cg.clip_by_norm(0.1), error_clip={"h": None})(tree)[1],
}


@pytest.mark.kinds("tree")
@pytest.mark.ci("function", "tree")
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_it_traces_on_trees_of_any_size(function, tree, users_promotion):
    result = jax.eval_shape(function, tree)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), result) == jax.tree.map(
        lambda x: (x.shape, x.dtype), tree
    )


def equations(program):
    """The equations of a program and of those inside of it."""
    for equation in program.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def is_program(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@pytest.mark.kinds()
@pytest.mark.ci("measure", "tree")
@pytest.mark.parametrize("tree", ["1e12 parameters", "a vector of 3e9 elements"])
@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_what_is_measured_is_floating_and_no_integer_counts_past_32_bits(
    measure, tree, users_promotion
):
    program = jax.make_jaxpr(measure)(TREES[tree])
    assert all(x.dtype in (jnp.float32, jnp.int32) for x in program.out_avals)
    for equation in equations(program.jaxpr):
        if equation.primitive.name in ("reduce", "reduce_sum"):
            ((given, *_), (result, *_)) = equation.invars, equation.outvars
            if jnp.issubdtype(result.aval.dtype, jnp.integer):
                assert given.aval.size < 2**32 * max(result.aval.size, 1)


@pytest.mark.parametrize("size", [2**31, 2**31 + 1, 2**32, 3 * 2**31 + 5, 10**10])
def test_masks_are_counted_in_parts_that_32_bits_count(size):
    for shape in ((size,), (2, size // 2), (size // 4, 4)):
        mask = jax.ShapeDtypeStruct(shape, bool)
        parts = jax.eval_shape(_countable, mask)
        assert sum(part.size for part in parts) == math.prod(shape)
        assert all(0 < part.size < 2**32 for part in parts)


def test_the_parts_of_a_mask_are_counted_together(monkeypatch):
    """As if 32 bits were fewer, since no test can hold a mask that is too large for them."""
    monkeypatch.setattr(_stats, "_countable", lambda mask: jnp.array_split(mask, 5))
    count = _stats._count_true([jnp.arange(7) % 3 == 0], "float32")
    assert count == 3 and count.dtype == jnp.float32


@pytest.mark.exhaustive
def test_the_count_of_nan_and_inf_does_not_wrap_at_32_bits():
    def run(tree):
        return cg.clip_grads(tree, cg.ClipByGlobalNorm(1.0), nonfinite="error")[0]

    for tree in TREES.values():
        program = str(jax.make_jaxpr(checkify.checkify(run))(tree))
        assert "reduce_sum" in program and not re.search(r":[iu]\d+\[\] = reduce_sum", program)
