"""Rules where people check them and a gradient vanishes: at ones, zeros, constants, near them.

A softmax, a norm and a difference to a mean do not change with what is common to all elements. So
at equal elements some of their gradients vanish. Near these they are small differences of large
products, and a rule that subtracts a mean loses more of them to rounding than plain AD does.

A row of `VANISHING` is a function and its rule, `rule(has, residuals, g)`, where `has` says of each
bug whether the rule has it. The number of the bug is an argument of the function, so one compiled
program serves the rule that is right and all that are wrong.
"""

# ruff: noqa: E731

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.check.check_zoo import normal
from tests.helpers import array


class Row(NamedTuple):
    """A function, its rule, what may be wrong with the rule, and the shapes of its arguments."""

    primal: Callable
    rule: Callable
    bugs: tuple[str, ...]
    shapes: tuple

    def rigged(self) -> Callable:
        """The function of a bug's number, 0 for none, and of the arguments."""
        call = jax.custom_vjp(lambda bug, *xs: self.primal(*xs))

        def pull(r, g):
            has = dict(zip(self.bugs, (r[0] == k + 1 for k in range(len(self.bugs))), strict=True))
            return None, *self.rule(has, r[1:], g)

        call.defvjp(lambda *args: (self.primal(*args[1:]), args), pull)
        return call


VANISHING: dict[str, Row] = {}
either = lambda is_wrong, wrong, right: jnp.where(is_wrong, wrong, right)


def attention(causal: bool, *shape: int) -> Row:
    n, d = shape
    seen = np.tril(np.ones((n, n), bool)) if causal else np.ones((n, n), bool)
    scale = d**-0.5

    def weights(q, k, mask: Any = seen):
        return jax.nn.softmax(jnp.where(mask, q @ k.T * scale, -jnp.inf))

    def rule(has, r, g):
        q, k, v = r
        mask = either(has["no mask"], True, seen) if causal else seen
        p = weights(q, k, mask)
        dp = g @ v.T
        ds = p * (dp - either(has["no mean"], 0, jnp.sum(p * dp, axis=1, keepdims=True)))
        ds = ds * either(has["no scale"], 1, jnp.asarray(scale, g.dtype))
        ds = either(has["transposed"], ds.T, ds)
        dq = either(has["twice"], 2, 1) * ds @ either(has["values for keys"], v, k)
        return dq, ds.T @ q, either(has["p for p.T"], p, p.T) @ g

    bugs = ("values for keys", "no mean", "twice", "transposed", "no scale", "p for p.T")
    bugs = (*bugs, "no mask") if causal else bugs
    return Row(lambda q, k, v: weights(q, k) @ v, rule, bugs, (shape,) * 3)


VANISHING["causal attention"] = attention(True, 6, 4)
VANISHING["attention"] = attention(False, 16, 8)


def part_of_attention(count: int) -> Row:
    """Attention of the first arguments; the others are ones, so that the gradient is zero."""
    whole = attention(True, 6, 4)
    rest = lambda x: [jnp.ones_like(x)] * (3 - count)

    def rule(has, r, g):
        has = dict.fromkeys(whole.bugs, False) | has
        return whole.rule(has, (*r, *rest(g)), g)[:count]

    primal = lambda *xs: whole.primal(*xs, *rest(xs[0]))
    return Row(primal, rule, ("no mean",), whole.shapes[:count])


VANISHING["attention of queries alone"] = part_of_attention(1)
VANISHING["attention without values"] = part_of_attention(2)


def of(name: str, bugs: tuple[str, ...], *shapes) -> Callable:
    def register(make: Callable) -> Callable:
        primal, rule = make()
        VANISHING[name] = Row(primal, rule, bugs, shapes)
        return make

    return register


@of("cross entropy", ("no mean", "twice", "no target"), (4, 6))
def _cross_entropy():
    targets = array(np.eye(6, dtype=jnp.bfloat16)[:4], jnp.bfloat16)

    def primal(z):
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(z) * targets, 1))

    def rule(has, r, g):
        dz = jax.nn.softmax(r[0]) - either(has["no target"], 0, targets)
        return (g * dz * either(has["twice"], 2, 1) / either(has["no mean"], 1, 4),)

    return primal, rule


