"""Small forms of public models, each example clipped by every method: against `vmap(grad)`.

They have the structure of flax's examples (WMT, gemma, ImageNet, seq2seq) and
of models of NNX, Equinox and Haiku: the same modules in the same order, with few features.
"""

import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import clipgrad as cg
from tests.rows import first_row

hk = pytest.importorskip("haiku")

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.slow]
EXAMPLES, WORDS, LENGTH, WIDTH = 3, 19, 6, 16
MODELS = {}


def model(direct):
    """Registers what makes a loss of one example, parameters and a batch.

    ``direct``: a pattern of the paths of the leaves that are direct.
    """

    def register(make):
        MODELS[make.__name__.replace("_", " ")] = make, direct
        return make

    return register


def numbers(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), (EXAMPLES, *shape))


def words(length=LENGTH, seed=0):
    """Sentences of which the last ones are padded with 0."""
    tokens = jax.random.randint(jax.random.key(seed), (EXAMPLES, length), 1, WORDS)
    return tokens.at[1, -2:].set(0)


def started(module, *args, **kwargs):
    return jax.jit(lambda: module.init(jax.random.key(0), *args, **kwargs)["params"])()


def cross_entropy(logits, targets):
    weights = (targets > 0).astype(logits.dtype)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(each * weights) / jnp.maximum(weights.sum(), 1)


class Block(nn.Module):
    """A layer of an encoder, or with ``source`` of a decoder."""

    @nn.compact
    def __call__(self, x, mask, source=None, source_mask=None):
        attention = lambda: nn.MultiHeadDotProductAttention(2, use_bias=False)  # noqa: E731
        y = nn.LayerNorm()(x)
        x = x + attention()(y, y, mask=mask)
        if source is not None:
            x = x + attention()(nn.LayerNorm()(x), source, mask=source_mask)
        h = nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.relu(h))


class Translation(nn.Module):
    """The transformer for WMT: one table for source, target and logits."""

    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(WORDS, WIDTH)
        places = self.param("places", nn.initializers.normal(), (LENGTH, WIDTH))
        x = Block()(embed(source) + places, nn.make_attention_mask(source > 0, source > 0))
        shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)))
        mask = nn.combine_masks(
            nn.make_attention_mask(target > 0, target > 0), nn.make_causal_mask(target)
        )
        across = nn.make_attention_mask(target > 0, source > 0)
        y = Block()(embed(shifted) + places, mask, nn.LayerNorm()(x), across)
        return embed.attend(nn.LayerNorm()(y)) / WIDTH**0.5


@model(r"places|.*/(bias|scale)")
def wmt():
    source, target = words(), words(seed=1)
    net = Translation()
    params = started(net, source, target)

    def loss(p, example):
        source, target = (x[None] for x in example)
        return cross_entropy(net.apply({"params": p}, source, target), target)

    return loss, params, (source, target)


class Language(nn.Module):
    """The decoder of gemma, with layers that are scanned and computed again."""

    @nn.compact
    def __call__(self, inputs):
        x = nn.Embed(WORDS, WIDTH)(jnp.pad(inputs[:, :-1], ((0, 0), (1, 0))))
        mask = nn.make_causal_mask(inputs)

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return Block()(x, mask), None

        axes, split = {"params": 0}, {"params": True}
        layers = nn.scan(nn.remat(Layer), variable_axes=axes, split_rngs=split, length=2)
        x, _ = layers()(x, None)
        return nn.Dense(WORDS)(nn.LayerNorm()(x))


@model(r".*/(bias|scale)")
def scanned_layers():
    inputs = words()
    params = started(Language(), inputs)

    def loss(p, x):
        return cross_entropy(Language().apply({"params": p}, x[None]), x[None])

    return loss, params, inputs


class ResNet(nn.Module):
    """The stem and two bottlenecks of ImageNet's, on images that become smaller than the kernel."""

    @nn.compact
    def __call__(self, x):
        norm = lambda x: nn.BatchNorm(use_running_average=True)(x)  # noqa: E731
        x = nn.Conv(8, (7, 7), (2, 2), [(3, 3), (3, 3)], use_bias=False)(x)
        x = nn.max_pool(nn.relu(norm(x)), (3, 3), (2, 2), "SAME")
        for features, stride in ((8, 1), (16, 2), (32, 2)):
            y = nn.relu(norm(nn.Conv(features, (1, 1), use_bias=False)(x)))
            y = nn.relu(norm(nn.Conv(features, (3, 3), (stride,) * 2, use_bias=False)(y)))
            y = norm(nn.Conv(4 * features, (1, 1), use_bias=False)(y))
            x = norm(nn.Conv(4 * features, (1, 1), (stride,) * 2, use_bias=False)(x))
            x = nn.relu(x + y)
        return nn.Dense(10)(jnp.mean(x, (1, 2)))


