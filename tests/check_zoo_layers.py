"""More wrong VJPs with their right twins: layers, losses and gathers as people write them.

They join the pairs of `check_zoo`, and were written after the checker, against it.
"""

# ruff: noqa: E731

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.check_zoo import custom, normal, twins

LAYERS = {}


def pair(check="value"):
    def register(make):
        LAYERS[make.__name__] = (make, check)
        return make

    return register


@pair()
def einsum_with_a_transposed_operand(dtype):
    args = (normal(1, 2, 4, 3, dtype=dtype), normal(2, 2, 4, 3, dtype=dtype))
    primal = lambda a, b: jnp.einsum("bij,bkj->bik", a, b)
    first = lambda r, g: jnp.einsum("bik,bkj->bij", g, r[1])
    wrong = lambda r, g: (first(r, g), jnp.einsum("bki,bij->bkj", g, r[0]))
    right = lambda r, g: (first(r, g), jnp.einsum("bik,bij->bkj", g, r[0]))
    return *twins(primal, wrong, right), args


@pair()
def softmax_summed_over_the_other_axis(dtype):
    args = (normal(3, 4, 4, dtype=dtype),)

    def backward(axis):
        def rule(r, g):
            p = jax.nn.softmax(r[0])
            return (p * (g - jnp.sum(p * g, axis=axis, keepdims=True)),)

        return rule

    return *twins(lambda x: jax.nn.softmax(x), backward(0), backward(1)), args


@pair()
def normalization_without_its_epsilon(dtype):
    args = (normal(4, 4, 8, dtype=dtype),)

    def primal(x, eps=1e-2):
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)

    def backward(eps):
        def rule(r, g):
            (x,) = r
            size = jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
            return (g / size - x * jnp.mean(g * x, axis=-1, keepdims=True) / size**3,)

        return rule

    return *twins(lambda x: primal(x), backward(0.0), backward(1e-2)), args


@pair()
def attention_with_the_scale_forgotten_for_keys(dtype):
    args = tuple(normal(k, n, 4, dtype=dtype) for k, n in ((5, 3), (6, 5), (7, 5)))

    def weights(q, k):
        return jax.nn.softmax(q @ k.T * 0.5)

    def backward(scale):
        def rule(r, g):
            q, k, v = r
            p = weights(q, k)
            inner = g @ v.T
            logits = p * (inner - jnp.sum(inner * p, axis=-1, keepdims=True))
            return 0.5 * logits @ k, scale * logits.T @ q, p.T @ g

        return rule

    return *twins(lambda q, k, v: weights(q, k) @ v, backward(1.0), backward(0.5)), args


@pair()
def masked_positions_that_leak(dtype):
    args = (normal(8, 3, 5, dtype=dtype),)
    mask = jnp.asarray([[True, True, False, True, False]])
    primal = lambda x: jnp.sum(jnp.where(mask, jnp.sin(x), 0), axis=-1)
    wrong = lambda r, g: (jnp.cos(r[0]) * g[:, None],)
    right = lambda r, g: (jnp.where(mask, jnp.cos(r[0]) * g[:, None], 0),)
    return *twins(primal, wrong, right), args


@pair()
def convolution_padded_on_one_side(dtype):
    args = (normal(9, 1, 2, 5, 5, dtype=dtype), normal(10, 3, 2, 3, 3, dtype=dtype))
    primal = lambda x, k: lax.conv(x, k, (1, 1), "SAME")

    def backward(padding):
        def rule(r, g):
            x, k = r
            flipped = jnp.flip(k.transpose(1, 0, 2, 3), (2, 3))
            by_input = lax.conv_general_dilated(g, flipped, (1, 1), [(1, 1), padding])
            return by_input, jax.vjp(lambda k: primal(x, k), k)[1](g)[0]

        return rule

    return *twins(primal, backward((2, 0)), backward((1, 1))), args


@pair()
def gate_without_the_path_through_its_state(dtype):
    args = (normal(11, 2, 4, dtype=dtype), normal(12, 4, 4, dtype=dtype))

    def primal(h, w):
        z = jax.nn.sigmoid(h @ w)
        return (1 - z) * h

    def backward(through):
        def rule(r, g):
            h, w = r
            z = jax.nn.sigmoid(h @ w)
            inner = -g * h * z * (1 - z)
            return g * (1 - z) + through * inner @ w.T, h.T @ inner

        return rule

    return *twins(primal, backward(0.0), backward(1.0)), args


