"""Held-out programs at lazy points: what is equal, zero or the identity there hides a wrong rule.

They were written by one who had read what the checker promises, and nothing inside it. `CASES` has
functions that make a `Case` each, as in `held_out_programs`. A rule ``__wrong`` is wrong near the
point, mostly not at it. The second half are right rules near the edge of a precision, and their
nearest wrong neighbors.
"""
# ruff: noqa: D103, E501, E731, E741

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import held_out_programs
from benchmarks.held_out_programs import Case, Rnd

CASES: list[Callable[[], Case]] = []
ONE, HALF = np.float32(1), np.float32(0.5)


def pair(make: Callable[[bool], tuple[Callable, tuple]]) -> Callable:
    """Registers the right rule and the wrong one."""
    for wrong in (False, True):
        one(make, wrong)
    return make


def one(make: Callable[[bool], tuple[Callable, tuple]], wrong: bool = False) -> Callable:
    """Registers one rule."""
    name = make.__name__ + ("__wrong" if wrong else "")

    def build() -> Case:
        fun, args = make(wrong)
        places = tuple(
            i for i, a in enumerate(args) if np.issubdtype(np.result_type(a), np.inexact)
        )
        return Case(name, wrong, fun, args, places)

    build.__name__ = name
    CASES.append(build)
    return make


def rule(primal: Callable, back: Callable) -> Callable:
    """A `jax.custom_vjp` whose defaults are not arguments."""
    return held_out_programs.rule(lambda *args: primal(*args), back)


# ------------------------------------------------------------------------------- equal inputs
@pair
def cross_of_a_vector_with_itself(wrong):
    v = Rnd(1).n(3)

    def back(a, y, g):
        u, w = a
        return (jnp.cross(u, g), jnp.cross(g, w)) if wrong else (jnp.cross(w, g), jnp.cross(g, u))

    return rule(jnp.cross, back), (v, v)


@pair
def quaternions_near_one(wrong):
    q = np.asarray([1, 0, 0, 0], np.float32)

    def product(a, b):
        return jnp.concatenate(
            [
                (a[:1] * b[:1] - jnp.dot(a[1:], b[1:])),
                a[:1] * b[1:] + b[:1] * a[1:] + jnp.cross(a[1:], b[1:]),
            ]
        )

    conj = lambda q: jnp.concatenate([q[:1], -q[1:]])

    def back(args, y, g):
        a, b = args
        da, db = product(g, conj(b)), product(conj(a), g)
        return (product(conj(b), g), db) if wrong else (da, db)

    return rule(product, back), (q, q)


@pair
def bilinear_layer_with_a_symmetric_tensor(wrong):
    r = Rnd(2)
    w = r.n(3, 3, 2)
    w, x = w + w.transpose(1, 0, 2), r.n(4, 3)
    primal = lambda x, w, y: jnp.einsum("bi,ijk,bj->bk", x, w, y)

    def back(args, out, g):
        x, w, y = args
        dx = jnp.einsum("bk,ijk,bj->bi", g, w, y)
        dy = jnp.einsum("bk,ijk,bi->bj", g, w, x)
        return (dy if wrong else dx), jnp.einsum("bi,bj,bk->ijk", x, y, g), dy

    return rule(primal, back), (x, w, x)


@pair
def prey_and_predator_alike(wrong):
    def primal(s, k):
        x, y = s[0], s[1]
        return jnp.stack([x + k[0] * x - k[1] * x * y, y - k[2] * y + k[3] * x * y])

    def back(args, out, g):
        s, k = args
        x, y = s[0], s[1]
        if wrong:
            x, y = y, x
        dx = g[0] * (1 + k[0] - k[1] * y) + g[1] * k[3] * y
        dy = -g[0] * k[1] * x + g[1] * (1 - k[2] + k[3] * x)
        x, y = s[0], s[1]
        return jnp.stack([dx, dy]), jnp.stack([g[0] * x, -g[0] * x * y, -g[1] * y, g[1] * x * y])

    return rule(primal, back), (np.full(2, 1.25, np.float32), np.full(4, 0.5, np.float32))


@pair
def halfway_between_two_points(wrong):
    r = Rnd(3)

    def back(args, y, g):
        a, b, t = args
        da, db = (1 - t) * g, t * g
        return (db, da, jnp.sum(g * (b - a))) if wrong else (da, db, jnp.sum(g * (b - a)))

    return rule(lambda a, b, t: (1 - t) * a + t * b, back), (r.n(5), r.n(5), HALF)


