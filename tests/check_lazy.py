"""Wrong VJPs at points that people choose because they are easy: there, some look right.

At a lazy point elements, inputs or triangles are equal, or the gradient vanishes. A maker takes a
dtype and returns (wrong, right, args). Of `LAZY`, the wrong one is right at the point itself.
"""

# ruff: noqa: E731

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.check_history_right import into
from tests.check_zoo import custom, normal, twins

LAZY: dict[str, Callable[[Any], tuple]] = {}


def symmetric(seed, n, dtype):
    matrix = normal(seed, n, n, dtype=dtype)
    return matrix + matrix.T


@into(LAZY)
def a_product_of_a_vector_with_itself(dtype):
    x = normal(0, 5, dtype=dtype)
    wrong, right = lambda r, g: (g * r[0], g * r[1]), lambda r, g: (g * r[1], g * r[0])
    return *twins(lambda x, y: x * y, wrong, right), (x, x)


def product(wrong_left, wrong_right):
    right = lambda r, g: (g @ r[1].T, r[0].T @ g)
    wrong = lambda r, g: (
        g @ r[0].T if wrong_left else g @ r[1].T,
        r[1].T @ g if wrong_right else r[0].T @ g,
    )
    return twins(lambda a, b: a @ b, wrong, right)


@into(LAZY)
def a_matrix_times_itself(dtype):
    a = normal(1, 3, 3, dtype=dtype)
    return *product(True, True), (a, a)


@into(LAZY)
def identity_matrices(dtype):
    return *product(True, False), (jnp.eye(3, dtype=dtype), jnp.eye(3, dtype=dtype))


@into(LAZY)
def matrices_of_ones(dtype):
    return *product(False, True), (jnp.ones((3, 3), dtype), jnp.ones((3, 3), dtype))


@into(LAZY)
def a_weight_that_is_the_identity(dtype):
    wrong, right = lambda r, g: (g @ r[1], r[0].T @ g), lambda r, g: (g @ r[1].T, r[0].T @ g)
    return *twins(lambda h, w: h @ w, wrong, right), (
        normal(2, 3, 4, dtype=dtype),
        jnp.eye(4, dtype=dtype),
    )


@into(LAZY)
def a_weight_that_is_symmetric(dtype):
    wrong, right = lambda r, g: (g @ r[1], r[0].T @ g), lambda r, g: (g @ r[1].T, r[0].T @ g)
    return *twins(lambda h, w: h @ w, wrong, right), (
        normal(3, 3, 4, dtype=dtype),
        symmetric(4, 4, dtype),
    )


@into(LAZY)
def attention_to_itself(dtype):
    x = normal(7, 4, 3, dtype=dtype)

    def primal(q, k, v):
        return jax.nn.softmax(q @ k.T) @ v

    def backward(queries_of):
        def pull(r, g):
            q, k, v = r
            p = jax.nn.softmax(q @ k.T)
            ds = p * (g @ v.T - jnp.sum((g @ v.T) * p, axis=1, keepdims=True))
            return ds @ queries_of(r), ds.T @ q, p.T @ g

        return pull

    return *twins(primal, backward(lambda r: r[2]), backward(lambda r: r[1])), (x, x, x)


@into(LAZY)
def squared_error_of_a_perfect_prediction(dtype):
    primal = lambda p, t: jnp.mean((p - t) ** 2)
    pull = lambda k: (
        lambda r, g: (
            g * k * (r[0] - r[1]) / r[0].size,
            -g * k * (r[0] - r[1]) / r[0].size,
        )
    )
    t = normal(8, 6, dtype=dtype)
    return *twins(primal, pull(3), pull(2)), (t, t)


@into(LAZY)
def a_square_at_zero_in_part(dtype):
    x = jnp.asarray([0.0, 0, 0, 0], dtype)
    return *twins(lambda x: x * x, lambda r, g: (3 * g * r[0],), lambda r, g: (2 * g * r[0],)), (x,)


@into(LAZY)
def a_norm_of_equal_elements(dtype):
    primal = lambda x: x / jnp.sqrt(jnp.mean(x * x))

    def right(r, g):
        (x,) = r
        size = jnp.sqrt(jnp.mean(x * x))
        return (g / size - x * jnp.mean(g * x) / size**3,)

    def wrong(r, g):  # the mean of g times the mean of x, in place of that of the product
        (x,) = r
        size = jnp.sqrt(jnp.mean(x * x))
        return (g / size - x * jnp.mean(g) * jnp.mean(x) / size**3,)

    return *twins(primal, wrong, right), (jnp.asarray([1.5, 1.5, 1.5, 1.5], dtype),)