@pair()
def gather_by_a_negative_index(dtype):
    args, index = (normal(13, 5, dtype=dtype),), jnp.asarray([0, -1, 2])
    wrong = lambda r, g: (jnp.zeros_like(r[0]).at[jnp.abs(index)].add(g),)
    right = lambda r, g: (jnp.zeros_like(r[0]).at[index].add(g),)
    return *twins(lambda x: x[index], wrong, right), args


@pair()
def scatter_that_multiplies(dtype):
    args, index = (normal(14, 5, dtype=dtype), normal(15, 2, dtype=dtype)), jnp.asarray([1, 3])
    primal = lambda x, y: x.at[index].multiply(y)
    wrong = lambda r, g: (g, g[index] * r[0][index])
    right = lambda r, g: (g.at[index].multiply(r[1]), g[index] * r[0][index])
    return *twins(primal, wrong, right), args


@pair()
def sort_by_the_inverse_permutation(dtype):
    args = (normal(16, 7, dtype=dtype),)
    wrong = lambda r, g: (g[jnp.argsort(r[0])],)
    right = lambda r, g: (jnp.zeros_like(g).at[jnp.argsort(r[0])].set(g),)
    return *twins(lambda x: jnp.sort(x), wrong, right), args


@pair()
def spectrum_of_real_data_with_a_wrong_last_bin(dtype):
    args = (lax.complex(normal(17, 4, dtype=dtype), normal(18, 4, dtype=dtype)),)

    def backward(last):
        def rule(r, g):
            bins = jnp.fft.rfft(g)
            return (jnp.conj(bins) * jnp.asarray([1, 2, 2, last], bins.dtype) / 6,)

        return rule

    return *twins(lambda z: jnp.fft.irfft(z, 6), backward(2), backward(1)), args


@pair()
def batch_mean_instead_of_the_sum(dtype):
    args = (normal(19, 3, 2, 4, dtype=dtype), normal(20, 4, 5, dtype=dtype))
    primal = lambda a, b: jnp.einsum("bij,jk->bik", a, b)
    first = lambda r, g: jnp.einsum("bik,jk->bij", g, r[1])
    second = lambda r, g: jnp.einsum("bij,bik->jk", r[0], g)
    wrong = lambda r, g: (first(r, g), second(r, g) / 3)
    right = lambda r, g: (first(r, g), second(r, g))
    return *twins(primal, wrong, right), args


@pair()
def one_percent_in_one_row_of_a_batch(dtype):
    args = (normal(21, 8, 16, dtype=dtype),)
    right = lambda r, g: (g * (1 - jnp.tanh(r[0]) ** 2),)
    wrong = lambda r, g: (right(r, g)[0].at[3].multiply(1.01),)
    return *twins(jnp.tanh, wrong, right), args


@pair()
def repeated_integer_indices_set(dtype):
    args = (normal(22, 5, dtype=dtype), jnp.asarray([1, 1, 3]))

    def backward(how):
        def rule(r, g):
            x, index = r
            places = jnp.zeros_like(x).at[index]
            none = np.zeros(index.shape, jax.dtypes.float0)
            return getattr(places, how)(2 * x[index] * g), none

        return rule

    return *twins(lambda x, i: x[i] * x[i], backward("set"), backward("add")), args


@pair()
def leaves_of_a_tree_swapped(dtype):
    args = ({"a": normal(23, 4, dtype=dtype), "b": normal(24, 4, dtype=dtype)},)
    parts = lambda t, g: (g * jnp.sin(t["b"]), g * t["a"] * jnp.cos(t["b"]))
    wrong = lambda r, g: (dict(zip("ba", parts(r[0], g), strict=True)),)
    right = lambda r, g: (dict(zip("ab", parts(r[0], g), strict=True)),)
    return *twins(lambda t: t["a"] * jnp.sin(t["b"]), wrong, right), args


@pair()
def a_fifth_off_in_a_narrow_output(dtype):
    args = (normal(25, 8, dtype=dtype),)
    right = lambda r, g: (g.astype(dtype) * jnp.cos(r[0]),)
    wrong = lambda r, g: (right(r, g)[0] * 1.2,)
    return *twins(lambda x: jnp.sin(x).astype(jnp.bfloat16), wrong, right), args