@pair
def kullback_leibler_of_the_same(wrong):
    p = np.asarray([0.1, 0.2, 0.3, 0.4], np.float32)
    primal = lambda p, q: jnp.sum(p * jnp.log(p / q))

    def back(args, y, g):
        p, q = args
        return (g * jnp.ones_like(p) if wrong else g * (jnp.log(p / q) + 1)), -g * p / q

    return rule(primal, back), (p, p)


@pair
def cosine_of_a_vector_with_itself(wrong):
    a = Rnd(4).n(6)
    norm = lambda v: jnp.sqrt(jnp.sum(v * v))

    def back(args, y, g):
        a, b = args
        da = (b / norm(b) - y * a / norm(a)) / (1 if wrong else norm(a))
        return g * da, g * (a / norm(a) - y * b / norm(b)) / norm(b)

    return rule(lambda a, b: jnp.dot(a, b) / (norm(a) * norm(b)), back), (a, a)


@pair
def sherman_morrison_of_one_vector(wrong):
    r = Rnd(5)
    u = r.n(3)

    def primal(u, v, b):
        return b - u * jnp.dot(v, b) / (1 + jnp.dot(v, u))

    def back(args, y, g):
        u, v, b = args
        db = g - v * jnp.dot(u, g) / (1 + jnp.dot(v, u))
        du = -db * jnp.dot(v, y)
        dv = -y * jnp.dot(u, db)
        return du, dv, (g - u * jnp.dot(v, g) / (1 + jnp.dot(v, u)) if wrong else db)

    return rule(primal, back), (u, u, r.n(3))


# ---------------------------------------------------------------- identities, ones and zeros
@pair
def layer_norm_with_a_fresh_gain(wrong):
    r = Rnd(6)

    def hat(x):
        m = jnp.mean(x, -1, keepdims=True)
        s = lax.rsqrt(jnp.mean((x - m) ** 2, -1, keepdims=True) + 1e-5)
        return (x - m) * s, s

    def back(args, y, g):
        x, gain, bias = args
        h, s = hat(x)
        d = g if wrong else g * gain[None]
        mean = lambda v: jnp.mean(v, -1, keepdims=True)
        return s * (d - mean(d) - h * mean(d * h)), jnp.sum(g * h, 0), jnp.sum(g, 0)

    fun = rule(lambda x, gain, bias: hat(x)[0] * gain[None] + bias[None], back)
    return fun, (r.n(4, 6), np.ones(6, np.float32), np.zeros(6, np.float32))


@pair
def batch_norm_of_a_constant(wrong):
    def parts(x):
        m = jnp.mean(x, 0, keepdims=True)
        s = lax.rsqrt(jnp.mean((x - m) ** 2, 0, keepdims=True) + 1e-2)
        return (x - m) * s, s

    def back(args, y, g):
        h, s = parts(args[0])
        mean = lambda v: jnp.mean(v, 0, keepdims=True)
        return (s * (g - mean(g) - (0 if wrong else h * mean(g * h))),)

    return rule(lambda x: parts(x)[0], back), (np.full((5, 3), 2, np.float32),)


@pair
def softmax_of_equal_logits(wrong):
    def back(args, y, g):
        inner = jnp.mean(g, -1, keepdims=True) if wrong else jnp.sum(g * y, -1, keepdims=True)
        return (y * (g - inner),)

    return rule(lambda x: jax.nn.softmax(x, -1), back), (np.zeros((3, 5), np.float32),)


@pair
def rotation_by_no_angle(wrong):
    r = Rnd(7)

    def turn(x, t, sign=1):
        c, s = jnp.cos(t), sign * jnp.sin(t)
        return jnp.stack([c * x[:, 0] - s * x[:, 1], s * x[:, 0] + c * x[:, 1]], 1)

    def back(args, y, g):
        x, t = args
        turned = jnp.stack([-y[:, 1], y[:, 0]], 1)
        return turn(g, t, 1 if wrong else -1), jnp.sum(g * turned, 1)

    return rule(lambda x, t: turn(x, t), back), (r.n(4, 2), np.zeros(4, np.float32))


@pair
def inverse_of_the_identity(wrong):
    def back(args, y, g):
        return (-(y @ g @ y) if wrong else -(y.T @ g @ y.T),)

    return rule(jnp.linalg.inv, back), (np.eye(3, dtype=np.float32),)


