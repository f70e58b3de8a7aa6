"""Real models, untouched: their own tags are clipped and watched by name."""

import functools
import sys

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad import _jaxpr, _names
from tests.helpers import assert_close

pytestmark = pytest.mark.exhaustive

X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
RULE = cg.ErrorClipByValue(0.01)


@pytest.fixture(autouse=True)
def lenient_promotion():
    """The libraries promote ranks and dtypes as NumPy does."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = checkpoint_name(nn.Dense(5)(x), "h")
        return nn.Dense(2)(jnp.tanh(h))


class Equinox(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.MLP

    def __init__(self, key):
        self.first = eqx.nn.Linear(3, 5, key=key)
        self.last = eqx.nn.MLP(5, 2, 4, 1, key=key)

    def __call__(self, x):
        return self.last(checkpoint_name(self.first(x), "h"))


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 5, rngs=rngs)
        self.last = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(checkpoint_name(self.first(x), "h")))


def linen():
    model = Linen()
    return (lambda params, x: model.apply(params, x)), jax.jit(model.init)(jax.random.key(0), X)


def equinox():
    params, static = eqx.partition(Equinox(jax.random.key(0)), eqx.is_inexact_array)
    return (lambda params, x: jax.vmap(eqx.combine(params, static))(x)), params


def flax_nnx():
    graph, params = nnx.split(NNX(nnx.Rngs(0)))
    return (lambda params, x: nnx.merge(graph, params)(x)), params


def haiku():
    def forward(x):
        h = checkpoint_name(hk.Linear(5)(x), "h")
        return hk.Linear(2)(jnp.tanh(h))

    model = hk.without_apply_rng(hk.transform(forward))
    return model.apply, jax.jit(model.init)(jax.random.key(0), X)


LIBRARIES = [linen, equinox, flax_nnx, haiku]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda f: f.__name__)
def test_a_module_is_clipped_and_watched_by_name(library):
    apply, params = library()

    def loss(params, x):
        return jnp.sum(apply(params, x) ** 2)

    clip = cg.value_and_grad_with_stats(loss, rules={"h": RULE})
    value, grads, stats = jax.jit(clip)(params, X)
    expected, plain = jax.jit(jax.value_and_grad(loss))(params, X)
    assert_close(value, expected)
    assert jax.tree.structure(grads) == jax.tree.structure(plain)
    assert stats["h"].size == 20 and stats["h"].clipped
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True)
    assert sum(not np.allclose(a, b) for a, b in pairs) == 2
    by_name = jax.jit(jax.grad(cg.error_clip_by_name(loss, {"h": RULE})))(params, X)
    assert_close(by_name, grads, atol=1e-8)  # sums of terms up to 1e-2, in another order


def test_an_equinox_module_is_an_argument_like_any_other():
    model = Equinox(jax.random.key(0))

    def loss(model, x):
        return jnp.sum(jax.vmap(model)(x) ** 2)

    grads = eqx.filter_grad(cg.error_clip_by_name(loss, {"h": RULE}))(model, X)
    plain = eqx.filter_grad(loss)(model, X)
    assert jax.tree.structure(grads) == jax.tree.structure(plain)
    assert not np.allclose(grads.first.weight, plain.first.weight)
    assert_close(grads.last.layers[0].weight, plain.last.layers[0].weight)


def test_an_nnx_module_trains_with_the_optimizer_of_its_library():
    model = NNX(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    graph, params = nnx.split(model)

    def loss(params):
        return jnp.sum(nnx.merge(graph, params)(X) ** 2)

    value, grads, stats = cg.value_and_grad_with_stats(loss, rules={"h": RULE})(params)
    optimizer.update(model, grads)
    assert loss(nnx.split(model)[1]) < value
    assert stats["h"].clipped


def test_a_pattern_selects_the_same_in_parameters_and_gradients_of_nnx():
    model = NNX(nnx.Rngs(0))
    clip = cg.clip_by_global_norm(0.1, where="kernel$", stats=True)
    optimizer = nnx.Optimizer(model, optax.chain(clip, optax.sgd(0.1)), wrt=nnx.Param)
    grads = nnx.grad(lambda model: jnp.sum(model(X) ** 2))(model)
    optimizer.update(model, grads)
    stats = optax.tree.get(optimizer.opt_state, "stats")
    kernels = [grads["first"]["kernel"].get_value(), grads["last"]["kernel"].get_value()]
    assert float(stats.size.get_value()) == sum(k.size for k in kernels)


class Layers(nn.Module):
    """A transformer whose layers are scanned and rematerialized."""

    depth: int = 3

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                x = checkpoint_name(x, "decoder_layer_input")
                y = nn.LayerNorm()(x)
                y = nn.MultiHeadDotProductAttention(num_heads=2, deterministic=True)(y, y)
                x = x + checkpoint_name(y, "attention_out")
                return x + nn.Dense(x.shape[-1])(jnp.tanh(nn.Dense(8)(nn.LayerNorm()(x)))), None

        policy = jax.checkpoint_policies.save_only_these_names("attention_out")
        layers = nn.scan(
            nn.remat(Layer, policy=policy),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.depth,
        )
        return layers()(x, None)[0]


def test_a_scanned_transformer_has_an_entry_for_each_layer():
    model = Layers()
    x = jax.random.normal(jax.random.key(1), (2, 5, 4))
    params = jax.jit(model.init)(jax.random.key(0), x)

    def loss(params):
        return jnp.mean(model.apply(params, x) ** 2)

    watched = jax.jit(cg.value_and_grad_with_stats(loss, rules={"attention_out": None}))
    value, grads, stats = watched(params)
    assert {name: s.norm.shape for name, s in stats.items()} == {
        "decoder_layer_input": (3,),
        "attention_out": (3,),
    }
    expected = jax.jit(jax.value_and_grad(loss))(params)
    assert_close((value, grads), expected, rtol=1e-5, atol=1e-7)
    limit = float(stats["attention_out"].norm.min()) / 2
    rules = {"attention_out": cg.ClipByNorm(limit)}
    clipped = jax.jit(cg.value_and_grad_with_stats(loss, rules=rules))(params)[2]
    np.testing.assert_allclose(clipped["attention_out"].clipped_norm, limit, rtol=1e-5)


def test_an_lstm_has_an_entry_for_each_time_step():
    class LSTM(nn.Module):
        @nn.compact
        def __call__(self, xs):
            class Tagged(nn.OptimizedLSTMCell):
                def __call__(self, carry, x):
                    c, h = carry
                    return super().__call__((c, checkpoint_name(h, "h")), x)

            return nn.RNN(Tagged(4))(xs)

    model = LSTM()
    xs = jax.random.normal(jax.random.key(0), (2, 7, 3))
    params = jax.jit(model.init)(jax.random.key(1), xs)

    def loss(params):
        return jnp.sum(model.apply(params, xs)[:, -1] ** 2)

    stats = jax.jit(cg.value_and_grad_with_stats(loss))(params)[2]["h"]
    assert stats.norm.shape == (7,)
    norms = np.asarray(stats.norm)
    assert (norms[1:] > 0).all() and norms[-1] > norms[1]


def test_many_tagged_sites_make_a_program_linear_in_the_size_of_the_model():
    """Counts equations, which no clock disturbs; the time is in the benchmarks."""

    def model(x, sites):
        @jax.jit
        def block(x):
            return checkpoint_name(jnp.sin(x), "out")

        for i in range(sites):
            x = block(checkpoint_name(jax.checkpoint(jnp.tanh)(x), f"in{i}"))
        return jnp.sum(x)

    def equations(sites):
        fun = functools.partial(model, sites=sites)
        names = {f"in{i}": RULE for i in range(sites)} | {"out": RULE}
        clipped = cg.error_clip_by_name(fun, names)
        return len(list(_jaxpr.equations(jax.make_jaxpr(clipped)(X))))

    small, large = equations(11), equations(88)
    assert large == pytest.approx(8 * small, rel=0.05)


def test_a_function_called_from_many_places_is_read_once(monkeypatch):
    read = []
    sites = sys.modules["clipgrad._names.sites"]
    find = sites._find
    monkeypatch.setattr(sites, "_find", lambda jaxpr: read.append(jaxpr) or find(jaxpr))

    called = jax.jit(lambda x: checkpoint_name(x, "h"))
    for _ in range(10):
        called = jax.jit(lambda x, f=called: f(f(x)))
    (site,) = _names.sites(jax.make_jaxpr(called)(X))
    assert site.name == "h" and len(read) <= 12
