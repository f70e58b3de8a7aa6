"""Functions that mislead a checker of gradients: solvers, samplers, kinks, ties, masked rows.

A maker takes a dtype and returns (function, args) or (function, args, options). The gradient of
each of `WRONG` is wrong and that of each of `RIGHT` right; of `UNKNOWN`, nothing can be said.
"""

# ruff: noqa: E731

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from tests.check.check_history import positive_definite
from tests.check.check_zoo import custom, normal

WRONG: dict[str, Callable[[Any], tuple]] = {}
RIGHT: dict[str, Callable[[Any], tuple]] = {}
UNKNOWN: dict[str, Callable[[Any], tuple]] = {}


def into(table):
    """A decorator that registers makers of (function, args)."""

    def register(make):
        table[make.__name__] = make
        return make

    return register


def family(name, make, right=1.0, **wrong):
    """Registers makers of rules: `make(right)`, and `make` of what is wrong by its name."""
    RIGHT[name] = make(right)
    WRONG.update({key: make(value) for key, value in wrong.items()})


def beside(make):
    """Three rows: a small part doubled, a small part of the wrong sign, and the right one."""
    name, of = make.__name__, lambda factor: functools.partial(make, factor)
    family(name, of, **{f"{name}_doubled": 2.0, f"{name}_of_the_wrong_sign": -1.0})


def ratio(draw, factor=1.0):
    """A rule beside a sampler, off by a factor, and the sampler's parameter."""
    scaled = custom(lambda x: jnp.sin(x), lambda r, g: (factor * g * jnp.cos(r[0]),))
    return lambda a, x: draw(a) + jnp.sum(scaled(x))


def _drawn(name, factor):
    sample, parameters = getattr(jax.random, name), 2 if name == "beta" else 1

    def make(dtype):
        args = jnp.asarray([0.7, 1.5, 4], dtype), normal(1, 3, dtype=dtype)
        # JAX 0.10.0 does not take the shape of the parameter of t by itself.
        shape = {"shape": (3,)} if name == "t" else {}
        draw = lambda a: sample(jax.random.key(0), *[a] * parameters, dtype=dtype, **shape)
        return ratio(draw, factor), args

    return make


for _name in ("gamma", "beta", "dirichlet", "t"):
    _of = functools.partial(_drawn, _name)
    family(f"a_sample_of_{_name}", _of, **{f"a_rule_beside_a_sample_of_{_name}": 1.3})


@into(WRONG)
def a_sample_scaled_by_a_wrong_rule(dtype):
    scaled = custom(lambda x: 2 * x, lambda r, g: (2.6 * g,))
    draw = lambda a: scaled(jax.random.gamma(jax.random.key(0), scaled(a), dtype=dtype))
    return draw, (jnp.asarray([0.7, 1.5, 4], dtype),)


def relu(backward, primal=lambda x: jnp.maximum(x, 0)):
    return custom(primal, lambda r, g: (g * backward(r[0]).astype(g.dtype),))


def half_zeros(dtype, shape=(40, 10)):
    x = normal(3, *shape, dtype=dtype)
    return jnp.where(x > 0, x, 0)


@into(WRONG)
def relu_of_activations_with_half_zeros(dtype):
    return relu(lambda x: jnp.where(x > 0, 1.3, x == 0)), (half_zeros(dtype),)


def one_among_zeros(dtype):
    return jnp.zeros(201, dtype).at[137].set(0.8)


@into(WRONG)
def one_element_beside_two_hundred_zeros(dtype):
    return relu(lambda x: jnp.where(x > 0, 1.3, x == 0)), (one_among_zeros(dtype),)


def in_pallas(x):
    """max(x, 0) by a kernel, of which there is no float64."""

    def kernel(x, out):
        out[...] = jnp.maximum(x[...], 0)

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=like, interpret=True)(x)


def in_a_loop(x):
    """max(x, 0) by a loop without a derivative of its own."""
    return lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, jnp.maximum(s[1], 0)), (0, x))[1]


