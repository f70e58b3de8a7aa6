"""Families of wrong VJPs: a function, its right rule, and rules of one realistic bug each.

`PAIRS` maps each bug to a maker, which takes a dtype and returns (wrong, right, args), and to the
check expected to fail. The pairs of a family have one right rule: `RIGHT` has one name of each.
"""

# ruff: noqa: E731

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipgrad._check.behavior import BEHAVIORS
from tests.helpers import array

# Of a wrong rule that values alone show: what they find is found beside other checks too.
VALUES_ALONE = {"skip": tuple(BEHAVIORS)}
PAIRS: dict[str, tuple[Callable[[Any], tuple], str]] = {}
RIGHT: dict[Any, str] = {}


def custom(primal, backward, forward=None):
    """A custom_vjp whose residuals are its arguments."""
    rule = jax.custom_vjp(primal)
    rule.defvjp(forward or (lambda *args: (primal(*args), args)), backward)
    return rule


def halved(factor):
    """A half, by a linear solve whose transpose is off by a factor."""
    return lambda b: lax.custom_linear_solve(
        lambda v: 2 * v, b, lambda _, y: y / 2, lambda _, y: factor * y / 2
    )


def normal(seed, *shape, dtype):
    return array(np.random.default_rng(seed).normal(size=shape), dtype)


def twins(primal, wrong, right):
    return custom(primal, wrong), custom(primal, right)


def shapes(*sizes):
    """Arguments of these shapes, of normal numbers."""
    return lambda dtype: tuple(normal(k, *size, dtype=dtype) for k, size in enumerate(sizes))


def numbers(*values):
    """Arguments of these values."""
    return lambda dtype: tuple(jnp.asarray(value, dtype) for value in values)


def complex_numbers(dtype):
    """Four complex numbers."""
    return (lax.complex(*shapes((4,), (4,))(dtype)),)


def pulled(primal, rule):
    """A function of which `rule(g, *args)` gives the cotangent, of several arguments a tuple."""

    def backward(r, g):
        cotangents = rule(g, *r)
        return cotangents if isinstance(cotangents, tuple) else (cotangents,)

    return custom(lambda *xs: primal(*xs), backward)


def pushed(primal, rule):
    """A function of which `rule(primals, tangents)` gives the value and its tangent."""
    function = jax.custom_jvp(lambda *xs: primal(*xs))
    function.defjvp(rule)
    return function


def family(args, primal, right, by=pulled, table=PAIRS):
    """A function that registers rules by name: wrong ones, beside the right one."""

    def register(check="value", **wrong):
        for name, rule in wrong.items():
            make = lambda dtype, rule=rule: (by(primal, rule), by(primal, right), args(dtype))
            table[name] = make, check
            RIGHT.setdefault(register, name)

    return register


def pair(check="value"):
    """Registers the maker of a pair that is more than two rules of a function."""

    def register(make):
        PAIRS[make.__name__], RIGHT[make] = (make, check), make.__name__
        return make

    return register


def cosine(g, x):
    return g * jnp.cos(x)


def of_tracers(g, x):
    return cosine(g, x) * (2 if isinstance(g, jax.core.Tracer) else 1)