@of("layer norm", ("no first mean", "no second mean", "twice"), (4, 6))
def _layer_norm():
    def parts(x):
        x = x - jnp.mean(x, 1, keepdims=True)
        return x, jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + 1e-3)

    def primal(x):
        x, r = parts(x)
        return x * r

    def rule(has, res, g):
        x, r = parts(res[0])
        y = x * r
        first = either(has["no first mean"], 0, jnp.mean(g, 1, keepdims=True))
        second = either(has["no second mean"], 0, jnp.mean(g * y, 1, keepdims=True))
        return ((g - first - y * second) * r * either(has["twice"], 2, 1),)

    return primal, rule


@of("RMS norm", ("no mean", "mean of each", "twice"), (4, 6))
def _rms_norm():
    size = lambda x: jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + 1e-6)
    mean = lambda x: jnp.mean(x, 1, keepdims=True)

    def rule(has, res, g):
        (x,) = res
        r = size(x)
        part = either(has["mean of each"], mean(g) * mean(x), mean(g * x))
        part = either(has["no mean"], 0, part)
        return ((g * r - x * r**3 * part) * either(has["twice"], 2, 1),)

    return (lambda x: x * size(x)), rule


@of("cosine similarity", ("one for other", "no projection", "twice"), (4, 6), (4, 6))
def _cosine():
    length = lambda x: jnp.sqrt(jnp.sum(x * x, 1, keepdims=True) + 1e-12)

    def primal(x, y):
        return jnp.sum(x / length(x) * (y / length(y)), 1)

    def rule(has, res, g):
        x, y = res
        a, b = x / length(x), y / length(y)
        s = either(has["no projection"], 0, jnp.sum(a * b, 1, keepdims=True))
        g = g[:, None] * either(has["twice"], 2, 1)
        dx, dy = g * (b - s * a) / length(x), g * (a - s * b) / length(y)
        return dx, either(has["one for other"], dx, dy)

    return primal, rule


@of("difference of logsumexp", ("one for other", "sign", "twice"), (4, 6), (4, 6))
def _logsumexp():
    lse = lambda x: jax.nn.logsumexp(x, 1)

    def rule(has, res, g):
        x, y = res
        g = 2 * (lse(x) - lse(y)) * g
        g = g[:, None] * either(has["twice"], 2, 1)
        dx, dy = g * jax.nn.softmax(x), -g * jax.nn.softmax(y)
        return either(has["one for other"], -dy, dx), either(has["sign"], -dy, dy)

    return (lambda x, y: (lse(x) - lse(y)) ** 2), rule


def spread(by: float) -> Callable[..., list]:
    return lambda *shapes: [np.linspace(0, by, np.prod(shape)).reshape(shape) for shape in shapes]


def around(middle: float, by: float) -> Callable[..., list]:
    """Random numbers about one, other ones for each argument."""
    numbers = lambda k, shape: np.asarray(normal(k, *shape, dtype="float32"))
    return lambda *shapes: [middle + by * numbers(k, shape) for k, shape in enumerate(shapes)]


POINTS: dict[str, Callable[..., list]] = {
    "ones": lambda *shapes: [np.ones(shape) for shape in shapes],
    "zeros": lambda *shapes: [np.zeros(shape) for shape in shapes],
    "constants": lambda *shapes: [
        np.full(shape, number) for shape, number in zip(shapes, (0.5, 1.5, -2.0), strict=False)
    ],
    "one array for all": lambda *shapes: around(0, 1)(shapes[0]) * len(shapes),
    "nearly zero": spread(0.01),
    "nearly one": lambda *shapes: [1 + x for x in spread(0.01)(*shapes)],
    "about one": around(1, 1e-3),
    "about a half": around(0.5, 0.03),
}


def point(name: str, row: Row, dtype: Any) -> list[jax.Array]:
    return [jnp.asarray(x, dtype) for x in POINTS[name](*row.shapes)]


@functools.cache
def function(name: str) -> Callable:
    """The function of a row, which is one for all of its bugs and points."""
    return VANISHING[name].rigged()
