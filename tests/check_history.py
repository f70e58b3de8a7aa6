"""Wrong VJPs that libraries have shipped, each with its corrected twin: the third table.

Each pair is modelled on a bug of a real library, or on one that its threads warn of: the
registration names the thread, as repository and number, or the rule that is easily written so.

A maker takes a dtype and returns (wrong, right, args).
"""

# ruff: noqa: E731

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import expm, expm_frechet

from tests.check_zoo import custom, normal, twins


class Bug(NamedTuple):
    """A pair, the check that must fail (None: any), and its source.

    A bug of one type alone has it as its `dtype`; one of float32 is one of float64, too.
    """

    make: Callable[[Any], tuple]
    check: str | None
    source: str
    dtype: str


HISTORY: dict[str, Bug] = {}


def bug(source, check="value", dtype="float32"):
    """A decorator that registers a maker."""

    def register(make):
        HISTORY[make.__name__] = Bug(make, check, source, dtype)
        return make

    return register


def edit(primal, backward, wrong, right, *args):
    """The pair whose rules are backward(wrong, g, *args) and backward(right, g, *args)."""
    pair = (lambda r, g, part=part: backward(part, g, *r) for part in (wrong, right))
    return *twins(primal, *pair), args


def others(x):
    """The product of all elements but each one."""
    return jnp.prod(jnp.where(jnp.eye(x.size, dtype=bool), 1, x[None]), axis=1)


def positive_definite(dtype, size=3):
    """A symmetric matrix with positive eigenvalues."""
    a = np.random.default_rng(40).normal(size=(size, size))
    return jnp.asarray(a @ a.T + size * np.eye(size), dtype)


@bug("pytorch/pytorch#76523, pytorch/pytorch#773")
def product_divided_and_masked_at_zero(dtype):
    args = (jnp.asarray([2, 0, 1.5], dtype),)
    masked = lambda x: jnp.where(x == 0, 0, jnp.prod(x) / jnp.where(x == 0, 1, x))
    backward = lambda rest, g, *r: (g * rest(r[0]),)
    return edit(lambda x: jnp.prod(x), backward, masked, others, *args)


@bug("jax-ml/jax#23842", "finite")
def masked_logsumexp_of_an_overflow(dtype):
    args, mask = (jnp.asarray([0, 1000, 1], dtype),), jnp.asarray([True, False, True])
    primal = lambda x: jnp.log(jnp.sum(jnp.where(mask, jnp.exp(jnp.where(mask, x, 0)), 0)))
    wrong = lambda r, g: (g * mask.astype(dtype) * jnp.exp(r[0] - primal(r[0])),)
    right = lambda r, g: (g * jnp.where(mask, jnp.exp(r[0] - primal(r[0])), 0),)
    return *twins(primal, wrong, right), args


def _safe(x):
    return jnp.where(x == 0, 1, x)


@bug("pytorch/pytorch#56734")
def maximum_that_gives_ties_to_both(dtype):
    args = (jnp.asarray([1, 2, 3, 0], dtype), jnp.asarray([2, 2, 3, -1], dtype))

    def backward(at_ties, g, x, y):
        share = jnp.where(x == y, at_ties, 1)
        return jnp.where(x >= y, share * g, 0), jnp.where(y >= x, share * g, 0)

    return edit(jnp.maximum, backward, 1.0, 0.5, *args)


@bug("jax-ml/jax#5054", "second order")
def sinc_without_curvature_at_zero(dtype):
    args = (jnp.asarray([0, 0.4, -1.3], dtype),)

    def backward(curvature, g, *r):
        x, away = r[0], _safe(r[0])
        slope = (jnp.cos(np.pi * away) - jnp.sinc(away)) / away
        return (g * jnp.where(x == 0, curvature * x, slope),)

    return edit(lambda x: jnp.sinc(x), backward, 0.0, -(np.pi**2) / 3, *args)


