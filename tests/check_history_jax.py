"""The third table's bugs of JAX and of libraries on it, as their threads have them."""

# ruff: noqa: E731

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.check_history import Bug, edit, registrar
from tests.check_zoo import custom, normal, twins

OF_JAX: dict[str, Bug] = {}
bug = registrar(OF_JAX)


@bug("jax-ml/jax#40626", "finite")
def scatter_max_that_counts_indices_before_they_are_clipped(dtype):
    args = jnp.asarray([1, 3, 4], dtype), jnp.asarray([1.25, 3.75], dtype)
    index, places = jnp.asarray([-3, 8]), jnp.arange(3)[:, None]
    clipped = jnp.clip(index, 0, 2)

    def backward(counted, g, x, u):
        of_update = (u >= x[clipped]).astype(dtype)
        hits = jnp.sum((places == counted[None]).astype(dtype), axis=1)
        lost = jnp.zeros_like(x).at[clipped].add(of_update)
        return g * (1 - lost), g[clipped] * of_update / hits[clipped]

    return edit(lambda x, u: x.at[clipped].max(u), backward, index, clipped, *args)


@bug("jax-ml/jax#15598")
def xlog1py_at_zero(dtype):
    args = jnp.asarray([0, 1, 0], dtype), jnp.asarray([3, 0.5, -0.4], dtype)
    right = lambda r, g: (g * jnp.log1p(r[1]), g * r[0] / (1 + r[1]))
    wrong = lambda r, g: tuple(jnp.where(r[0] == 0, 0, part) for part in right(r, g))
    return *twins(lambda x, y: jax.scipy.special.xlog1py(x, y), wrong, right), args


@bug("jax-ml/jax#22398")
def logsumexp_by_a_weight_of_zero(dtype):
    args = normal(60, 3, dtype=dtype), jnp.asarray([1, 0, 2], dtype)

    def backward(kept, g, a, b):
        share = jnp.exp(a) / jnp.sum(b * jnp.exp(a))
        return g * b * share, g * jnp.where(kept(b), share, 0)

    primal = lambda a, b: jnp.log(jnp.sum(b * jnp.exp(a)))
    return edit(primal, backward, lambda b: b != 0, lambda b: b == b, *args)


def _power_rule(x, n):
    return n * x ** (n - 1)


def _constant_for_zero(x, n):
    return jnp.where(n == 0, 0, n * jnp.where(n == 0, 1, x) ** (n - 1))


@bug("jax-ml/jax#14397", "finite")
def integer_power_of_zero(dtype):
    args, n = (jnp.asarray([0, 0, 1.5], dtype),), jnp.asarray([0, 2, 3])
    backward = lambda slope, g, *r: (g * slope(r[0], n.astype(dtype)),)
    return edit(lambda x: lax.pow(x, n), backward, _power_rule, _constant_for_zero, *args)


@bug("jax-ml/jax#18450", "jit")
def power_whose_exponent_is_seen_without_jit_alone(dtype):
    args, n = (jnp.asarray([0, 1.5], dtype),), 0

    def wrong(r, g):
        traced = isinstance(r[0], jax.core.Tracer)
        exponent = jnp.asarray(n, dtype)
        return (g * (_power_rule(r[0], exponent) if traced else jnp.zeros_like(g)),)

    right = lambda r, g: (jnp.zeros_like(g),)
    return *twins(lambda x: x**n, wrong, right), args


@bug("jax-ml/jax#8126, jax-ml/jax#8128", "finite")
def variance_beside_a_missing_value(dtype):
    args = (normal(60, 4, dtype=dtype),)
    whole = lambda x: jnp.append(x, jnp.asarray(np.nan, dtype))

    def backward(
        kept, g, x
    ):  # the mean's own gradient is a sum over all, the missing one among them
        centred = kept(whole(x) - jnp.nanmean(whole(x)))
        return ((2 * g * (centred - jnp.sum(centred) / 4) / 4)[:4],)

    primal = lambda x: jnp.nanvar(whole(x))
    return edit(primal, backward, lambda c: c, lambda c: jnp.where(jnp.isnan(c), 0, c), *args)


@bug("jax-ml/jax#6223")
def inverse_real_transform_without_its_conjugate(dtype):
    args = (lax.complex(normal(61, 4, dtype=dtype), normal(62, 4, dtype=dtype)),)
    weights = (jnp.asarray([1, 2, 2, 1], dtype) / 6).astype(args[0].dtype)
    backward = lambda turn, g, *r: (turn(weights * jnp.fft.rfft(g)),)
    return edit(lambda z: jnp.fft.irfft(z, 6), backward, lambda z: z, jnp.conj, *args)


@bug("jax-ml/jax#979")
def imaginary_part_without_its_sign(dtype):
    args = (lax.complex(normal(63, 4, dtype=dtype), normal(64, 4, dtype=dtype)),)
    backward = lambda sign, g, *r: (lax.complex(jnp.zeros_like(g), sign * g),)
    return edit(lambda z: lax.imag(z), backward, 1, -1, *args)


