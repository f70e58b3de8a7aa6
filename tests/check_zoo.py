"""Wrong VJPs with their right twins: each pair differs by one realistic bug.

A maker takes a dtype and returns (wrong, right, args). `PAIRS` maps its name to the maker and the
check expected to fail; None means any.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

PAIRS = {}


def pair(check="value"):
    def register(make):
        PAIRS[make.__name__] = (make, check)
        return make

    return register


def custom(primal, backward, forward=None):
    """A custom_vjp whose residuals are its arguments."""
    rule = jax.custom_vjp(primal)
    rule.defvjp(forward or (lambda *args: (primal(*args), args)), backward)
    return rule


def normal(seed, *shape, dtype):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def twins(primal, wrong, right):
    return custom(primal, wrong), custom(primal, right)


@pair()
def wrong_sign(dtype):
    args = (normal(0, 5, dtype=dtype),)
    return *twins(
        jnp.cos, lambda r, g: (jnp.sin(r[0]) * g,), lambda r, g: (-jnp.sin(r[0]) * g,)
    ), args


@pair()
def missing_factor(dtype):
    args = (normal(1, 4, 3, dtype=dtype),)
    primal = lambda x: x * x  # noqa: E731
    return *twins(primal, lambda r, g: (r[0] * g,), lambda r, g: (2 * r[0] * g,)), args


@pair()
def forgotten_mean(dtype):
    args = (normal(2, 6, 4, dtype=dtype),)
    primal = lambda x: jnp.mean(x * x, axis=0)  # noqa: E731
    wrong = lambda r, g: (2 * r[0] * g[None],)  # noqa: E731
    right = lambda r, g: (2 * r[0] * g[None] / 6,)  # noqa: E731
    return *twins(primal, wrong, right), args


@pair("cotangent")
def forgotten_sum_over_broadcast_axis(dtype):
    args = (normal(3, 5, 4, dtype=dtype), normal(4, 4, dtype=dtype))
    primal = lambda x, b: x * b[None]  # noqa: E731
    wrong = lambda r, g: (g * r[1][None], g * r[0])  # noqa: E731
    right = lambda r, g: (g * r[1][None], jnp.sum(g * r[0], axis=0))  # noqa: E731
    return *twins(primal, wrong, right), args


@pair()
def first_row_instead_of_the_sum(dtype):
    args = (normal(5, 5, 4, dtype=dtype), normal(6, 4, dtype=dtype))
    primal = lambda x, b: x * b[None]  # noqa: E731
    wrong = lambda r, g: (g * r[1][None], (g * r[0])[0])  # noqa: E731
    right = lambda r, g: (g * r[1][None], jnp.sum(g * r[0], axis=0))  # noqa: E731
    return *twins(primal, wrong, right), args


@pair()
def swapped_residuals(dtype):
    args = (normal(7, 4, dtype=dtype), normal(8, 4, dtype=dtype))
    wrong = lambda r, g: (g * r[0], g * r[1])  # noqa: E731
    right = lambda r, g: (g * r[1], g * r[0])  # noqa: E731
    return *twins(jnp.multiply, wrong, right), args


@pair("points")
def stale_residual(dtype):
    args = (normal(9, 4, dtype=dtype),)
    saved = []

    def remembering(x):
        saved.append(x)
        return jnp.sin(x), x

    wrong = custom(jnp.sin, lambda r, g: (jnp.cos(saved[-1]) * g,), remembering)
    return wrong, custom(jnp.sin, lambda r, g: (jnp.cos(r[0]) * g,)), args


@pair()
def zero_at_one_of_thousands(dtype):
    args = (normal(10, 4000, dtype=dtype),)
    wrong = lambda r, g: ((jnp.cos(r[0]) * g).at[2718].set(0),)  # noqa: E731
    return *twins(jnp.sin, wrong, lambda r, g: (jnp.cos(r[0]) * g,)), args


@pair()
def wrong_for_negative_inputs_only(dtype):
    args = (normal(11, 30, dtype=dtype),)
    primal = lambda x: jnp.abs(x) ** 3  # noqa: E731
    right = lambda r, g: (3 * r[0] * jnp.abs(r[0]) * g,)  # noqa: E731
    return *twins(primal, lambda r, g: (3 * r[0] ** 2 * g,), right), args


@pair("cotangent")
def wrong_dtype(dtype):
    args = (normal(12, 6, dtype=dtype),)
    narrow = jnp.float16 if dtype == jnp.float32 else jnp.float32
    wrong = lambda r, g: ((jnp.cos(r[0]) * g).astype(narrow),)  # noqa: E731
    return *twins(jnp.sin, wrong, lambda r, g: (jnp.cos(r[0]) * g,)), args


def _off_by(part):
    def make(dtype):
        args = (normal(13, 40, dtype=dtype),)
        right = lambda r, g: (jnp.exp(r[0]) * g,)  # noqa: E731
        return *twins(jnp.exp, lambda r, g: ((1 + part) * jnp.exp(r[0]) * g,), right), args

    return make


PAIRS["off_by_one_percent"] = (_off_by(0.01), "value")
PAIRS["off_by_three_permille"] = (_off_by(0.003), "value")


@pair()
def wrong_in_one_of_several_inputs(dtype):
    args = tuple(normal(20 + k, 4, 4, dtype=dtype) for k in range(3))
    primal = lambda a, b, c: jnp.tanh(a @ b) * c  # noqa: E731

    def backward(scale):
        def rule(r, g):
            a, b, c = r
            h = jnp.tanh(a @ b)
            inner = g * c * (1 - h * h)
            return inner @ b.T, scale * (a.T @ inner), g * h

        return rule

    return *twins(primal, backward(1.1), backward(1.0)), args


@pair("jit")
def wrong_only_under_jit(dtype):
    args = (normal(14, 5, dtype=dtype),)

    def wrong(r, g):
        factor = 2 if isinstance(g, jax.core.Tracer) else 1
        return (factor * jnp.cos(r[0]) * g,)

    return *twins(jnp.sin, wrong, lambda r, g: (jnp.cos(r[0]) * g,)), args


@pair("vmap")
def wrong_only_under_vmap(dtype):
    args = (normal(15, 5, dtype=dtype),)

    def scale(factor):
        gradient = jax.custom_batching.custom_vmap(lambda x, g: jnp.cos(x) * g)

        @gradient.def_vmap
        def batched(size, in_batched, x, g):
            x, g = (
                a if b else jnp.stack([a] * size) for a, b in zip((x, g), in_batched, strict=True)
            )
            return factor * jnp.cos(x) * g, True

        return custom(jnp.sin, lambda r, g: (gradient(r[0], g),))

    return scale(2.0), scale(1.0), args


@pair()
def a_kink_outside_of_its_subdifferential(dtype):
    args = (jnp.asarray([-1.0, 0.0, 2.0], dtype),)
    primal = lambda x: jnp.maximum(x, 0)  # noqa: E731
    wrong = lambda r, g: (g * jnp.where(r[0] == 0, -1, (r[0] > 0).astype(dtype)),)  # noqa: E731
    return *twins(primal, wrong, lambda r, g: (g * (r[0] > 0).astype(dtype),)), args


@pair("determinism")
def random_gradient(dtype):
    args = (normal(16, 5, dtype=dtype),)
    rng = np.random.default_rng(0)
    wrong = lambda r, g: (jnp.cos(r[0]) * g * jnp.asarray(rng.uniform(), dtype),)  # noqa: E731
    return *twins(jnp.sin, wrong, lambda r, g: (jnp.cos(r[0]) * g,)), args


@pair("primal")
def forward_rule_that_disagrees(dtype):
    args = (normal(17, 5, dtype=dtype),)
    backward = lambda r, g: (jnp.cos(r[0]) * g,)  # noqa: E731
    wrong = custom(jnp.sin, backward, lambda x: (jnp.sin(x) * 1.01, (x,)))
    return wrong, custom(jnp.sin, backward), args


@pair()
def dropped_second_output(dtype):
    args = (normal(18, 5, dtype=dtype),)
    primal = lambda x: (jnp.sin(x), x * x)  # noqa: E731
    wrong = lambda r, g: (jnp.cos(r[0]) * g[0],)  # noqa: E731
    right = lambda r, g: (jnp.cos(r[0]) * g[0] + 2 * r[0] * g[1],)  # noqa: E731
    return *twins(primal, wrong, right), args


@pair("linearity")
def stray_clip_of_the_cotangent(dtype):
    args = (normal(19, 5, dtype=dtype),)
    wrong = lambda r, g: (jnp.cos(r[0]) * jnp.clip(g, -5, 5),)  # noqa: E731
    return *twins(jnp.sin, wrong, lambda r, g: (jnp.cos(r[0]) * g,)), args


@pair("linearity")
def affine_backward(dtype):
    args = (normal(20, 5, dtype=dtype),)
    wrong = lambda r, g: (jnp.cos(r[0]) * g + jnp.asarray(1e-3, dtype),)  # noqa: E731
    return *twins(jnp.sin, wrong, lambda r, g: (jnp.cos(r[0]) * g,)), args


@pair("linearity")
def squared_cotangent(dtype):
    args = (normal(21, 5, dtype=dtype),)
    wrong = lambda r, g: (jnp.cos(r[0]) * g * jnp.abs(g),)  # noqa: E731
    return *twins(jnp.sin, wrong, lambda r, g: (jnp.cos(r[0]) * g,)), args


@pair()
def ignored_cotangent(dtype):
    args = (normal(22, 5, dtype=dtype),)
    return *twins(jnp.sin, lambda r, g: (jnp.cos(r[0]),), lambda r, g: (jnp.cos(r[0]) * g,)), args


@pair()
def scatter_that_sets_instead_of_adds(dtype):
    index = jnp.asarray([0, 2, 2, 3])
    args = (normal(23, 5, 2, dtype=dtype),)
    primal = lambda x: x[index]  # noqa: E731
    wrong = lambda r, g: (jnp.zeros_like(r[0]).at[index].set(g),)  # noqa: E731
    right = lambda r, g: (jnp.zeros_like(r[0]).at[index].add(g),)  # noqa: E731
    return *twins(primal, wrong, right), args


@pair()
def complex_conjugate_of_the_other_convention(dtype):
    args = (jax.lax.complex(normal(24, 4, dtype=dtype), normal(25, 4, dtype=dtype)),)
    primal = lambda z: z * z  # noqa: E731
    wrong = lambda r, g: (2 * jnp.conj(r[0]) * g,)  # noqa: E731
    return *twins(primal, wrong, lambda r, g: (2 * r[0] * g,)), args


@pair()
def transposed_weight_gradient(dtype):
    args = (normal(26, 4, 4, dtype=dtype), normal(27, 4, 4, dtype=dtype))
    wrong = lambda r, g: (g @ r[1].T, g.T @ r[0])  # noqa: E731
    right = lambda r, g: (g @ r[1].T, r[0].T @ g)  # noqa: E731
    return *twins(jnp.matmul, wrong, right), args


@pair()
def gradient_lost_in_a_large_leaf(dtype):
    args = (normal(28, 3000, dtype=dtype) * 100, normal(29, 3, dtype=dtype) / 100)
    primal = lambda x, y: jnp.sum(x * x) + jnp.sum(jnp.sin(y))  # noqa: E731
    wrong = lambda r, g: (2 * r[0] * g, jnp.cos(r[1]) * g * 1.02)  # noqa: E731
    return *twins(primal, wrong, lambda r, g: (2 * r[0] * g, jnp.cos(r[1]) * g)), args


@pair()
def softmax_that_is_zero_for_equal_cotangents(dtype):
    args = (normal(30, 3, 6, dtype=dtype),)
    primal = functools.partial(jax.nn.softmax, axis=-1)

    def right(r, g):
        p = primal(r[0])
        return (p * (g - jnp.sum(p * g, axis=-1, keepdims=True)),)

    return *twins(primal, lambda r, g: (jnp.zeros_like(g),), right), args


@pair()
def layer_norm_without_the_mean_term(dtype):
    args = (normal(31, 4, 8, dtype=dtype),)

    def primal(x):
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        return centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)

    def backward(mean):
        def rule(r, g):
            x = r[0]
            y = primal(x)
            width = jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5)
            average = mean * jnp.mean(g, axis=-1, keepdims=True)
            return ((g - average - y * jnp.mean(g * y, axis=-1, keepdims=True)) / width,)

        return rule

    return *twins(primal, backward(0.0), backward(1.0)), args


@pair()
def cumulative_sum_not_reversed(dtype):
    args = (normal(32, 7, dtype=dtype),)
    right = lambda r, g: (jnp.flip(jnp.cumsum(jnp.flip(g))),)  # noqa: E731
    return *twins(lambda x: jnp.cumsum(x), lambda r, g: (jnp.cumsum(g),), right), args


@pair()
def permuted_cotangent(dtype):
    args = (normal(33, 6, dtype=dtype),)
    wrong = lambda r, g: (jnp.roll(g, 1) * jnp.cos(r[0]),)  # noqa: E731
    return *twins(jnp.sin, wrong, lambda r, g: (g * jnp.cos(r[0]),)), args


@pair()
def off_by_one_at_the_edge(dtype):
    args = (normal(34, 9, dtype=dtype),)
    primal = lambda x: x[1:] - x[:-1]  # noqa: E731

    def right(r, g):
        zero = jnp.zeros(1, dtype)
        return (jnp.concatenate([zero, g]) - jnp.concatenate([g, zero]),)

    return *twins(primal, lambda r, g: (right(r, g)[0].at[-1].set(0),), right), args


@pair()
def right_at_one_point_only(dtype):
    args = (normal(35, 5, dtype=dtype),)
    fixed = jnp.cos(args[0])
    return *twins(jnp.sin, lambda r, g: (fixed * g,), lambda r, g: (jnp.cos(r[0]) * g,)), args


@pair()
def wrong_beyond_a_threshold(dtype):
    args = (normal(36, 200, dtype=dtype),)
    primal = lambda x: x * jnp.tanh(x)  # noqa: E731
    full = lambda x: jnp.tanh(x) + x / jnp.cosh(x) ** 2  # noqa: E731
    wrong = lambda r, g: (g * jnp.where(r[0] > 2, 1, full(r[0])),)  # noqa: E731
    return *twins(primal, wrong, lambda r, g: (g * full(r[0]),)), args


@pair()
def logarithm_base_two_without_its_constant(dtype):
    args = (jnp.abs(normal(37, 5, dtype=dtype)) + 1,)
    return *twins(
        jnp.log2, lambda r, g: (g / r[0],), lambda r, g: (g / r[0] / np.log(2).astype(dtype),)
    ), args


@pair()
def norm_without_its_division(dtype):
    args = (normal(38, 8, dtype=dtype),)
    primal = lambda x: jnp.sqrt(jnp.sum(x * x))  # noqa: E731
    right = lambda r, g: (g * r[0] / primal(r[0]),)  # noqa: E731
    return *twins(primal, lambda r, g: (g * r[0],), right), args


@pair()
def maximum_gives_both_the_gradient(dtype):
    args = (normal(39, 6, dtype=dtype), normal(40, 6, dtype=dtype))
    larger = lambda r: (r[0] > r[1]).astype(dtype)  # noqa: E731
    right = lambda r, g: (g * larger(r), g * (1 - larger(r)))  # noqa: E731
    return *twins(jnp.maximum, lambda r, g: (g, g * (1 - larger(r))), right), args


@pair()
def convolution_with_an_unflipped_kernel(dtype):
    args = (normal(41, 12, dtype=dtype), normal(42, 3, dtype=dtype))
    primal = functools.partial(jnp.convolve, mode="valid")
    correct = jnp.convolve

    def right(r, g):
        return correct(g, r[1][::-1]), jnp.convolve(r[0][::-1], g, mode="valid")

    def wrong(r, g):
        return correct(g, r[1]), jnp.convolve(r[0][::-1], g, mode="valid")

    return *twins(primal, wrong, right), args


@pair("second order")
def stopped_second_derivative(dtype):
    args = (normal(43, 5, dtype=dtype),)
    wrong = lambda r, g: (jax.lax.stop_gradient(jnp.cos(r[0])) * g,)  # noqa: E731
    return *twins(jnp.sin, wrong, lambda r, g: (jnp.cos(r[0]) * g,)), args


@pair("second order")
def wrong_second_derivative(dtype):
    args = (normal(44, 5, dtype=dtype),)
    cosine = custom(jnp.cos, lambda r, g: (jnp.sin(r[0]) * g,))
    return *twins(
        jnp.sin, lambda r, g: (cosine(r[0]) * g,), lambda r, g: (jnp.cos(r[0]) * g,)
    ), args


def _jvp(primal, tangent):
    rule = jax.custom_jvp(primal)
    rule.defjvp(tangent)
    return rule


@pair()
def custom_jvp_with_a_missing_factor(dtype):
    args = (normal(45, 5, dtype=dtype),)
    make = lambda k: _jvp(  # noqa: E731
        jnp.tanh, lambda p, t: (jnp.tanh(p[0]), k * (1 - jnp.tanh(p[0]) ** 2) * t[0])
    )
    return make(2.0), make(1.0), args


@pair("primal")
def custom_jvp_with_another_primal(dtype):
    args = (normal(46, 5, dtype=dtype),)
    make = lambda k: _jvp(  # noqa: E731
        jnp.sin, lambda p, t: (jnp.sin(p[0]) + k, jnp.cos(p[0]) * t[0])
    )
    return make(0.1), make(0.0), args


@pair()
def custom_jvp_that_forgets_an_argument(dtype):
    args = (normal(47, 5, dtype=dtype), normal(48, 5, dtype=dtype))
    primal = lambda x, y: jnp.sin(x) * y  # noqa: E731

    def make(k):
        return _jvp(
            primal,
            lambda p, t: (primal(*p), jnp.cos(p[0]) * p[1] * t[0] + k * jnp.sin(p[0]) * t[1]),
        )

    return make(0.0), make(1.0), args


@pair()
def wrong_deep_inside_a_scan(dtype):
    args = (normal(49, 4, dtype=dtype), normal(50, 6, 4, dtype=dtype))

    def make(scale):
        cell = custom(
            lambda h, x: jnp.tanh(h + x),
            lambda r, g: (
                (scale * g * (1 - jnp.tanh(r[0] + r[1]) ** 2),)
                + (g * (1 - jnp.tanh(r[0] + r[1]) ** 2),)
            ),
        )
        return lambda h, xs: jax.lax.scan(lambda h, x: (cell(h, x),) * 2, h, xs)[1]

    return make(0.98), make(1.0), args


@pair()
def one_wrong_bias_in_a_deep_tree(dtype):
    params = {
        f"layer{k}": {"w": normal(k, 4, 4, dtype=dtype), "b": normal(k, 4, dtype=dtype)}
        for k in range(6)
    }

    def make(scale):
        add = custom(lambda x, b: x + b[None], lambda r, g: (g, scale * jnp.sum(g, axis=0)))

        def model(params, x):
            for k in range(6):
                layer = params[f"layer{k}"]
                plus = add if k == 3 else (lambda x, b: x + b[None])
                x = jnp.tanh(plus(x @ layer["w"], layer["b"]))
            return x

        return model

    return make(0.9), make(1.0), (params, normal(60, 3, 4, dtype=dtype))


@pair()
def huber_loss_with_the_wrong_branch(dtype):
    args = (normal(61, 20, dtype=dtype) * 3,)
    primal = lambda x: jnp.where(jnp.abs(x) < 1, x * x / 2, jnp.abs(x) - 0.5)  # noqa: E731
    wrong = lambda r, g: (g * r[0],)  # noqa: E731
    return *twins(primal, wrong, lambda r, g: (g * jnp.clip(r[0], -1, 1),)), args


@pair()
def tiny_gradient_that_is_twice_too_large(dtype):
    args = (normal(62, 6, dtype=dtype),)
    primal = lambda x: 1e-12 * jnp.sin(x)  # noqa: E731
    make = lambda k: lambda r, g: (k * 1e-12 * jnp.cos(r[0]) * g,)  # noqa: E731
    return *twins(primal, make(2), make(1)), args


@pair("finite")
def nan_where_the_argument_is_zero(dtype):
    args = (jnp.asarray([0.0, 1.0, -2.0], dtype),)
    wrong = lambda r, g: (g * 2 * r[0] ** 2 / r[0],)  # noqa: E731
    return *twins(jnp.square, wrong, lambda r, g: (g * 2 * r[0],)), args
