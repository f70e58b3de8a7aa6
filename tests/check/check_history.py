"""Wrong VJPs that libraries have shipped, each with its corrected twin: the third table.

Each pair is modelled on a bug of a real library, or on one that its threads warn of: the
registration names the thread, as repository and number, or the rule that is easily written so.

A maker takes a dtype and returns (wrong, right, args).
"""

# ruff: noqa: E731

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import expm, expm_frechet

from tests.check.check_zoo import custom, normal, twins


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


@bug("pytorch/pytorch#2421, HIPS/autograd#151", "finite")
def norm_of_a_zero_row(dtype):
    args = (normal(3, 3, 4, dtype=dtype).at[1].set(0),)
    size = lambda x: jnp.sqrt(jnp.sum(x * x, axis=1, keepdims=True))
    backward = lambda safe, g, *r: (g[:, None] * r[0] / safe(size(r[0])),)
    return edit(lambda x: size(x)[:, 0], backward, lambda n: n, _safe, *args)


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


@bug("stan-dev/math#3031")
def power_that_skips_a_zero_base(dtype):
    args, power = (jnp.asarray([0, 0, 1.5], dtype),), jnp.asarray([1, 2, 3], dtype)
    right = lambda r, g: (g * power * jnp.power(r[0], power - 1),)
    wrong = lambda r, g: (jnp.where(r[0] == 0, 0, right(r, g)[0]),)
    return *twins(lambda x: jnp.power(x, power), wrong, right), args


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


@bug("jax-ml/jax#10877")
def eigenvectors_with_the_gaps_negated(dtype):
    args = (positive_definite(dtype, 4),)

    def primal(a):
        w, v = jnp.linalg.eigh(a)
        return w, v * v

    def backward(sign, g, *r):
        w, v = jnp.linalg.eigh(r[0])
        gaps = sign * (w[None] - w[:, None]) + jnp.eye(4, dtype=dtype)
        inner = (1 - jnp.eye(4, dtype=dtype)) / gaps * (v.T @ (2 * v * g[1]))
        return (v @ (jnp.diag(g[0]) + (inner + inner.T) / 2) @ v.T,)

    return edit(primal, backward, -1, 1, *args)


@bug("jax-ml/jax#8732, tensorflow/tensorflow#17476", "finite")
def singular_values_that_are_equal(dtype):
    args = (jnp.diag(jnp.asarray([1, 1, 2, 3], dtype)),)
    primal = lambda a: jnp.sqrt(jnp.sum(jnp.linalg.svd(a, compute_uv=False) ** 2))

    def backward(vectors, g, *r):
        u, s, v = jnp.linalg.svd(r[0])
        gaps = 1 / (s[None] ** 2 - s[:, None] ** 2 + jnp.eye(4, dtype=dtype))
        inner = jnp.diag(g * s / jnp.sqrt(jnp.sum(s * s))) + vectors(jnp.zeros_like(gaps), gaps)
        return (u @ inner @ v,)

    return edit(primal, backward, jnp.multiply, lambda zeros, _: zeros, *args)


@bug("pytorch/pytorch#54787, tensorflow/tensorflow#122823")
def determinant_of_a_singular_matrix(dtype):
    rows = normal(4, 2, 3, dtype=dtype)
    args = (jnp.stack([*rows, rows[0] - 2 * rows[1]]),)
    wrong = lambda a: jnp.linalg.det(a) * jnp.linalg.pinv(a).T
    cofactors = lambda a: jnp.stack([jnp.cross(a[k - 2], a[k - 1]) for k in range(3)])
    backward = lambda minors, g, *r: (g * minors(r[0]),)
    return edit(lambda a: jnp.linalg.det(a), backward, wrong, cofactors, *args)