@pair
def kronecker_of_identities(wrong):
    def back(args, y, g):
        a, b = args
        blocks = g.reshape(2, 2, 2, 2)
        da, db = jnp.einsum("ikjl,kl->ij", blocks, b), jnp.einsum("ikjl,ij->kl", blocks, a)
        return (jnp.einsum("ikjl,kl->ij", blocks, a) if wrong else da), db

    e = np.eye(2, dtype=np.float32)
    return rule(jnp.kron, back), (e, e)


@pair
def cube_of_twice_the_identity(wrong):
    def back(args, y, g):
        t = args[0].T
        return (3 * t @ t @ g if wrong else t @ t @ g + t @ g @ t + g @ t @ t,)

    return rule(lambda a: a @ a @ a, back), (2 * np.eye(3, dtype=np.float32),)


@pair
def box_filter(wrong):
    r = Rnd(8)
    smooth = lambda x, k: jnp.convolve(x, k, mode="full", precision="highest")

    def back(args, y, g):
        x, k = args
        dx = jnp.convolve(g, k if wrong else k[::-1], mode="valid", precision="highest")
        return dx, jnp.convolve(g, x[::-1], mode="valid", precision="highest")

    return rule(smooth, back), (r.n(9), np.ones(3, np.float32))


@pair
def polynomial_at_one(wrong):
    r = Rnd(9)
    powers = lambda x, n: x ** jnp.arange(n, dtype=x.dtype)

    def back(args, y, g):
        c, x = args
        k = jnp.arange(5, dtype=x.dtype)
        slope = jnp.sum(c[1:] * k[1:] * powers(x, 4))
        d = powers(x, 5)
        return g * (d[::-1] if wrong else d), g * slope

    return rule(lambda c, x: jnp.sum(c * powers(x, 5)), back), (r.n(5), ONE)


@pair
def mean_with_weights_of_one(wrong):
    r = Rnd(10)

    def back(args, y, g):
        x, w = args
        total = x.shape[0] if wrong else jnp.sum(w)
        return g * w / jnp.sum(w), g * (x - y) / total

    return rule(lambda x, w: jnp.sum(x * w) / jnp.sum(w), back), (r.n(6), np.ones(6, np.float32))


@pair
def mahalanobis_with_no_correlation(wrong):
    r = Rnd(11)

    def back(args, y, g):
        d, s = args
        z = jnp.linalg.solve(s, d)
        t = jnp.linalg.solve(s.T, d)
        return g * (z + t), -g * (jnp.outer(d, d) if wrong else jnp.outer(t, z))

    fun = rule(lambda d, s: jnp.dot(d, jnp.linalg.solve(s, d)), back)
    return fun, (r.n(3), np.eye(3, dtype=np.float32))


@pair
def adapter_that_begins_at_zero(wrong):
    r = Rnd(12)

    def back(args, y, g):
        x, w, a, b = args
        da = x.T @ (g @ b.T)
        return g @ w.T + g @ b.T @ a.T, x.T @ g, (0 * da if wrong else da), (x @ a).T @ g

    fun = rule(lambda x, w, a, b: x @ w + x @ a @ b, back)
    return fun, (r.n(4, 5), r.n(5, 3), r.n(5, 2), np.zeros((2, 3), np.float32))


@pair
def residual_with_a_closed_gate(wrong):
    r = Rnd(13)

    def back(args, y, g):
        x, gate = args
        inner = 0 if wrong else gate * g * (1 - jnp.tanh(x) ** 2)
        return g + inner, jnp.sum(g * jnp.tanh(x))

    fun = rule(lambda x, gate: x + gate * jnp.tanh(x), back)
    return fun, (r.n(7), np.float32(0))


@pair
def average_that_forgets_at_once(wrong):
    r = Rnd(14)

    def run(a, x, reverse=False):
        step = lambda h, v: (a * h + v,) * 2
        return lax.scan(step, jnp.zeros((), x.dtype), x, reverse=reverse)[1]

    def back(args, y, g):
        a, x = args
        dx = run(a, g, reverse=True)
        before = jnp.concatenate([jnp.zeros(1, y.dtype), y[:-1]])
        return jnp.sum(dx * before), (g if wrong else dx)

    return rule(lambda a, x: run(a, x), back), (np.float32(0), r.n(6))


