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
from clipgrad._trees import matches

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.exhaustive]
X = jax.random.normal(jax.random.key(1), (4, 3, 6))
TOKENS = jnp.array([[0, 2, 4], [1, 3, 0]])
RULE = cg.ErrorClipByValue(max=1e-3)


class Case(NamedTuple):
    """A model: its loss, names that there are, and the same with some values tagged by hand."""

    loss: Callable[..., Any]
    args: tuple[Any, ...]
    names: set[str]
    pattern: str
    clipped: tuple[str, ...]
    tagged: Callable[..., Any]  # of the same arguments; the tags have the names that are clipped
    tagged_args: tuple[Any, ...]


# ---- NNX ----------------------------------------------------------------------------------------


class NNXBlock(nnx.Module):
    """A block of a transformer, with statistics and random numbers."""

    def __init__(self, rngs):
        self.attn = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        up, down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.mlp = nnx.Sequential(up, nnx.gelu, down)
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


def nnx_loss(model, x):
    return jnp.mean(jnp.sin(model(x)) ** 2)


def nnx_transformer():
    plain, tagged = NNXTransformer(nnx.Rngs(0)), NNXTransformer(nnx.Rngs(0))
    for i, block in enumerate(tagged.decoder.blocks):
        block.mlp.layers[0] = NNXTagged(block.mlp.layers[0], f"decoder/blocks/{i}/mlp/layers/0")
    blocks = [f"decoder/blocks/{i}" for i in range(2)]
    inner = {"attn/query", "attn", "norm", "mlp/layers/0", "mlp/layers/2", "mlp", "drop"}
    names = {f"{block}/{name}" for block in blocks for name in inner}
    clipped = tuple(f"{block}/mlp/layers/0" for block in blocks)
    return Case(
        nnx_loss, (plain, TOKENS), names | {"embed", *blocks}, "**/mlp/layers/0", clipped,
        nnx_loss, (tagged, TOKENS),
    )  # fmt: skip


class NNXAdapted(nnx.Module):
    """Linear layers with adapters of low rank."""

    def __init__(self, rngs):
        self.first = nnx.LoRALinear(6, 5, lora_rank=2, rngs=rngs)
        self.last = nnx.LoRA(5, 2, 3, base_module=nnx.Linear(5, 3, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


def nnx_adapters():
    plain, tagged = NNXAdapted(nnx.Rngs(0)), NNXAdapted(nnx.Rngs(0))
    tagged.first = NNXTagged(tagged.first, "first")
    names = {"first", "last", "last/base_module"}
    return Case(nnx_loss, (plain, X), names, "f*", ("first",), nnx_loss, (tagged, X))


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
    """Blocks of one's own, one after the other."""

    blocks: list[Block]
    drop: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        *keys, last = jax.random.split(key, 3)
        self.blocks = [Block(k) for k in keys]
        self.drop = eqx.nn.Dropout(0.5)
        self.head = eqx.nn.Linear(6, 2, key=last)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x, key=jax.random.key(2)))


class Tagged(eqx.Module):
    """A module whose result is tagged."""

    inner: Any
    name: str = eqx.field(static=True)

    def __call__(self, *args, **kwargs):
        return checkpoint_name(self.inner(*args, **kwargs), self.name)


def equinox_loss(model, x):
    return jnp.mean(jnp.sin(jax.vmap(jax.vmap(model))(x)) ** 2)


def equinox_blocks():
    model = Model(jax.random.key(0))
    wheres = [lambda m, i=i: m.blocks[i].up for i in range(2)]
    tagged = model
    for i, where in enumerate(wheres):
        tagged = eqx.tree_at(where, tagged, Tagged(where(model), f"blocks/{i}/up"))
    names = {f"blocks/{i}{name}" for i in range(2) for name in ("", "/up", "/down")}
    names |= {"blocks/0/up/eqx.nn.Linear", "head", "head/eqx.nn.Linear", "blocks"}
    return Case(
        equinox_loss, (model, X), names, "blocks/*/up", ("blocks/0/up", "blocks/1/up"),
        equinox_loss, (tagged, X),
    )  # fmt: skip


class Stacked(eqx.Module):
    """Blocks whose arrays are stacked, scanned with remat."""

    layers: Block

    def __init__(self, key):
        self.layers = eqx.filter_vmap(Block)(jax.random.split(key, 3))

    def __call__(self, x):
        arrays, rest = eqx.partition(self.layers, eqx.is_array)

        @jax.checkpoint
        def step(x, arrays):
            return eqx.combine(arrays, rest)(x), None

        return jax.lax.scan(step, x, arrays)[0]


