"""Wrong VJPs that libraries have shipped, each with its corrected twin: the third table.

Each pair is modelled on a bug of a real library, or on one that its threads warn of: the
registration names the thread, as repository and number, or the rule that is easily written so.
This file holds elementwise functions, reductions, indexing and constants; `check_history_linalg`
and `check_history_layers` hold the others, `check_history_right` right functions without a twin.

A maker takes a dtype and returns (wrong, right, args).
"""

# ruff: noqa: E731

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.check_zoo import custom, normal, twins


class Bug(NamedTuple):
    """A pair, the check that must fail (None: any), its source, and how it is to be checked."""

    make: Callable[[Any], tuple]
    check: str | None
    source: str
    order: int = 1
    dtype: str = "float32"


def registrar(table):
    """A decorator that registers makers in the table."""

    def bug(source, check="value", order=1, dtype="float32"):
        def register(make):
            table[make.__name__] = Bug(make, check, source, order, dtype)
            return make

        return register

    return bug


def edit(primal, backward, wrong, right, *args):
    """The pair whose rules are backward(wrong, g, *args) and backward(right, g, *args)."""
    pair = (lambda r, g, part=part: backward(part, g, *r) for part in (wrong, right))
    return *twins(primal, *pair), args


def later(x):
    """The sum of each element and all after it."""
    return jnp.flip(jnp.cumsum(jnp.flip(x)))


def others(x):
    """The product of all elements but each one."""
    return jnp.prod(jnp.where(jnp.eye(x.size, dtype=bool), 1, x[None]), axis=1)


def positive_definite(dtype, size=3):
    """A symmetric matrix with positive eigenvalues."""
    a = np.random.default_rng(40).normal(size=(size, size))
    return jnp.asarray(a @ a.T + size * np.eye(size), dtype)


HISTORY: dict[str, Bug] = {}
bug = registrar(HISTORY)


@bug("Theano/Theano#5197, tensorflow/tensorflow#119430")
def cumprod_divided_by_its_argument(dtype):
    args = (jnp.asarray([2, 3, 0, 1.5], dtype),)

    def wrong(r, g):
        safe = jnp.where(r[0] == 0, 1, r[0])
        return (jnp.where(r[0] == 0, 0, later(g * jnp.cumprod(r[0])) / safe),)

    def right(r, g):
        before = jnp.concatenate([jnp.ones(1, dtype), jnp.cumprod(r[0])[:-1]])
        following = jnp.append(r[0][1:], jnp.zeros(1, dtype))
        step = lambda after, element: (element[0] + after * element[1],) * 2
        _, after = lax.scan(step, jnp.zeros((), dtype), (g, following), reverse=True)
        return (before * after,)

    return *twins(lambda x: jnp.cumprod(x), wrong, right), args


@bug("pytorch/pytorch#76523, pytorch/pytorch#773")
def product_divided_and_masked_at_zero(dtype):
    args = (jnp.asarray([2, 0, 1.5], dtype),)
    masked = lambda x: jnp.where(x == 0, 0, jnp.prod(x) / jnp.where(x == 0, 1, x))
    backward = lambda rest, g, *r: (g * rest(r[0]),)
    return edit(lambda x: jnp.prod(x), backward, masked, others, *args)


@bug("pytorch/pytorch#106789", "second order", order=2)
def product_of_two_zeros_without_second_derivative(dtype):
    args = (jnp.asarray([2, 3, 0, 0], dtype),)

    def backward(stop, g, *r):
        several = jnp.sum((r[0] == 0).astype(dtype)) >= 2
        return (g * jnp.where(several, stop(others(r[0])), others(r[0])),)

    return edit(lambda x: jnp.prod(x), backward, lax.stop_gradient, lambda x: x, *args)


@bug("jax-ml/jax#9296")
def segment_product_as_if_alone_in_its_segment(dtype):
    args, segments = (normal(1, 5, dtype=dtype) + 2,), np.array([0, 0, 1, 1, 1])
    primal = lambda x: jnp.ones(2, dtype).at[segments].multiply(x)
    mates = jnp.asarray((segments[:, None] == segments) & ~np.eye(5, dtype=bool))
    rest = lambda x: jnp.prod(jnp.where(mates, x[None], 1), axis=1)
    backward = lambda factor, g, *r: (g[segments] * factor(r[0]),)
    return edit(primal, backward, jnp.ones_like, rest, *args)