@pair
def likelihood_with_unit_spread(wrong):
    r = Rnd(15)
    primal = lambda x, m, s: jnp.sum(jnp.log(s) + 0.5 * ((x - m) / s) ** 2)

    def back(args, y, g):
        x, m, s = args
        d = (x - m) / s**2
        return g * (x - m if wrong else d), -g * d, g * (1 / s - (x - m) ** 2 / s**3)

    return rule(primal, back), (r.n(5), r.n(5), np.ones(5, np.float32))


@pair
def softmax_at_unit_temperature(wrong):
    r = Rnd(16)

    def back(args, y, g):
        x, t = args
        d = y * (g - jnp.sum(g * y))
        return (d if wrong else d / t), -jnp.sum(d * x) / t**2

    return rule(lambda x, t: jax.nn.softmax(x / t), back), (r.n(6), ONE)


@pair
def product_of_ones(wrong):
    def back(args, y, g):
        (x,) = args
        return (g * jnp.ones_like(x) if wrong else g * y / x,)

    return rule(jnp.prod, back), (np.ones(5, np.float32),)


@pair
def leaky_slope_of_one(wrong):
    r = Rnd(17)
    primal = lambda x, a: jnp.where(x > 0, x, a * x)

    def back(args, y, g):
        x, a = args
        return (g if wrong else jnp.where(x > 0, g, a * g)), jnp.sum(jnp.where(x > 0, 0, g * x))

    return rule(primal, back), (r.n(8), ONE)


@pair
def real_numbers_as_complex_ones(wrong):
    r = Rnd(18)
    z, w = (r.n(4).astype(np.complex64) for _ in range(2))

    def back(args, y, g):
        z, w = args
        return g * (jnp.conj(w) if wrong else w), g * z if wrong else g * z

    # y = z w, in JAX's convention the cotangents are g w and g z
    return rule(lambda z, w: z * w, back), (z, w)


@pair
def running_maximum_of_sorted_numbers(wrong):
    x = np.asarray([-1.5, -0.25, 0.5, 1.0, 2.25], np.float32)

    def back(args, y, g):
        (x,) = args
        picks = jnp.argmax(jnp.where(jnp.tril(jnp.ones((5, 5), bool)), x[None], -jnp.inf), 1)
        return (g if wrong else jnp.zeros_like(x).at[picks].add(g),)

    return rule(lambda x: lax.cummax(x), back), (x,)


@pair
def sort_of_sorted_numbers(wrong):
    x = np.asarray([-1.5, -0.25, 0.5, 1.0, 2.25], np.float32)

    def back(args, y, g):
        (x,) = args
        return (g if wrong else jnp.zeros_like(x).at[jnp.argsort(x)].set(g),)

    return rule(jnp.sort, back), (x,)


@pair
def mask_of_ones(wrong):
    r = Rnd(19)

    def back(args, y, g):
        x, m = args
        return (g if wrong else g * m), g * x

    return rule(lambda x, m: x * m, back), (r.n(3, 4), np.ones((3, 4), np.float32))


@pair
def log_cosh_of_no_error(wrong):
    r = Rnd(20)
    p = r.n(6)

    def back(args, y, g):
        d = g * jnp.tanh(args[0] - args[1])
        return (2 * d, -2 * d) if wrong else (d, -d)

    return rule(lambda p, t: jnp.sum(jnp.log(jnp.cosh(p - t))), back), (p, p)


@pair
def recurrent_cell_from_rest(wrong):
    r = Rnd(21)
    w, u = r.n(3, 4, k=0.5), r.n(4, 4, k=0.5)

    def parts(x, h, w, u):
        gate = jax.nn.sigmoid(h @ u)
        return gate, jnp.tanh(x @ w + (gate * h) @ u)

    def back(args, y, g):
        x, h, w, u = args
        gate, new = parts(*args)
        pre = g * (1 - new**2)
        inner = pre @ u.T
        dgate = inner * h * gate * (1 - gate)
        dh = inner * gate + dgate @ u.T
        du = ((h if wrong else gate * h).T @ pre) + h.T @ dgate
        return pre @ w.T, dh, x.T @ pre, du

    fun = rule(lambda *a: parts(*a)[1], back)
    return fun, (r.n(2, 3), np.zeros((2, 4), np.float32), w, u)