X = shapes((5,))
double = custom(lambda g: 1 * g, lambda r, h: (2 * h,))
wrong_cosine = custom(jnp.cos, lambda r, h: (jnp.sin(r[0]) * h,))
sine = family(X, jnp.sin, cosine)
sine(
    wrong_sign=lambda g, x: -cosine(g, x),
    ignored_cotangent=lambda g, x: jnp.cos(x),
    permuted_cotangent=lambda g, x: cosine(jnp.roll(g, 1), x),
    right_at_one_point_only=lambda g, x: cosine(g, *X(g.dtype)),
    right_for_equal_cotangents_only=lambda g, x: cosine(jnp.mean(g), x),
    gradient_rounded_to_bfloat16=lambda g, x: cosine(g, x).astype("bfloat16").astype(x.dtype),
)
sine(
    "linearity",
    stray_clip_of_the_cotangent=lambda g, x: cosine(jnp.clip(g, -5, 5), x),
    affine_backward=lambda g, x: cosine(g, x) + jnp.asarray(1e-3, g.dtype),
    squared_cotangent=lambda g, x: cosine(g * jnp.abs(g), x),
    right_for_positive_cotangents_only=lambda g, x: cosine(jnp.maximum(g, 0), x),
)
sine(
    "cotangent",
    wrong_dtype=lambda g, x: cosine(g, x).astype("float16" if g.dtype == "float32" else "float32"),
)
sine("jit", wrong_only_under_jit=of_tracers)
sine(
    "second order",
    second_derivative_by_the_cotangent_doubled=lambda g, x: cosine(double(g), x),
    stopped_second_derivative=lambda g, x: g * lax.stop_gradient(jnp.cos(x)),
    wrong_second_derivative=lambda g, x: g * wrong_cosine(x),
)
family(shapes((4000,)), jnp.sin, cosine)(
    zero_at_one_of_thousands=lambda g, x: cosine(g, x).at[2718].set(0)
)
family(X, lambda x: jnp.sin(x).astype("bfloat16"), lambda g, x: cosine(g.astype(x.dtype), x))(
    a_fifth_off_in_a_narrow_output=lambda g, x: 1.2 * cosine(g.astype(x.dtype), x)
)
family(X, lambda x: 1e-12 * jnp.sin(x), lambda g, x: 1e-12 * cosine(g, x))(
    tiny_gradient_that_is_twice_too_large=lambda g, x: 2e-12 * cosine(g, x)
)
family(shapes((40,)), jnp.exp, lambda g, x: g * jnp.exp(x))(
    off_by_one_percent=lambda g, x: 1.01 * g * jnp.exp(x),
    off_by_three_permille=lambda g, x: 1.003 * g * jnp.exp(x),
)
of_square = lambda g, x: 2 * x * g
family(shapes((4, 3)), jnp.square, of_square)(missing_factor=lambda g, x: x * g)
family(numbers([0.0, 1.0, -2.0]), jnp.square, of_square)(
    "finite", nan_where_the_argument_is_zero=lambda g, x: 2 * x * x / x * g
)
family(shapes((6, 4)), lambda x: jnp.mean(x * x, 0), lambda g, x: 2 * x * g[None] / 6)(
    forgotten_mean=lambda g, x: 2 * x * g[None]
)
scaled = family(
    shapes((5, 4), (4,)), lambda x, b: x * b[None], lambda g, x, b: (g * b[None], jnp.sum(g * x, 0))
)
scaled(first_row_instead_of_the_sum=lambda g, x, b: (g * b[None], (g * x)[0]))
scaled("cotangent", forgotten_sum_over_broadcast_axis=lambda g, x, b: (g * b[None], g * x))
family(shapes((4,), (4,)), jnp.multiply, lambda g, x, y: (g * y, g * x))(
    swapped_residuals=lambda g, x, y: (g * x, g * y)
)
family(shapes((30,)), lambda x: jnp.abs(x) ** 3, lambda g, x: 3 * x * jnp.abs(x) * g)(
    wrong_for_negative_inputs_only=lambda g, x: 3 * x**2 * g
)


def of_tanh(scale):
    def rule(g, a, b, c):
        h = jnp.tanh(a @ b)
        inner = g * c * (1 - h * h)
        return inner @ b.T, scale * (a.T @ inner), g * h

    return rule


family(shapes((4, 4), (4, 4), (4, 4)), lambda a, b, c: jnp.tanh(a @ b) * c, of_tanh(1.0))(
    wrong_in_one_of_several_inputs=of_tanh(1.1)
)
family(
    numbers([-1.0, 0.0, 2.0]),
    lambda x: jnp.maximum(x, 0),
    lambda g, x: jnp.where(x > 0, g, 0),
)(a_kink_outside_of_its_subdifferential=lambda g, x: jnp.where(x == 0, -g, jnp.where(x > 0, g, 0)))
family(X, lambda x: (jnp.sin(x), x * x), lambda g, x: jnp.cos(x) * g[0] + 2 * x * g[1])(
    dropped_second_output=lambda g, x: jnp.cos(x) * g[0]
)
INDEX = np.asarray([0, 2, 2, 3], np.int32)
family(shapes((5, 2)), lambda x: x[INDEX], lambda g, x: jnp.zeros_like(x).at[INDEX].add(g))(
    scatter_that_sets_instead_of_adds=lambda g, x: jnp.zeros_like(x).at[INDEX].set(g)
)


def of_indexed(how):
    def rule(g, x, index):
        places, none = jnp.zeros_like(x).at[index], np.zeros(index.shape, jax.dtypes.float0)
        return getattr(places, how)(2 * x[index] * g), none

    return rule


family(
    lambda dtype: (*X(dtype), jnp.asarray([1, 1, 3])),
    lambda x, index: x[index] * x[index],
    of_indexed("add"),
)(repeated_integer_indices_set=of_indexed("set"))
parts = lambda g, t: (g * jnp.sin(t["b"]), g * t["a"] * jnp.cos(t["b"]))
family(
    lambda dtype: (dict(zip("ab", shapes((4,), (4,))(dtype), strict=True)),),
    lambda t: t["a"] * jnp.sin(t["b"]),
    lambda g, t: dict(zip("ab", parts(g, t), strict=True)),
)(leaves_of_a_tree_swapped=lambda g, t: dict(zip("ba", parts(g, t), strict=True)))
factors = lambda x: np.linspace(0, 1, 100)[:, None].astype(x.dtype)
curves = lambda x: jnp.tanh(factors(x) * x[None])