def _spread(x):
    centred = x - jnp.mean(x, axis=1, keepdims=True)
    return centred, jnp.sqrt(jnp.mean(centred**2, axis=1, keepdims=True))


def _spread_backward(guard, g, *r):
    centred, size = _spread(r[0])
    return (g[:, None] * centred / (r[0].shape[1] * guard(size)),)


@bug("Lightning-AI/lightning-thunder#1848")
def standard_deviation_with_an_epsilon(dtype):
    args = (normal(15, 3, 4, dtype=dtype) * 1e-8,)
    primal = lambda x: _spread(x)[1][:, 0]
    return edit(primal, _spread_backward, lambda s: s + 1e-8, lambda s: s, *args)


@bug("tenstorrent/tt-metal#53386, apache/mxnet#17703", None, dtype="bfloat16")
def embedding_that_stops_counting_at_256(dtype):
    rng = np.random.default_rng(26)
    words = jnp.asarray(np.where(np.arange(2048) < 1771, 1, rng.integers(0, 5, 2048)))

    def primal(e):
        return (jnp.sum(e[words].astype(jnp.float32), axis=0) / 1024).astype(dtype)

    def backward(counted, g, *r):
        rows = jnp.broadcast_to(g[None], (2048, 3)).astype(counted) / 1024
        return (jnp.zeros((5, 3), counted).at[words].add(rows).astype(dtype),)

    return edit(primal, backward, dtype, jnp.float32, normal(27, 5, 3, dtype=dtype))


@bug("after the rule of max, shared in half precision", None, dtype="float16")
def maximum_of_70_000_ties(dtype):
    def backward(counted, g, *r):
        chosen = (r[0] == jnp.max(r[0])).astype(counted)
        return ((g.astype(counted) * chosen / jnp.sum(chosen)).astype(dtype),)

    args = (jnp.ones(70_000, dtype),)
    return edit(lambda x: jnp.max(x), backward, jnp.float16, jnp.float32, *args)


@bug("after the rule of erf with a constant of six digits")
def off_by_a_hundred_thousandth(dtype):
    args = (normal(29, 6, dtype=dtype),)
    backward = lambda constant, g, *r: (g * constant * jnp.exp(-r[0] * r[0]),)
    return edit(jax.scipy.special.erf, backward, 1.12837, 2 / np.pi**0.5, *args)


def _trigamma(x):
    """The derivative of digamma; `polygamma` of JAX 0.12 is wrong for negative numbers."""
    reflected = (jnp.pi / jnp.sin(jnp.pi * x)) ** 2 - jax.scipy.special.polygamma(1, 1 - x)
    return jnp.where(x < 0, reflected, jax.scipy.special.polygamma(1, jnp.where(x < 0, 1, x)))


def _digamma(derivative):
    return custom(lambda x: lax.digamma(x), lambda r, g: (g * derivative(r[0]),))


def _as_in_jax(x):
    return jax.scipy.special.polygamma(1, x)


@bug("jax-ml/jax#37635")
def digamma_of_negative_numbers(dtype):
    args = (jnp.asarray([-16.5, -19.5, 1.5], dtype),)
    return _digamma(_as_in_jax), _digamma(_trigamma), args


@bug("jax-ml/jax#39800", "second order", dtype="float64")
def lgamma_of_negative_numbers_twice(dtype):
    args = (jnp.asarray([-100.5, 2.5], dtype),)
    backward = lambda derivative, g, *r: (g * _digamma(derivative)(r[0]),)
    return edit(lambda x: lax.lgamma(x), backward, _as_in_jax, _trigamma, *args)


@bug("jax-ml/jax#26248", "finite")
def norm_of_zeros(dtype):
    norm = lambda x: jnp.sqrt(jnp.sum(x * x))
    wrong = lambda r, g: (g * r[0] / norm(r[0]),)
    right = lambda r, g: (g * r[0] / jnp.where(norm(r[0]) > 0, norm(r[0]), 1),)
    return *twins(norm, wrong, right), (jnp.zeros(3, dtype),)