@bug("pytorch/pytorch#26637")
def cumulative_maximum_of_its_own_place_only(dtype):
    args = (jnp.asarray([1, -1, 0.5, 2, 0], dtype),)
    record = lambda x: x == lax.cummax(x)
    wrong = lambda r, g: (jnp.where(record(r[0]), g, 0),)

    def right(r, g):
        index = lax.cummax(jnp.where(record(r[0]), jnp.arange(5), 0))
        return (jnp.zeros_like(g).at[index].add(g),)

    return *twins(lambda x: lax.cummax(x), wrong, right), args


@bug("pytorch/pytorch#32876")
def cumulative_logsumexp_normalized_twice(dtype):
    args = (normal(2, 6, dtype=dtype),)
    primal = lambda x: lax.cumlogsumexp(x)
    backward = lambda k, g, *r: (jnp.exp(r[0]) * later(g * jnp.exp(-k * primal(r[0]))),)
    return edit(primal, backward, 2, 1, *args)


@bug("jax-ml/jax#23842", "finite")
def masked_logsumexp_of_an_overflow(dtype):
    args, mask = (jnp.asarray([0, 1000, 1], dtype),), jnp.asarray([True, False, True])
    primal = lambda x: jnp.log(jnp.sum(jnp.where(mask, jnp.exp(jnp.where(mask, x, 0)), 0)))
    wrong = lambda r, g: (g * mask.astype(dtype) * jnp.exp(r[0] - primal(r[0])),)
    right = lambda r, g: (g * jnp.where(mask, jnp.exp(r[0] - primal(r[0])), 0),)
    return *twins(primal, wrong, right), args


def _safe(x):
    return jnp.where(x == 0, 1, x)


@bug("pytorch/pytorch#2421, HIPS/autograd#151", "finite")
def norm_of_a_zero_row(dtype):
    args = (normal(3, 3, 4, dtype=dtype).at[1].set(0),)
    size = lambda x: jnp.sqrt(jnp.sum(x * x, axis=1, keepdims=True))
    backward = lambda safe, g, *r: (g[:, None] * r[0] / safe(size(r[0])),)
    return edit(lambda x: size(x)[:, 0], backward, lambda n: n, _safe, *args)


@bug("pytorch/pytorch#41779")
def infinity_norm_that_gives_ties_everything(dtype):
    args = (jnp.asarray([[1, -2, 2], [3, 0, -3]], dtype),)

    def backward(shared, g, *r):
        size = jnp.abs(r[0])
        largest = (size == jnp.max(size, axis=1, keepdims=True)).astype(dtype)
        count = jnp.sum(largest, axis=1, keepdims=True) if shared else 1
        return (g[:, None] * jnp.sign(r[0]) * largest / count,)

    return edit(lambda x: jnp.max(jnp.abs(x), axis=1), backward, False, True, *args)


@bug("pytorch/pytorch#56734")
def maximum_that_gives_ties_to_both(dtype):
    args = (jnp.asarray([1, 2, 3, 0], dtype), jnp.asarray([2, 2, 3, -1], dtype))

    def backward(at_ties, g, x, y):
        share = jnp.where(x == y, at_ties, 1)
        return jnp.where(x >= y, share * g, 0), jnp.where(y >= x, share * g, 0)

    return edit(jnp.maximum, backward, 1.0, 0.5, *args)


def _shared(extreme):
    """Rules that hand an extreme's gradient to all that equal it, whole or shared."""

    def backward(shared, g, *r):
        chosen = (r[0] == extreme(r[0])).astype(g.dtype)
        return (g * chosen / (jnp.sum(chosen) if shared else 1),)

    return backward


@bug("PaddlePaddle/Paddle#42385")
def median_that_gives_ties_everything(dtype):
    args = (jnp.asarray([1, 2, 2, 5, 0.5], dtype),)
    return edit(lambda x: jnp.nanmedian(x), _shared(jnp.nanmedian), False, True, *args)


@bug("pytorch/pytorch#76523")
def segment_maximum_that_gives_ties_everything(dtype):
    args, segments = (jnp.asarray([1, 2, 2, 0, -1, 3], dtype),), jnp.asarray([0, 0, 0, 1, 1, 1])
    primal = lambda x: jax.ops.segment_max(x, segments, 2)

    def backward(shared, g, *r):
        chosen = (r[0] == primal(r[0])[segments]).astype(dtype)
        count = jax.ops.segment_sum(chosen, segments, 2)[segments]
        return (g[segments] * chosen / (count if shared else 1),)

    return edit(primal, backward, False, True, *args)