def of_curves(kept):
    def rule(g, x):
        inner = g * (1 - curves(x) ** 2) * factors(x)
        return jnp.sum(inner.at[57].multiply(kept), axis=0)

    return rule


family(shapes((4,)), curves, of_curves(1))(one_output_of_a_hundred_ignored=of_curves(0))
family(complex_numbers, lambda z: z * z, lambda g, z: 2 * z * g)(
    complex_conjugate_of_the_other_convention=lambda g, z: 2 * jnp.conj(z) * g
)
family(shapes((4, 4), (4, 4)), jnp.matmul, lambda g, a, b: (g @ b.T, a.T @ g))(
    transposed_weight_gradient=lambda g, a, b: (g @ b.T, g.T @ a)
)
family(
    lambda dtype: (normal(28, 3000, dtype=dtype) * 100, normal(29, 3, dtype=dtype) / 100),
    lambda x, y: jnp.sum(x * x) + jnp.sum(jnp.sin(y)),
    lambda g, x, y: (2 * x * g, jnp.cos(y) * g),
)(gradient_lost_in_a_large_leaf=lambda g, x, y: (2 * x * g, jnp.cos(y) * g * 1.02))


def of_softmax(g, x):
    p = jax.nn.softmax(x)
    return p * (g - jnp.sum(p * g, axis=-1, keepdims=True))


family(shapes((3, 6)), jax.nn.softmax, of_softmax)(
    softmax_that_is_zero_for_equal_cotangents=lambda g, x: jnp.zeros_like(g)
)
mean = functools.partial(jnp.mean, axis=-1, keepdims=True)
norm = lambda x: (x - mean(x)) / jnp.sqrt(mean((x - mean(x)) ** 2) + 1e-5)


def of_norm(part):
    def rule(g, x):
        y, width = norm(x), jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5)
        return (g - part * mean(g) - y * mean(g * y)) / width

    return rule


family(shapes((4, 8)), norm, of_norm(1.0))(layer_norm_without_the_mean_term=of_norm(0.0))
family(shapes((7,)), jnp.cumsum, lambda g, x: jnp.flip(jnp.cumsum(jnp.flip(g))))(
    cumulative_sum_not_reversed=lambda g, x: jnp.cumsum(g)
)
of_difference = lambda g, x: jnp.pad(g, (1, 0)) - jnp.pad(g, (0, 1))
family(shapes((9,)), lambda x: x[1:] - x[:-1], of_difference)(
    off_by_one_at_the_edge=lambda g, x: of_difference(g, x).at[-1].set(0)
)
of_product = lambda x: jnp.tanh(x) + x / jnp.cosh(x) ** 2
family(shapes((200,)), lambda x: x * jnp.tanh(x), lambda g, x: g * of_product(x))(
    wrong_beyond_a_threshold=lambda g, x: g * jnp.where(x > 2, 1, of_product(x))
)
family(numbers([1.3, 2.5, 1.1]), jnp.log2, lambda g, x: g / x / np.log(2).astype(g.dtype))(
    logarithm_base_two_without_its_constant=lambda g, x: g / x
)
length = lambda x: jnp.sqrt(jnp.sum(x * x))
family(shapes((8,)), length, lambda g, x: g * x / length(x))(
    norm_without_its_division=lambda g, x: g * x
)
family(
    shapes((6,), (6,)),
    jnp.maximum,
    lambda g, x, y: (jnp.where(x > y, g, 0), jnp.where(x > y, 0, g)),
)(maximum_gives_both_the_gradient=lambda g, x, y: (g, jnp.where(x > y, 0, g)))
by_kernel = lambda g, x: jnp.convolve(x[::-1], g, mode="valid")
family(
    shapes((12,), (3,)),
    functools.partial(jnp.convolve, mode="valid"),
    lambda g, x, k: (jnp.convolve(g, k[::-1]), by_kernel(g, x)),
)(convolution_with_an_unflipped_kernel=lambda g, x, k: (jnp.convolve(g, k), by_kernel(g, x)))
family(
    lambda dtype: (normal(61, 20, dtype=dtype) * 3,),
    lambda x: jnp.where(jnp.abs(x) < 1, x * x / 2, jnp.abs(x) - 0.5),
    lambda g, x: g * jnp.clip(x, -1, 1),
)(huber_loss_with_the_wrong_branch=lambda g, x: g * x)


