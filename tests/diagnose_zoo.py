"""Healthy and sick programs as people write them, each with what a diagnosis has to say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

KEY = jax.random.key(0)
LOW = jnp.float16


def normal(*shape, seed=0, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), jnp.float32)


def orthogonal(size, seed=0):
    return jnp.asarray(np.linalg.qr(np.asarray(normal(size, size, seed=seed)))[0])


def cross_entropy(logits, labels):
    logs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], -1))


def of_flax(layer, steps):
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(nn.RNN(layer(nn))(x)[:, -1])

    x = normal(8, steps, 6)
    params = jax.jit(Model().init)(jax.random.key(1), x)
    return lambda params: cross_entropy(Model().apply(params, x), jnp.arange(8)), (params,)


def layers(count, size=8, scale=1.0, seed=0):
    return [scale * normal(size, size, seed=seed + i) / size**0.5 for i in range(count)]


def stack(activation, count, scale=1.0, size=8, skip=lambda x, y: y):
    """Layers one behind the other."""

    def loss(weights, x):
        for w in weights:
            x = skip(x, activation(x @ w))
        return jnp.mean((x - 1) ** 2)

    return loss, (layers(count, size, scale), normal(4, size, seed=99))


def scanned(step, start, *args, result=jnp.sum, **options):
    """A state that a step changes, given the parameters, the state and an element; at the end."""

    def loss(w, x=None):
        last, _ = jax.lax.scan(lambda h, x: (step(w, h, x), None), start, x, **options)
        return result(last)

    return loss, args


def recurrent(radius, steps=50, activation=lambda x: x, last=True, size=8):
    def loss(params, x):
        def step(h, x):
            h = activation(h @ params["rec"] + x @ params["in"])
            return h, h

        h, every = jax.lax.scan(step, jnp.zeros(size), x)
        return jnp.sum(h if last else every)

    params = {"rec": radius * orthogonal(size), "in": normal(3, size, seed=1)}
    return loss, (params, normal(steps, 3, seed=2, scale=0.1))


def gated(params, c, x):
    both = x @ params["in"] + c @ params["rec"]
    forget = jax.nn.sigmoid(both[:4] - 1)
    return forget * c + (1 - forget) * jnp.tanh(both[4:])


def discounted(factor, steps):
    step = lambda w, value, x: jnp.tanh(x @ w) + factor * value  # noqa: E731
    return scanned(step, 0.0, normal(3), normal(steps, 3), reverse=True)


def averages_of_adam(w, state, x):
    m, v = state
    return 0.5 * m + 0.5 * x * w, 0.6 * v + 0.4 * (x * w) ** 2


def transformer():
    def loss(params, x):
        def block(x, p):
            q, k, v = jnp.split(normalized(x) @ p["qkv"], 3, -1)
            mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
            scores = jnp.where(mask, q @ k.T / 8**0.5, -jnp.inf)
            x = x + jax.nn.softmax(scores) @ v
            return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

        return cross_entropy(jax.lax.scan(block, x, params)[0], jnp.arange(6))

    shapes = {"qkv": (6, 8, 24), "up": (6, 8, 16), "down": (6, 16, 8)}
    return loss, ({k: normal(*s, scale=0.3) for k, s in shapes.items()}, normal(6, 8))


def in_bfloat16(loss, args):
    """A loss of a model in bfloat16."""
    return lambda *args: loss(*args).astype(jnp.float32), jax.tree.map(
        lambda x: x.astype(jnp.bfloat16), args
    )


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def fitted(scale, dtype, loss):
    """A softmax of eight classes that is fitted."""
    eye = jnp.eye(8, dtype=dtype)
    return lambda w, x: loss(x @ w, jnp.arange(8)).astype(jnp.float32), (scale * eye, eye)


def of_probabilities(logits, labels):
    return -jnp.mean(jnp.log(jax.nn.softmax(logits)[jnp.arange(8), labels]).astype(jnp.float32))


def masked_attention(w, x, mask):
    scores = jnp.where(mask, x @ w @ x.T, -jnp.inf)
    return jnp.mean((jax.nn.softmax(scores) @ x) ** 2)


def residual(h, w):
    return h + 0.3 * jnp.tanh(h @ w)


def over_layers(layer, count):
    def loss(weights, x):
        return jnp.mean(jax.lax.scan(lambda h, w: (layer(h, w), None), x, weights)[0] ** 2)

    return loss, (jnp.stack(layers(count)), normal(4, 8))


def squares(x):
    return jnp.sum(jnp.square(jnp.stack(x) if isinstance(x, tuple) else x))


HEALTHY = {
    "lstm_fresh_over_20_steps": lambda: of_flax(lambda nn: nn.OptimizedLSTMCell(16), 20),
    "gru_fresh_over_50_steps": lambda: of_flax(lambda nn: nn.GRUCell(16), 50),
    "gated_by_hand": lambda: scanned(
        gated, jnp.zeros(4), {"in": normal(3, 8), "rec": normal(4, 8, seed=1, scale=0.1)},
        normal(20, 3),
    ),
    "unrolled_fixed_point": lambda: scanned(
        lambda p, z, _: jnp.tanh(z @ p["w"] + normal(8) @ p["u"]), jnp.zeros(8),
        {"w": 0.3 * orthogonal(8), "u": normal(8, 8)}, result=squares, length=60,
    ),
    "discounted_return_of_the_first_step": lambda: discounted(0.5, 60),
    "long_discounted_return": lambda: discounted(0.9, 1000),
    "moving_average": lambda: scanned(
        lambda w, m, x: 0.5 * m + 0.5 * jnp.tanh(x @ w), jnp.zeros(4), normal(3, 4), normal(80, 3)
    ),
    "two_averages_of_adam": lambda: scanned(
        averages_of_adam, (jnp.zeros(4), jnp.zeros(4)), normal(4), normal(60, 4),
        result=lambda s: jnp.sum(s[0] / jnp.sqrt(s[1] + 1e-3)),
    ),
    "residual_net_of_40_layers": lambda: stack(jnp.tanh, 40, 0.2, skip=lambda x, y: x + y),
    "relu_net_of_he": lambda: stack(jax.nn.relu, 20, 2**0.5),
    "scanned_residual_layers": lambda: over_layers(residual, 30),
    "transformer": transformer,
    "transformer_in_bfloat16": lambda: in_bfloat16(*transformer()),
    "fitted_softmax_of_a_float16_model": lambda: fitted(20, LOW, of_probabilities),
    "softmax_in_float16_whose_rest_is_one_rounding": lambda: fitted(17, LOW, cross_entropy),
    "masked_attention": lambda: (
        masked_attention, (normal(4, 4), normal(5, 4), jnp.tril(jnp.ones((5, 5), bool)))
    ),
    "recurrent_net_with_a_loss_at_each_step": lambda: recurrent(0.5, last=False),
    "recurrent_net_of_radius_1": lambda: recurrent(1.0),
}  # fmt: skip


def multiplied(factor, steps):
    return scanned(lambda w, h, x: w * h + x, jnp.zeros(3), jnp.float32(factor), normal(steps, 3))


def forgotten(h):
    return jnp.sum(jax.lax.scan(lambda h, _: (0.5 * h, None), h, length=50)[0])


def net_of_one_array(weights, x):
    for i in range(12):
        x = jax.nn.sigmoid(x @ weights[i])
    return jnp.mean((x - 1) ** 2)


def small_mean(x):
    return jnp.mean((x * 2).astype(jnp.float32)) * 1e-6


# Decays that leave a gradient to all leaves, those of the last steps.
DECAYS = {
    "spectral_radius_0_6": lambda: recurrent(0.6),
    "tanh_recurrent_net": lambda: recurrent(0.5, activation=jnp.tanh),
}


# Programs, the kind of the first finding, and its factor if it is known.
SICK = {
    "spectral_radius_1_5": (lambda: recurrent(1.5), "grows", 1.5),
    "threefold_recurrence_whose_gradient_overflows_in_the_sum": (
        lambda: multiplied(3.0, 80), "grows", 3.0
    ),
    "start_that_is_forgotten": (lambda: (forgotten, (jnp.ones(3),)), "shrinks", 0.5),
    "deep_sigmoid_net": (lambda: stack(jax.nn.sigmoid, 12), "shrinks", None),
    "deep_sigmoid_net_of_one_array": (
        lambda: (net_of_one_array, (jnp.stack(layers(12)), normal(4, 8, seed=99))),
        "shrinks", None,
    ),
    "scanned_layers_that_vanish": (
        lambda: over_layers(lambda h, w: jax.nn.sigmoid(h @ w), 20), "shrinks", None
    ),
    "mean_over_many_in_float16": (
        lambda: (small_mean, (jnp.ones(64, LOW),)), "underflow", None
    ),
}  # fmt: skip


def at_a_point(fun, *values):
    args = jnp.array(values)
    return lambda w: jnp.sum(fun(w * args)), (jnp.ones(len(values)),)


# Functions, and a point at which a value or a VJP goes wrong.
POINTS = {
    "division_by_a_zero_norm": ("value", lambda x: x / jnp.linalg.norm(x), 0.0, 0.0),
    "entropy_of_a_certain_choice": ("value", lambda x: -x * jnp.log(x), 1.0, 0.0),
}  # fmt: skip
SICK |= {
    name: (functools.partial(at_a_point, fun, *values), kind, None)
    for name, (kind, fun, *values) in POINTS.items()
}
