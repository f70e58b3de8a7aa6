"""Models of flax, Haiku and Equinox, as they are written there: no tag, no edit."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.error_clips.framework_models import Transformer, X, linen

hk = pytest.importorskip("haiku")

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.slow]


def with_dummies(loss, module_paths, intercept, path_of):
    """The gradients of a loss by what is added to the outputs of modules."""

    def run(dummies, params, x):
        def add(next_fun, args, kwargs, context):
            out = next_fun(*args, **kwargs)
            path = path_of(context)
            return out + dummies[path] if path in dummies else out

        with intercept(add):
            return loss(params, x)

    return run


@pytest.mark.parametrize("compile", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_statistics_are_those_of_what_is_added_to_the_output_of_a_linen_module(compile):
    params, loss = linen(Transformer())
    stats = compile(cg.value_and_grad_with_stats(loss))(params, X)[2]
    shapes = {n.name: n.shape for n in cg.list_names(loss, (params, X))}
    paths = {f"Transformer/block_{i}/{p}": () for i in (0, 1) for p in ("up", "down", "attn")}
    paths |= {"Transformer/block_0": (), "Transformer/block_1": (), "Transformer/head": ()}
    dummies = {path: jnp.zeros(shapes[path]) for path in paths}

    def path_of(context):
        is_call = context.method_name == "__call__"
        return "/".join(("Transformer", *context.module.path)) if is_call else None

    run = with_dummies(loss, paths, nn.intercept_methods, path_of)
    for path, cotangent in jax.jit(jax.grad(run))(dummies, params, X).items():
        np.testing.assert_allclose(stats[path].norm, jnp.linalg.norm(cotangent), rtol=1e-6)


def test_statistics_are_those_of_what_is_added_to_the_output_of_a_haiku_module():
    def forward(x):
        return hk.nets.MLP([16, 16, 3])(x)

    model = hk.without_apply_rng(hk.transform(forward))
    params = jax.jit(model.init)(jax.random.key(0), X)

    def loss(params, x):
        return jnp.mean(jnp.sin(model.apply(params, x)) ** 2)

    stats = jax.jit(cg.value_and_grad_with_stats(loss))(params, X)[2]
    assert {"mlp", "mlp/linear_0", "mlp/linear_1", "mlp/linear_2"} <= set(stats)
    shapes = {n.name: n.shape for n in cg.list_names(loss, (params, X))}
    dummies = {f"mlp/~/linear_{i}": jnp.zeros(shapes[f"mlp/linear_{i}"]) for i in range(3)}

    def path_of(context):
        return context.module.module_name if context.method_name == "__call__" else None

    run = with_dummies(loss, dummies, hk.intercept_methods, path_of)
    for path, cotangent in jax.grad(run)(dummies, params, X).items():
        norm = stats[path.replace("~/", "")].norm
        np.testing.assert_allclose(norm, jnp.linalg.norm(cotangent), rtol=1e-6)


def test_statistics_are_those_of_what_is_added_to_the_output_of_an_equinox_module():
    model = eqx.nn.MLP(8, 3, 16, depth=2, key=jax.random.key(0))

    arrays, static = eqx.partition(model, eqx.is_array)

    def loss(arrays, x):
        model = jax.vmap(jax.vmap(eqx.combine(arrays, static)))
        return jnp.mean(jnp.sin(model(x)) ** 2)

    stats = jax.jit(cg.value_and_grad_with_stats(loss))(arrays, X)[2]
    assert set(stats) == {"eqx.nn.MLP", "eqx.nn.MLP/eqx.nn.Linear"}

    class Added(eqx.Module):
        layer: eqx.nn.Linear
        dummy: jax.Array

        def __call__(self, x, *, key=None):
            return self.layer(x, key=key) + self.dummy

    out = jax.grad(lambda y: jnp.mean(jnp.sin(y) ** 2))(jax.vmap(jax.vmap(model))(X))
    np.testing.assert_allclose(stats["eqx.nn.MLP"].norm, jnp.linalg.norm(out), rtol=1e-6)

    def added(dummies, x):
        layers = tuple(Added(*pair) for pair in zip(model.layers, dummies, strict=True))
        return jnp.mean(jnp.sin(eqx.tree_at(lambda m: m.layers, model, layers)(x)) ** 2)

    # One example, since a dummy is shared by all examples of a batch.
    one = X[0, 0]
    dummies = [jnp.zeros(layer.out_features) for layer in model.layers]
    expected = sum(jnp.sum(d**2) for d in jax.grad(added)(dummies, one))

    def of_one(arrays, x):
        return jnp.mean(jnp.sin(eqx.combine(arrays, static)(x)) ** 2)

    stats = cg.value_and_grad_with_stats(of_one)(arrays, one)[2]
    np.testing.assert_allclose(stats["eqx.nn.MLP/eqx.nn.Linear"].norm ** 2, expected, rtol=1e-6)
