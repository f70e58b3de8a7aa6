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


def positive_recurrent_net():
    loss, (params, x) = recurrent(1.5, activation=jax.nn.relu)
    return loss, (params | {"rec": 2 * jnp.abs(orthogonal(8)), "in": jnp.abs(params["in"])}, abs(x))


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


def descent(target, w, _):
    slope = jax.grad(lambda w: jnp.sum((w - target * jnp.arange(1.0, 5.0)) ** 2) / 2)(w)
    return w - 0.5 * slope


def pendulum(params, state, _):
    angle, speed = state
    push = params["motor"] - params["damping"] * speed - jnp.sin(angle)
    return angle + 0.5 * speed, speed + 0.5 * push


def diffusion(w, x, t):
    beta, noise = t
    return (x - beta * jnp.tanh(x @ w)) / jnp.sqrt(1 - beta) * 0.95 + 0.01 * noise


def generalized_advantage():
    def loss(w, x, rewards, done):
        values = x @ w

        def step(total, t):
            value, after, reward, done = t
            delta = reward + 0.99 * after * (1 - done) - value
            total = delta + 0.99 * 0.5 * (1 - done) * total
            return total, total

        after = jnp.roll(values, -1)
        last, _ = jax.lax.scan(step, 0.0, (values, after, rewards, done), reverse=True)
        return last**2

    return loss, (normal(3), normal(50, 3), normal(50), jnp.zeros(50))


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


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def normalizing_flow():
    def loss(params, x):
        total = 0.0
        for p in params:
            a, b = jnp.split(x, 2)
            scale = jnp.tanh(a @ p)
            b, total = b * jnp.exp(scale) + a, total + scale.sum()
            x = jnp.concatenate([b, a])
        return 0.5 * jnp.sum(x**2) - total

    return loss, ([normal(4, 4, seed=i, scale=0.3) for i in range(8)], normal(8))


def fitted(scale, dtype, loss):
    """A softmax of eight classes that is fitted."""
    eye = jnp.eye(8, dtype=dtype)
    return lambda w, x: loss(x @ w, jnp.arange(8)).astype(jnp.float32), (scale * eye, eye)


def of_probabilities(logits, labels):
    return -jnp.mean(jnp.log(jax.nn.softmax(logits)[jnp.arange(8), labels]).astype(jnp.float32))


def masked_attention(w, x, mask):
    scores = jnp.where(mask, x @ w @ x.T, -jnp.inf)
    return jnp.mean((jax.nn.softmax(scores) @ x) ** 2)


def smoothed(w, x):
    target = 0.9 * jax.nn.one_hot(jnp.arange(4), 4) + 0.025
    return -jnp.mean(jnp.sum(target * jax.nn.log_softmax(x @ w), -1))