# ----------------------------------------------------------------- near the edge of precision
@one
def relative_exponential_near_zero(wrong):
    x = np.asarray([1e-4, 3e-3, 0.1, 1.0], np.float32)
    back = lambda a, y, g: (g * (jnp.exp(a[0]) * a[0] - jnp.expm1(a[0])) / a[0] ** 2,)
    return rule(lambda x: jnp.expm1(x) / x, back), (x,)


@one
def variance_of_large_numbers(wrong):
    x = Rnd(30).n(12, m=500)
    back = lambda a, y, g: (2 * g * (a[0] - jnp.mean(a[0])) / 12,)
    return rule(lambda x: jnp.mean(x * x) - jnp.mean(x) ** 2, back), (x,)


@one
def angle_near_zero(wrong):
    x = np.asarray([0.999999, 0.9999, -0.99999, 0.3], np.float32)
    return rule(jnp.arccos, lambda a, y, g: (-g / jnp.sqrt(1 - a[0] ** 2),)), (x,)


@pair
def far_tail(wrong):
    x = np.asarray([0.5, 2, 4, 7, 9], np.float32)
    factor = 2 / np.sqrt(np.pi)

    def back(args, y, g):
        (x,) = args
        d = -factor * jnp.exp(-x * x) * g
        return (d.at[3].mul(1.01) if wrong else d,)

    return rule(lambda x: jax.scipy.special.erfc(x), back), (x,)


@one
def lazy_tail_of_softplus(wrong):
    x = np.asarray([-80, -40, -20, 0, 20, 60], np.float32)
    return rule(jax.nn.softplus, lambda a, y, g: (g * jax.nn.sigmoid(a[0]),)), (x,)


@pair
def gelu_by_tanh(wrong):
    x = np.linspace(-2, 2, 9, dtype=np.float32)
    k = np.sqrt(2 / np.pi)
    primal = lambda x: 0.5 * x * (1 + jnp.tanh(k * (x + 0.044715 * x**3)))

    def back(args, y, g):
        (x,) = args
        if wrong:  # the derivative of the exact one
            return (g * (jax.scipy.stats.norm.cdf(x) + x * jax.scipy.stats.norm.pdf(x)),)
        t = jnp.tanh(k * (x + 0.044715 * x**3))
        return (g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x)),)

    return rule(primal, back), (x,)


@one
def norm_of_tiny_numbers(wrong):
    x = Rnd(31).n(5, k=1e-22)

    def primal(x):
        top = jnp.max(jnp.abs(x))
        return top * jnp.sqrt(jnp.sum((x / top) ** 2))

    return rule(primal, lambda a, y, g: (g * (a[0] / y),)), (x,)


@pair
def anomaly_by_twelve_steps(wrong):
    e, m = np.float32(0.4), np.asarray([0.3, 1.0, 2.5], np.float32)

    def primal(e, m):
        step = lambda _, z: z - (z - e * jnp.sin(z) - m) / (1 - e * jnp.cos(z))
        return lax.fori_loop(0, 12, step, m)

    def back(args, z, g):
        e, m = args
        d = g / (1 - e * jnp.cos(z))
        return jnp.sum(d * (jnp.cos(z) if wrong else jnp.sin(z))), d

    return rule(primal, back), (e, m)


@one
def root_by_eight_averages(wrong):
    a = np.asarray([0.25, 2.0, 30.0], np.float32)
    primal = lambda a: lax.fori_loop(0, 8, lambda _, x: 0.5 * (x + a / x), jnp.ones_like(a))
    return rule(primal, lambda args, x, g: (g / (2 * x),)), (a,)


@one
def fiftieth_power(wrong):
    x = np.asarray([0.2, 0.7, 0.95, 1.02], np.float32)
    return rule(lambda x: x**50, lambda a, y, g: (50 * g * a[0] ** 49,)), (x,)


@one
def logit_of_the_almost_sure(wrong):
    p = np.asarray([1e-6, 0.02, 0.5, 0.9999], np.float32)
    primal = lambda p: jnp.log(p) - jnp.log1p(-p)
    return rule(primal, lambda a, y, g: (g / (a[0] * (1 - a[0])),)), (p,)


@one
def compensated_sum(wrong):
    x = np.asarray([1e8, 1.25, -1e8, 0.5, 3e4, -2.5], np.float32)

    def primal(x):
        def add(carry, v):
            total, lost = carry
            new = total + (v - lost)
            return (new, (new - total) - (v - lost)), None

        zero = jnp.zeros((), x.dtype)
        return lax.scan(add, (zero, zero), x)[0][0]

    return rule(primal, lambda a, y, g: (g * jnp.ones_like(a[0]),)), (x,)