def equinox_stacked():
    model = Stacked(jax.random.key(0))
    tagged = eqx.tree_at(lambda m: m.layers.up, model, Tagged(model.layers.up, "layers/up"))
    names = {"layers", "layers/up", "layers/down", "layers/up/eqx.nn.Linear"}
    return Case(
        equinox_loss, (model, X), names, "layers/u*", ("layers/up",), equinox_loss, (tagged, X)
    )


class WithState(eqx.Module):
    """A layer with running statistics."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.first = eqx.nn.Linear(6, 5, key=key)
        self.norm = eqx.nn.BatchNorm(5, axis_name="batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.first(x), state)


def state_loss(model, state, x):
    run = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    y, state = run(x, state)
    return jnp.mean(jnp.sin(y) ** 2), (state, model)


def equinox_state():
    model, state = eqx.nn.make_with_state(WithState)(jax.random.key(0))
    tagged = eqx.tree_at(lambda m: m.first, model, Tagged(model.first, "first"))
    names = {"first", "norm", "first/eqx.nn.Linear", "norm/eqx.nn.BatchNorm"}
    args = (state, X[:, 0])
    return Case(state_loss, (model, *args), names, "first", ("first",), state_loss, (tagged, *args))


CASES = [
    nnx_transformer, nnx_adapters, equinox_blocks, equinox_stacked, equinox_state
]  # fmt: skip
cases = pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)


def compiled(fun, args):
    if any(isinstance(arg, nnx.Module) for arg in args):
        return nnx.jit(fun)
    return eqx.filter_jit(fun)


def value_and_grad(args, has_aux):
    if any(isinstance(arg, nnx.Module) for arg in args):
        return functools.partial(nnx.value_and_grad, has_aux=has_aux)
    return functools.partial(eqx.filter_value_and_grad, has_aux=has_aux)


def numbers(tree):
    def as_number(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return [as_number(x) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def assert_same(first, second):
    jax.tree.map(np.testing.assert_array_equal, numbers(first), numbers(second))


def states(args):
    return [nnx.state(arg) for arg in args if isinstance(arg, nnx.Module)]


def classes(args):
    return [
        {path: type(part) for path, part in nnx.iter_modules(arg)}
        for arg in args
        if isinstance(arg, nnx.Module)
    ]


@cases
def test_names_change_neither_value_nor_gradient_nor_state(case):
    """The bits are those of a program without names, where the statistics are not used."""
    one, other = case(), case()
    has_aux = one.loss is state_loss
    before = classes(one.args), jax.tree.structure(one.args)
    watched = cg.value_and_grad_with_stats(one.loss, has_aux=has_aux, watch=["**"])
    found = compiled(lambda *args: watched(*args)[:2], one.args)(*one.args)
    plain = value_and_grad(other.args, has_aux)(other.loss)
    expected = compiled(plain, other.args)(*other.args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_same(found, expected)
    assert_same(states(one.args), states(other.args))
    if not states(one.args):
        assert (classes(one.args), jax.tree.structure(one.args)) == before
    assert classes(one.args) == before[0]


@cases
def test_a_pattern_clips_and_watches_what_tags_by_hand_do(case):
    there = case()
    listed = {name.name: name for name in cg.list_names(there.loss, there.args)}
    assert there.names <= set(listed)
    assert set(there.clipped) == {n for n in listed if matches(there.pattern, n)}
    has_aux = there.loss is state_loss
    rules = {there.pattern: RULE}
    by_name = cg.value_and_grad_with_stats(there.loss, 0, has_aux, rules=rules, watch=())
    _, grads, stats = compiled(by_name, there.args)(*there.args)
    rules = dict.fromkeys(there.clipped, RULE)
    by_hand = cg.value_and_grad_with_stats(there.tagged, 0, has_aux, rules=rules, watch=())
    _, expected, at_tags = compiled(by_hand, there.tagged_args)(*there.tagged_args)
    assert set(stats) == set(at_tags) == set(there.clipped)
    for name, found in stats.items():
        assert found.clipped.all()
        assert found.norm.shape == listed[name].scans
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, at_tags[name])
    pairs = zip(numbers(grads), numbers(expected), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