@pair("second order")
def second_derivative_by_the_cotangent_doubled(dtype):
    args = (normal(26, 5, dtype=dtype),)
    double = custom(lambda g: 1 * g, lambda r, h: (2 * h,))
    wrong = lambda r, g: (double(g) * jnp.cos(r[0]),)
    return *twins(jnp.sin, wrong, lambda r, g: (g * jnp.cos(r[0]),)), args


@pair("linearity")
def right_for_positive_cotangents_only(dtype):
    args = (normal(27, 6, dtype=dtype),)
    wrong = lambda r, g: (jnp.maximum(g, 0) * jnp.cos(r[0]),)
    return *twins(jnp.sin, wrong, lambda r, g: (g * jnp.cos(r[0]),)), args


@pair()
def right_for_equal_cotangents_only(dtype):
    args = (normal(28, 6, dtype=dtype),)
    wrong = lambda r, g: (jnp.mean(g) * jnp.cos(r[0]),)
    return *twins(jnp.sin, wrong, lambda r, g: (g * jnp.cos(r[0]),)), args


@pair("vmap")
def wrong_where_only_the_cotangent_is_batched(dtype):
    args = (normal(29, 5, dtype=dtype),)

    def make(factor):
        gradient = jax.custom_batching.custom_vmap(lambda x, g: jnp.cos(x) * g)

        @gradient.def_vmap
        def batched(size, in_batched, x, g):
            if not in_batched[0]:
                return factor * jnp.cos(x)[None] * g, True
            return jnp.cos(x) * (g if in_batched[1] else g[None]), True

        return custom(jnp.sin, lambda r, g: (gradient(r[0], g),))

    return make(2.0), make(1.0), args


@pair("determinism")
def wrong_from_the_fourth_call_on(dtype):
    args, calls = (normal(30, 5, dtype=dtype),), []

    def wrong(r, g):
        calls.append(1)
        return (g * jnp.cos(r[0]) * (1 if len(calls) < 4 else 2),)

    return *twins(jnp.sin, wrong, lambda r, g: (g * jnp.cos(r[0]),)), args


@pair()
def derivative_of_the_approximation(dtype):
    args = (normal(31, 20, dtype=dtype) * 2,)
    primal = lambda x: jax.nn.gelu(x, approximate=False)
    right = lambda r, g: jax.vjp(primal, r[0])[1](g)
    wrong = lambda r, g: jax.vjp(lambda x: jax.nn.gelu(x, approximate=True), r[0])[1](g)
    return *twins(primal, wrong, right), args


@pair()
def smoothed_labels_forgotten(dtype):
    args, hard = (normal(32, 3, 4, dtype=dtype),), jax.nn.one_hot(jnp.asarray([0, 2, 1]), 4)
    soft = (0.9 * hard + 0.025).astype(dtype)
    primal = lambda x: -jnp.sum(soft * jax.nn.log_softmax(x), axis=-1)
    backward = lambda y: lambda r, g: (g[:, None] * (jax.nn.softmax(r[0]) - y),)
    return *twins(primal, backward(hard.astype(dtype)), backward(soft)), args


@pair()
def rotation_in_the_same_direction(dtype):
    args, angle = (normal(33, 3, 8, dtype=dtype),), jnp.linspace(0.1, 1, 4, dtype=dtype)[None]

    def rotated(x, sign):
        a, b, sine = x[:, :4], x[:, 4:], sign * jnp.sin(angle)
        cosine = jnp.cos(angle)
        return jnp.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=1)

    backward = lambda sign: lambda r, g: (rotated(g, sign),)
    return *twins(lambda x: rotated(x, 1), backward(1), backward(-1)), args


@pair()
def solve_without_the_transpose(dtype):
    matrix = normal(34, 4, 4, dtype=dtype) + 4 * jnp.eye(4, dtype=dtype)
    args = (matrix, normal(35, 4, dtype=dtype))

    def backward(turn):
        def rule(r, g):
            x, back = jnp.linalg.solve(*r), jnp.linalg.solve(turn(r[0]), g)
            return -jnp.outer(back, x), back

        return rule

    return *twins(
        lambda a, b: jnp.linalg.solve(a, b), backward(lambda a: a), backward(jnp.transpose)
    ), args


