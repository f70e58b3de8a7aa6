"""The third table's linear algebra, transforms and complex numbers: see `check_history`."""

# ruff: noqa: E731

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import expm, expm_frechet, solve_triangular

from tests.check_history import Bug, edit, positive_definite, registrar
from tests.check_zoo import normal, twins

LINALG: dict[str, Bug] = {}
bug = registrar(LINALG)


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


@bug("HIPS/autograd#412")
def normal_density_with_the_wrong_sign(dtype):
    args, x = (positive_definite(dtype),), normal(1, 3, dtype=dtype)

    def primal(c):
        return jax.scipy.stats.multivariate_normal.logpdf(x, jnp.zeros_like(x), (c + c.T) / 2)

    def backward(sign, g, *r):
        inverse = jnp.linalg.inv((r[0] + r[0].T) / 2)
        return (g * sign * 0.5 * (jnp.outer(inverse @ x, inverse @ x) - inverse),)

    return edit(primal, backward, -1, 1, *args)


def _copied(m):
    """The lower triangle, copied to the upper one."""
    return jnp.tril(m) + jnp.tril(m, -1).T


def _qr_backward(q, r, of_q, of_r, fold):
    of_r = jnp.triu(of_r)
    inner = fold(r @ of_r.T - of_q.T @ q)
    return solve_triangular(r, (of_q + q @ inner).T).T


@bug("pytorch/pytorch#76115")
def qr_with_its_diagonal_twice(dtype):
    args = (normal(2, 4, 3, dtype=dtype),)
    primal = lambda a: tuple(jnp.linalg.qr(a))
    backward = lambda fold, g, *r: (_qr_backward(*primal(r[0]), *g, fold),)
    return edit(primal, backward, lambda m: jnp.tril(m) + jnp.tril(m).T, _copied, *args)


@bug("pytorch/pytorch#42216, tensorflow/tensorflow#39321")
def qr_of_a_wide_matrix_without_its_last_columns(dtype):
    args = (normal(3, 3, 5, dtype=dtype),)
    primal = lambda a: tuple(jnp.linalg.qr(a))

    def backward(through, g, *res):
        (q, r), (of_q, of_r) = primal(res[0]), g
        of_q = of_q + through * res[0][:, 3:] @ of_r[:, 3:].T
        first = _qr_backward(q, r[:, :3], of_q, of_r[:, :3], _copied)
        return (jnp.concatenate([first, q @ of_r[:, 3:]], axis=1),)

    return edit(primal, backward, 0, 1, *args)


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


def _triangular(dtype):
    return normal(7, 4, 4, dtype=dtype) + 4 * jnp.eye(4, dtype=dtype), normal(8, 4, dtype=dtype)


@bug("pymc-devs/pytensor#1230")
def unit_triangular_solve_with_a_gradient_for_its_diagonal(dtype):
    solve = lambda a, b, **k: solve_triangular(a, b, lower=True, unit_diagonal=True, **k)

    def backward(diagonal, g, *r):
        back = solve(r[0], g, trans=1)
        return -jnp.tril(jnp.outer(back, solve(*r)), diagonal), back

    return edit(lambda a, b: solve(a, b), backward, 0, -1, *_triangular(dtype))


@bug("pymc-devs/pytensor#1230")
def transposed_triangular_solve_by_the_rule_of_the_other(dtype):
    def backward(turn, g, *r):
        back = solve_triangular(r[0], g, lower=True)
        x = solve_triangular(*r, lower=True, trans=1)
        return -jnp.tril(turn(jnp.outer(x, back))), back

    primal = lambda a, b: solve_triangular(a, b, lower=True, trans=1)
    return edit(primal, backward, jnp.transpose, lambda m: m, *_triangular(dtype))


@bug("jax-ml/jax#1458")
def triangular_solve_with_a_gradient_for_the_other_triangle(dtype):
    def backward(keep, g, *r):
        back = solve_triangular(r[0], g, lower=True, trans=1)
        return -keep(jnp.outer(back, solve_triangular(*r, lower=True))), back

    primal = lambda a, b: solve_triangular(a, b, lower=True)
    return edit(primal, backward, lambda m: m, jnp.tril, *_triangular(dtype))


@bug("tensorflow/tensorflow#15465")
def matrix_exponential_in_the_forward_direction(dtype):
    args = (normal(9, 3, 3, dtype=dtype),)

    def backward(turn, g, *r):
        return (expm_frechet(turn(r[0]), g, compute_expm=False),)

    return edit(lambda a: expm(a), backward, lambda a: a, jnp.transpose, *args)


@bug("pytorch/pytorch#65061")
def least_squares_without_their_residual(dtype):
    args = (normal(10, 5, 3, dtype=dtype), normal(11, 5, dtype=dtype))
    primal = lambda a, b: jnp.linalg.solve(a.T @ a, a.T @ b)

    def backward(through, g, a, b):
        x, inner = primal(a, b), jnp.linalg.solve(a.T @ a, g)
        return through * jnp.outer(b - a @ x, inner) - jnp.outer(a @ inner, x), a @ inner

    return edit(primal, backward, 0, 1, *args)


@bug("EnzymeAD/Reactant.jl#2294")
def imaginary_part_with_the_other_sign(dtype):
    args = (normal(12, 4, dtype=dtype), normal(13, 4, dtype=dtype))
    backward = lambda sign, g, *r: (jnp.real(g), sign * jnp.imag(g))
    return edit(lax.complex, backward, 1, -1, *args)


@bug("after the rule of rfft")
def real_transform_by_its_inverse(dtype):
    args = (normal(14, 6, dtype=dtype),)
    wrong = lambda r, g: (jnp.fft.irfft(jnp.conj(g), 6) * 6,)
    right = lambda r, g: (jnp.real(jnp.fft.fft(g, 6)),)
    return *twins(lambda x: jnp.fft.rfft(x), wrong, right), args


@bug("jax-ml/jax#12795")
def eigenvalues_of_one_triangle_with_a_gradient_in_both(dtype):
    symmetric = lambda a: jnp.tril(a) + jnp.swapaxes(jnp.tril(a, -1), -1, -2)
    args = (jnp.tril(normal(35, 3, 3, dtype=dtype)),)

    def backward(of_lower, g, *r):
        vectors = jnp.linalg.eigh(symmetric(r[0]))[1]
        whole = vectors @ (g[:, None] * vectors.T)
        return (jnp.tril(whole) + jnp.tril(whole, -1) if of_lower else whole,)

    return edit(lambda a: jnp.linalg.eigh(symmetric(a))[0], backward, False, True, *args)
