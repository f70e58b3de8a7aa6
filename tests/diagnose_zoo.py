"""Healthy and sick programs as people write them, each with what a diagnosis has to say."""

import jax
import jax.numpy as jnp
import numpy as np

HEALTHY, SICK = {}, {}
KEY = jax.random.key(0)
LOW = jnp.float16


def healthy(fun):
    HEALTHY[fun.__name__] = fun
    return fun


def sick(*kinds, factor=None):
    def register(fun):
        SICK[fun.__name__] = fun, kinds, factor
        return fun

    return register


def normal(*shape, seed=0, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), jnp.float32)


def orthogonal(size, seed=0):
    return jnp.asarray(np.linalg.qr(np.asarray(normal(size, size, seed=seed)))[0])


def cross_entropy(logits, labels):
    logs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], -1))


def of_flax(layer, steps, width=16):
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(nn.RNN(layer(nn, width))(x)[:, -1])

    x = normal(8, steps, 6)
    params = jax.jit(Model().init)(jax.random.key(1), x)
    return lambda params: cross_entropy(Model().apply(params, x), jnp.arange(8)), (params,)


def layers(count, size=8, scale=1.0, seed=0):
    return [scale * normal(size, size, seed=seed + i) / size**0.5 for i in range(count)]


def stack(activation, count, scale=1.0, size=8, skip=None):
    def loss(weights, x):
        for w in weights:
            x = activation(x @ w) if skip is None else skip(x, activation(x @ w))
        return jnp.mean((x - 1) ** 2)

    return loss, (layers(count, size, scale), normal(4, size, seed=99))


def recurrent(radius, steps=50, activation=lambda x: x, last=True, size=8):
    def loss(params, x):
        def step(h, x):
            h = activation(h @ params["rec"] + x @ params["in"])
            return h, h

        h, every = jax.lax.scan(step, jnp.zeros(size), x)
        return jnp.sum(h if last else every)

    params = {"rec": radius * orthogonal(size), "in": normal(3, size, seed=1)}
    return loss, (params, normal(steps, 3, seed=2, scale=0.1))


@healthy
def lstm_fresh_over_20_steps():
    return of_flax(lambda nn, width: nn.OptimizedLSTMCell(width), 20)


@healthy
def narrow_lstm_over_20_steps():
    return of_flax(lambda nn, width: nn.LSTMCell(4), 20)


@healthy
def gru_fresh_over_50_steps():
    return of_flax(lambda nn, width: nn.GRUCell(width), 50)


@healthy
def gated_by_hand():
    def loss(params, x):
        def step(c, x):
            both = x @ params["in"] + c @ params["rec"]
            forget = jax.nn.sigmoid(both[:4] - 1)
            return forget * c + (1 - forget) * jnp.tanh(both[4:]), None

        return jnp.sum(jax.lax.scan(step, jnp.zeros(4), x)[0])

    params = {"in": normal(3, 8), "rec": normal(4, 8, seed=1, scale=0.1)}
    return loss, (params, normal(20, 3))


@healthy
def unrolled_fixed_point():
    def loss(params, x):
        step = lambda _, z: jnp.tanh(z @ params["w"] + x @ params["u"])  # noqa: E731
        return jnp.sum(jax.lax.fori_loop(0, 60, step, jnp.zeros(8)) ** 2)

    return loss, ({"w": 0.3 * orthogonal(8), "u": normal(8, 8)}, normal(8))


@healthy
def babylonian_root():
    def loss(a, x):
        y = jax.lax.scan(lambda y, _: ((y + a * x / y) / 2, None), x, length=30)[0]
        return jnp.sum(y)

    return loss, (jnp.float32(2.0), jnp.arange(1.0, 5.0))


@healthy
def gradient_descent_in_the_loop():
    def loss(target, x):
        def step(w, _):
            slope = jax.grad(lambda w: jnp.sum((w - target * x) ** 2) / 2)(w)
            return w - 0.5 * slope, None

        return jnp.sum(jax.lax.scan(step, jnp.zeros(4), length=40)[0] ** 2)

    return loss, (normal(4), jnp.arange(1.0, 5.0))


@healthy
def discounted_return_of_the_first_step():
    def loss(w, x):
        step = lambda value, r: (r + 0.5 * value, None)  # noqa: E731
        return jax.lax.scan(step, 0.0, jnp.tanh(x @ w), reverse=True)[0]

    return loss, (normal(3), normal(60, 3))