@into(LAZY)
def a_bilinear_form_of_one_vector(dtype):
    x = normal(9, 3, dtype=dtype)
    w = normal(10, 3, 3, dtype=dtype)
    primal = lambda x, w, y: x @ w @ y
    wrong = lambda r, g: (g * (r[1] @ r[0]), g * jnp.outer(r[0], r[2]), g * (r[1].T @ r[0]))
    right = lambda r, g: (g * (r[1] @ r[2]), g * jnp.outer(r[0], r[2]), g * (r[1].T @ r[0]))
    return *twins(primal, wrong, right), (x, w, x)


@into(LAZY)
def a_log_determinant_of_a_symmetric_matrix(dtype):
    primal = lambda a: jnp.linalg.slogdet(a)[1]
    wrong, right = (
        lambda r, g: (g * jnp.linalg.inv(r[0]),),
        lambda r, g: (g * jnp.linalg.inv(r[0]).T,),
    )
    return *twins(primal, wrong, right), (symmetric(11, 3, dtype) + 5 * jnp.eye(3, dtype=dtype),)


@into(LAZY)
def a_product_by_callback_of_a_vector_with_itself(dtype):
    primal = lambda x, y: jax.pure_callback(
        lambda x, y: x * y, jax.ShapeDtypeStruct(x.shape, x.dtype), x, y, vmap_method="sequential"
    )
    x = normal(12, 4, dtype=dtype)
    wrong, right = lambda r, g: (g * r[0], g * r[1]), lambda r, g: (g * r[1], g * r[0])
    return custom(primal, wrong), custom(primal, right), (x, x)


@into(LAZY)
def a_product_with_itself_beside_a_decomposition_that_reads_one_triangle(dtype):
    wrong, right = lambda r, g: (g * r[0], g * r[1]), lambda r, g: (g * r[1], g * r[0])
    pair = twins(lambda x, y: x * y, wrong, right)
    a, x = symmetric(13, 3, dtype) + 6 * jnp.eye(3, dtype=dtype), normal(14, 3, dtype=dtype)
    solve = lambda a, b: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), b)
    return *((lambda a, x, y, f=f: solve(a, f(x, y))) for f in pair), (a, x, x)


@into(LAZY)
def a_quadratic_form_of_a_symmetric_matrix(dtype):
    primal = lambda a, x: x @ a @ x
    wrong = lambda r, g: (g * jnp.outer(r[1], r[1]), 2 * g * r[0] @ r[1])
    right = lambda r, g: (g * jnp.outer(r[1], r[1]), g * (r[0] + r[0].T) @ r[1])
    return *twins(primal, wrong, right), (symmetric(15, 3, dtype), normal(16, 3, dtype=dtype))


@into(LAZY)
def a_quadratic_form_of_a_symmetric_matrix_by_callback(dtype):
    primal = lambda a, x: jax.pure_callback(
        lambda a, x: np.asarray(x @ a @ x, a.dtype),
        jax.ShapeDtypeStruct((), dtype),
        a,
        x,
        vmap_method="sequential",
    )
    wrong = lambda r, g: (g * jnp.outer(r[1], r[1]), 2 * g * r[0] @ r[1])
    right = lambda r, g: (g * jnp.outer(r[1], r[1]), g * (r[0] + r[0].T) @ r[1])
    args = symmetric(15, 3, dtype), normal(16, 3, dtype=dtype)
    return custom(primal, wrong), custom(primal, right), args


@into(LAZY)
def a_sort_of_sorted_numbers(dtype):
    wrong = lambda r, g: (g,)
    right = lambda r, g: (jnp.zeros_like(g).at[jnp.argsort(r[0])].set(g),)
    args = (jnp.asarray([-1.5, -0.25, 0.5, 1.0, 2.25], dtype),)
    return *twins(lambda x: jnp.sort(x), wrong, right), args


@into(LAZY)
def a_sort_of_the_rows_of_a_range(dtype):
    wrong = lambda r, g: (jnp.flip(g, 1),)
    right = lambda r, g: (
        jnp.put_along_axis(jnp.zeros_like(g), jnp.argsort(-r[0], 1), g, axis=1, inplace=False),
    )
    args = (jnp.arange(12, dtype=dtype).reshape(3, 4) - 5.5,)
    return *twins(lambda x: -jnp.sort(-x, 1), wrong, right), args


@into(LAZY)
def a_product_of_complex_numbers_that_are_real(dtype):
    wide = jnp.result_type(dtype, jnp.complex64)
    x, y = (normal(seed, 4, dtype=dtype).astype(wide) for seed in (17, 18))
    wrong = lambda r, g: (g * jnp.conj(r[1]), g * r[0])
    right = lambda r, g: (g * r[1], g * r[0])
    return *twins(lambda x, y: x * y, wrong, right), (x, y)
