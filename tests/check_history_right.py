"""Right functions that a checker of gradients is tempted to refuse; a maker gives (function, args).

`RIGHT` holds rules that are right for symmetric inputs only, functions that do not read all of
their input, and constants rounded to float32. `IMPLICIT` holds samplers: their gradient by a
parameter is an implicit derivative, not the one at a fixed key.
"""

# ruff: noqa: E731

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.check_history import positive_definite
from tests.check_zoo import custom, normal

RIGHT: dict[str, Callable[[Any], tuple]] = {}
IMPLICIT: dict[str, Callable[[Any], tuple]] = {}


def into(table):
    """A decorator that registers makers of (function, args)."""

    def register(make):
        table[make.__name__] = make
        return make

    return register


@into(RIGHT)
def density_by_a_symmetric_covariance(dtype):
    x, covariance = normal(41, 3, dtype=dtype), positive_definite(dtype)
    primal = lambda c: jax.scipy.stats.multivariate_normal.logpdf(x, jnp.zeros_like(x), c)

    def backward(r, g):
        scaled = jnp.linalg.solve(r[0], x)
        return (g * 0.5 * (jnp.outer(scaled, scaled) - jnp.linalg.inv(r[0])),)

    return custom(primal, backward), (covariance,)


@into(RIGHT)
def solve_by_conjugate_gradients(dtype):
    tolerance = 1e-12 if dtype == jnp.float64 else 1e-7

    def solve(a, b):
        iterate = lambda matvec, b: jax.scipy.sparse.linalg.cg(matvec, b, tol=tolerance)[0]
        return lax.custom_linear_solve(lambda x: a @ x, b, iterate, symmetric=True)

    return solve, (positive_definite(dtype), normal(42, 3, dtype=dtype))


@into(RIGHT)
def solve_by_cholesky(dtype):
    solve = lambda a, b: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), b)
    return solve, (positive_definite(dtype), normal(43, 3, dtype=dtype))


@into(RIGHT)
def eigenvalues_of_one_triangle(dtype):
    values = lambda a: jnp.linalg.eigh(a, symmetrize_input=False)[0]
    return values, (positive_definite(dtype),)


@into(RIGHT)
def gelu_with_constants_of_float32(dtype):
    c, cubic = (jnp.asarray(np.float32(k), dtype) for k in (0.7978846, 0.044715))

    def backward(r, g):
        (x,) = r
        t = jnp.tanh(c * (x + cubic * x**3))
        return (g * 0.5 * (1 + t + x * (1 - t * t) * c * (1 + 3 * cubic * x * x)),)

    return custom(lambda x: jax.nn.gelu(x), backward), (normal(44, 9, dtype=dtype),)


@into(RIGHT)
def constant_whose_square_is_rounded(dtype):
    c, squared = (jnp.asarray(np.float32(k), dtype) for k in ((2 / np.pi) ** 0.5, 2 / np.pi))
    primal = lambda x: jnp.exp(-((c * x) ** 2))
    backward = lambda r, g: (-2 * g * squared * r[0] * primal(r[0]),)
    return custom(primal, backward), (normal(45, 9, dtype=dtype),)


def _draws(draw, parameter):
    return lambda dtype: (lambda a: draw(jax.random.key(0), a, dtype), (parameter(dtype),))


def _positive(dtype):
    return jnp.asarray([0.7, 1.5, 4], dtype)


IMPLICIT["gamma"] = _draws(lambda key, a, dtype: jax.random.gamma(key, a, dtype=dtype), _positive)
IMPLICIT["beta"] = _draws(lambda key, a, dtype: jax.random.beta(key, a, a, dtype=dtype), _positive)
IMPLICIT["dirichlet"] = _draws(
    lambda key, a, dtype: jax.random.dirichlet(key, a, dtype=dtype), _positive
)
# JAX 0.10.0 does not take the shape of the parameter by itself.
IMPLICIT["t"] = _draws(lambda key, a, dtype: jax.random.t(key, a, a.shape, dtype=dtype), _positive)
