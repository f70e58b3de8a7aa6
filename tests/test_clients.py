"""Trainings as users write them: each falls, is clipped, and has the curve that it has with optax.

One for each kind of trainer: a policy that is trained in one scan, recurrent models of three
libraries, parameters that are sharded, learning to learn, differential privacy.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
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


def clips_of(training):
    """The number of steps at which the gradient clip acted."""
    return int(optax.tree.get(training.state, "clipped_count"))


def assert_like_optax(train, max_norm, options):
    """The training with our clip, whose curve is that with optax's, bit for bit.

    So are the parameters, as a user's compiler makes them; with the options of the tests those of
    PPO differ by 5e-5 at the end in JAX 0.12.
    """
    ours = train(cg.clip_by_global_norm(max_norm, stats=True), options)
    theirs = train(optax.clip_by_global_norm(max_norm), options)
    assert_same(ours.curve, theirs.curve)
    if options is RELEASED:
        assert_same(ours.params, theirs.params)
    return ours


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


# PPO, all of whose training is one program


class ActorCritic(nn.Module):
    """Logits of two actions, and the value of the state."""

    @nn.compact
    def __call__(self, x):
        hidden = functools.partial(nn.Dense, 32, kernel_init=nn.initializers.orthogonal(2**0.5))
        small = nn.initializers.orthogonal(0.01)
        logits = nn.Dense(2, kernel_init=small)(nn.tanh(hidden()(x)))
        return logits, nn.Dense(1)(nn.tanh(hidden()(x)))[..., 0]


class Transition(NamedTuple):
    """One step of all environments."""

    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    fell: jax.Array


def cart_pole(state, push, key):
    """A pole on a cart that is pushed left or right; it starts again where it fell."""
    x, v, angle, speed = state
    force = jnp.where(push == 1, 10.0, -10.0) + 0.05 * speed**2 * jnp.sin(angle)
    turn = 9.8 * jnp.sin(angle) - jnp.cos(angle) * force / 1.1
    turn = turn / (0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1))
    pull = (force - 0.05 * turn * jnp.cos(angle)) / 1.1
    state = state + 0.02 * jnp.stack([v, pull, speed, turn])
    fell = (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > 0.21)
    return jnp.where(fell, jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05), state), fell


def play(params, states, key, length):
    """A rollout of all environments, and the states at its end."""

    def step(states, key):
        keys = jax.random.split(key, len(states) + 1)
        logits, value = ActorCritic().apply(params, states)
        action = jax.random.categorical(keys[0], logits)
        log_prob = jax.nn.log_softmax(logits)[jnp.arange(len(states)), action]
        after, fell = jax.vmap(cart_pole)(states, action, keys[1:])
        return after, Transition(states, action, log_prob, value, fell)

    return jax.lax.scan(step, states, jax.random.split(key, length))


def advantages(played, last):
    """By generalized advantage estimation, with a reward of 0.1 for each step."""

    def step(carry, now):
        following, total = carry
        goes_on = 1.0 - now.fell
        delta = 0.1 + 0.99 * following * goes_on - now.value
        total = delta + 0.99 * 0.95 * goes_on * total
        return (now.value, total), total

    return jax.lax.scan(step, (last, jnp.zeros_like(last)), played, reverse=True)[1]


def ppo_loss(params, batch):
    played, advantage = batch
    logits, value = ActorCritic().apply(params, played.observation)
    log_probs = jax.nn.log_softmax(logits)
    ratio = jnp.exp(log_probs[jnp.arange(len(value)), played.action] - played.log_prob)
    unit = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = jnp.minimum(ratio * unit, jnp.clip(ratio, 0.8, 1.2) * unit).mean()
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1).mean()
    return 0.5 * jnp.mean((value - played.value - advantage) ** 2) - gain - 0.01 * entropy


def ppo_update(carry, key):
    """A rollout, then four passes over it in four minibatches each."""
    state, environments = carry
    for_play, *for_passes = jax.random.split(key, 5)
    environments, played = play(state.params, environments, for_play, 64)
    last = ActorCritic().apply(state.params, environments)[1]
    data = (played, advantages(played, last))
    data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)

    def minibatch(state, indices):
        batch = jax.tree.map(lambda x: x[indices], data)
        return state.apply_gradients(grads=jax.grad(ppo_loss)(state.params, batch)), None

    def one_pass(state, key):
        indices = jax.random.permutation(key, data[1].size).reshape(4, -1)
        return jax.lax.scan(minibatch, state, indices)

    state, _ = jax.lax.scan(one_pass, state, jnp.stack(for_passes))
    return (state, environments), played.fell.mean()


def ppo(clip, options, updates):
    """The curve is how often the pole falls."""

    @functools.partial(jax.jit, compiler_options=options)
    def train(key):
        params = ActorCritic().init(key, jnp.zeros((1, 4)))
        tx = optax.chain(clip, optax.adam(2.5e-3))
        state = TrainState.create(apply_fn=None, params=params, tx=tx)
        keys = jax.random.split(key, updates)
        (state, _), fell = jax.lax.scan(ppo_update, (state, jnp.zeros((16, 4))), keys)
        return Training(fell, state.params, state.opt_state)

    return train(jax.random.key(0))


@pytest.mark.ci()
@pytest.mark.parametrize(
    "updates, part, options",
    [(15, 0.6, None), (100, 0.1, RELEASED)],
    ids=["short", "long"],
)
def test_ppo_in_one_scan(updates, part, options):
    trained = assert_like_optax(functools.partial(ppo, updates=updates), 1.0, options)
    assert remaining(trained.curve, 3) < part
    assert 0 < clips_of(trained) < 16 * updates


# a recurrent model of Equinox, whose cell is clipped where it is written


class Cell(eqx.Module):
    """An RNN whose gradient explodes without the clip."""

    into: eqx.nn.Linear
    back: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.into = eqx.nn.Linear(2, 32, key=keys[0])
        back = eqx.nn.Linear(32, 32, use_bias=False, key=keys[1])
        self.back = eqx.tree_at(lambda layer: layer.weight, back, 4 * back.weight)

    @cg.error_clip({"h": cg.ErrorClipByValue(0.003)})
    def __call__(self, h, x):
        return jnp.tanh(self.into(x) + self.back(h))


class Adder(eqx.Module):
    """The sum of what the first input was at the last three steps, squashed by tanh."""

    cell: Cell
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.cell, self.head = Cell(keys[0]), eqx.nn.Linear(32, 1, key=keys[1])

    def __call__(self, xs):
        h, _ = jax.lax.scan(lambda h, x: (self.cell(h, x), None), jnp.zeros(32), xs)
        return self.head(h)[0]


def numbers(key):
    xs = jax.random.normal(key, (32, 30, 2))
    return xs, jnp.tanh(xs[:, -3:, 0].sum(axis=1))


def adder_loss(model, batch):
    return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)


def equinox_rnn(clip, options):
    arrays, static = eqx.partition(Adder(jax.random.key(0)), eqx.is_array)
    tx = optax.chain(clip, optax.adam(3e-3))

    def step(carry, i):
        arrays, state = carry
        model, batch = eqx.combine(arrays, static), numbers(jax.random.key(i))
        loss, grads = eqx.filter_value_and_grad(adder_loss)(model, batch)
        updates, state = tx.update(grads, state, arrays)
        return (eqx.apply_updates(arrays, updates), state), loss

    (arrays, state), losses = loop(step, (arrays, tx.init(arrays)), 100, options)
    return Training(losses, arrays, state)


@each_compiler
def test_an_equinox_rnn_with_a_clip_in_its_cell(monkeypatch, options):
    trained = assert_like_optax(equinox_rnn, 1.0, options)
    assert remaining(trained.curve) < 0.5
    assert 20 < clips_of(trained) < 100
    model, batch = Adder(jax.random.key(0)), numbers(jax.random.key(0))
    clipped = cg.global_norm(eqx.filter_grad(adder_loss)(model, batch))
    monkeypatch.setattr(Cell, "__call__", Cell.__call__.__wrapped__)
    assert cg.global_norm(eqx.filter_grad(adder_loss)(model, batch)) > 10 * clipped


# an LSTM of Haiku, clipped by the path of a module


def lstm(waves):
    core = hk.LSTM(16)
    out, _ = hk.dynamic_unroll(core, waves, core.initial_state(waves.shape[1]))
    return hk.Linear(1)(out)


LSTM = hk.without_apply_rng(hk.transform(lstm))


def sines(key):
    """Of shape (time, batch, 1), as Haiku's core modules take them."""
    phases = jax.random.uniform(key, (16,), maxval=2 * jnp.pi)
    return jnp.sin(phases + jnp.arange(33)[:, None] * 0.5)[..., None]