@bug("JuliaDiff/ChainRules.jl#804")
def clamp_between_crossed_bounds(dtype):
    args = tuple(jnp.asarray(x, dtype) for x in ([0, 0.5, 3], [1, 0, 1], [-1, 1, 2]))

    def backward(of_bounded, g, x, low, high):
        below, above = x < low, (jnp.maximum(x, low) if of_bounded else x) > high
        inside = ~below & ~above
        lower = below & ~above if of_bounded else below
        return tuple(jnp.where(part, g, 0) for part in (inside, lower, above))

    return edit(lambda *a: jnp.minimum(jnp.maximum(*a[:2]), a[2]), backward, False, True, *args)


@bug("pytorch/pytorch#27134", "finite")
def exponent_of_a_zero_base(dtype):
    args, base = (jnp.asarray([1, 1.5, 2], dtype),), jnp.asarray([0, 2, 0.5], dtype)
    primal = lambda y: jnp.power(base, y)
    backward = lambda safe, g, *r: (g * primal(r[0]) * jnp.log(safe(base)),)
    return edit(primal, backward, lambda x: x, _safe, *args)


@bug("stan-dev/math#3031")
def power_that_skips_a_zero_base(dtype):
    args, power = (jnp.asarray([0, 0, 1.5], dtype),), jnp.asarray([1, 2, 3], dtype)
    right = lambda r, g: (g * power * jnp.power(r[0], power - 1),)
    wrong = lambda r, g: (jnp.where(r[0] == 0, 0, right(r, g)[0]),)
    return *twins(lambda x: jnp.power(x, power), wrong, right), args


@bug("pytorch/pytorch#80770")
def xlogy_at_zero(dtype):
    args, y = (jnp.asarray([0, 1, -2], dtype),), jnp.asarray([2, 3, 0.5], dtype)
    right = lambda r, g: (g * jnp.log(y),)
    wrong = lambda r, g: (jnp.where(r[0] == 0, 0, g * jnp.log(y)),)
    return *twins(lambda x: jax.scipy.special.xlogy(x, y), wrong, right), args


@bug("pytorch/pytorch#51408")
def hard_sigmoid_below_its_left_end(dtype):
    args = (jnp.asarray([-4.6, -3.9, -1, 0.7, 4], dtype),)
    backward = lambda low, g, *r: (jnp.where((r[0] > low) & (r[0] < 3), g / 6, 0),)
    return edit(lambda x: jax.nn.hard_sigmoid(x), backward, -np.inf, -3, *args)


@bug("pytorch/pytorch#55587")
def softplus_with_a_threshold_for_its_output(dtype):
    args, beta, threshold = (jnp.asarray([-1, -0.2, 0.25, 0.6], dtype),), 3, 1
    soft = lambda x: jnp.log1p(jnp.exp(beta * x)) / beta
    primal = lambda x: jnp.where(beta * x > threshold, x, soft(x))

    def backward(of, g, *r):
        linear = beta * of(r[0]) > threshold
        return (jnp.where(linear, g, g * jax.nn.sigmoid(beta * r[0])),)

    return edit(primal, backward, soft, lambda x: x, *args)


@bug("pytorch/pytorch#44433")
def smooth_l1_without_its_beta(dtype):
    args, beta = (normal(4, 9, dtype=dtype),), 0.7
    primal = lambda d: jnp.where(jnp.abs(d) < beta, 0.5 * d * d / beta, jnp.abs(d) - 0.5 * beta)
    small = lambda d: jnp.abs(d) < beta
    backward = lambda divisor, g, d: (g * jnp.where(small(d), d / divisor, jnp.sign(d)),)
    return edit(primal, backward, 1.0, beta, *args)


@bug("BobMcDear/attorch#13")
def huber_threshold_for_the_signed_difference(dtype):
    args = (normal(5, 9, dtype=dtype) * 2,)
    primal = lambda d: jnp.where(jnp.abs(d) < 1, d * d / 2, jnp.abs(d) - 0.5)
    backward = lambda of, g, *r: (g * jnp.where(of(r[0]) < 1, r[0], jnp.sign(r[0])),)
    return edit(primal, backward, lambda d: d, jnp.abs, *args)