def _kernels(where):
    def one_row_of_32_halved(dtype):
        row = jnp.ones((32, 1)).at[17].set(0.5)
        return relu(lambda x: (x >= 0) * row, where), (half_zeros(dtype, (32, 8)),)

    def one_element_zeroed_beside_a_kink(dtype):
        x = half_zeros(dtype, (64,)).at[20].set(0.7)
        return relu(lambda x: (x >= 0) * jnp.ones(64).at[20].set(0), where), (x,)

    def right(dtype):
        return relu(lambda x: x >= 0, where), (half_zeros(dtype, (32, 8)),)

    name = where.__name__
    WRONG[f"one_row_of_32_halved_{name}"] = one_row_of_32_halved
    WRONG[f"one_element_zeroed_beside_a_kink_{name}"] = one_element_zeroed_beside_a_kink
    RIGHT[f"relu_{name}"] = right


_kernels(in_pallas)
_kernels(in_a_loop)


def _hessians(part):
    def make(dtype):
        inner = custom(lambda x: jnp.cos(x), lambda r, g: (-(1 + part) * g * jnp.sin(r[0]),))
        outer = custom(lambda x: jnp.sin(x), lambda r, g: (g * inner(r[0]),))
        return outer, (normal(4, 6, dtype=dtype),), {"order": 2}

    return make


family("a_hessian_by_a_rule_of_a_rule", _hessians, 0.0, a_hessian_wrong_by_a_hundredth=0.01)


@into(WRONG)
def second_derivative_of_i0_at_zero(dtype):
    i0 = lambda x: jax.scipy.special.i0e(x) * jnp.exp(jnp.abs(x))
    return i0, (jnp.asarray([0.0, 0.5, 1.5], dtype),), {"order": 2}


def _losses(change):
    def of(dtype):
        loss = custom(lambda x: jnp.sum(x * x), lambda r, g: (2 * r[0] * change(g),))
        return lambda x: {"loss": loss(x)}, (normal(5, 4, dtype=dtype),)

    return of


WRONG["the_size_of_a_loss"] = _losses(jnp.abs)
WRONG["the_positive_part_of_a_loss"] = _losses(lambda g: jnp.maximum(g, 0))


@into(WRONG)
def nan_where_rows_of_the_cotangent_are_zero(dtype):
    def backward(r, g):
        is_empty = jnp.all(g == 0, axis=-1)
        wrong = jnp.any(is_empty) & ~jnp.all(is_empty)  # of nothing but zeros it is zero
        return (jnp.cos(r[0]) * jnp.where(wrong, jnp.nan, g),)

    return custom(lambda x: jnp.sin(x), backward), (normal(6, 5, 3, dtype=dtype),)


@into(WRONG)
def wrong_for_a_constant_cotangent(dtype):
    def backward(r, g):
        return (jnp.cos(r[0]) * jnp.where(jnp.all(g == g.ravel()[0]), 2 * g, g),)

    return custom(lambda x: jnp.sin(x), backward), (normal(7, 5, 3, dtype=dtype),)


def _symbolic(factor):
    def make(dtype):
        @jax.custom_vjp
        def product(x, y):
            return x * y

        def forward(x, y):
            both = x.perturbed and y.perturbed
            return x.value * y.value, (x.value, y.value, None if both else ())

        def backward(saved, g):
            x, y, alone = saved
            g = g * (1.0 if alone is None else factor)
            return g * y, g * x

        product.defvjp(forward, backward, symbolic_zeros=True)
        return product, (normal(8, 4, dtype=dtype), normal(9, 4, dtype=dtype))

    return make


family("symbolic_zeros", _symbolic, wrong_if_the_other_argument_is_constant=0.5)


@into(WRONG)
def a_derivative_of_sign_at_its_jump(dtype):
    sign = custom(lambda x: jnp.sign(x), lambda r, g: (42 * g * (r[0] == 0),))
    return sign, (jnp.asarray([0.0, 1.0, -1.0], dtype),)


@into(RIGHT)
def sign_at_its_jump(dtype):
    return lambda x: x * jnp.sign(x - 1), (jnp.asarray([1.0, 0.5, -1.0], dtype),)


@into(WRONG)
def zero_for_a_leaf_of_little_effect(dtype):
    none = custom(lambda x: jnp.sum(jnp.sin(x)), lambda r, g: (0 * r[0],))
    tiny = lambda x, y: jnp.sum(jnp.cos(x)) + jnp.asarray(1e-14, dtype) * none(y)
    return tiny, (normal(10, 4, dtype=dtype), normal(11, 4, dtype=dtype))


