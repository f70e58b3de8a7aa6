"""Wrong VJPs at points that people choose because they are easy: there, some look right.

At a lazy point elements, inputs or triangles are equal, or the gradient vanishes. The wrong rules
of `LAZY`, a table as that of `check_zoo`, are right at the point itself.
"""

# ruff: noqa: E731

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.check.check_zoo import family as _family
from tests.check.check_zoo import normal, numbers, shapes

LAZY: dict[str, tuple] = {}
family = functools.partial(_family, table=LAZY)


def symmetric(n, dtype):
    (matrix,) = shapes((n, n))(dtype)
    return matrix + matrix.T


def twice(*sizes):
    """The last of the arguments twice."""
    return lambda dtype: (*shapes(*sizes)(dtype), shapes(*sizes)(dtype)[-1])


def called_back(function):
    """A function of NumPy by a callback; its results have the type of the first argument."""

    def call(*xs):
        out = jax.eval_shape(function, *xs)
        on_host = lambda *xs: np.asarray(function(*xs), out.dtype)
        return jax.pure_callback(on_host, out, *xs, vmap_method="sequential")

    return call


of_products = lambda g, x, y: (g * y, g * x)
confused = lambda g, x, y: (g * x, g * y)
times = lambda x, y: x * y
family(twice((5,)), times, of_products)(a_product_of_a_vector_with_itself=confused)
family(twice((4,)), called_back(times), of_products)(
    a_product_by_callback_of_a_vector_with_itself=confused
)
family(
    lambda dtype: tuple(
        x.astype(jnp.result_type(x, "complex64")) for x in shapes((4,), (4,))(dtype)
    ),
    times,
    of_products,
)(a_product_of_complex_numbers_that_are_real=lambda g, x, y: (g * jnp.conj(y), g * x))


def solved(a, b):
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), b)


def beside_a_decomposition(rule):
    product = jax.custom_vjp(times)
    product.defvjp(lambda x, y: (x * y, (x, y)), lambda r, g: rule(g, *r))
    return lambda a, x, y: solved(a, product(x, y))


LAZY["a_product_with_itself_beside_a_decomposition_that_reads_one_triangle"] = (
    lambda dtype: (
        beside_a_decomposition(confused),
        beside_a_decomposition(of_products),
        (symmetric(3, dtype) + 6 * jnp.eye(3, dtype=dtype), *twice((3,))(dtype)),
    ),
    "value",
)
of_matmul = lambda g, a, b: (g @ b.T, a.T @ g)
family(twice((3, 3)), jnp.matmul, of_matmul)(
    a_matrix_times_itself=lambda g, a, b: (g @ a.T, b.T @ g)
)
family(lambda dtype: (jnp.eye(3, dtype=dtype),) * 2, jnp.matmul, of_matmul)(
    identity_matrices=lambda g, a, b: (g @ a.T, a.T @ g)
)
family(lambda dtype: (jnp.ones((3, 3), dtype),) * 2, jnp.matmul, of_matmul)(
    matrices_of_ones=lambda g, a, b: (g @ b.T, b.T @ g)
)
untransposed = lambda g, h, w: (g @ w, h.T @ g)
family(lambda dtype: (*shapes((3, 4))(dtype), jnp.eye(4, dtype=dtype)), jnp.matmul, of_matmul)(
    a_weight_that_is_the_identity=untransposed
)
family(lambda dtype: (*shapes((3, 4))(dtype), symmetric(4, dtype)), jnp.matmul, of_matmul)(
    a_weight_that_is_symmetric=untransposed
)


def of_attention(keys):
    def rule(g, q, k, v):
        p = jax.nn.softmax(q @ k.T)
        ds = p * (g @ v.T - jnp.sum((g @ v.T) * p, axis=1, keepdims=True))
        return ds @ keys(k, v), ds.T @ q, p.T @ g

    return rule


family(
    lambda dtype: shapes((4, 3))(dtype) * 3,
    lambda q, k, v: jax.nn.softmax(q @ k.T) @ v,
    of_attention(lambda k, v: k),
)(attention_to_itself=of_attention(lambda k, v: v))


def of_error(factor):
    def rule(g, p, t):
        by_p = g * factor * (p - t) / p.size
        return by_p, -by_p

    return rule


family(twice((6,)), lambda p, t: jnp.mean((p - t) ** 2), of_error(2))(
    squared_error_of_a_perfect_prediction=of_error(3)
)
family(numbers([0.0, 0, 0, 0]), jnp.square, lambda g, x: 2 * g * x)(
    a_square_at_zero_in_part=lambda g, x: 3 * g * x
)
size = lambda x: jnp.sqrt(jnp.mean(x * x))
family(
    numbers([1.5, 1.5, 1.5, 1.5]),
    lambda x: x / size(x),
    lambda g, x: g / size(x) - x * jnp.mean(g * x) / size(x) ** 3,
)(  # the mean of g times the mean of x, instead of that of the product
    a_norm_of_equal_elements=lambda g, x: g / size(x) - x * jnp.mean(g) * jnp.mean(x) / size(x) ** 3
)


def of_form(of_x):
    return lambda g, x, w, y: (g * (w @ of_x(x, y)), g * jnp.outer(x, y), g * (w.T @ x))


family(
    lambda dtype: (*shapes((3,), (3, 3))(dtype), *shapes((3,))(dtype)),
    lambda x, w, y: x @ w @ y,
    of_form(lambda x, y: y),
)(a_bilinear_form_of_one_vector=of_form(lambda x, y: x))
family(
    lambda dtype: (symmetric(3, dtype) + 5 * jnp.eye(3, dtype=dtype),),
    lambda a: jnp.linalg.slogdet(a)[1],
    lambda g, a: g * jnp.linalg.inv(a).T,
)(a_log_determinant_of_a_symmetric_matrix=lambda g, a: g * jnp.linalg.inv(a))
for name, call in {"": lambda form: form, "_by_callback": called_back}.items():
    family(
        lambda dtype: (symmetric(3, dtype), normal(16, 3, dtype=dtype)),
        call(lambda a, x: x @ a @ x),
        lambda g, a, x: (g * jnp.outer(x, x), g * (a + a.T) @ x),
    )(
        **{
            f"a_quadratic_form_of_a_symmetric_matrix{name}": lambda g, a, x: (
                g * jnp.outer(x, x),
                2 * g * a @ x,
            )
        }
    )
family(
    numbers([-1.5, -0.25, 0.5, 1.0, 2.25]),
    jnp.sort,
    lambda g, x: jnp.zeros_like(g).at[jnp.argsort(x)].set(g),
)(a_sort_of_sorted_numbers=lambda g, x: g)
put = functools.partial(jnp.put_along_axis, axis=1, inplace=False)
family(
    lambda dtype: (jnp.arange(12, dtype=dtype).reshape(3, 4) - 5.5,),
    lambda x: -jnp.sort(-x, 1),
    lambda g, x: put(jnp.zeros_like(g), jnp.argsort(-x, 1), g),
)(a_sort_of_the_rows_of_a_range=lambda g, x: jnp.flip(g, 1))