@bug("jax-ml/jax#5004")
def logarithm_of_a_complex_determinant(dtype):
    args = (lax.complex(normal(5, 3, 3, dtype=dtype), normal(6, 3, 3, dtype=dtype)),)
    primal = lambda z: jnp.linalg.slogdet(z)[1]

    def backward(turn, g, *r):
        return (lax.complex(g, jnp.zeros_like(g)) * turn(jnp.linalg.inv(r[0]).T),)

    return edit(primal, backward, jnp.conj, lambda z: z, *args)


@bug("tensorflow/tensorflow#15465")
def matrix_exponential_in_the_forward_direction(dtype):
    args = (normal(9, 3, 3, dtype=dtype),)

    def backward(turn, g, *r):
        return (expm_frechet(turn(r[0]), g, compute_expm=False),)

    return edit(lambda a: expm(a), backward, lambda a: a, jnp.transpose, *args)


@bug("EnzymeAD/Reactant.jl#2294")
def imaginary_part_with_the_other_sign(dtype):
    args = (normal(12, 4, dtype=dtype), normal(13, 4, dtype=dtype))
    backward = lambda sign, g, *r: (jnp.real(g), sign * jnp.imag(g))
    return edit(lax.complex, backward, 1, -1, *args)


@bug("jax-ml/jax#12795")
def eigenvalues_of_one_triangle_with_a_gradient_in_both(dtype):
    symmetric = lambda a: jnp.tril(a) + jnp.swapaxes(jnp.tril(a, -1), -1, -2)
    args = (jnp.tril(normal(35, 3, 3, dtype=dtype)),)

    def backward(of_lower, g, *r):
        vectors = jnp.linalg.eigh(symmetric(r[0]))[1]
        whole = vectors @ (g[:, None] * vectors.T)
        return (jnp.tril(whole) + jnp.tril(whole, -1) if of_lower else whole,)

    return edit(lambda a: jnp.linalg.eigh(symmetric(a))[0], backward, False, True, *args)


@bug("jax-ml/jax#22398")
def logsumexp_by_a_weight_of_zero(dtype):
    args = normal(60, 3, dtype=dtype), jnp.asarray([1, 0, 2], dtype)

    def backward(kept, g, a, b):
        share = jnp.exp(a) / jnp.sum(b * jnp.exp(a))
        return g * b * share, g * jnp.where(kept(b), share, 0)

    primal = lambda a, b: jnp.log(jnp.sum(b * jnp.exp(a)))
    return edit(primal, backward, lambda b: b != 0, lambda b: b == b, *args)


@bug("jax-ml/jax#14302")
def spectral_operator_computed_again_along_one_axis(dtype):
    args = normal(68, 4, 6, dtype=dtype), normal(69, 4, 6, dtype=dtype)
    waves = np.hypot(*np.meshgrid(range(4), range(6), indexing="ij"))
    damping = lax.complex(jnp.asarray(1 / (1 + waves), dtype), jnp.zeros((4, 6), dtype))

    def smoothed(u, axes=(0, 1)):
        return jnp.real(jnp.fft.ifftn(jnp.fft.fftn(u, axes=axes) * damping, axes=axes))

    def backward(axes, g, speed, u):
        again = jax.checkpoint(lambda u: smoothed(u, axes))(u)
        return g * again, jax.vjp(smoothed, u)[1](g * speed)[0]

    primal = lambda speed, u: speed * jax.checkpoint(smoothed)(u)
    return edit(primal, backward, (1,), (0, 1), *args)


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


def _attend(q, k, v, mask):
    scores = jnp.einsum("...id,...jd->...ij", q, k) / q.shape[-1] ** 0.5
    return jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ v


def _grouped(wrong, right, length, width, dtype):
    """Eight heads of queries on two of keys, with the heads by which gradients are summed."""
    args = tuple(normal(30 + k, h, length, width, dtype=dtype) for k, h in enumerate((8, 2, 2)))
    heads, every = np.arange(8) % 2, jnp.ones((1, 1, 1), bool)
    attend = lambda q, k, v: _attend(q, k, v, every)
    primal = lambda q, k, v: attend(q, k[heads], v[heads])

    def backward(gathered, g, q, k, v):
        by_q, by_k, by_v = jax.vjp(attend, q, k[heads], v[heads])[1](g)
        return by_q, gathered(by_k), gathered(by_v)

    return edit(primal, backward, wrong, right, *args)