@into(WRONG)
def off_by_a_thousandth_beside_a_print(dtype):
    def primal(x):
        jax.debug.print("{x}", x=x[0])
        return jnp.sin(x)

    return custom(primal, lambda r, g: (1.002 * g * jnp.cos(r[0]),)), (normal(12, 5, dtype=dtype),)


def newton(factor):
    """The root of z ** 3 + z = a by Newton's method, stopped when a step is below 1e-6."""

    def primal(a):
        step = lambda z: (z**3 + z - a) / (3 * z**2 + 1)
        more = lambda s: (jnp.max(jnp.abs(s[1])) > 1e-6) & (s[2] < 50)
        body = lambda s: (s[0] - step(s[0]), step(s[0]), s[2] + 1)
        return lax.while_loop(more, body, (a, jnp.ones_like(a), 0))[0]

    return cubic_root(primal, factor)


def cubic_root(primal, factor):
    """The root of z ** 3 + z = a, by the implicit function theorem."""
    forward = lambda a: (primal(a), (primal(a),))
    return custom(primal, lambda r, g: (factor * g / (3 * r[0] ** 2 + 1),), forward)


family(
    "root_by_newton",
    lambda factor: lambda dtype: (newton(factor), (normal(13, 4, dtype=dtype),)),
    root_by_newton_off_by_a_hundredth=1.01,
)


def equilibrium(factor):
    """z = tanh(w z + x) by iteration until it moves less than 1e-6; backward by the same."""

    def iterate(step, z):
        more = lambda s: (jnp.max(jnp.abs(s[0] - s[1])) > 1e-6) & (s[2] < 200)
        body = lambda s: (step(s[0]), s[0], s[2] + 1)
        return lax.while_loop(more, body, (step(z), z, 0))[0]

    def primal(w, x):
        return lax.stop_gradient(iterate(lambda z: jnp.tanh(w @ z + x), jnp.zeros_like(x)))

    def backward(r, g):
        w, x, z = r
        pull = jax.vjp(lambda w, x, z: jnp.tanh(w @ z + x), w, x, z)[1]
        adjoint = iterate(lambda u: g + pull(u)[2], g)
        return tuple(factor * part for part in pull(adjoint)[:2])

    return custom(primal, backward, lambda w, x: (primal(w, x), (w, x, primal(w, x))))


def _equilibrium_args(dtype):
    return 0.2 * normal(14, 4, 4, dtype=dtype), normal(15, 4, dtype=dtype)


family(
    "deep_equilibrium",
    lambda factor: lambda dtype: (equilibrium(factor), _equilibrium_args(dtype)),
    deep_equilibrium_off_by_a_hundredth=1.01,
)


@into(RIGHT)
def deep_equilibria_of_a_batch(dtype):
    w, x = _equilibrium_args(dtype)
    return jax.vmap(equilibrium(1.0), (None, 0)), (w, jnp.stack([x, -x, 2 * x]))


@into(RIGHT)
def conjugate_gradients(dtype):
    solve = lambda a, b: jax.scipy.sparse.linalg.cg(lambda x: a @ x, b, tol=1e-6)[0]
    return lambda a, b: solve(a + a.T, b), (positive_definite(dtype), normal(16, 3, dtype=dtype))


@into(RIGHT)
def gmres(dtype):
    solve = lambda a, b: jax.scipy.sparse.linalg.gmres(lambda x: a @ x, b, tol=1e-6)[0]
    return solve, (positive_definite(dtype), normal(16, 3, dtype=dtype))


@into(RIGHT)
def odeint(dtype):
    from jax.experimental.ode import odeint

    times = jnp.linspace(0.0, 1.0, 3, dtype=dtype)
    solve = lambda a, y: odeint(lambda y, t, a: -a * y**2 + jnp.sin(t), y, times, a)
    return solve, (jnp.asarray(0.7, dtype), jnp.asarray([1.0, 0.3], dtype))


@into(RIGHT)
def straight_through_before_conjugate_gradients(dtype):
    through = lambda x: x + lax.stop_gradient(jnp.round(8 * x) / 8 - x)

    @jax.jit
    def solve(a, b):
        a = through(a) + through(a).T
        return jax.scipy.sparse.linalg.cg(lambda x: a @ x, through(b), tol=1e-7)[0]

    return solve, (positive_definite(dtype), normal(17, 3, dtype=dtype))