def next_number_loss(params, waves):
    return jnp.mean(jnp.sum((LSTM.apply(params, waves[:-1]) - waves[1:]) ** 2, axis=0))


def haiku_lstm(clip, options):
    params = jax.jit(LSTM.init)(jax.random.key(0), sines(jax.random.key(0)))
    tx = optax.chain(clip, optax.adam(1e-2))
    rules = {"**/lstm/linear": cg.ErrorClipByValue(0.02)}
    watched = cg.value_and_grad_with_stats(next_number_loss, rules=rules, watch=())

    def step(carry, i):
        params, state, clipped = carry
        loss, grads, stats = watched(params, sines(jax.random.key(i)))
        updates, state = tx.update(grads, state, params)
        (at_gates,) = stats.values()
        return (optax.apply_updates(params, updates), state, clipped + at_gates.clipped), loss

    (params, *states), losses = loop(step, (params, tx.init(params), jnp.zeros(32)), 60, options)
    return Training(losses, params, states)


@each_compiler
def test_a_haiku_lstm_with_a_clip_by_path(options):
    trained = assert_like_optax(haiku_lstm, 2.0, options)
    assert remaining(trained.curve) < 0.2
    assert 0 < clips_of(trained) < 60
    at_each_step = trained.state[1]
    assert at_each_step.shape == (32,)
    assert at_each_step[:5].min() > 15 > at_each_step[5:].max()


# a seq2seq model of Linen, trained by train_step


