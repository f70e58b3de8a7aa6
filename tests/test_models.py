"""Real models, untouched: their own tags are clipped and watched by name."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad import _jaxpr

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