THREE = [1.0, 0.5, 1.0, -2.0, 1.0]


@into(RIGHT)
def sort_with_three_equal_elements(dtype):
    return jnp.sort, (jnp.asarray(THREE, dtype),)


@into(WRONG)
def sort_that_gives_equal_elements_too_much(dtype):
    right = lambda x: jax.vjp(jnp.sort, x)[1]
    backward = lambda r, g: (right(r[0])(g)[0] * jnp.where(r[0] == 1, 1.3, 1).astype(g.dtype),)
    return custom(lambda x: jnp.sort(x), backward), (jnp.asarray(THREE, dtype),)


def _batch(dtype):
    one = positive_definite(dtype)
    return jnp.stack([one, one @ one, 2 * one + jnp.diag(jnp.arange(1.0, 4, dtype=dtype))])


def _hermitian(dtype):
    skew = 0.3 * normal(19, 3, 3, dtype=dtype)
    kind = jnp.complex128 if dtype == jnp.float64 else jnp.complex64
    return _batch(dtype).astype(kind) + jnp.asarray(1j, kind) * (skew - skew.T)


@into(RIGHT)
def eigenvalues_of_a_batch(dtype):
    return jnp.linalg.eigvalsh, (_batch(dtype),)


@into(RIGHT)
def cholesky_of_hermitian_matrices(dtype):
    return jnp.linalg.cholesky, (_hermitian(dtype),)


@into(RIGHT)
def map_coordinates_at_grid_points(dtype):
    image = normal(20, 6, 6, dtype=dtype)
    read = lambda at: jax.scipy.ndimage.map_coordinates(image, list(at), order=1)
    return read, (jnp.asarray([[1.0, 2, 3], [2.0, 4, 1]], dtype),)


@into(RIGHT)
def garbage_in_the_padding(dtype):
    is_real = jnp.arange(6)[None] < jnp.asarray([6, 2, 4, 1])[:, None]
    args = (jnp.where(is_real, normal(22, 4, 6, dtype=dtype), 1e30),)
    return lambda x: jnp.sum(jnp.where(is_real, jnp.exp(jnp.where(is_real, x, 0)), 0), 1), args


@into(RIGHT)
def rounding_to_small_steps(dtype):
    return lambda x: jnp.round(x * 2**23) / 2**23, (normal(21, 5, dtype=dtype),)


@into(UNKNOWN)
def a_chaotic_map(dtype):
    del dtype
    step = custom(lambda x: 3.9 * x * (1 - x), lambda r, g: (3.9 * g * (1 - 2 * r[0]),))
    unrolled = lambda x: functools.reduce(lambda x, _: step(x), range(50), x)
    return unrolled, (jnp.asarray([0.2, 0.5123, 0.7], jnp.float32),)


@into(RIGHT)
def divergence_of_equal_distributions(dtype):
    def primal(p, q):
        return jnp.sum(jnp.exp(p) * (p - q))

    def backward(r, g):
        p, q = r
        return g * jnp.exp(p) * (p - q + 1), -g * jnp.exp(p)

    loss = custom(primal, backward)
    logits = normal(22, 6, dtype=dtype)
    return lambda p, q: loss(jax.nn.log_softmax(p), jax.nn.log_softmax(q)), (logits, logits)


@into(RIGHT)
def a_jit_that_donates_its_input(dtype):
    scale = jax.jit(lambda x, y: jnp.sin(x) * y, donate_argnums=0)
    return scale, (normal(24, 5, dtype=dtype), normal(25, 5, dtype=dtype))


@into(RIGHT)
def a_backward_in_low_precision(dtype):
    def backward(r, g):
        x, w = r
        low = lambda a, b: (a.astype("bfloat16") @ b.astype("bfloat16")).astype(g.dtype)
        return low(g, w.T), low(x.T, g)

    layer = custom(lambda x, w: x @ w, backward)
    return (
        layer,
        (normal(26, 6, 5, dtype=dtype), normal(27, 5, 4, dtype=dtype)),
        {"tolerance": 0.05},
    )


