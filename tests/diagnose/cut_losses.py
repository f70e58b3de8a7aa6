"""Losses of which one leaf is cut, each with its cause and what a diagnosis says of it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.helpers import array

P = {"w": array([0.3, -0.7, 1.1]), "v": array(np.ones(3))}
X = array([[0.3, 0.7, -1.1], [0.2, 0.4, 0.1]])
EYE, ROW = array(np.eye(3)), array([0.3, 0.7, -1.1])
SQUARES = array(1 + np.square([0.3, 0.7, -1.1]))
stop = lax.stop_gradient
CUTS = {}


def cut(cause, says="", never="comparison", params=P):
    """Puts a loss of which ``w`` is cut into the table, by the cause and parts of the message."""

    def register(loss):
        CUTS[loss.__name__] = loss, cause, says, never, params
        return loss

    return register


@cut("cast")
def integers_in_a_scan(p, x):
    def step(n, x):
        return n + (p["w"] * 9).astype(jnp.int32), None  # cut

    return jnp.sum(lax.scan(step, jnp.zeros(3, jnp.int32), x)[0] * p["v"])


@cut("cast")
def integers_in_a_loop(p, x):
    def body(state):
        return state[0] + 1, state[1] + (p["w"] * 9).astype(jnp.int32)  # cut

    state = lax.while_loop(lambda state: state[0] < 3, body, (0, jnp.zeros(3, jnp.int32)))
    return jnp.sum(state[1] * p["v"])


@cut("index")
def choices_of_a_scan(p, x):
    def step(i, x):
        i = jnp.argmax(p["w"] + x + i)  # cut
        return i, i

    return jnp.sum(x[0][lax.scan(step, 0, x)[1]] * p["v"][:2])


@cut("index")
def index_that_is_gathered(p, x):
    order = jnp.argsort(p["w"])  # cut
    return jnp.sum(x[0][order[jnp.array([2, 0, 0])]] * p["v"])


@cut("index", "also cut at", params={"w": EYE, "v": EYE})
def codebook(p, x):
    z = x @ p["v"]
    nearest = jnp.argmin(jnp.sum((z[:, None] - p["w"]) ** 2, -1), -1)  # cut
    q = z + stop(p["w"][nearest] - z)
    return jnp.mean((q - x) ** 2) + jnp.mean((q - stop(z)) ** 2)


@cut("integers", "is_finite is bool")
def flags(p, x):
    return jnp.sum(jnp.isfinite(p["w"]) * x * p["v"])  # cut


@cut("comparison", never="integers")
def threshold(p, x):
    return jnp.sum((p["w"] > 0.1) * x * p["v"])  # cut


@cut("empty")
def empty_slice(p, x):
    return jnp.sum(p["w"][0:0]) + jnp.sum(p["v"] ** 2)  # cut


@cut("empty")
def scan_without_steps(p, x):
    step = lambda c, _: (c * p["w"], None)  # noqa: E731
    return jnp.sum(lax.scan(step, p["v"], None, length=0)[0])  # cut


@cut("unknown", "its base is 1 to 1, its exponent is", "saturated")
def exponent_of_one(p, x):
    return jnp.sum(jnp.ones(3) ** p["w"] * p["v"])  # cut


@cut(
    "unknown",
    "its exponent is 0 to 0",
    "saturated",
    {"w": array([1.09, 1.49, 2.21]), "v": array([0.3, 0.7, -1.1])},
)
def base_of_exponent_zero(p, x):
    return jnp.sum(p["w"] ** (x[0] * 0) * p["v"])  # cut


@cut(
    "underflow",
    "div passes back, 2.5e-",
    "scale the loss",
    {"w": array([2.0] * 3), "v": array([0.3, 0.7, -1.1])},
)
def divisor_whose_square_overflows(p, x):
    return jnp.sum(1 / (1 + p["w"] * 1e25)) + jnp.sum(p["v"])  # cut


@cut("overflow", "div takes inf, which square at", "scale the loss")
def divisor_that_overflows(p, x):
    big = jnp.square(jnp.square(p["w"] * 1e15))
    return jnp.sum(1 / (1 + big)) + jnp.sum(p["v"])  # cut


@cut("underflow", "scale the loss, or rescale", "saturated")
def small_cotangent(p, x):
    return jnp.sum(jnp.tanh(p["w"]) * 1e-25 * 1e-25) + jnp.sum(p["v"])  # cut


@cut("flat", never="at step")
def at_each_step_of_a_carry(p, x):
    def step(h, x):
        return jnp.round(9 * h) + x, None  # cut

    return jnp.sum(lax.scan(step, p["w"], x)[0] * p["v"])


@cut("dead", never="at step")
def at_each_step(p, x):
    def step(h, x):
        return h + jax.nn.relu(p["w"] - x - 9), None  # cut

    return jnp.sum(lax.scan(step, p["v"], x)[0])


@cut("where", "at step 1 of 4")
def at_one_step(p, x):
    def step(h, t):
        return jnp.where(t == 1, 1.0, 0.9 * h) + 0.1, None  # cut

    return jnp.sum(lax.scan(step, p["w"], jnp.arange(4))[0] * p["v"])


def keep_half(key):
    return jax.random.bernoulli(key, 0.5, (3,)).astype(jnp.float32)


@cut("zero factor", never="random numbers")
def masks_that_the_data_makes_from_the_second_step_on(p, x):
    def step(keep, row):
        y = jnp.sum(p["w"] * keep * (1 - keep))  # cut
        return (row > 0.3).astype(jnp.float32), y

    return jnp.sum(lax.scan(step, keep_half(jax.random.key(1)), x)[1]) + jnp.sum(p["v"])