@bug("jax-ml/jax#40628")
def bessel_function_with_a_slope_at_zero(dtype):
    args = (jnp.asarray([0, 0.5, -1.2], dtype),)
    slope = jax.scipy.special.i1
    backward = lambda at_zero, g, x: (g * (slope(x) + jnp.where(x == 0, at_zero, 0)),)
    return edit(lambda x: jax.scipy.special.i0(x), backward, 1.0, 0.0, *args)


@bug("jax-ml/jax#5054", "second order", order=2)
def sinc_without_curvature_at_zero(dtype):
    args = (jnp.asarray([0, 0.4, -1.3], dtype),)

    def backward(curvature, g, *r):
        x, away = r[0], _safe(r[0])
        slope = (jnp.cos(np.pi * away) - jnp.sinc(away)) / away
        return (g * jnp.where(x == 0, curvature * x, slope),)

    return edit(lambda x: jnp.sinc(x), backward, 0.0, -(np.pi**2) / 3, *args)


@bug("after the rule of gelu in its tanh form")
def gelu_without_the_power_of_its_cubic_term(dtype):
    args, c = (normal(6, 9, dtype=dtype),), (2 / np.pi) ** 0.5

    def backward(power, g, x):
        t = jnp.tanh(c * (x + 0.044715 * x**3))
        inner = c * (1 + power * 0.044715 * x * x)
        return (g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner),)

    return edit(lambda x: jax.nn.gelu(x), backward, 1, 3, *args)


@bug("tenstorrent/tt-metal#6533")
def ldexp_by_the_natural_exponential(dtype):
    args = (normal(7, 4, dtype=dtype), normal(8, 4, dtype=dtype))
    ln2 = np.log(2).item()
    backward = lambda by_x, g, *r: (g * by_x(r[1]), g * r[0] * jnp.exp2(r[1]) * ln2)
    wrong = lambda y: jnp.exp(y) * ln2
    return edit(lambda x, y: x * jnp.exp2(y), backward, wrong, jnp.exp2, *args)


@bug("jax-ml/jax#7538")
def segment_sum_of_a_dropped_element(dtype):
    args, index = (normal(9, 4, dtype=dtype),), jnp.asarray([0, 2, 7, 1])
    primal = lambda x: jnp.zeros(3, dtype).at[index].add(x, mode="drop")
    backward = lambda mode, g, *r: (g.at[index].get(mode=mode, fill_value=0),)
    return edit(primal, backward, "clip", "fill", *args)


@bug("jax-ml/jax#753")
def scan_without_gradient_by_its_sequence(dtype):
    args = (normal(10, dtype=dtype), normal(11, 5, dtype=dtype))
    primal = lambda start, xs: lax.scan(lambda c, x: (c + 2 * x,) * 2, start, xs)[1]
    backward = lambda factor, g, *r: (jnp.sum(g), factor * later(g))
    return edit(primal, backward, 0, 2, *args)


@bug("HIPS/autograd#510")
def einsum_off_its_diagonal(dtype):
    args = (normal(12, 4, 3, dtype=dtype), normal(13, 4, 4, dtype=dtype))
    by_x = lambda r, g: jnp.diagonal(r[1])[:, None] * g[None]
    backward = lambda mask, g, *r: (by_x(r, g), mask * (r[0] @ g)[:, None])
    primal = lambda x, w: jnp.einsum("nd,nn->d", x, w)
    return edit(primal, backward, jnp.ones((4, 4), dtype), jnp.eye(4, dtype=dtype), *args)


def _spread(x):
    centred = x - jnp.mean(x, axis=1, keepdims=True)
    return centred, jnp.sqrt(jnp.mean(centred**2, axis=1, keepdims=True))


def _spread_backward(guard, g, *r):
    centred, size = _spread(r[0])
    return (g[:, None] * centred / (r[0].shape[1] * guard(size)),)


@bug("pytorch/pytorch#4320, jax-ml/jax#11716", "finite")
def standard_deviation_of_a_constant(dtype):
    args = (normal(14, 3, 4, dtype=dtype).at[1].set(2),)
    return edit(lambda x: _spread(x)[1][:, 0], _spread_backward, lambda s: s, _safe, *args)


@bug("Lightning-AI/lightning-thunder#1848")
def standard_deviation_with_an_epsilon(dtype):
    args = (normal(15, 3, 4, dtype=dtype) * 1e-8,)
    primal = lambda x: _spread(x)[1][:, 0]
    return edit(primal, _spread_backward, lambda s: s + 1e-8, lambda s: s, *args)