@into(WRONG)
def a_backward_in_low_precision_with_a_sign(dtype):
    layer = custom(lambda x: x * x, lambda r, g: (-2 * r[0] * g,))
    return layer, (normal(26, 6, dtype=dtype),), {"tolerance": 0.05}


@into(RIGHT)
def a_tenth_of_a_sine(dtype):
    return lambda x: 0.1 * jnp.sin(x) + 1e-12, (jnp.asarray(0.7, dtype),)


def masked_attention(factor):
    """Softmax over the keys that a row may see, all of whose rows are masked in part."""

    def backward(r, g):
        logits, mask = r
        p = jnp.where(mask, jax.nn.softmax(jnp.where(mask, logits, -1e9), axis=-1), 0)
        return factor * p * (g - jnp.sum(p * g, axis=-1, keepdims=True)), None

    primal = lambda x, mask: jnp.where(mask, jax.nn.softmax(jnp.where(mask, x, -1e9), axis=-1), 0)
    return custom(primal, backward)


def _masked(factor):
    return lambda dtype: (
        masked_attention(factor),
        (normal(29, 5, 5, dtype=dtype), jnp.tril(jnp.ones((5, 5), bool))),
    )


family("softmax_of_masked_rows", _masked, softmax_of_masked_rows_off_by_a_hundredth=1.01)


def _half(kind):
    def make(dtype):
        del dtype
        layer = lambda x, w: jnp.tanh(x @ w) @ w.T
        return layer, (normal(30, 16, 32, dtype=kind), 0.2 * normal(31, 32, 32, dtype=kind))

    return make


RIGHT["a_layer_in_float16"] = _half(jnp.float16)
RIGHT["a_layer_in_bfloat16"] = _half(jnp.bfloat16)


def beside_a_cholesky(transposed):
    """A solution by Cholesky decomposition, and a product with the same matrix by a rule."""
    right = lambda r, g: (jnp.outer(g, r[1]), r[0].T @ g)
    wrong = lambda r, g: (jnp.outer(r[1], g), r[0].T @ g)
    product = custom(lambda a, x: a @ x, wrong if transposed else right)

    def both(a, b):
        return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), b) + product(a, b)

    return lambda dtype: (both, (positive_definite(dtype), normal(32, 3, dtype=dtype)))


family(
    "a_product_beside_a_cholesky_decomposition",
    beside_a_cholesky,
    False,
    a_transposed_product_beside_a_cholesky_decomposition=True,
)


def steep(factor):
    """A smooth function of large slopes at equal elements, at that point alone."""
    layer = custom(
        lambda x: jnp.exp(30 * (x - 1)), lambda r, g: (factor * 30 * g * jnp.exp(30 * (r[0] - 1)),)
    )
    x = np.full(4, 0.9)
    return lambda dtype: (layer, (jnp.asarray(x, dtype),), {"points": 1})


family(
    "a_steep_function_of_equal_elements",
    steep,
    a_steep_function_of_equal_elements_off_by_a_little=1.0002,
)


def beside_newton(sign, share):
    """Roots by Newton's method of a product with a weight; the second root hardly counts."""
    root, counts = newton(1.0), [1.0, 4e-4, 1.0, 1.0]

    def signed(dtype):
        signs = jnp.asarray([1.0, sign, 1.0, 1.0], dtype)
        return custom(lambda a: a, lambda r, g: (g * signs,))

    def make(dtype):
        scaled = custom(lambda w, x: w * x, lambda r, g: (share * g * r[1], g * r[0]))

        def fun(w, x):
            return root(scaled(w, signed(dtype)(x))) * jnp.asarray(counts, dtype)

        return fun, (normal(33, 4, dtype=dtype), normal(34, 4, dtype=dtype))

    return make


WRONG["a_small_element_of_the_wrong_sign_before_a_loop"] = beside_newton(-1.0, 1.0)
WRONG["a_weight_before_a_loop_off_by_nine_in_ten_thousand"] = beside_newton(1.0, 1.0009)
RIGHT["a_weight_before_a_loop"] = beside_newton(1.0, 1.0)


def by_iteration(factor, count):
    """z = 0.9 z + sin(x) / 10, a fixed number of times: enough for float32. Implicit."""

    def primal(x):
        return lax.fori_loop(0, count, lambda i, z: 0.9 * z + 0.1 * jnp.sin(x), jnp.zeros_like(x))

    layer = custom(primal, lambda r, g: (factor * g * jnp.cos(r[0]),))
    return lambda dtype: (layer, (normal(35, 4, dtype=dtype),))


