"""Models of NNX and Equinox as they are written: their modules have names."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._arrays import matches

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.slow]
RULE = cg.ErrorClipByValue(max=1e-3)


class Case(NamedTuple):
    """A model, some of its names, and the same model with some values tagged by hand."""

    loss: Callable[..., Any]
    args: tuple[Any, ...]
    names: set[str]
    pattern: str
    clipped: set[str]
    tagged: Any  # the model; the tags have the names that are clipped
    has_aux: bool = False


# ---- NNX ----------------------------------------------------------------------------------------


class NNXBlock(nnx.Module):
    """A block of a transformer, with statistics, random numbers and an adapter of low rank."""

    def __init__(self, rngs):
        self.attn = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        up, down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        adapted = nnx.LoRA(8, 2, 4, base_module=down, rngs=rngs)
        self.mlp = nnx.Sequential(up, nnx.gelu, adapted)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.mlp(self.norm(x + self.attn(x))))


class NNXDecoder(nnx.Module):
    """Blocks that the model calls itself."""

    def __init__(self, rngs):
        self.blocks = nnx.List([NNXBlock(rngs) for _ in range(2)])


class NNXTransformer(nnx.Module):
    """An embedding that is used twice, and blocks."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.decoder = NNXDecoder(rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.decoder.blocks:
            x = block(x)
        return self.embed.attend(x)


class NNXTagged(nnx.Module):
    """A module whose result is tagged."""

    def __init__(self, inner, name):
        self.inner, self.name = inner, name

    def __call__(self, *args):
        return checkpoint_name(self.inner(*args), self.name)


def nnx_model():
    model, tagged = NNXTransformer(nnx.Rngs(0)), NNXTransformer(nnx.Rngs(0))
    blocks = [f"decoder/blocks/{i}" for i in range(2)]
    for block, name in zip(tagged.decoder.blocks, blocks, strict=True):
        block.mlp.layers[0] = NNXTagged(block.mlp.layers[0], f"{name}/mlp/layers/0")
    inner = "attn/query attn norm mlp/layers/0 mlp/layers/2/base_module mlp/layers/2 mlp drop"
    names = {f"{block}/{name}" for block in blocks for name in inner.split()} | {"embed", *blocks}
    clipped = {f"{block}/mlp/layers/0" for block in blocks}
    loss = lambda model, x: jnp.mean(jnp.sin(model(x)) ** 2)  # noqa: E731
    args = model, jnp.array([[0, 2, 4], [1, 3, 0]])
    return Case(loss, args, names, "**/mlp/layers/0", clipped, tagged)


# ---- Equinox ------------------------------------------------------------------------------------


class Block(eqx.Module):
    """A block with a function among its leaves."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: Callable

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.up = eqx.nn.Linear(6, 8, key=first)
        self.down = eqx.nn.Linear(8, 6, key=second)
        self.activation = jax.nn.gelu

    def __call__(self, x):
        return x + self.down(self.hidden(x))

    def hidden(self, x):
        return self.activation(self.up(x))


class Model(eqx.Module):
    """Blocks one after the other, others stacked and scanned with remat, running statistics."""

    blocks: list[Block]
    layers: Block
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout

    def __init__(self, key):
        self.blocks = [Block(k) for k in jax.random.split(key)]
        self.layers = eqx.filter_vmap(Block)(jax.random.split(key, 3))
        self.norm = eqx.nn.BatchNorm(6, axis_name="batch", mode="batch")
        self.drop = eqx.nn.Dropout(0.5)

    def __call__(self, x, state):
        for block in self.blocks:
            x = block(x)
        arrays, rest = eqx.partition(self.layers, eqx.is_array)

        @jax.checkpoint
        def step(x, arrays):
            return eqx.combine(arrays, rest)(x), None

        x = self.drop(jax.lax.scan(step, x, arrays)[0], key=jax.random.key(2))
        return self.norm(x, state)


class Tagged(eqx.Module):
    """A module whose result is tagged."""

    inner: Any
    name: str = eqx.field(static=True)

    def __call__(self, *args, **kwargs):
        return checkpoint_name(self.inner(*args, **kwargs), self.name)


def state_loss(model, state, x):
    run = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    y, state = run(x, state)
    return jnp.mean(jnp.sin(y) ** 2), (state, model)


def equinox_model():
    model, state = eqx.nn.make_with_state(Model)(jax.random.key(0))
    places = {f"blocks/{i}/up": lambda m, i=i: m.blocks[i].up for i in range(2)}
    places["layers/up"] = lambda m: m.layers.up
    tagged = model
    for name, where in places.items():
        tagged = eqx.tree_at(where, tagged, Tagged(where(model), name))
    names = {*places, "blocks/0", "blocks/1/down", "blocks", "layers", "layers/down", "norm"}
    names |= {"blocks/0/up/eqx.nn.Linear", "layers/up/eqx.nn.Linear", "norm/eqx.nn.BatchNorm"}
    args = model, state, jax.random.normal(jax.random.key(1), (4, 6))
    return Case(state_loss, args, names, "**/up", {*places}, tagged, has_aux=True)


cases = pytest.mark.parametrize("case", [nnx_model, equinox_model], ids=lambda f: f.__name__)


def compiled(fun, case):
    return nnx.jit(fun) if isinstance(case.args[0], nnx.Module) else eqx.filter_jit(fun)


def value_and_grad(case):
    """That of the framework."""
    is_nnx = isinstance(case.args[0], nnx.Module)
    transform = nnx.value_and_grad if is_nnx else eqx.filter_value_and_grad
    return transform(case.loss, has_aux=case.has_aux)


def numbers(tree):
    def as_number(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return [as_number(x) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def state_and_classes(case):
    model = case.args[0]
    if not isinstance(model, nnx.Module):
        return [], jax.tree.structure(case.args)
    return nnx.state(model), {path: type(part) for path, part in nnx.iter_modules(model)}


@cases
def test_names_change_neither_value_nor_gradient_nor_state(case):
    """The bits are those of a program without names, where the statistics are not used."""
    one, other = case(), case()
    classes = state_and_classes(one)[1]
    watched = cg.value_and_grad_with_stats(one.loss, has_aux=one.has_aux, watch=["**"])
    named = compiled(lambda *args: watched(*args)[:2], one)(*one.args)
    expected = compiled(value_and_grad(other), other)(*other.args)
    assert jax.tree.structure(named) == jax.tree.structure(expected)
    assert state_and_classes(one)[1] == classes
    states = [state_and_classes(each)[0] for each in (one, other)]
    for ours, theirs in ((named, expected), states):
        jax.tree.map(np.testing.assert_array_equal, numbers(ours), numbers(theirs))


@cases
def test_a_pattern_clips_and_watches_what_tags_by_hand_do(case):
    there = case()
    listed = {name.name: name for name in cg.list_names(there.loss, there.args)}
    assert there.names <= set(listed)
    assert there.clipped == {n for n in listed if matches(there.pattern, n)}

    def clipped(model, names):
        rules = dict.fromkeys(names, RULE)
        run = cg.value_and_grad_with_stats(there.loss, 0, there.has_aux, error_clip=rules, watch=())
        return compiled(run, there)(model, *there.args[1:])[1:]

    grads, stats = clipped(there.args[0], [there.pattern])
    expected, at_tags = clipped(there.tagged, there.clipped)
    assert set(stats) == set(at_tags) == there.clipped
    for name, by_pattern in stats.items():
        assert by_pattern.clipped.all()
        assert by_pattern.norm.shape == listed[name].scans
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5), by_pattern, at_tags[name]
        )
    for ours, theirs in zip(numbers(grads), numbers(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