@bug("chainer/chainer#4190")
def unit_vectors_with_the_epsilon_forgotten(dtype):
    args = (normal(16, 3, 4, dtype=dtype),)
    size = lambda x: jnp.sqrt(jnp.sum(x * x, axis=1, keepdims=True))

    def backward(inner, g, x):
        n = size(x) + 0.5
        dot = jnp.sum(x * g, axis=1, keepdims=True)
        return (g / n - x * dot / (n * n * (size(x) + inner)),)

    return edit(lambda x: x / (size(x) + 0.5), backward, 0.5, 0.0, *args)


@bug("flagos-ai/FlagGems#5023")
def distances_with_the_euclidean_gradient(dtype):
    args = (normal(17, 4, 3, dtype=dtype), normal(18, 5, 3, dtype=dtype))
    apart = lambda x, y: x[:, None] - y[None]
    primal = lambda x, y: jnp.sum(jnp.abs(apart(x, y)) ** 3, axis=-1) ** (1 / 3)

    def backward(p, g, *r):
        diff = apart(*r)
        part = jnp.sign(diff) * (jnp.abs(diff) / primal(*r)[..., None]) ** (p - 1)
        part = g[..., None] * part
        return jnp.sum(part, axis=1), -jnp.sum(part, axis=0)

    return edit(primal, backward, 2, 3, *args)


@bug("after the rule of kl_div(log_target=True)")
def divergence_of_logarithmic_targets(dtype):
    args = (normal(19, 6, dtype=dtype), normal(20, 6, dtype=dtype))
    primal = lambda x, t: jnp.exp(t) * (t - x)
    by_target = lambda r, g: g * jnp.exp(r[1]) * (r[1] - r[0] + 1)
    backward = lambda weight, g, *r: (-g * weight(r[1]), by_target(r, g))
    return edit(primal, backward, lambda t: t, jnp.exp, *args)


@bug("tensorflow/tensorflow#7403", "second order", order=2)
def cross_entropy_without_second_derivative(dtype):
    args, labels = (normal(21, 3, 4, dtype=dtype),), jax.nn.softmax(normal(22, 3, 4, dtype=dtype))
    primal = lambda x: -jnp.sum(labels * jax.nn.log_softmax(x), axis=-1)
    backward = lambda stop, g, *r: (g[:, None] * stop(jax.nn.softmax(r[0]) - labels),)
    return edit(primal, backward, lax.stop_gradient, lambda x: x, *args)


@bug("apache/mxnet#14992", "second order", order=2)
def second_derivative_with_the_cotangent_squared(dtype):
    args = (jnp.abs(normal(23, 5, dtype=dtype)) + 1,)

    def backward(power, g, x):
        by_both = lambda r, h: (-h * r[1] ** power / r[0] ** 2, h / r[0])
        divided = custom(lambda x, g: g / x, by_both)
        return (divided(x, g),)

    return edit(jnp.log, backward, 2, 1, *args)


@bug("after the rule of the trapezoid")
def trapezoid_with_whole_ends(dtype):
    args = (normal(24, 6, dtype=dtype),)
    ends = jnp.asarray([0, -1])
    backward = lambda end, g, y: (g * 0.5 * jnp.ones(6, dtype).at[ends].set(end),)
    return edit(lambda y: jnp.trapezoid(y, dx=0.5), backward, 1.0, 0.5, *args)


@bug("pytorch/pytorch#80204")
def overwritten_elements_with_a_gradient(dtype):
    args, index = (normal(25, 4, dtype=dtype),), jnp.asarray([4, 2, 3, 2])
    primal = lambda x: jnp.zeros(6, dtype).at[index].set(x)
    last = jnp.asarray([1, 0, 1, 1], dtype)
    backward = lambda kept, g, *r: (g[index] * kept,)
    return edit(primal, backward, jnp.ones(4, dtype), last, *args)


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


@bug("after the rule of an embedding, summed in a loop", None, dtype="bfloat16")
def loop_that_stops_counting_at_256(dtype):
    weights = jnp.abs(normal(30, 2048, dtype=jnp.float32)) / 1024

    def primal(x):
        add = lambda total, w: (total + x.astype(jnp.float32) * w, None)
        return lax.scan(add, jnp.zeros(5), weights)[0].astype(dtype)

    def backward(counted, g, *r):
        add = lambda total, w: (total + (g.astype(counted) * w.astype(counted)), None)
        return (lax.scan(add, jnp.zeros(5, counted), weights)[0].astype(dtype),)

    return edit(primal, backward, dtype, jnp.float32, jnp.arange(1, 6, dtype=dtype))