def _summed_by(heads):
    return lambda x: jnp.zeros((2, *x.shape[1:]), x.dtype).at[heads].add(x)


@bug("XunhaoLai/native-sparse-attention-triton#27")
def heads_divided_where_they_are_interleaved(dtype):
    interleaved = np.arange(8) % 2
    return _grouped(_summed_by(np.arange(8) // 4), _summed_by(interleaved), 64, 32, dtype)


@bug("lmnt-com/haste#43")
def zoneout_by_the_mask_of_the_first_step(dtype):
    args = (normal(38, 3, dtype=dtype), normal(39, 4, 3, dtype=dtype))
    mask = jnp.asarray([[1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 0, 1]], dtype)

    def states(h, xs):
        step = lambda h, e: (e[1] * jnp.tanh(h + e[0]) + (1 - e[1]) * h,) * 2
        return lax.scan(step, h, (xs, mask))[1]

    def backward(masks, g, *r):
        before = jnp.concatenate([r[0][None], states(*r)[:-1]])

        def step(after, element):
            g, h, x, m = element
            total = g + after
            inner = m * total * (1 - jnp.tanh(h + x) ** 2)
            return inner + (1 - m) * total, inner

        elements = (g, before, r[1], masks)
        return lax.scan(step, jnp.zeros_like(r[0]), elements, reverse=True)

    return edit(states, backward, jnp.tile(mask[:1], (4, 1)), mask, *args)


@bug("pytorch/pytorch#52241, pytorch/pytorch#82545")
def ctc_with_the_gradient_of_a_softmax_before_it(dtype):
    args, steps = (normal(47, 4, 3, dtype=dtype),), np.arange(4)
    collapse = lambda path: [k for k, _ in itertools.groupby(path) if k]
    paths = np.array([p for p in itertools.product(range(3), repeat=4) if collapse(p) == [1, 2]])
    scores = lambda x: jnp.sum(x[steps[None], paths], axis=1)

    def backward(probabilities, g, *r):
        posterior = jax.nn.softmax(scores(r[0]))[:, None]
        counted = jnp.zeros_like(r[0]).at[steps[None], paths].add(posterior)
        return (g * (probabilities(r[0]) - counted),)

    return edit(lambda x: -jax.nn.logsumexp(scores(x)), backward, jnp.exp, jnp.zeros_like, *args)


@bug("fla-org/flash-linear-attention#568")
def causal_convolution_with_its_state_reversed(dtype):
    sizes = (2, 8, 1024), (2, 3, 1024), (4, 1024)
    args = tuple(normal(53 + k, *size, dtype=dtype) for k, size in enumerate(sizes))

    def primal(x, state, taps):
        whole = jnp.concatenate([state, x], axis=1)
        return jax.nn.silu(sum(whole[:, k : k + 8] * taps[k][None, None] for k in range(4)))

    def backward(route, g, *r):
        return jax.vjp(lambda x, s, w: primal(x, route(s), w), *r)[1](g)

    return edit(primal, backward, lambda s: jnp.flip(s, 1), lambda s: s, *args)


@bug("after the rule of a cross entropy with soft targets")
def soft_targets_by_their_largest(dtype):
    args = (normal(56, 1024, 512, dtype=dtype),)
    targets = jax.nn.softmax(normal(57, 1024, 512, dtype=dtype))
    hard = jax.nn.one_hot(jnp.argmax(targets, axis=1), 512, dtype=dtype)
    primal = lambda x: -jnp.sum(targets * jax.nn.log_softmax(x), axis=1)
    backward = lambda labels, g, *r: (g[:, None] * (jax.nn.softmax(r[0]) - labels),)
    return edit(primal, backward, hard, targets, *args)
