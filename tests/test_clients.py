"""Trainings as users write them: each falls, is clipped, and has the curve that it has with optax.

One with differential privacy, one whose parameters are sharded.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.helpers import RELEASED, all_reduces, assert_close, assert_same

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.exhaustive]

# The compiler of the tests, which takes a third of the time, and that of a user: what that does to
# the bits is in tests/test_bits.py.
each_compiler = pytest.mark.parametrize(
    "options", [None, pytest.param(RELEASED, marks=pytest.mark.product)], ids=["fast", "users"]
)


class Training(NamedTuple):
    """What a training leaves behind."""

    curve: jax.Array
    params: Any
    state: Any  # of the optimizer, with what else was counted


def remaining(curve, steps=10):
    """The end of a loss curve as a part of its beginning."""
    return curve[-steps:].mean() / curve[:steps].mean()


def loop(step, state, steps, options):
    """A Python loop around a compiled step ``(state, i) -> (state, loss)``."""
    step, losses = jax.jit(step, compiler_options=options), []
    for i in range(steps):
        state, loss = step(state, jnp.int32(i))
        losses.append(loss)
    return state, jnp.stack(losses)


# DP-SGD


def labelled(i):
    x = jax.random.normal(jax.random.key(i), (64, 8))
    return x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype(jnp.float32)


def classifier():
    keys = jax.random.split(jax.random.key(0))
    return {
        "in": jax.random.normal(keys[0], (8, 32)) / 8**0.5,
        "out": jax.random.normal(keys[1], (32,)) / 32**0.5,
    }


def one_loss(params, example):
    x, label = example
    return optax.sigmoid_binary_cross_entropy(jnp.tanh(x @ params["in"]) @ params["out"], label)


def private(rate, max_norm, noise, steps, options):
    """Each example's gradient clipped, the sum made noisy, and then the mean."""
    rule = cg.ClipByGlobalNorm(max_norm)
    per_example = cg.clip_per_example(one_loss, rule, reduce="sum", microbatch=16)

    def step(carry, i):
        params, key, clipped = carry
        total, grads, stats = per_example(params, labelled(i))
        key, *keys = jax.random.split(key, 3)
        leaves, structure = jax.tree.flatten(grads)
        noisy = [
            g + max_norm * noise * jax.random.normal(k, g.shape, g.dtype)
            for g, k in zip(leaves, keys, strict=True)
        ]
        grads = jax.tree.unflatten(structure, noisy)
        params = jax.tree.map(lambda p, g: p - rate * g / 64, params, grads)
        return (params, key, clipped + stats.clipped.mean()), total / 64

    (params, _, clipped), losses = loop(
        step, (classifier(), jax.random.key(7), 0.0), steps, options
    )
    return Training(losses, params, clipped / steps)


def private_by_optax(rate, max_norm, noise, steps, options):
    aggregate = optax.contrib.differentially_private_aggregate
    tx = optax.chain(aggregate(max_norm, noise, jax.random.key(7)), optax.sgd(rate))

    def step(carry, i):
        params, state = carry
        losses, grads = jax.vmap(jax.value_and_grad(one_loss), (None, 0))(params, labelled(i))
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), losses.mean()

    (params, state), losses = loop(step, (classifier(), tx.init(classifier())), steps, options)
    return Training(losses, params, state)


@each_compiler
def test_dp_sgd(options):
    setting = 1.0, 0.3, 0.5, 100, options
    ours, theirs = private(*setting), private_by_optax(*setting)
    assert_close((ours.curve, ours.params), (theirs.curve, theirs.params), rtol=1e-4, atol=1e-6)
    assert remaining(ours.curve) < 0.9
    assert 0.2 < ours.state < 0.9  # of the examples are clipped


# parameters of NNX that are sharded over eight devices


class Perceptron(nnx.Module):
    """Its parameters, and so its gradients, are spread over the devices."""

    def __init__(self, rngs):
        init, spread = nnx.initializers.lecun_normal(), nnx.with_partitioning
        kernel, bias = spread(init, ("data", None)), spread(nnx.initializers.zeros, ("data",))
        layer = functools.partial(nnx.Linear, kernel_init=kernel, bias_init=bias, rngs=rngs)
        self.first, self.second, self.last = layer(16, 64), layer(64, 64), layer(64, 8)

    def __call__(self, x):
        return self.last(nnx.gelu(self.second(nnx.gelu(self.first(x)))))


def teacher(i):
    x = jax.random.normal(jax.random.key(i), (64, 16))
    return x, jnp.sin(2 * x[:, :8]) + x[:, 8:]


def fsdp(clip, steps=60):
    """A training by train_step, its metrics, and the program of its step."""
    graph, params = nnx.split(Perceptron(nnx.Rngs(0)))

    def loss(params, batch):
        x, y = batch
        return jnp.mean((nnx.merge(graph, params)(x) - y) ** 2)

    step = cg.train_step(loss, optax.chain(clip, optax.adam(1e-2)))
    state, history = step.init(params), []
    over = NamedSharding(jax.sharding.get_mesh(), P("data"))
    update = step.update.lower(state, jax.device_put(teacher(0), over)).compile()
    for i in range(steps):
        state, metrics = update(state, jax.device_put(teacher(i), over))
        history.append(metrics)
    return state, jax.tree.map(lambda *x: jnp.stack(x), *history), update


def mesh_of(devices):
    return jax.set_mesh(jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,)))


def test_nnx_with_parameters_over_eight_devices():
    ours, theirs = cg.clip_by_global_norm(0.5), optax.clip_by_global_norm(0.5)
    with mesh_of(8):
        state, metrics, program = fsdp(ours)
        their_state, their_metrics, their_program = fsdp(theirs)
    assert_same(metrics["loss"], their_metrics["loss"])
    assert_same(state.params, their_state.params)
    with mesh_of(1):
        assert_close(metrics["loss"], fsdp(ours)[1]["loss"], rtol=1e-4)
    assert remaining(metrics["loss"]) < 0.5
    clipped = metrics["clipped_norm"] < metrics["grad_norm"]
    assert 0.2 < clipped.mean() < 1 and metrics["clipped_norm"].max() < 0.5 * (1 + 4e-7)
    kernels = [x for x in jax.tree.leaves(state) if x.ndim == 2]
    assert len(kernels) == 9  # those of the model and of both moments of adam
    assert {x.sharding.spec for x in kernels} == {P("data")}
    # What gradients that are not finite take is a branch beside it.
    entry = program.as_text().partition("ENTRY ")[2]
    assert entry.count(" all-reduce(") == all_reduces(their_program)