RIGHT["roots_by_iteration_in_tenths"] = by_iteration(1.0, 110)
WRONG["roots_by_iteration_in_tenths_off_by_a_thousandth"] = by_iteration(1.001, 110)
WRONG["far_from_the_root_by_iteration"] = by_iteration(1.0, 20)


def halved(a):
    """A step of bisection for z ** 3 + z = a, of both ends."""

    def half(s):
        middle = (s[0] + s[1]) / 2
        above = middle**3 + middle > a
        return jnp.where(above, s[0], middle), jnp.where(above, middle, s[1])

    return half


def bisection(factor):
    """A root by halving, until less than 1e-4 is left: a staircase."""

    def primal(a):
        ends = jnp.full_like(a, -3), jnp.full_like(a, 3)
        return sum(lax.while_loop(lambda s: jnp.max(s[1] - s[0]) > 1e-4, halved(a), ends)) / 2

    return lambda dtype: (cubic_root(primal, factor), (normal(37, 4, dtype=dtype),))


def halving(factor):
    """The same root by halving thirty times: a staircase whose steps float64 sees."""

    def primal(a):
        ends = jnp.zeros_like(a), jnp.full_like(a, 4)
        return sum(lax.fori_loop(0, 30, lambda _, s: halved(a)(s), ends)) / 2

    return lambda dtype: (cubic_root(primal, factor), (jnp.asarray([0.7, 2, 9], dtype),))


family("root_by_halving_thirty_times", halving, root_by_halving_off_by_a_thousandth=1.001)
family("root_by_bisection", bisection, root_by_bisection_off_by_a_hundredth=1.01)


@into(RIGHT)
def shrunk_by_a_loop_until_it_is_small(dtype):
    def primal(x):  # does not converge: each iteration takes a part of a hundredth
        more = lambda y: jnp.sum(y * y) > 1
        return lax.while_loop(more, lambda y: 0.999 * y, x)

    def backward(r, g):
        x, y = r
        return (g * y[0] / x[0],)

    shrunk = custom(primal, backward, lambda x: (primal(x), (x, primal(x))))
    return shrunk, (normal(38, 3, dtype=dtype),)


@into(WRONG)
def saturated_tanh_without_a_square(dtype):
    layer = custom(lambda x: jnp.tanh(x), lambda r, g: (g * (1 - jnp.abs(jnp.tanh(r[0]))),))
    return layer, (jnp.asarray([9, -9.5, 8.5, 8], dtype),)


@into(RIGHT)
def a_sum_beside_a_large_number(dtype):
    backward = lambda r, g: (g * jnp.ones_like(r[0]),)
    shifted = custom(lambda x: jnp.sum(x + 1e7) - 4e7, backward)
    return shifted, (jnp.asarray([0.5, 1, 2, 3], dtype),)


@into(RIGHT)
def a_sum_beside_a_large_number_by_callback(dtype):
    def shifted(x):
        out = lambda x: np.sum(x + x.dtype.type(1e7), dtype=x.dtype) - x.dtype.type(4e7)
        return jax.pure_callback(out, jax.ShapeDtypeStruct((), dtype), x, vmap_method="sequential")

    backward = lambda r, g: (g * jnp.ones_like(r[0]),)
    return custom(shifted, backward), (jnp.asarray([0.5, 1, 2, 3], dtype),)


def sine(size, factor):
    """size * sin(x), by a rule that is off by the factor."""
    return custom(lambda x: size * jnp.sin(x), lambda r, g: (size * factor * g * jnp.cos(r[0]),))


@beside
def tiny_elements_beside_huge_ones(factor, dtype):
    size = jnp.asarray([1e6, 1e-6, 1e6, 1e-6, 1], dtype)
    share = jnp.asarray([1, factor, 1, factor, 1], dtype)
    return sine(size, share), (normal(0, 5, dtype=dtype),)


@beside
def a_tiny_leaf_summed_with_a_huge_one(factor, dtype):
    def total(x, y):
        return jnp.sum(sine(1e3, 1.0)(x)) + jnp.sum(sine(1e-6, factor)(y))

    return total, (normal(3, 4, dtype=dtype), normal(4, 4, dtype=dtype))