@bug("jax-ml/jax#1521")
def taken_along_an_axis_of_one_row_only(dtype):
    args, index = (normal(65, 1, 3, dtype=dtype),), jnp.asarray(np.arange(6)[:, None] // 2)
    chosen = (index == jnp.arange(3)[None]).astype(dtype)
    backward = lambda rows, g, *r: (jnp.sum((g * chosen)[:rows], axis=0, keepdims=True),)
    primal = lambda y: jnp.take_along_axis(jnp.broadcast_to(y, (6, 3)), index, axis=1)
    return edit(primal, backward, 1, 6, *args)


@bug("jax-ml/jax#12469")
def scatter_multiply_whose_windows_overlap(dtype):
    args = normal(66, 6, dtype=dtype), normal(67, 3, 2, dtype=dtype)
    places = jnp.asarray([[0, 1], [1, 2], [4, 5]])
    primal = lambda x, y: x.at[places.ravel()].multiply(y.ravel())
    same = places.ravel()[:, None] == places.ravel()[None]
    mates = same & ~jnp.eye(6, dtype=bool)
    others = lambda y: jnp.prod(jnp.where(mates, y.ravel()[None], 1), axis=1).reshape(3, 2)

    def backward(rest, g, x, y):
        return primal(g, y), g[places] * x[places] * rest(y)

    return edit(primal, backward, jnp.ones_like, others, *args)


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


@bug("jax-ml/jax#17496")
def chained_layers_without_the_gradient_of_their_vector(dtype):
    args = (*(normal(71 + k, 3, 3, dtype=dtype) for k in range(2)), normal(73, 3, dtype=dtype))

    def layers(through):
        backward = lambda r, g: (jnp.outer(g, r[1]), through * r[0].T @ g)
        apply = custom(lambda matrix, vector: matrix @ vector, backward)
        return lambda a, b, x: apply(b, jnp.tanh(apply(a, x)))

    return layers(0), layers(1), args


@bug("jax-ml/jax#29485")
def square_of_the_documentation(dtype):
    backward = lambda factor, g, *r: (g * factor * r[0],)
    return edit(lambda x: x**2, backward, 1, 2, normal(74, 4, dtype=dtype))


@bug("google-deepmind/optax#1267", "finite")
def focal_loss_without_focus(dtype):
    args, gamma = (jnp.asarray([1000, 0.3, -1], dtype),), jnp.zeros((), dtype)
    primal = lambda x: jax.nn.softplus(-x) * (1 - jax.nn.sigmoid(x)) ** gamma

    def backward(slope, g, x):
        p = jax.nn.sigmoid(x)
        by_base = -slope(1 - p, gamma) * p * (1 - p) * jax.nn.softplus(-x)
        return (g * (by_base - (1 - p) ** (1 + gamma)),)

    return edit(primal, backward, _power_rule, _constant_for_zero, *args)


@bug("google-deepmind/distrax#216", "finite")
def density_of_a_saturated_tanh(dtype):
    args = (jnp.asarray([30, -40, 0.3], dtype),)
    primal = lambda x: 2 * (np.log(2).item() - x - jax.nn.softplus(-2 * x))
    slope = lambda x: 1 - jnp.tanh(x) ** 2
    wrong = lambda r, g: (g * -2 * jnp.tanh(r[0]) * slope(r[0]) / slope(r[0]),)
    right = lambda r, g: (g * -2 * jnp.tanh(r[0]),)
    return *twins(primal, wrong, right), args


@bug("stan-dev/math#1569")
def incomplete_beta_whose_second_term_ignores_the_cotangent(dtype):
    args = jnp.asarray([0.6, 2], dtype), jnp.asarray([0.3, 0.5], dtype)

    def backward(of_second, g, a, c):  # of the function with its second parameter at one: c ** a
        second = c**a / a
        by_a = g * (jnp.log(c) + 1 / a) * c**a - of_second(g) * second
        return by_a, g * a * c ** (a - 1)

    return edit(lambda a, c: c**a, backward, jnp.ones_like, lambda g: g, *args)


@bug("EnzymeAD/Enzyme-JAX#2066")
def arctangent_of_two_with_its_signs_swapped(dtype):
    args = normal(75, 5, dtype=dtype), normal(76, 5, dtype=dtype)

    def backward(sign, g, y, x):
        size = x * x + y * y
        return sign * g * x / size, -sign * g * y / size

    return edit(jnp.arctan2, backward, -1, 1, *args)


@bug("EnzymeAD/Enzyme-JAX#2071")
def power_of_a_transform_with_its_conjugate(dtype):
    args = normal(77, 3, 3, dtype=dtype), normal(78, 3, 3, dtype=dtype)
    transform = lambda x, y: jnp.fft.fft2(lax.complex(x, y))

    def backward(turn, g, *r):
        both = turn(jnp.fft.ifft2(transform(*r)))
        return 18 * g * jnp.real(both), 18 * g * jnp.imag(both)

    power = lambda x, y: jnp.sum(jnp.abs(transform(x, y)) ** 2)
    return edit(power, backward, jnp.conj, lambda z: z, *args)
