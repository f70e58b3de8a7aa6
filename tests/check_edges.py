"""Functions at the edge of what a checker can see: tiny beside huge, chaos, waves, triangles.

The tables are those of `check_cases`: a maker takes a dtype and returns (function, args) or
(function, args, options).
"""

# ruff: noqa: E731

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.check_history import positive_definite
from tests.check_history_right import into
from tests.check_zoo import custom, normal

WRONG: dict[str, Callable[[Any], tuple]] = {}
RIGHT: dict[str, Callable[[Any], tuple]] = {}
UNKNOWN: dict[str, Callable[[Any], tuple]] = {}


def sine(size, factor):
    """size * sin(x), by a rule that is off by the factor."""
    return custom(lambda x: size * jnp.sin(x), lambda r, g: (size * factor * g * jnp.cos(r[0]),))


def beside(make):
    """Three rows: a small part doubled, a small part of the wrong sign, and the right one."""
    name = make.__name__
    WRONG[f"{name}_doubled"] = functools.partial(make, 2.0)
    WRONG[f"{name}_of_the_wrong_sign"] = functools.partial(make, -1.0)
    RIGHT[name] = functools.partial(make, 1.0)


@beside
def tiny_elements_beside_huge_ones(factor, dtype):
    size = jnp.asarray([1e6, 1e-6, 1e6, 1e-6, 1], dtype)
    share = jnp.asarray([1, factor, 1, factor, 1], dtype)
    return sine(size, share), (normal(0, 5, dtype=dtype),)


@beside
def a_tiny_leaf_beside_a_huge_one(factor, dtype):
    def both(x, y):
        return sine(1e6, 1.0)(x), sine(1e-6, factor)(y)

    return both, (normal(1, 4, dtype=dtype), normal(2, 4, dtype=dtype))


@beside
def a_tiny_leaf_summed_with_a_huge_one(factor, dtype):
    def total(x, y):
        return jnp.sum(sine(1e3, 1.0)(x)) + jnp.sum(sine(1e-6, factor)(y))

    return total, (normal(3, 4, dtype=dtype), normal(4, 4, dtype=dtype))


def hessian_of_a_scalar(factor, of_loss, dtype):
    inner = custom(lambda x: jnp.cos(x), lambda r, g: (-factor * g * jnp.sin(r[0]),))
    primal = lambda x: jnp.sum(jnp.sin(x))
    loss = custom(primal, lambda r, g: (g * inner(r[0]),))
    x = normal(5, 4, dtype=dtype) if of_loss else jnp.asarray(0.7, dtype)
    return loss, (x,), {"order": 2}


WRONG["hessian_of_a_scalar_off_by_a_tenth"] = functools.partial(hessian_of_a_scalar, 1.1, False)
RIGHT["hessian_of_a_scalar"] = functools.partial(hessian_of_a_scalar, 1.0, False)
WRONG["hessian_of_a_loss_off_by_a_tenth"] = functools.partial(hessian_of_a_scalar, 0.9, True)
RIGHT["hessian_of_a_loss"] = functools.partial(hessian_of_a_scalar, 1.0, True)


@into(UNKNOWN)
def a_chaotic_map_off_by_half_a_percent(dtype):
    del dtype
    step = custom(lambda x: 3.9 * x * (1 - x), lambda r, g: (3.9 * g * (1 - 2 * r[0]),))
    iterated = lambda x: functools.reduce(lambda x, _: step(x), range(100), x)
    return sine_after(iterated, 1.005), (jnp.asarray([0.2, 0.5123, 0.7], jnp.float32),)


def sine_after(function, factor):
    scaled = custom(lambda y: jnp.sin(y), lambda r, g: (factor * g * jnp.cos(r[0]),))
    return lambda x: scaled(function(x))


def triangle_wave(sign):
    def make(dtype):
        phase = lambda x: x * 2**19 - jnp.round(x * 2**19)
        backward = lambda r, g: (sign * g * jnp.sign(phase(r[0])),)
        wave = custom(lambda x: jnp.abs(phase(x)) / 2**19, backward)
        return wave, (jnp.asarray([0.3, 0.7, 1.1], jnp.float32).astype(dtype),)

    return make


RIGHT["a_triangle_wave"] = triangle_wave(1)
WRONG["a_triangle_wave_of_the_wrong_sign"] = triangle_wave(-1)


@into(RIGHT)
def rounding_to_24_bits(dtype):
    return lambda x: jnp.round(x * 2**24) / 2**24, (normal(6, 5, dtype=dtype),)


@into(RIGHT)
def straight_through_a_rounding_to_24_bits(dtype):
    through = lambda x: x + lax.stop_gradient(jnp.round(x * 2**24) / 2**24 - x)
    return lambda x: jnp.sin(through(x)), (normal(7, 5, dtype=dtype),)


def unit_norm(projected, start):
    """x / |x|, by a rule that projects the cotangent or forgets it."""

    def backward(r, g):
        size = jnp.sqrt(jnp.sum(r[0] * r[0]))
        unit = r[0] / size
        return ((g - projected * unit * jnp.sum(unit * g)) / size,)

    layer = custom(lambda x: x / jnp.sqrt(jnp.sum(x * x)), backward)
    return lambda dtype: (layer, (jnp.asarray(start, dtype),))


for _name, _start in {"": [0.3, -1.2, 0.7], "_of_a_unit_vector": [0.6, 0.8, 0]}.items():
    RIGHT[f"projection_onto_unit_norm{_name}"] = unit_norm(1, _start)
    WRONG[f"unit_norm{_name}_without_its_projection"] = unit_norm(0, _start)


@into(WRONG)
def a_jit_that_donates_its_input_off_by_a_hundredth(dtype):
    scale = jax.jit(lambda x, y: sine(1, 1.01)(x) * y, donate_argnums=0)
    return scale, (normal(8, 5, dtype=dtype), normal(9, 5, dtype=dtype))


@into(RIGHT)
def cholesky_that_reads_one_triangle(dtype):
    read = lambda a: lax.linalg.cholesky(a, symmetrize_input=False)
    return read, (positive_definite(dtype),)


@into(RIGHT)
def eigenvalues_as_near_as_numbers_are(dtype):
    return jnp.linalg.eigvalsh, (jnp.diag(2.0**53 + jnp.asarray([0, 2, 4], dtype)),)


@into(RIGHT)
def log_add_exp_of_one_number_under_vmap(dtype):
    added = lambda y, z: jnp.logaddexp(z, jnp.sum(y) + z)
    total = lambda z: jnp.sum(jax.vmap(added, (0, None))(jnp.ones((3, 2), dtype), z))
    return total, (jnp.asarray(0.1, dtype),)


@into(RIGHT)
def a_sum_of_samples_of_gamma(dtype):
    draw = lambda x: jnp.sum(jax.random.gamma(jax.random.key(0), x + 1, (1000,), dtype))
    return draw, (jnp.zeros((), dtype),)