@pair()
def modulus_of_the_conjugate(dtype):
    args = (lax.complex(normal(36, 5, dtype=dtype), normal(37, 5, dtype=dtype)),)
    scaled = lambda z, g: lax.complex(z.real * g / jnp.abs(z), z.imag * g / jnp.abs(z))
    wrong = lambda r, g: (scaled(r[0], g),)
    right = lambda r, g: (scaled(jnp.conj(r[0]), g),)
    return *twins(lambda z: jnp.abs(z), wrong, right), args


@pair()
def gradient_rounded_to_bfloat16(dtype):
    args = (normal(38, 50, dtype=dtype),)
    right = lambda r, g: (g * jnp.cos(r[0]),)
    wrong = lambda r, g: (right(r, g)[0].astype(jnp.bfloat16).astype(dtype),)
    return *twins(jnp.sin, wrong, right), args


@pair()
def tied_maxima_that_all_take_the_gradient(dtype):
    args = (jnp.asarray([[1, 2, 2], [3, 0, 3]], dtype),)

    def backward(shared):
        def rule(r, g):
            largest = (r[0] == jnp.max(r[0], axis=1, keepdims=True)).astype(dtype)
            share = largest / jnp.sum(largest, axis=1, keepdims=True) if shared else largest
            return (share * g[:, None],)

        return rule

    return *twins(lambda x: jnp.max(x, axis=1), backward(False), backward(True)), args


@pair()
def one_output_of_a_hundred_ignored(dtype):
    args, factor = (normal(39, 4, dtype=dtype),), jnp.linspace(0, 1, 100, dtype=dtype)[:, None]
    primal = lambda x: jnp.tanh(factor * x[None])

    def backward(kept):
        def rule(r, g):
            inner = g * (1 - primal(r[0]) ** 2) * factor
            return (jnp.sum(inner.at[57].multiply(kept), axis=0),)

        return rule

    return *twins(primal, backward(0), backward(1)), args


@pair()
def state_that_carries_no_gradient_back(dtype):
    args = (normal(40, 3, dtype=dtype), normal(41, 5, 3, dtype=dtype))

    def states(h, xs):
        return lax.scan(lambda h, x: (jnp.tanh(h + x),) * 2, h, xs)[1]

    def backward(carried):
        def rule(r, g):
            def step(later, element):
                g, h = element
                inner = (g + later) * (1 - h * h)
                return carried * inner, inner

            _, by_input = lax.scan(step, jnp.zeros_like(r[0]), (g, states(*r)), reverse=True)
            return by_input[0], by_input

        return rule

    return *twins(states, backward(0), backward(1)), args


@pair()
def padding_row_of_an_embedding_without_gradient(dtype):
    args, words = (normal(42, 9, 3, dtype=dtype),), jnp.asarray([[1, 4, 4], [7, 1, 0]])

    def backward(first):
        def rule(r, g):
            rows = jnp.broadcast_to(g[:, None], (2, 3, 3))
            return (jnp.zeros_like(r[0]).at[words].add(rows).at[0].multiply(first),)

        return rule

    return *twins(lambda e: jnp.sum(e[words], axis=1), backward(0), backward(1)), args


@pair()
def largest_values_one_place_off(dtype):
    args = (normal(43, 8, dtype=dtype),)

    def backward(shift):
        def rule(r, g):
            index = lax.top_k(r[0], 3)[1] + shift
            return (jnp.zeros_like(r[0]).at[index].add(g),)

        return rule

    return *twins(lambda x: lax.top_k(x, 3)[0], backward(1), backward(0)), args


@pair()
def average_pooling_that_counts_the_padding(dtype):
    args = (normal(44, 7, dtype=dtype),)

    def summed(x):
        return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, (3,), (1,), "SAME")

    def counts(edge):
        return jnp.asarray([edge, 3, 3, 3, 3, 3, edge], dtype)

    backward = lambda edge: lambda r, g: (summed(g / counts(edge)),)
    return *twins(lambda x: summed(x) / counts(2), backward(3), backward(2)), args


@pair()
def normalizer_taken_for_a_constant(dtype):
    args = (normal(45, 6, dtype=dtype),)

    def backward(through):
        def rule(r, g):
            (x,), total = r, jnp.sum(jnp.abs(r[0]))
            return (g / total - through * jnp.sign(x) * jnp.sum(g * x) / total**2,)

        return rule

    return *twins(lambda x: x / jnp.sum(jnp.abs(x)), backward(0), backward(1)), args