@healthy
def long_discounted_return():
    def loss(w, x):
        step = lambda value, r: (r + 0.9 * value, None)  # noqa: E731
        return jax.lax.scan(step, 0.0, jnp.tanh(x @ w), reverse=True)[0]

    return loss, (normal(3), normal(1000, 3))


@healthy
def moving_average():
    def loss(w, x):
        step = lambda m, x: (0.5 * m + 0.5 * jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, jnp.zeros(4), x)[0])

    return loss, (normal(3, 4), normal(80, 3))


@healthy
def two_averages_of_adam():
    def loss(w, x):
        def step(state, x):
            m, v = state
            g = x * w
            return (0.5 * m + 0.5 * g, 0.6 * v + 0.4 * g * g), None

        m, v = jax.lax.scan(step, (jnp.zeros(4), jnp.zeros(4)), x)[0]
        return jnp.sum(m / jnp.sqrt(v + 1e-3))

    return loss, (normal(4), normal(60, 4))


@healthy
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


@healthy
def weight_decay_loop():
    def loss(w, x):
        step = lambda v, g: (0.5 * v + 0.1 * g * w, None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, w, x)[0] ** 2)

    return loss, (normal(4), normal(40, 4))


@healthy
def low_pass_filter_of_a_signal():
    def loss(gain, x):
        step = lambda y, x: (y + 0.6 * (gain * x - y), None)  # noqa: E731
        return jax.lax.scan(step, 0.0, x)[0] ** 2

    return loss, (jnp.float32(2.0), normal(40))


@healthy
def residual_net_of_40_layers():
    return stack(jnp.tanh, 40, 0.2, skip=lambda x, y: x + y)


@healthy
def residual_net_of_small_branches():
    return stack(jax.nn.relu, 40, skip=lambda x, y: x + 1e-3 * y)


@healthy
def skip_from_each_layer():
    return stack(jnp.tanh, 30, 0.5, skip=lambda x, y: 0.9 * x + y)


@healthy
def relu_net_of_he():
    return stack(jax.nn.relu, 20, 2**0.5)


@healthy
def tanh_net_of_lecun():
    return stack(jnp.tanh, 10)


@healthy
def normalized_net():
    norm = lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)  # noqa: E731
    return stack(lambda x: jax.nn.relu(norm(x)), 12)


@healthy
def scanned_residual_layers():
    def loss(weights, x):
        step = lambda x, w: (x + 0.3 * jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(step, x, weights)[0] ** 2)

    return loss, (jnp.stack(layers(30)), normal(4, 8))


@healthy
def transformer():
    def loss(params, x):
        def block(x, p):
            norm = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
            q, k, v = jnp.split(norm @ p["qkv"], 3, -1)
            mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
            scores = jnp.where(mask, q @ k.T / 8**0.5, -jnp.inf)
            x = x + jax.nn.softmax(scores) @ v
            return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

        return cross_entropy(jax.lax.scan(block, x, params)[0], jnp.arange(6))

    shapes = {"qkv": (6, 8, 24), "up": (6, 8, 16), "down": (6, 16, 8)}
    return loss, ({k: normal(*s, scale=0.3) for k, s in shapes.items()}, normal(6, 8))


@healthy
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


@healthy
def ode_steps():
    def loss(w, x):
        step = lambda x, _: (x + 0.05 * jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x, length=50)[0] ** 2)

    return loss, (normal(4, 4), normal(4))


@healthy
def damped_pendulum_with_a_motor():
    def loss(params, start):
        def step(state, _):
            angle, speed = state
            push = params["motor"] - params["damping"] * speed - jnp.sin(angle)
            return (angle + 0.5 * speed, speed + 0.5 * push), None

        return jnp.sum(jnp.stack(jax.lax.scan(step, start, length=100)[0]) ** 2)

    return loss, ({"motor": jnp.float32(0.5), "damping": jnp.float32(1.2)}, (0.1, 0.0))


@healthy
def fitted_softmax_in_float16():
    def loss(w, x, labels):
        return cross_entropy((x @ w).astype(LOW), labels).astype(jnp.float32)

    return loss, (20 * jnp.eye(8), jnp.eye(8), jnp.arange(8))