@model(r".*/(bias|scale)")
def resnet():
    images, labels = numbers(16, 16, 3), jnp.arange(EXAMPLES)
    variables = jax.jit(ResNet().init)(jax.random.key(0), images)
    rest = {"batch_stats": variables["batch_stats"]}

    def loss(p, example):
        logits = ResNet().apply({"params": p, **rest}, example[0][None])
        return optax.softmax_cross_entropy_with_integer_labels(logits[0], example[1])

    return loss, variables["params"], (images, labels)


class Seq2Seq(nn.Module):
    """An encoder and a decoder, both LSTMs, on one-hot characters."""

    @nn.compact
    def __call__(self, source, target):
        encoder = nn.RNN(nn.OptimizedLSTMCell(WIDTH), return_carry=True, name="encoder")
        decoder = nn.RNN(nn.OptimizedLSTMCell(WIDTH), name="decoder")
        carry = encoder(nn.one_hot(source, WORDS))[0]
        return nn.Dense(WORDS)(decoder(nn.one_hot(target, WORDS), initial_carry=carry))


@model(r".*/bias|OptimizedLSTMCell.*")  # which joins its kernels
def seq2seq():
    source, target = words(), words(seed=1)
    params = started(Seq2Seq(), source, target)

    def loss(p, example):
        source, target = (x[None] for x in example)
        logits = Seq2Seq().apply({"params": p}, source, target[:, :-1])
        return cross_entropy(logits, target[:, 1:])

    return loss, params, (source, target)


class NnxTransformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, WIDTH, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(ids))
        return self.embed.attend(x + self.down(nnx.gelu(self.up(x))))


@model(r".*(bias|scale)")
def nnx_transformer():
    loss = lambda model, x: cross_entropy(model(x[None, :-1]), x[None, 1:])  # noqa: E731
    return loss, NnxTransformer(nnx.Rngs(0)), words()


class EquinoxRecurrent(eqx.Module):
    embedding: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    mixer: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(WORDS, 12, key=keys[0])
        self.cell = eqx.nn.GRUCell(12, WIDTH, key=keys[1])
        self.mixer = eqx.nn.MLP(WIDTH, WORDS, 24, 2, key=keys[2])

    def __call__(self, ids):
        step = lambda h, x: (self.cell(x, h),) * 2  # noqa: E731
        xs = jax.vmap(self.embedding)(ids)
        return jax.vmap(self.mixer)(jax.lax.scan(step, jnp.zeros(WIDTH), xs)[1])


@model(r".*/bias.*|embedding/weight")
def equinox_recurrent():
    loss = lambda model, x: cross_entropy(model(x[:-1]), x[1:])  # noqa: E731
    return loss, EquinoxRecurrent(jax.random.key(0)), words()


@model(r".*/(b|offset|scale)")
def haiku_layers():
    def forward(x):
        h = hk.Conv1D(WIDTH, 3)(x)

        def layer(h):
            y = hk.LayerNorm(-1, True, True)(h)
            start = hk.initializers.VarianceScaling(1.0)
            y = hk.MultiHeadAttention(2, 8, model_size=WIDTH, w_init=start)(y, y, y)
            return h + hk.nets.MLP([32, WIDTH])(y)

        core = hk.LSTM(8)
        out, _ = hk.dynamic_unroll(core, hk.layer_stack(2)(layer)(h), core.initial_state(None))
        return jnp.sum(jnp.sin(out))

    net, x = hk.without_apply_rng(hk.transform(forward)), numbers(LENGTH, 5)
    return net.apply, jax.jit(net.init)(jax.random.key(0), x[0]), x


