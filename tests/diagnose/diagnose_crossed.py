"""Sick and healthy functions, each as it is and beside or inside of what a training step has.

A function of ``w`` and ``x``, four numbers each, is `SICK` or `HEALTHY`. A surrounding makes a loss
of a function. The line of a finding is the one with ``# here``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from tests.helpers import array, line_of

X = np.array([0.3, -0.7, 1.1, 0.9], np.float32)
W = np.array([0.5, -0.3, 0.8, 1.2], np.float32)
ZERO = np.array([0.5, 0.0, 0.8, 1.2], np.float32)
stop = lax.stop_gradient


@dataclasses.dataclass(frozen=True)
class Sick:
    """A function, and its finding.

    Attributes:
      function: the function.
      w: the parameter.
      kind: of the finding.
      what: its operation, or the cause of a gradient that is zero.
    """

    function: Callable[[Any, Any], Any]
    w: Any
    kind: str
    what: str

    @property
    def line(self) -> int:
        """The line of the finding."""
        return line_of(self.function, "# here")


SICK: dict[str, Sick] = {}
HEALTHY: dict[str, Callable[[Any, Any], Any]] = {}


def sick(kind, what, w=W):
    """Puts a function into the table."""

    def register(function):
        SICK[function.__name__] = Sick(function, w, kind, what)
        return function

    return register


def healthy(function):
    """Puts a function into the table."""
    HEALTHY[function.__name__] = function
    return function


@sick("vjp", "sqrt", ZERO)
def root_of_zero(w, x):
    return jnp.sqrt(w) * x  # here


@sick("value", "log", ZERO)
def log_of_zero(w, x):
    return jnp.log(w) * x  # here


@sick("zero", "dead")
def dead_unit(w, x):
    return jax.nn.relu(w * x - 40.0) + x  # here


@sick("zero", "flat")
def rounded(w, x):
    return jnp.round(w * 8) * x  # here


@sick("zero", "cast")
def cast_to_integers(w, x):
    return (w * 8).astype(jnp.int32).astype(x.dtype) * x  # here


@sick("zero", "index")
def gathered_index(w, x):
    order = jnp.argsort(w)  # here
    return x[order[jnp.array([0, 2, 1, 1])]]


@sick("zero", "stop_gradient")
def detached(w, x):
    return stop(w) * x  # here


@sick("zero", "overflow")
def divided_by_what_overflows(w, x):
    big = jnp.square(jnp.square(jnp.square(jnp.square(w * 1e3))))
    return x / (1.0 + big)  # here


@sick("zero", "underflow")
def small_cotangents(w, x):
    return jnp.tanh(w) * 1e-30 * 1e-30 + x  # here


@healthy
def unit(w, x):
    return jnp.tanh(w * x) + x


@healthy
def straight_through(w, x):
    return (w + stop(jnp.round(w) - w)) * x


@healthy
def attention(w, x):
    mask = jnp.tril(jnp.ones((4, 4), bool))
    return jax.nn.softmax(jnp.where(mask, jnp.outer(w, x), -jnp.inf)) @ w


# -- Surroundings: a loss of a parameter and of data, of a function.

AROUND: dict[str, Callable[[Callable[[Any, Any], Any]], Callable[[Any, Any], Any]]] = {}


def around(make):
    """Puts a surrounding into the table."""
    AROUND[make.__name__] = make
    return make


@around
def plain(function):
    return lambda w, x: jnp.sum(function(w, x))


@around
def in_branches_that_are_one_function(function):
    def loss(w, x):
        x = lax.cond(x[0] > 0, augmented, augmented, x)
        return jnp.sum(lax.switch(1, [lambda w, x: w * x, function, function], w, x))

    return loss


def augmented(x):
    return x + 0.1 * jnp.sin(x)


@around
def beside_a_detached_loop(function):
    @jax.jit
    def power(w):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.9), (0, w))[1]

    return lambda w, x: jnp.sum(function(w, x) * power(stop(x * 0.1 + w) + 9.0))


@around
def beside_a_loop_in_a_detached_carry(function):
    def loss(w, x):
        def step(carry, _):
            h, scale = carry
            scale = lax.while_loop(lambda s: jnp.max(s) > 1, lambda s: s / 2, scale)
            return (h + function(w, x) * scale, scale + 1), None

        return jnp.sum(lax.scan(step, (x * 0, stop(w) * 0 + 1), None, length=2)[0][0])

    return loss


@around
def beside_a_callback(function):
    def loss(w, x):
        of = jax.ShapeDtypeStruct(w.shape, w.dtype)
        scale = jax.pure_callback(lambda a: np.abs(np.asarray(a)) + 1, of, stop(w))
        return jnp.sum(function(w, x) * scale)

    return loss


@around
def beside_a_kernel(function):
    def kernel(x, out):
        out[...] = jnp.exp(x[...])

    def loss(w, x):
        of = jax.ShapeDtypeStruct(w.shape, w.dtype)
        scale = pl.pallas_call(kernel, out_shape=of, interpret=True)(stop(w))
        return jnp.sum(function(w, x) * scale)

    return loss


@around
def in_a_scan_with_remat(function):
    def loss(w, x):
        step = jax.checkpoint(lambda h, t: (h * 0.5 + function(w, x) * t, None))
        return jnp.sum(lax.scan(step, x * 0, jnp.ones(3, x.dtype))[0])

    return loss


@around
def in_a_vmap(function):
    return lambda w, x: jnp.sum(jax.vmap(function, (None, 0))(w, jnp.stack([x, x + 0.5])))


@around
def in_bfloat16(function):
    def loss(w, x):
        return jnp.sum(function(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)), dtype=jnp.float32)

    return loss


def in_equinox(function):
    """A loss of an Equinox module that holds the parameter."""
    import equinox as eqx

    class Layer(eqx.Module):
        w: Any

        def __call__(self, x):
            return function(self.w, x)

    class Model(eqx.Module):
        layer: Layer

        def __call__(self, x):
            return self.layer(x)

    return lambda w: Model(Layer(w)), lambda model, x: jnp.sum(model(x))


def in_nnx(function):
    """A loss of an NNX model that holds the parameter."""
    from flax import nnx

    class Layer(nnx.Module):
        def __init__(self, w):
            self.w = nnx.Param(w)

        def __call__(self, x):
            return function(self.w[...], x)

    class Model(nnx.Module):
        def __init__(self, w):
            self.layer = Layer(w)

        def __call__(self, x):
            return self.layer(x)

    return Model, lambda model, x: jnp.sum(model(x))


MODELS = {"in_equinox": in_equinox, "in_nnx": in_nnx}


def subject(surrounding, function, w):
    """The loss and its arguments, and the name of the leaf."""
    if surrounding in MODELS:
        make, loss = MODELS[surrounding](function)
        return loss, (make(jnp.asarray(w)), jnp.asarray(X)), "args[0].layer.w"
    loss = AROUND[surrounding](function)
    return loss, (array(w), array(X)), "args[0]"