class Seq2Seq(nn.Module):
    """Reads a sequence of digits and says it backwards, with the last digit that it should say."""

    @nn.compact
    def __call__(self, digits, said):
        embed = nn.Embed(11, 16)
        reader = nn.RNN(nn.GRUCell(32), return_carry=True, name="encoder")
        speaker = nn.RNN(nn.GRUCell(32), name="decoder")
        return nn.Dense(10)(speaker(embed(said), initial_carry=reader(embed(digits))[0]))


def seq2seq_loss(params, digits):
    backwards = digits[:, ::-1]
    said = jnp.pad(backwards[:, :-1], ((0, 0), (1, 0)), constant_values=10)
    logits = Seq2Seq().apply(params, digits, said)
    return optax.softmax_cross_entropy_with_integer_labels(logits, backwards).mean()


def digits(i):
    return jax.random.randint(jax.random.key(i), (64, 4), 0, 10)


def seq2seq(clip, options):
    params = jax.jit(Seq2Seq().init)(jax.random.key(0), digits(0), digits(0))
    rules = {"Seq2Seq/decoder/*/*": cg.ErrorClipByValue(1e-3)}
    tx = optax.chain(clip, optax.adam(2e-2))
    step = cg.train_step(seq2seq_loss, tx, error_clip=rules)
    state, history = step.init(params), []
    update = step.update.lower(state, digits(0)).compile(compiler_options=options)
    for i in range(100):
        state, metrics = update(state, digits(i))
        history.append(metrics)
    curve = jnp.stack([metrics["loss"] for metrics in history])
    return Training(curve, state.params, (state.opt_state, history))


@each_compiler
def test_a_linen_seq2seq_with_clips_by_path(options):
    trained = assert_like_optax(seq2seq, 0.2, options)
    for metrics in trained.state[1]:
        (stats,) = metrics["error_clip"].values()
        assert stats.norm.shape == (4,) and 0 < stats.fraction.min() <= stats.fraction.max() < 1
    assert remaining(trained.curve) < 0.5
    assert 0 < clips_of(trained) < 100


# MAML, which differentiates through the inner clip


def sine_tasks(key):
    """Of each task the examples to learn from, and others to test it by."""
    amplitude, phase, x = jax.random.split(key, 3)
    x = jax.random.uniform(x, (16, 20, 1), minval=-3.0, maxval=3.0)
    amplitude = jax.random.uniform(amplitude, (16, 1, 1), minval=0.5, maxval=4.0)
    y = amplitude * jnp.sin(x + jax.random.uniform(phase, (16, 1, 1), maxval=3.0))
    return (x[:, :10], y[:, :10]), (x[:, 10:], y[:, 10:])


def regressor(key):
    keys = jax.random.split(key)
    return {
        "in": jax.random.normal(keys[0], (1, 40)),
        "bias": jnp.zeros(40),
        "out": jax.random.normal(keys[1], (40, 1)) / 40**0.5,
    }


def regression_loss(params, examples):
    x, y = examples
    return jnp.mean((jnp.tanh(x @ params["in"] + params["bias"]) @ params["out"] - y) ** 2)


def adapted(inner, params, examples):
    state = inner.init(params)
    for _ in range(3):
        grads = jax.grad(regression_loss)(params, examples)
        updates, state = inner.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def meta_loss(inner, params, tasks):
    def of_one(learnt, tested):
        return regression_loss(adapted(inner, params, learnt), tested)

    return jax.vmap(of_one)(*tasks).mean()


def maml(clip, options, inner_clip=None):
    inner = optax.chain(inner_clip or cg.clip_by_global_norm(2.0), optax.sgd(0.05))
    params, tx = regressor(jax.random.key(0)), optax.chain(clip, optax.adam(1e-2))

    def step(carry, i):
        params, state = carry
        tasks = sine_tasks(jax.random.key(i))
        loss, grads = jax.value_and_grad(functools.partial(meta_loss, inner))(params, tasks)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    (params, state), losses = loop(step, (params, tx.init(params)), 100, options)
    return Training(losses, params, state)


@each_compiler
def test_maml_through_the_inner_update(options):
    trained = assert_like_optax(maml, 1.0, options)
    assert remaining(trained.curve) < 0.7
    assert 0 < clips_of(trained) <= 100
    theirs = maml(optax.clip_by_global_norm(1.0), options, optax.clip_by_global_norm(2.0))
    np.testing.assert_allclose(trained.curve, theirs.curve, rtol=1e-4)


def test_a_task_whose_gradient_is_zero_does_not_harm_the_others_of_maml():
    inner = optax.chain(cg.clip_by_global_norm(2.0), optax.sgd(0.05))
    meta_grad = jax.jit(jax.grad(functools.partial(meta_loss, inner)))
    params, tasks = regressor(jax.random.key(0)), sine_tasks(jax.random.key(0))
    padded = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros((16, *x.shape[1:]))]), tasks)
    twice = jax.tree.map(lambda g: 2 * g, meta_grad(params, padded))
    assert_close(twice, meta_grad(params, tasks), rtol=1e-5, atol=1e-6)


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