@healthy
def fitted_softmax_of_a_float16_model():
    def loss(w, x, labels):
        return -jnp.mean(jnp.log(jax.nn.softmax(x @ w)[jnp.arange(8), labels]).astype(jnp.float32))

    return loss, (20 * jnp.eye(8, dtype=LOW), jnp.eye(8, dtype=LOW), jnp.arange(8))


@healthy
def softmax_in_float16_whose_rest_is_one_rounding():
    def loss(w, x, labels):
        return cross_entropy(x @ w, labels).astype(jnp.float32)

    return loss, (17 * jnp.eye(8, dtype=LOW), jnp.eye(8, dtype=LOW), jnp.arange(8))


@healthy
def masked_attention():
    def loss(w, x, mask):
        scores = jnp.where(mask, x @ w @ x.T, -jnp.inf)
        return jnp.mean((jax.nn.softmax(scores) @ x) ** 2)

    return loss, (normal(4, 4), normal(5, 4), jnp.tril(jnp.ones((5, 5), bool)))


@healthy
def label_smoothing():
    def loss(w, x):
        target = 0.9 * jax.nn.one_hot(jnp.arange(4), 4) + 0.025
        return -jnp.mean(jnp.sum(target * jax.nn.log_softmax(x @ w), -1))

    return loss, (normal(4, 4), normal(4, 4))


@healthy
def diffusion_schedule():
    def loss(w, x, noise):
        beta = jnp.linspace(1e-4, 0.2, 50)

        def step(x, t):
            beta, noise = t
            guess = jnp.tanh(x @ w)
            return (x - beta * guess) / jnp.sqrt(1 - beta) * 0.95 + 0.01 * noise, None

        return jnp.mean(jax.lax.scan(step, x, (beta, noise))[0] ** 2)

    return loss, (0.1 * normal(4, 4), normal(4), normal(50, 4))


@healthy
def logarithm_selected_away():
    def loss(w, x):
        p = jnp.maximum(x @ w, 0)
        return jnp.sum(jnp.where(p > 0, jnp.log(jnp.where(p > 0, p, 1)), 0))

    return loss, (normal(4, 4), normal(4, 4))


@healthy
def norm_with_a_double_where():
    def loss(w, x):
        squares = jnp.sum((x @ w) ** 2, -1)
        return jnp.sum(jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0))

    return loss, (normal(4, 4), jnp.zeros((2, 4)))


@healthy
def recurrent_net_with_a_loss_at_each_step():
    return recurrent(0.5, last=False)


@sick("grows", factor=1.5)
def spectral_radius_1_5():
    return recurrent(1.5)


@sick("shrinks", factor=0.6)
def spectral_radius_0_6():
    return recurrent(0.6)


@sick("shrinks", factor=0.6)
def spectral_radius_0_6_over_20_steps():
    return recurrent(0.6, 20)


@sick("shrinks", factor=0.3)
def spectral_radius_0_3():
    return recurrent(0.3)


@sick("shrinks")
def tanh_recurrent_net():
    return recurrent(0.5, activation=jnp.tanh)


@sick("shrinks")
def sigmoid_recurrent_net():
    return recurrent(1.0, activation=jax.nn.sigmoid)


@sick("grows")
def relu_recurrent_net():
    loss, (params, x) = recurrent(1.5, activation=jax.nn.relu)
    return loss, (params | {"rec": 2 * jnp.abs(orthogonal(8)), "in": jnp.abs(params["in"])}, abs(x))


@sick("grows", factor=2.0)
def recurrence_by_hand():
    def loss(w, x):
        h = jax.lax.scan(lambda h, x: (w * h + x, None), jnp.zeros(3), x)[0]
        return h.sum()

    return loss, (jnp.float32(2.0), normal(40, 3))


@sick("grows", factor=3.0)
def threefold_recurrence_whose_gradient_overflows_in_the_sum():
    def loss(w, x):
        return jax.lax.scan(lambda h, x: (w * h + x, None), jnp.zeros(3), x)[0].sum()

    return loss, (jnp.float32(3.0), normal(80, 3))


@sick("shrinks", factor=0.5)
def start_that_is_forgotten():
    return lambda h: jnp.sum(jax.lax.scan(lambda h, _: (0.5 * h, None), h, length=50)[0]), (
        jnp.ones(3),
    )