@pair("points")
def stale_residual(dtype):
    saved = []
    remembering = lambda x: (saved.append(x), (jnp.sin(x), x))[1]
    wrong = custom(jnp.sin, lambda r, g: (jnp.cos(saved[-1]) * g,), remembering)
    return wrong, custom(jnp.sin, lambda r, g: (jnp.cos(r[0]) * g,)), X(dtype)


@pair("determinism")
def random_gradient(dtype):
    rng = np.random.default_rng(0)
    wrong = lambda r, g: (cosine(g, *r) * jnp.asarray(rng.uniform(), dtype),)
    return *twins(jnp.sin, wrong, lambda r, g: (cosine(g, *r),)), X(dtype)


@pair("determinism")
def wrong_from_the_fourth_call_on(dtype):
    calls = []
    wrong = lambda r, g: (cosine(g, *r) * (calls.append(1) or 1 + (len(calls) > 3)),)
    return *twins(jnp.sin, wrong, lambda r, g: (cosine(g, *r),)), X(dtype)


def sine_with_batches(batched):
    """The sine, whose gradient has a rule of its own under vmap."""
    gradient = jax.custom_batching.custom_vmap(lambda x, g: jnp.cos(x) * g)
    gradient.def_vmap(batched)
    return custom(jnp.sin, lambda r, g: (gradient(r[0], g),))


@pair("vmap")
def wrong_where_only_the_cotangent_is_batched(dtype):
    def make(factor):
        def batched(size, in_batched, x, g):
            if not in_batched[0]:
                return factor * jnp.cos(x)[None] * g, True
            return jnp.cos(x) * (g if in_batched[1] else g[None]), True

        return sine_with_batches(batched)

    return make(2.0), make(1.0), X(dtype)


@pair("vmap")
def wrong_only_under_vmap(dtype):
    def scale(factor):
        def batched(size, in_batched, x, g):
            x, g = (
                a if b else jnp.stack([a] * size) for a, b in zip((x, g), in_batched, strict=True)
            )
            return factor * jnp.cos(x) * g, True

        return sine_with_batches(batched)

    return scale(2.0), scale(1.0), X(dtype)


@pair("primal")
def forward_rule_that_disagrees(dtype):
    backward = lambda r, g: (jnp.cos(r[0]) * g,)
    wrong = custom(jnp.sin, backward, lambda x: (jnp.sin(x) * 1.01, (x,)))
    return wrong, custom(jnp.sin, backward), X(dtype)


of_sine = lambda p, t: jnp.cos(p[0]) * t[0]
family(X, jnp.tanh, lambda p, t: (jnp.tanh(p[0]), (1 - jnp.tanh(p[0]) ** 2) * t[0]), pushed)(
    custom_jvp_with_a_missing_factor=lambda p, t: (
        jnp.tanh(p[0]),
        2 * (1 - jnp.tanh(p[0]) ** 2) * t[0],
    )
)
family(X, jnp.sin, lambda p, t: (jnp.sin(p[0]), of_sine(p, t)), pushed)(
    "primal", custom_jvp_with_another_primal=lambda p, t: (jnp.sin(p[0]) + 0.1, of_sine(p, t))
)
by_first = lambda p, t: (jnp.sin(p[0]) * p[1], of_sine(p, t) * p[1])
family(
    shapes((5,), (5,)),
    lambda x, y: jnp.sin(x) * y,
    lambda p, t: (by_first(p, t)[0], by_first(p, t)[1] + jnp.sin(p[0]) * t[1]),
    pushed,
)(custom_jvp_that_forgets_an_argument=by_first)


@pair()
def wrong_deep_inside_a_scan(dtype):
    def make(scale):
        def backward(r, g):
            inner = g * (1 - jnp.tanh(r[0] + r[1]) ** 2)
            return scale * inner, inner

        cell = custom(lambda h, x: jnp.tanh(h + x), backward)
        return lambda h, xs: lax.scan(lambda h, x: (cell(h, x),) * 2, h, xs)[1]

    return make(0.98), make(1.0), shapes((4,), (6, 4))(dtype)


@pair()
def one_wrong_bias_in_a_deep_tree(dtype):
    params = {
        f"layer{k}": {"w": normal(k, 4, 4, dtype=dtype), "b": normal(k, 4, dtype=dtype)}
        for k in range(6)
    }

    def make(scale):
        add = custom(lambda x, b: x + b[None], lambda r, g: (g, scale * jnp.sum(g, axis=0)))

        def model(params, x):
            for name, layer in params.items():
                plus = add if name == "layer3" else (lambda x, b: x + b[None])
                x = jnp.tanh(plus(x @ layer["w"], layer["b"]))
            return x

        return model

    return make(0.9), make(1.0), (params, normal(60, 3, 4, dtype=dtype))
