"""Sick and healthy programs as people write them, each with what a diagnosis has to say.

The line of a finding is the one with ``# here``. Those that go wrong by a number are in
`diagnose_numbers`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.helpers import array, line_of

LOW = jnp.float16
FILE = "tests/diagnose/diagnose_zoo.py"  # as findings name it


def kinds(diagnosis):
    return [finding.kind for finding in diagnosis.findings]


@dataclasses.dataclass(frozen=True)
class Sick:
    """A program, and its first finding.

    Attributes:
      loss: the program.
      args: the arguments for which it is sick.
      expected: attributes of the finding.
      says: parts of the message.
      never: what is not in the message.
      others: the kinds of the findings behind the first, or None for any.
      good: arguments for which it is healthy.
    """

    loss: Callable
    args: tuple
    expected: dict[str, Any]
    says: tuple[str, ...]
    never: tuple[str, ...]
    others: tuple[str, ...] | None
    good: tuple | None

    def check(self) -> None:
        """Diagnoses the program."""
        diagnosis = cg.diagnose(self.loss, self.args)
        assert diagnosis.findings, str(diagnosis)
        first, *behind = diagnosis.findings
        assert {name: getattr(first, name) for name in self.expected} == self.expected, str(
            diagnosis
        )
        assert self.others in (None, tuple(finding.kind for finding in behind)), str(diagnosis)
        assert all(text in first.message for text in self.says), first.message
        assert not any(text in first.message for text in self.never), first.message
        assert self.good is None or cg.diagnose(self.loss, self.good).ok


SICK: dict[str, Sick] = {}


def texts_of(texts: Any) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts)


def sick(
    kind: str, operation: str | None, *args: Any, at: Any = None, name: str = "",
    says: Any = (), never: Any = (), others: Any = (), good: Any = None, **expected: Any,
) -> Callable:  # fmt: skip
    """Puts a program into the table; its line may be in ``at``, which it calls."""

    def register(loss):
        keywords = {"kind": kind, "operation": operation, "line": line_of(at or loss, "# here")}
        expected_finding = {
            name: value for name, value in keywords.items() if value is not None
        } | expected
        SICK[name or loss.__name__] = Sick(
            loss, args, expected_finding, texts_of(says), texts_of(never), others, good
        )
        return loss

    return register


def normal(*shape, seed=0, scale=1.0):
    return array(scale * np.random.default_rng(seed).normal(size=shape))


def orthogonal(size, scale=1.0):
    return array(scale * np.linalg.qr(np.asarray(normal(size, size)))[0])


def cross_entropy(logits, labels):
    logs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], -1))


def of_flax(layer, steps):
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(nn.RNN(layer(nn))(x)[:, -1])

    x = normal(8, steps, 6)
    params = jax.jit(Model().init)(jax.random.key(1), x)
    return lambda params: cross_entropy(Model().apply(params, x), jnp.arange(8)), (params,)


def lstm_of_haiku():
    hk = pytest.importorskip("haiku")

    def lstm(x):
        out, _ = hk.dynamic_unroll(hk.LSTM(16), x, hk.LSTM(16).initial_state(8), time_major=False)
        return hk.Linear(10)(out[:, -1])

    model, x = hk.transform(lstm), normal(8, 20, 6)
    params = jax.jit(model.init)(jax.random.key(1), x)
    return lambda params: cross_entropy(model.apply(params, None, x), jnp.arange(8)), (params,)


def mlp_of_equinox():
    eqx = pytest.importorskip("equinox")
    model, x = eqx.nn.MLP(6, 10, 32, 8, key=jax.random.key(2)), normal(8, 6)
    arrays, static = eqx.partition(model, eqx.is_array)
    apply = lambda arrays: jax.vmap(eqx.combine(arrays, static))(x)  # noqa: E731
    return lambda arrays: cross_entropy(apply(arrays), jnp.arange(8)), (arrays,)


def layers(count, size=8, scale=1.0, seed=0):
    return [normal(size, size, seed=seed + i, scale=scale / size**0.5) for i in range(count)]


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

    params = {"rec": orthogonal(size, radius), "in": normal(3, size, seed=1)}
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

    return loss, (array(layers(count)), normal(4, 8))


def squares(x):
    return jnp.sum(jnp.square(jnp.stack(x) if isinstance(x, tuple) else x))


HEALTHY = {
    "lstm_fresh_over_20_steps": lambda: of_flax(lambda nn: nn.OptimizedLSTMCell(16), 20),
    "gru_fresh_over_50_steps": lambda: of_flax(lambda nn: nn.GRUCell(16), 50),
    "gated_by_hand": lambda: scanned(
        gated, jnp.zeros(4), {"in": normal(3, 8), "rec": normal(4, 8, seed=1, scale=0.1)},
        normal(20, 3),
    ),
    "discounted_return_of_the_first_step": lambda: discounted(0.5, 60),
    "long_discounted_return": lambda: discounted(0.9, 1000),
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
        masked_attention, (normal(4, 4), normal(5, 4), array(np.tril(np.ones((5, 5))), bool))
    ),
    "recurrent_net_with_a_loss_at_each_step": lambda: recurrent(0.5, last=False),
    "recurrent_net_of_radius_1": lambda: recurrent(1.0),
    "recurrent_net_of_radius_0_7": lambda: recurrent(0.7),
    "slow_growth": lambda: multiplied(1.04, 300),
    "short_growth": lambda: multiplied(1.06, 20),
    "deep_linear_net": lambda: deep(1.0),
    "heads_beside_each_other": lambda: heads(1e3),
    "heads_of_small_weights": lambda: heads(0.1),
    "lstm_of_haiku": lstm_of_haiku,
    "mlp_of_equinox": mlp_of_equinox,
}  # fmt: skip
# Decays that leave a gradient to all leaves, those of the last steps, and what is not measured:
# each with its only note.
EACH_STEP = "at each of the", "all leaves keep a gradient"
NOTED = {
    "spectral_radius_0_6": (lambda: recurrent(0.6), *EACH_STEP),
    "slow_decay": (lambda: recurrent(0.7, 220), "a factor of 0.7", *EACH_STEP),
    "tanh_recurrent_net": (lambda: recurrent(0.5, activation=jnp.tanh), *EACH_STEP),
    "unrolled_fixed_point": (
        lambda: scanned(
            lambda p, z, _: jnp.tanh(z @ p["w"] + normal(8) @ p["u"]), jnp.zeros(8),
            {"w": 0.3 * orthogonal(8), "u": normal(8, 8)}, result=squares, length=60,
        ),
        *EACH_STEP,
    ),
    "moving_average": (
        lambda: scanned(
            lambda w, m, x: 0.5 * m + 0.5 * jnp.tanh(x @ w), jnp.zeros(4), normal(3, 4),
            normal(80, 3),
        ),
        *EACH_STEP,
    ),
}  # fmt: skip


# -- Sick programs.


def multiplied(factor, steps):
    return scanned(lambda w, h, x: w * h + x, array(np.zeros(3)), array(factor), normal(steps, 3))


def forgotten(factor, steps):
    decay = lambda h, _: (factor * h, None)  # noqa: E731
    return lambda h: jnp.sum(jax.lax.scan(decay, h, length=steps)[0]), (array(np.ones(3)),)


def net_of_one_array(weights, x):
    for i in range(12):
        x = jax.nn.sigmoid(x @ weights[i])
    return jnp.mean((x - 1) ** 2)


def deep(scale, depth=20, size=32):
    """Layers without activations, each in a module of its own."""

    def loss(weights, x):
        for i, w in enumerate(weights):
            with jax.named_scope(f"layer_{i}"):
                x = x @ w
        return jnp.sqrt(jnp.mean(x**2))

    return loss, (layers(depth, size, scale), normal(4, size, seed=99))


def heads(factor):
    def loss(weights, x):
        return sum(factor**i * jnp.sum(jnp.tanh(x @ w)) for i, w in enumerate(weights))

    return loss, ([0.1 * jnp.eye(4)] * 8, jnp.ones(4))


def near(factor, rel=1e-2):
    return {"factor": pytest.approx(factor, rel=rel)}


# Programs, the kind of the finding, and its factor if it is known.
for _name, (_loss, _args), _kind, _expected in [
    ("spectral_radius_1_5", recurrent(1.5), "grows", near(1.5)),
    ("threefold_recurrence_whose_gradient_overflows_in_the_sum", multiplied(3.0, 80), "grows",
     near(3.0)),
    ("growth_of_six_percent", multiplied(1.06, 300), "grows", near(1.06)),
    ("growth_by_module", deep(2.5), "grows", near(2.5, 0.15) | {"module": "layer_0"}),
    ("decay_by_module", deep(0.4), "shrinks", near(0.4, 0.15) | {"module": "layer_0"}),
    ("start_that_is_forgotten", forgotten(0.5, 50), "shrinks", near(0.5)),
    ("start_that_is_forgotten_slowly", forgotten(0.7, 220), "shrinks", near(0.7)),
    ("deep_sigmoid_net", stack(jax.nn.sigmoid, 12), "shrinks", {}),
    ("deep_sigmoid_net_of_one_array",
     (net_of_one_array, (array(layers(12)), normal(4, 8, seed=99))), "shrinks", {}),
    ("scanned_layers_that_vanish", over_layers(lambda h, w: jax.nn.sigmoid(h @ w), 20),
     "shrinks", {}),
]:  # fmt: skip
    sick(_kind, None, *_args, name=_name, others=None, **_expected)(_loss)


# 1.5 ** n leaves float32 between n = 218 and 219; the last step is 399.
@sick(
    "vjp",
    "dot_general",
    array(1.5 * np.eye(16)),
    array(np.zeros((400, 16))),
    step=399 - 218,
    others=("grows",),
)
def growth_that_overflows(w, x):
    return jnp.sum(jax.lax.scan(lambda h, x: (h @ w + x, None), jnp.zeros(16), x)[0])


@sick("grows", None, array(5), array(np.zeros((8, 10))),
      says="at each of the 8 steps of the scan,", **near(5))  # fmt: skip
def growth_between_the_scans_inside(w, x):
    def outer(h, x):
        return jax.lax.scan(lambda h, x: (h + x, None), w * h, x)[0], None

    return jax.lax.scan(outer, 0.0, x)[0]


EYES = [(array(n * np.eye(4)), array(np.zeros((24, 4)))) for n in (1, 2)]


def recurrent_step(h, x_and_w):
    x, w = x_and_w
    return jnp.tanh(h @ w) + x, jnp.sum(x * x)  # in the step


@sick("grows", None, *EYES[1], good=EYES[0],
      says=f"; its state is multiplied at {FILE}:{line_of(recurrent_step, '# in the step')}; clip",
      **near(2))  # fmt: skip
def growth_inside_of_a_step(w, x):
    step = jax.checkpoint(lambda h, x: recurrent_step(h, (x, w)))
    return jnp.sum(jax.lax.scan(step, jnp.zeros(4), x)[0])  # here


@sick("grows", None, array([1e-6] * 3), says="parts of the model")
def growing_expression(x):
    for scale in (3.0, 4.0, 5.0, 2.0, 3.0, 6.0, 4.0, 3.0, 5.0):
        x = jnp.sin(x) * scale
    return jnp.sum(x @ jnp.ones((3, 1)))


# Underflow in float16.


def in_dtypes(*shapes):
    ones = [np.ones(shape) for shape in shapes]
    return [tuple(array(one, dtype) for one in ones) for dtype in (LOW, jnp.bfloat16)]


HALF, BRAIN = in_dtypes((8, 8), (4, 8))


@sick("underflow", None, *HALF, good=BRAIN)
def small_steps(w, x):
    h = (x @ w) * w.dtype.type(1e-3)  # here
    h = h * w.dtype.type(1e-3)
    return 0.1 * jnp.mean(h.astype(jnp.float32))


@sick("underflow", None, array(np.ones(64), LOW), others=None)
def small_mean(x):
    return jnp.mean((x * 2).astype(jnp.float32)) * 1e-6


HALF, BRAIN = ({"w": array(np.ones(4), dtype)} for dtype in (LOW, jnp.bfloat16))


@sick("underflow", "argument", HALF, good=(BRAIN,), leaf="args[0]['w']", cause="underflow",
      says="100% of the gradient of args[0]['w'] is zero in float16")  # fmt: skip
def small_gradient_of_an_argument(params):
    h = params["w"] * params["w"].dtype.type(1e-3)
    return jnp.sum(h.astype(jnp.float32) * 1e-6)


BEHIND = {
    "relu": lambda x: jax.nn.relu(x * 2),
    "relu6": lambda x: jax.nn.relu6(x * 2),
    "noise": lambda x: x * 2 + jax.random.normal(jax.random.key(0), x.shape, x.dtype),
    "while": lambda x: x * 2 + jax.lax.while_loop(lambda y: y < 3, lambda y: y + 1, LOW(0)),
}


def small_behind(layer):
    def loss(x):
        h = layer(x) * x.dtype.type(1e-3)
        return jnp.sum(h.astype(jnp.float32) * 1e-6)

    return loss


for _name, _layer in BEHIND.items():
    _x = array([-1.0, 1.0, 2.0, 2.5], LOW)
    sick("underflow", None, _x, name=f"underflow_behind_{_name}", others=None)(small_behind(_layer))