@sick("shrinks")
def deep_tanh_net():
    return stack(jnp.tanh, 20, 0.4)


@sick("shrinks")
def deep_sigmoid_net():
    return stack(jax.nn.sigmoid, 12)


@sick("shrinks")
def deep_sigmoid_net_of_one_array():
    def loss(weights, x):
        for i in range(12):
            x = jax.nn.sigmoid(x @ weights[i])
        return jnp.mean((x - 1) ** 2)

    return loss, (jnp.stack(layers(12)), normal(4, 8, seed=99))


@sick("shrinks")
def deep_linear_net():
    return stack(lambda x: x, 20, 0.4)


@sick("grows")
def deep_net_of_large_weights():
    return stack(lambda x: x, 20, 2.5)


@sick("shrinks")
def scanned_layers_that_vanish():
    def loss(weights, x):
        step = lambda x, w: (jax.nn.sigmoid(x @ w), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(step, x, weights)[0] ** 2)

    return loss, (jnp.stack(layers(20)), normal(4, 8))


@sick("underflow")
def small_steps_in_float16():
    def loss(w, x):
        h = (x @ w) * LOW(1e-3)
        return 0.1 * jnp.mean((h * LOW(1e-3)).astype(jnp.float32))

    return loss, (jnp.ones((8, 8), LOW), jnp.ones((4, 8), LOW))


@sick("underflow")
def mean_over_many_in_float16():
    return lambda x: jnp.mean((x * 2).astype(jnp.float32)) * 1e-6, (jnp.ones(64, LOW),)


def point(kind, fun, *values):
    register = sick(kind)
    args = jnp.array(values)
    entry = lambda: (lambda w: jnp.sum(fun(w * args)), (jnp.ones(len(values)),))  # noqa: E731
    entry.__name__ = fun.__name__
    register(entry)
    return fun


def division_by_a_zero_norm(x):
    return x / jnp.linalg.norm(x)


def logarithm_of_zero(x):
    return jnp.log(x)


def root_of_zero(x):
    return jnp.sqrt(x)


def angle_of_zero(x):
    return jnp.arctan2(x[0], x[1])


def one_where_is_missing(x):
    return jnp.where(x > 0, jnp.sqrt(x) * jnp.log(x), 0.0)


def overflow_in_exp(x):
    return jnp.exp(x) / jnp.sum(jnp.exp(x))


def masked_throughout(x):
    return jax.nn.softmax(jnp.where(x > 1e9, x, -jnp.inf))


def half_square(x):
    squares = x.astype(LOW) ** 2
    return (squares / squares.max()).astype(jnp.float32)


def power_at_zero(x):
    return x**0.5


def entropy_of_a_certain_choice(x):
    return -x * jnp.log(x)


def standard_deviation_of_equal_numbers(x):
    return jnp.std(x)


def cosine_of_nothing(x):
    return jnp.arccos(jnp.clip(x, -1, 1))


def logit_of_one(x):
    return jnp.log(x / (1 - x))


@jax.custom_vjp
def bad_rule(x):
    return x


bad_rule.defvjp(lambda x: (x, x), lambda x, g: (g / (x - x),))


def wrong_rule(x):
    return bad_rule(x)


POINTS = [
    ("value", division_by_a_zero_norm, 0.0, 0.0),
    ("value", logarithm_of_zero, 1.0, 0.0),
    ("vjp", root_of_zero, 1.0, 0.0),
    ("vjp", angle_of_zero, 0.0, 0.0),
    ("vjp", one_where_is_missing, 1.0, 0.0),
    ("value", overflow_in_exp, 1.0, 100.0),
    ("value", masked_throughout, 1.0, 2.0),
    ("value", half_square, 1.0, 300.0),
    ("vjp", power_at_zero, 1.0, 0.0),
    ("value", entropy_of_a_certain_choice, 1.0, 0.0),
    ("vjp", standard_deviation_of_equal_numbers, 1.0, 1.0),
    ("vjp", cosine_of_nothing, 1.0, 0.5),
    ("value", logit_of_one, 0.5, 1.0),
    ("vjp", wrong_rule, 1.0, 2.0),
]
for _kind, _fun, *_values in POINTS:
    point(_kind, _fun, *_values)