@bug("after the rule of max, shared in half precision", None, dtype="float16")
def maximum_of_70_000_ties(dtype):
    def backward(counted, g, *r):
        chosen = (r[0] == jnp.max(r[0])).astype(counted)
        return ((g.astype(counted) * chosen / jnp.sum(chosen)).astype(dtype),)

    args = (jnp.ones(70_000, dtype),)
    return edit(lambda x: jnp.max(x), backward, jnp.float16, jnp.float32, *args)


@bug("after the rule of log2 with a constant of four digits")
def off_by_a_twentieth_of_a_percent(dtype):
    args = (jnp.abs(normal(28, 6, dtype=dtype)) + 1,)
    backward = lambda constant, g, *r: (g * constant / r[0],)
    return edit(jnp.log2, backward, 1.442, 1 / np.log(2).item(), *args)


@bug("after the rule of erf with a constant of six digits")
def off_by_a_hundred_thousandth(dtype):
    args = (normal(29, 6, dtype=dtype),)
    backward = lambda constant, g, *r: (g * constant * jnp.exp(-r[0] * r[0]),)
    return edit(jax.scipy.special.erf, backward, 1.12837, 2 / np.pi**0.5, *args)


@bug("after the rule of a loss whose terms have different scales")
def small_element_doubled_beside_large_ones(dtype):
    args = (normal(30, 8, dtype=dtype),)
    scale = jnp.full(8, 1e3, dtype).at[3].set(1e-6)
    right = lambda r, g: (g * scale * jnp.cos(r[0]),)
    wrong = lambda r, g: (right(r, g)[0].at[3].multiply(2),)
    return *twins(lambda x: scale * jnp.sin(x), wrong, right), args


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


@bug("jax-ml/jax#39800", "second order", order=2, dtype="float64")
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


@bug("flatironinstitute/jax-finufft#158")
def fourier_series_whose_frequencies_begin_at_zero(dtype):
    frequencies = np.fft.fftfreq(6, 1 / 6).astype(dtype)
    cosines = lambda c, x, k: jnp.cos(x[:, None] * k[None]) @ c

    def backward(order, g, c, x):
        k = jnp.asarray(frequencies)
        slopes = -jnp.sin(x[:, None] * k[None]) @ (jnp.asarray(order(frequencies)) * c)
        return jnp.cos(x[:, None] * k[None]).T @ g, g * slopes

    primal = lambda c, x: cosines(c, x, jnp.asarray(frequencies))
    args = normal(31, 6, dtype=dtype), normal(32, 4, dtype=dtype)
    return edit(primal, backward, np.fft.fftshift, lambda k: k, *args)


@bug("jax-ml/jax#36886")
def each_example_with_the_gradients_of_all_devices(dtype):
    devices = 2
    args = normal(33, 4, 3, dtype=dtype), normal(34, 4, 3, dtype=dtype)

    def backward(over, g, *r):
        own = g[:, None] * r[1]
        return over(own.reshape(devices, -1, 3)).reshape(own.shape), g[:, None] * r[0]

    summed = lambda parts: jnp.broadcast_to(jnp.sum(parts, 0, keepdims=True), parts.shape)
    return edit(lambda p, x: jnp.sum(p * x, 1), backward, summed, lambda parts: parts, *args)


@bug("jax-ml/jax#5900")
def power_by_a_scan_that_keeps_its_last_value(dtype):
    def primal(x):
        return lax.scan(lambda y, _: (y * x, None), jnp.ones_like(x), None, 4)[0]

    args = (jnp.asarray([3, 0.7, -1.5], dtype),)
    return edit(primal, lambda n, g, *r: (4 * g * r[0] ** n,), 4, 3, *args)


@bug("google/jaxopt#141")
def root_without_the_gradient_of_what_its_equation_closes_over(dtype):
    def primal(y, a, b):  # of a x ** 2 + b x = (a + b) y
        return (jnp.sqrt(b * b + 4 * a * (a + b) * y) - b) / (2 * a)

    def backward(part, g, y, a, b):
        x = primal(y, a, b)
        scale = g / (2 * a * x + b)
        return (a + b) * scale, part * (y - x * x) * scale, part * (y - x) * scale

    return edit(primal, backward, 0, 1, *(jnp.asarray(v, dtype) for v in (0.5, 1.5, 0.7)))