def arrays(tree):
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def each_by_grad(loss, params, batch):
    """The gradients of the examples by the functions of the framework."""
    if isinstance(params, nnx.Module):
        graph, trained, rest = nnx.split(params, nnx.Param, ...)
        of_one = lambda p, x: loss(nnx.merge(graph, p, rest, copy=True), x)  # noqa: E731
        return jax.jit(jax.vmap(jax.grad(of_one), (None, 0)))(trained, batch)
    trained, rest = eqx.partition(params, eqx.is_inexact_array)
    of_one = lambda p, x: loss(eqx.combine(p, rest), x)  # noqa: E731
    return jax.jit(jax.vmap(jax.grad(of_one), (None, 0)))(trained, batch)


def assert_plan(plan, direct):
    """What is direct has a reason that is no failure, and is what the table says."""
    direct_leaves = {leaf.path for leaf in plan.leaves if leaf.norm == "direct"}
    assert all(leaf.reason for leaf in plan.leaves if leaf.path in direct_leaves)
    assert not [leaf for leaf in plan.leaves if "failed" in leaf.reason]
    expected = {leaf.path for leaf in plan.leaves if re.fullmatch(direct, leaf.path)}
    assert direct_leaves == expected, "\n".join(map(str, plan.leaves))


@pytest.mark.parametrize("name", MODELS)
def test_a_public_model_is_clipped_by_every_method_as_by_vmap_of_grad(name):
    make, direct = MODELS[name]
    loss, params, batch = make()
    each = arrays(each_by_grad(loss, params, batch))
    by_leaf = [np.sqrt(np.sum(np.square(g), axis=tuple(range(1, g.ndim)))) for g in each]
    norms = np.sqrt(sum(n**2 for n in by_leaf))
    # Nearly all leaves are above it, so that each of them tells whether its own norm is right.
    limit = float(np.median(norms)) / 1000
    clips = [
        cg.clip_per_example(loss, cg.ClipByNorm(limit), reduce="sum", method=method)
        for method in ("auto", "direct")
    ]
    plan = clips[0].plan(params, batch)
    assert plan.method == "rows"
    assert_plan(plan, direct)
    factors = [limit / np.maximum(n, limit) for n in by_leaf]
    assert np.mean(np.array(factors) < 1) > 0.8
    expected = [np.tensordot(*pair, 1) for pair in zip(factors, each, strict=True)]
    for clip in clips:
        compiled = clip if isinstance(params, nnx.Module) else eqx.filter_jit(clip)
        _, grads, stats = compiled(params, batch)
        np.testing.assert_allclose(stats.norm, norms, rtol=1e-5)
        for grad, total, factor in zip(arrays(grads), expected, factors, strict=True):
            # A part of a leaf, and the rounding of a gradient of the size of the whole one.
            atol = 2e-5 * np.abs(total).max() + 1e-7 * np.max(factor * norms)
            np.testing.assert_allclose(grad, total, rtol=0, atol=atol)


def computing_in(loss, dtype):
    """The loss with parameters and examples cast to a narrow type, its result in float32."""

    def narrow(tree):
        is_float = lambda x: jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)

    def cast(params):
        if isinstance(params, nnx.Module):
            graph, state = nnx.split(params)
            return nnx.merge(graph, narrow(state), copy=True)
        arrays, rest = eqx.partition(params, eqx.is_array)
        return eqx.combine(narrow(arrays), rest)

    return lambda params, x: loss(cast(params), narrow(x)).astype(jnp.float32)


@first_row
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["scanned layers", "resnet", "equinox recurrent"])
def test_norms_of_a_public_model_in_half_precision_are_as_near_as_those_of_vmap_of_grad(
    name, dtype
):
    """Near the norms in float32: at most twice as far as the gradients of the examples are."""
    loss, params, batch = MODELS[name][0]()
    half = computing_in(loss, dtype)

    def norms_of(loss):
        return np.sqrt(
            sum(
                np.square(g).reshape(EXAMPLES, -1).sum(1)
                for g in arrays(each_by_grad(loss, params, batch))
            )
        )

    wide, near = norms_of(loss), norms_of(half)
    bound = 2 * np.abs(near - wide).max() + 4 * float(jnp.finfo(dtype).eps) * wide
    norms = cg.per_example_norms(half)
    compiled = norms if isinstance(params, nnx.Module) else eqx.filter_jit(norms)
    norms_here = np.asarray(compiled(params, batch), np.float64)
    assert (np.abs(norms_here - wide) <= bound).all(), (norms_here, near, wide)