@one
def third_from_a_rounded_constant(wrong):
    third = float(np.float32(1 / 3))
    x = Rnd(32).u(0.5, 2, 5)
    back = lambda a, y, g: (third * g * a[0] ** (-2 / 3),)
    return rule(lambda x: jnp.cbrt(x), back), (x,)


@one
def direction_of_a_tiny_vector(wrong):
    x = Rnd(33).n(4, k=1e-15)

    def back(args, y, g):
        size = jnp.sqrt(jnp.sum(args[0] ** 2))
        return ((g - y * jnp.dot(y, g)) / size,)

    return rule(lambda x: x / jnp.sqrt(jnp.sum(x * x)), back), (x,)


@pair
def gradients_over_twelve_decades(wrong):
    k = np.logspace(-6, 6, 60, dtype=np.float32)
    x = Rnd(34).n(60)

    def back(args, y, g):
        d = k * jnp.cos(args[0]) * g
        return (d.at[17].mul(1.005) if wrong else d,)

    return rule(lambda x: k * jnp.sin(x), back), (x,)


@pair
def chebyshev_of_degree_twenty(wrong):
    x = np.asarray([-0.99, -0.4, 0.1, 0.83, 0.999], np.float32)

    def second(x, n):
        a, b = jnp.ones_like(x), 2 * x
        for _ in range(n - 1):
            a, b = b, 2 * x * b - a
        return b

    def primal(x):
        a, b = jnp.ones_like(x), x
        for _ in range(19):
            a, b = b, 2 * x * b - a
        return b

    back = lambda args, y, g: (20 * g * second(args[0], 20 if wrong else 19),)
    return rule(primal, back), (x,)


@one
def legendre_near_the_end(wrong):
    x = np.asarray([0.2, 0.9, 0.999], np.float32)

    def both(x):
        a, b = jnp.ones_like(x), x
        for n in range(2, 7):
            a, b = b, ((2 * n - 1) * x * b - (n - 1) * a) / n
        return a, b

    def back(args, y, g):
        (x,) = args
        a, b = both(x)
        return (g * 6 * (x * b - a) / (x * x - 1),)

    return rule(lambda x: both(x)[1], back), (x,)


@pair
def dilogarithm_by_its_series(wrong):
    x = np.asarray([0.3, 0.5, 0.6], np.float32)
    n = np.arange(1, 80)

    def primal(x):
        k = jnp.asarray(n, x.dtype)
        return jnp.sum(x[:, None] ** k[None] / k[None] ** 2, 1)

    back = lambda a, y, g: (-g * jnp.log1p(-a[0]) / (1 if wrong else a[0]),)
    return rule(primal, back), (x,)


@one
def angle_of_a_distant_point(wrong):
    r = Rnd(35)

    def back(args, t, g):
        y, x = args
        size = x * x + y * y
        return g * x / size, -g * y / size

    return rule(jnp.arctan2, back), (r.n(4, k=1e15), r.n(4, k=1e15))


@one
def hypotenuse_of_huge_sides(wrong):
    r = Rnd(36)

    def primal(x, y):
        a, b = jnp.abs(x), jnp.abs(y)
        top, low = jnp.maximum(a, b), jnp.minimum(a, b)
        return top * jnp.sqrt(1 + (low / top) ** 2)

    back = lambda a, h, g: (g * (a[0] / h), g * (a[1] / h))
    return rule(primal, back), (r.n(4, k=1e25), r.n(4, k=1e25))


@one
def flat_near_zero(wrong):
    x = np.asarray([0.02, 0.1, 0.5, 2.0], np.float32)
    return rule(lambda x: jnp.exp(-1 / x), lambda a, y, g: (g * y / a[0] ** 2,)), (x,)


@pair
def almost_hard_choice(wrong):
    x = np.asarray([0.10, 0.11, 0.095, 0.02], np.float32)

    def back(args, y, g):
        d = y * (g - jnp.sum(g * y)) * 200
        return (d * jnp.asarray([1, 1, 1.02, 1], d.dtype) if wrong else d,)

    return rule(lambda x: jax.nn.softmax(200 * x), back), (x,)