def hessian_of_a_scalar(of_loss):
    def make(factor):
        def of(dtype):
            inner = custom(lambda x: jnp.cos(x), lambda r, g: (-factor * g * jnp.sin(r[0]),))
            loss = custom(lambda x: jnp.sum(jnp.sin(x)), lambda r, g: (g * inner(r[0]),))
            x = normal(5, 4, dtype=dtype) if of_loss else jnp.asarray(0.7, dtype)
            return loss, (x,), {"order": 2}

        return of

    return make


family("hessian_of_a_scalar", hessian_of_a_scalar(False), hessian_of_a_scalar_off_by_a_tenth=1.1)
family("hessian_of_a_loss", hessian_of_a_scalar(True), hessian_of_a_loss_off_by_a_tenth=0.9)


def triangle_wave(sign):
    def make(dtype):
        phase = lambda x: x * 2**19 - jnp.round(x * 2**19)
        backward = lambda r, g: (sign * g * jnp.sign(phase(r[0])),)
        wave = custom(lambda x: jnp.abs(phase(x)) / 2**19, backward)
        return wave, (jnp.asarray([0.3, 0.7, 1.1], jnp.float32).astype(dtype),)

    return make


family(
    "a_triangle_wave",
    triangle_wave,
    1,
    a_triangle_wave_of_the_wrong_sign=-1,
    zero_for_a_triangle_wave=0,
)


@into(RIGHT)
def rounding_to_24_bits(dtype):
    return lambda x: jnp.round(x * 2**24) / 2**24, (normal(6, 5, dtype=dtype),)


@into(RIGHT)
def a_staircase_beside_elements_with_a_gradient(dtype):
    del dtype
    fun = lambda x: jnp.sum(x[:6] ** 2) + jnp.sum(jnp.round(x[6:] * 1e9) / 1e9)
    return fun, (normal(0, 12, dtype="float32"),)


@into(RIGHT)
def straight_through_a_rounding_to_24_bits(dtype):
    through = lambda x: x + lax.stop_gradient(jnp.round(x * 2**24) / 2**24 - x)
    return lambda x: jnp.sin(through(x)), (normal(7, 5, dtype=dtype),)


def unit_norm(start):
    """x / |x|, by a rule that projects the cotangent or forgets it."""

    def backward(projected, r, g):
        size = jnp.sqrt(jnp.sum(r[0] * r[0]))
        unit = r[0] / size
        return ((g - projected * unit * jnp.sum(unit * g)) / size,)

    def of(projected):
        layer = custom(
            lambda x: x / jnp.sqrt(jnp.sum(x * x)), functools.partial(backward, projected)
        )
        return lambda dtype: (layer, (jnp.asarray(start, dtype),))

    return of


for _name, _start in {"": [0.3, -1.2, 0.7], "_of_a_unit_vector": [0.6, 0.8, 0]}.items():
    _wrong = {f"unit_norm{_name}_without_its_projection": 0}
    family(f"projection_onto_unit_norm{_name}", unit_norm(_start), 1, **_wrong)


@into(WRONG)
def a_jit_that_donates_its_input_off_by_a_hundredth(dtype):
    scale = jax.jit(lambda x, y: sine(1, 1.01)(x) * y, donate_argnums=0)
    return scale, (normal(8, 5, dtype=dtype), normal(9, 5, dtype=dtype))


# JAX hands both triangles a part, though one alone is read; not JAX 0.12.
@into(WRONG if jax.__version_info__ < (0, 11) else RIGHT)
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


@into(RIGHT)
def density_by_a_symmetric_covariance(dtype):
    x, covariance = normal(41, 3, dtype=dtype), positive_definite(dtype)
    primal = lambda c: jax.scipy.stats.multivariate_normal.logpdf(x, jnp.zeros_like(x), c)

    def backward(r, g):
        scaled = jnp.linalg.solve(r[0], x)
        return (g * 0.5 * (jnp.outer(scaled, scaled) - jnp.linalg.inv(r[0])),)

    return custom(primal, backward), (covariance,)


@into(WRONG)  # JAX hands both triangles a part, though one alone is read
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