def twice_selected(of, kept):
    """A function of what is kept alone: a double `where`."""

    def loss(w, x):
        value = kept(x @ w)
        return jnp.sum(jnp.where(value > 0, of(jnp.where(value > 0, value, 1)), 0))

    return loss


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
    "narrow_lstm_over_20_steps": lambda: of_flax(lambda nn: nn.LSTMCell(4), 20),
    "gru_fresh_over_50_steps": lambda: of_flax(lambda nn: nn.GRUCell(16), 50),
    "gated_by_hand": lambda: scanned(
        gated, jnp.zeros(4), {"in": normal(3, 8), "rec": normal(4, 8, seed=1, scale=0.1)},
        normal(20, 3),
    ),
    "unrolled_fixed_point": lambda: scanned(
        lambda p, z, _: jnp.tanh(z @ p["w"] + normal(8) @ p["u"]), jnp.zeros(8),
        {"w": 0.3 * orthogonal(8), "u": normal(8, 8)}, result=squares, length=60,
    ),
    "babylonian_root": lambda: scanned(
        lambda a, y, _: (y + a * jnp.arange(1.0, 5.0) / y) / 2, jnp.arange(1.0, 5.0),
        jnp.float32(2.0), length=30,
    ),
    "gradient_descent_in_the_loop": lambda: scanned(
        descent, jnp.zeros(4), normal(4), result=squares, length=40
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
    "generalized_advantage": generalized_advantage,
    "weight_decay_loop": lambda: (
        lambda w, g: squares(jax.lax.scan(lambda v, g: (0.5 * v + 0.1 * g * w, None), w, g)[0]),
        (normal(4), normal(40, 4)),
    ),
    "low_pass_filter_of_a_signal": lambda: scanned(
        lambda gain, y, x: y + 0.6 * (gain * x - y), 0.0, jnp.float32(2.0), normal(40),
        result=squares,
    ),
    "residual_net_of_40_layers": lambda: stack(jnp.tanh, 40, 0.2, skip=lambda x, y: x + y),
    "residual_net_of_small_branches": lambda: stack(
        jax.nn.relu, 40, skip=lambda x, y: x + 1e-3 * y
    ),
    "skip_from_each_layer": lambda: stack(jnp.tanh, 30, 0.5, skip=lambda x, y: 0.9 * x + y),
    "relu_net_of_he": lambda: stack(jax.nn.relu, 20, 2**0.5),
    "tanh_net_of_lecun": lambda: stack(jnp.tanh, 10),
    "normalized_net": lambda: stack(lambda x: jax.nn.relu(normalized(x)), 12),
    "scanned_residual_layers": lambda: over_layers(residual, 30),
    "transformer": transformer,
    "normalizing_flow": normalizing_flow,
    "ode_steps": lambda: scanned(
        lambda w, x, _: x + 0.05 * jnp.tanh(x @ w), normal(4), normal(4, 4), result=squares,
        length=50,
    ),
    "damped_pendulum_with_a_motor": lambda: scanned(
        pendulum, (0.1, 0.0), {"motor": jnp.float32(0.5), "damping": jnp.float32(1.2)},
        result=squares, length=100,
    ),
    "fitted_softmax_in_float16": lambda: fitted(
        20, jnp.float32, lambda logits, labels: cross_entropy(logits.astype(LOW), labels)
    ),
    "fitted_softmax_of_a_float16_model": lambda: fitted(20, LOW, of_probabilities),
    "softmax_in_float16_whose_rest_is_one_rounding": lambda: fitted(17, LOW, cross_entropy),
    "masked_attention": lambda: (
        masked_attention, (normal(4, 4), normal(5, 4), jnp.tril(jnp.ones((5, 5), bool)))
    ),
    "label_smoothing": lambda: (smoothed, (normal(4, 4), normal(4, 4))),
    "diffusion_schedule": lambda: scanned(
        diffusion, normal(4), 0.1 * normal(4, 4), (jnp.linspace(1e-4, 0.2, 50), normal(50, 4)),
        result=squares,
    ),
    "logarithm_selected_away": lambda: (
        twice_selected(jnp.log, lambda x: jnp.maximum(x, 0)), (normal(4, 4), normal(4, 4))
    ),
    "norm_with_a_double_where": lambda: (
        twice_selected(jnp.sqrt, lambda x: jnp.sum(x**2, -1)), (normal(4, 4), jnp.zeros((2, 4)))
    ),
    "recurrent_net_with_a_loss_at_each_step": lambda: recurrent(0.5, last=False),
    "recurrent_net_of_radius_0_8": lambda: recurrent(0.8),
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


def small_steps(w, x):
    h = (x @ w) * LOW(1e-3)
    return 0.1 * jnp.mean((h * LOW(1e-3)).astype(jnp.float32))


def small_mean(x):
    return jnp.mean((x * 2).astype(jnp.float32)) * 1e-6


# Programs, the kind of the first finding, and its factor if it is known.
SICK = {
    "spectral_radius_1_5": (lambda: recurrent(1.5), "grows", 1.5),
    "spectral_radius_0_6": (lambda: recurrent(0.6), "shrinks", 0.6),
    "spectral_radius_0_6_over_20_steps": (lambda: recurrent(0.6, 20), "shrinks", 0.6),
    "spectral_radius_0_3": (lambda: recurrent(0.3), "shrinks", 0.3),
    "tanh_recurrent_net": (lambda: recurrent(0.5, activation=jnp.tanh), "shrinks", None),
    "sigmoid_recurrent_net": (
        lambda: recurrent(1.0, activation=jax.nn.sigmoid), "shrinks", None
    ),
    "relu_recurrent_net": (positive_recurrent_net, "grows", None),
    "recurrence_by_hand": (lambda: multiplied(2.0, 40), "grows", 2.0),
    "threefold_recurrence_whose_gradient_overflows_in_the_sum": (
        lambda: multiplied(3.0, 80), "grows", 3.0
    ),
    "start_that_is_forgotten": (lambda: (forgotten, (jnp.ones(3),)), "shrinks", 0.5),
    "deep_tanh_net": (lambda: stack(jnp.tanh, 20, 0.4), "shrinks", None),
    "deep_sigmoid_net": (lambda: stack(jax.nn.sigmoid, 12), "shrinks", None),
    "deep_sigmoid_net_of_one_array": (
        lambda: (net_of_one_array, (jnp.stack(layers(12)), normal(4, 8, seed=99))),
        "shrinks", None,
    ),
    "deep_linear_net": (lambda: stack(lambda x: x, 20, 0.4), "shrinks", None),
    "deep_net_of_large_weights": (lambda: stack(lambda x: x, 20, 2.5), "grows", None),
    "scanned_layers_that_vanish": (
        lambda: over_layers(lambda h, w: jax.nn.sigmoid(h @ w), 20), "shrinks", None
    ),
    "small_steps_in_float16": (
        lambda: (small_steps, (jnp.ones((8, 8), LOW), jnp.ones((4, 8), LOW))), "underflow", None
    ),
    "mean_over_many_in_float16": (
        lambda: (small_mean, (jnp.ones(64, LOW),)), "underflow", None
    ),
}  # fmt: skip


@jax.custom_vjp
def bad_rule(x):
    return x


bad_rule.defvjp(lambda x: (x, x), lambda x, g: (g / (x - x),))


def half_square(x):
    squares = x.astype(LOW) ** 2
    return (squares / squares.max()).astype(jnp.float32)


def at_a_point(fun, *values):
    args = jnp.array(values)
    return lambda w: jnp.sum(fun(w * args)), (jnp.ones(len(values)),)


# Functions, and a point at which a value or a VJP goes wrong.
POINTS = {
    "division_by_a_zero_norm": ("value", lambda x: x / jnp.linalg.norm(x), 0.0, 0.0),
    "logarithm_of_zero": ("value", jnp.log, 1.0, 0.0),
    "root_of_zero": ("vjp", jnp.sqrt, 1.0, 0.0),
    "angle_of_zero": ("vjp", lambda x: jnp.arctan2(x[0], x[1]), 0.0, 0.0),
    "one_where_is_missing": (
        "vjp", lambda x: jnp.where(x > 0, jnp.sqrt(x) * jnp.log(x), 0.0), 1.0, 0.0
    ),
    "overflow_in_exp": ("value", lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x)), 1.0, 100.0),
    "masked_throughout": (
        "value", lambda x: jax.nn.softmax(jnp.where(x > 1e9, x, -jnp.inf)), 1.0, 2.0
    ),
    "half_square": ("value", half_square, 1.0, 300.0),
    "power_at_zero": ("vjp", lambda x: x**0.5, 1.0, 0.0),
    "entropy_of_a_certain_choice": ("value", lambda x: -x * jnp.log(x), 1.0, 0.0),
    "standard_deviation_of_equal_numbers": ("vjp", jnp.std, 1.0, 1.0),
    "cosine_of_nothing": ("vjp", lambda x: jnp.arccos(jnp.clip(x, -1, 1)), 1.0, 0.5),
    "logit_of_one": ("value", lambda x: jnp.log(x / (1 - x)), 0.5, 1.0),
    "wrong_rule": ("vjp", bad_rule, 1.0, 2.0),
}  # fmt: skip
SICK |= {
    name: (functools.partial(at_a_point, fun, *values), kind, None)
    for name, (kind, fun, *values) in POINTS.items()
}