def _diagonal(x):
    return jnp.diag(jnp.diag(x))


def _by_factor(factor, g):
    """The gradient by a matrix of its Cholesky factor, before it is made symmetric."""
    p = jnp.tril(factor.T @ jnp.tril(g))
    inverse = jnp.linalg.inv(factor)
    return inverse.T @ (p - _diagonal(p) / 2) @ inverse


@bug("pytorch/pytorch#18825, pytorch/pytorch#137284")
def cholesky_with_both_triangles_counted(dtype):
    args = (positive_definite(dtype, 4),)

    def backward(finish, g, *r):
        return (finish(_by_factor(jnp.linalg.cholesky(r[0]), g)),)

    return edit(
        lambda a: jnp.linalg.cholesky(a),
        backward,
        lambda s: s + s.T - _diagonal(s),
        lambda s: (s + s.T) / 2,
        *args,
    )


@bug("jax-ml/jax#40421")
def cholesky_with_a_gradient_for_the_triangle_it_ignores(dtype):
    args = (positive_definite(dtype, 4),)
    factor = lambda a: jnp.linalg.cholesky(jnp.triu(a) + jnp.triu(a, 1).T)

    def backward(fold, g, *r):
        s = _by_factor(factor(r[0]), g.T)
        return (fold((s + s.T) / 2),)

    upper = lambda s: 2 * jnp.triu(s) - _diagonal(s)
    return edit(lambda a: factor(a).T, backward, lambda s: s, upper, *args)


@bug("pytorch/pytorch#54787, tensorflow/tensorflow#122823")
def determinant_of_a_singular_matrix(dtype):
    rows = normal(4, 2, 3, dtype=dtype)
    args = (jnp.stack([*rows, rows[0] - 2 * rows[1]]),)
    wrong = lambda a: jnp.linalg.det(a) * jnp.linalg.pinv(a).T
    cofactors = lambda a: jnp.stack([jnp.cross(a[k - 2], a[k - 1]) for k in range(3)])
    backward = lambda minors, g, *r: (g * minors(r[0]),)
    return edit(lambda a: jnp.linalg.det(a), backward, wrong, cofactors, *args)


@bug("tensorflow/tensorflow#15465")
def matrix_exponential_in_the_forward_direction(dtype):
    args = (normal(9, 3, 3, dtype=dtype),)

    def backward(turn, g, *r):
        return (expm_frechet(turn(r[0]), g, compute_expm=False),)

    return edit(lambda a: expm(a), backward, lambda a: a, jnp.transpose, *args)


@bug("jax-ml/jax#3970")
def sum_over_devices_differentiated_on_each(dtype):
    args = jnp.asarray(0.7, dtype), normal(70, 3, dtype=dtype)
    loss = lambda w, d: (w * w + 1) * d

    def on_each(gradient, g, *r):
        return (
            g * jax.vmap(gradient, (None, 0), axis_name="batch")(*r)[0],
            g * (r[0] * r[0] + 1) * jnp.ones_like(r[1]),
        )

    wrong = lambda w, d: jax.grad(lambda w: lax.psum(loss(w, d), "batch"))(w)
    right = lambda w, d: lax.psum(jax.grad(loss)(w, d), "batch")
    return edit(lambda w, d: jnp.sum(loss(w, d)), on_each, wrong, right, *args)


@bug("after the rule of a cross entropy with soft targets")
def soft_targets_by_their_largest(dtype):
    args = (normal(56, 1024, 512, dtype=dtype),)
    targets = jax.nn.softmax(normal(57, 1024, 512, dtype=dtype))
    hard = jax.nn.one_hot(jnp.argmax(targets, axis=1), 512, dtype=dtype)
    primal = lambda x: -jnp.sum(targets * jax.nn.log_softmax(x), axis=1)
    backward = lambda labels, g, *r: (g[:, None] * (jax.nn.softmax(r[0]) - labels),)
    return edit(primal, backward, hard, targets, *args)
