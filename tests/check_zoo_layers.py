"""More families of wrong VJPs: layers, losses and gathers as people write them.

They join those of `check_zoo`, and were written after the checker, against it.
"""

# ruff: noqa: E731

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.check_zoo import Table, X, complex_numbers, cosine, custom, normal, numbers, shapes
from tests.check_zoo import family as _family
from tests.check_zoo import pair as _pair

LAYERS: Table = {}
family = functools.partial(_family, table=LAYERS)
pair = functools.partial(_pair, table=LAYERS)

first = lambda g, b: jnp.einsum("bik,bkj->bij", g, b)
family(
    shapes((2, 4, 3), (2, 4, 3)),
    lambda a, b: jnp.einsum("bij,bkj->bik", a, b),
    lambda g, a, b: (first(g, b), jnp.einsum("bik,bij->bkj", g, a)),
)(einsum_with_a_transposed_operand=lambda g, a, b: (first(g, b), jnp.einsum("bki,bij->bkj", g, a)))


def of_softmax(axis):
    def rule(g, x):
        p = jax.nn.softmax(x)
        return p * (g - jnp.sum(p * g, axis=axis, keepdims=True))

    return rule


family(shapes((4, 4)), jax.nn.softmax, of_softmax(1))(
    softmax_summed_over_the_other_axis=of_softmax(0)
)
mean = lambda x: jnp.mean(x, axis=-1, keepdims=True)
size = lambda x, eps=1e-2: jnp.sqrt(mean(x * x) + eps)


def of_norm(eps):
    return lambda g, x: g / size(x, eps) - x * mean(g * x) / size(x, eps) ** 3


family(shapes((4, 8)), lambda x: x / size(x), of_norm(1e-2))(
    normalization_without_its_epsilon=of_norm(0.0)
)
weights = lambda q, k: jax.nn.softmax(q @ k.T * 0.5)


def of_attention(scale):
    def rule(g, q, k, v):
        p, inner = weights(q, k), g @ v.T
        logits = p * (inner - jnp.sum(inner * p, axis=-1, keepdims=True))
        return 0.5 * logits @ k, scale * logits.T @ q, p.T @ g

    return rule


family(shapes((3, 4), (5, 4), (5, 4)), lambda q, k, v: weights(q, k) @ v, of_attention(0.5))(
    attention_with_the_scale_forgotten_for_keys=of_attention(1.0)
)
MASK = np.asarray([[True, True, False, True, False]])
family(
    shapes((3, 5)),
    lambda x: jnp.sum(jnp.where(MASK, jnp.sin(x), 0), axis=-1),
    lambda g, x: jnp.where(MASK, jnp.cos(x) * g[:, None], 0),
)(masked_positions_that_leak=lambda g, x: jnp.cos(x) * g[:, None])
convolved = lambda x, k: lax.conv(x, k, (1, 1), "SAME")


def of_convolution(padding):
    def rule(g, x, k):
        flipped = jnp.flip(k.transpose(1, 0, 2, 3), (2, 3))
        by_input = lax.conv_general_dilated(g, flipped, (1, 1), [(1, 1), padding])
        return by_input, jax.vjp(lambda k: convolved(x, k), k)[1](g)[0]

    return rule


family(shapes((1, 2, 5, 5), (3, 2, 3, 3)), convolved, of_convolution((1, 1)))(
    convolution_padded_on_one_side=of_convolution((2, 0))
)


def of_gate(through):
    def rule(g, h, w):
        z = jax.nn.sigmoid(h @ w)
        inner = -g * h * z * (1 - z)
        return g * (1 - z) + through * inner @ w.T, h.T @ inner

    return rule


family(shapes((2, 4), (4, 4)), lambda h, w: (1 - jax.nn.sigmoid(h @ w)) * h, of_gate(1.0))(
    gate_without_the_path_through_its_state=of_gate(0.0)
)
SOME = np.asarray([0, -1, 2])
family(X, lambda x: x[SOME], lambda g, x: jnp.zeros_like(x).at[SOME].add(g))(
    gather_by_a_negative_index=lambda g, x: jnp.zeros_like(x).at[np.abs(SOME)].add(g)
)
TWO = np.asarray([1, 3])
family(
    shapes((5,), (2,)),
    lambda x, y: x.at[TWO].multiply(y),
    lambda g, x, y: (g.at[TWO].multiply(y), g[TWO] * x[TWO]),
)(scatter_that_multiplies=lambda g, x, y: (g, g[TWO] * x[TWO]))
family(shapes((7,)), jnp.sort, lambda g, x: jnp.zeros_like(g).at[jnp.argsort(x)].set(g))(
    sort_by_the_inverse_permutation=lambda g, x: g[jnp.argsort(x)]
)


def of_spectrum(last):
    return lambda g, z: (jnp.conj(jnp.fft.rfft(g)) * np.asarray([1, 2, 2, last]) / 6).astype(z)


family(complex_numbers, lambda z: jnp.fft.irfft(z, 6), of_spectrum(1))(
    spectrum_of_real_data_with_a_wrong_last_bin=of_spectrum(2)
)
by_rows = lambda g, b: jnp.einsum("bik,jk->bij", g, b)
by_kernel = lambda g, a: jnp.einsum("bij,bik->jk", a, g)
family(
    shapes((3, 2, 4), (4, 5)),
    lambda a, b: jnp.einsum("bij,jk->bik", a, b),
    lambda g, a, b: (by_rows(g, b), by_kernel(g, a)),
)(batch_mean_instead_of_the_sum=lambda g, a, b: (by_rows(g, b), by_kernel(g, a) / 3))
of_tanh = lambda g, x: g * (1 - jnp.tanh(x) ** 2)
family(shapes((8, 16)), jnp.tanh, of_tanh)(
    one_percent_in_one_row_of_a_batch=lambda g, x: of_tanh(g, x).at[3].multiply(1.01)
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
family(shapes((8,)), lambda x: jnp.sin(x).astype("bfloat16"), lambda g, x: cosine(g.astype(x), x))(
    a_fifth_off_in_a_narrow_output=lambda g, x: cosine(g.astype(x), x) * 1.2
)
sine = family(shapes((50,)), jnp.sin, cosine)
sine(
    right_for_equal_cotangents_only=lambda g, x: cosine(jnp.mean(g), x),
    gradient_rounded_to_bfloat16=lambda g, x: cosine(g, x).astype("bfloat16").astype(x),
)
sine("linearity", right_for_positive_cotangents_only=lambda g, x: cosine(jnp.maximum(g, 0), x))
double = custom(lambda g: 1 * g, lambda r, h: (2 * h,))
sine(
    "second order",
    second_derivative_by_the_cotangent_doubled=lambda g, x: cosine(double(g), x),
)


@pair("vmap")
def wrong_where_only_the_cotangent_is_batched(dtype):
    def make(factor):
        gradient = jax.custom_batching.custom_vmap(lambda x, g: jnp.cos(x) * g)

        @gradient.def_vmap
        def batched(size, in_batched, x, g):
            if not in_batched[0]:
                return factor * jnp.cos(x)[None] * g, True
            return jnp.cos(x) * (g if in_batched[1] else g[None]), True

        return custom(jnp.sin, lambda r, g: (gradient(r[0], g),))

    return make(2.0), make(1.0), X(dtype)


@pair("determinism")
def wrong_from_the_fourth_call_on(dtype):
    calls = []

    def wrong(r, g):
        calls.append(1)
        return (cosine(g, *r) * (1 if len(calls) < 4 else 2),)

    return custom(jnp.sin, wrong), custom(jnp.sin, lambda r, g: (cosine(g, *r),)), X(dtype)


def of_gelu(approximate):
    return lambda g, x: jax.vjp(lambda x: jax.nn.gelu(x, approximate=approximate), x)[1](g)


family(
    lambda dtype: (normal(31, 20, dtype=dtype) * 2,),
    lambda x: jax.nn.gelu(x, approximate=False),
    of_gelu(False),
)(derivative_of_the_approximation=of_gelu(True))
HARD = np.eye(4)[[0, 2, 1]]
SOFT = 0.9 * HARD + 0.025


def of_labels(labels):
    return lambda g, x: g[:, None] * (jax.nn.softmax(x) - labels.astype(x.dtype))


family(
    shapes((3, 4)),
    lambda x: -jnp.sum(SOFT.astype(x.dtype) * jax.nn.log_softmax(x), axis=-1),
    of_labels(SOFT),
)(smoothed_labels_forgotten=of_labels(HARD))


def rotated(sign):
    def rotate(x, *_):
        angle = np.linspace(0.1, 1, 4)[None]
        cosines, sines = (f(angle).astype(x.dtype) for f in (np.cos, np.sin))
        a, b, sines = x[:, :4], x[:, 4:], sign * sines
        return jnp.concatenate([a * cosines - b * sines, a * sines + b * cosines], axis=1)

    return rotate


family(shapes((3, 8)), rotated(1), rotated(-1))(rotation_in_the_same_direction=rotated(1))


def of_solve(turn):
    def rule(g, a, b):
        x, back = jnp.linalg.solve(a, b), jnp.linalg.solve(turn(a), g)
        return -jnp.outer(back, x), back

    return rule


family(
    lambda dtype: (
        normal(34, 4, 4, dtype=dtype) + 4 * jnp.eye(4, dtype=dtype),
        *shapes((4,))(dtype),
    ),
    jnp.linalg.solve,
    of_solve(jnp.transpose),
)(solve_without_the_transpose=of_solve(lambda a: a))
scaled = lambda g, z: lax.complex(z.real * g / jnp.abs(z), z.imag * g / jnp.abs(z))
family(complex_numbers, jnp.abs, lambda g, z: scaled(g, jnp.conj(z)))(
    modulus_of_the_conjugate=scaled
)


def of_maximum(shared):
    def rule(g, x):
        largest = (x == jnp.max(x, axis=1, keepdims=True)).astype(x.dtype)
        share = largest / jnp.sum(largest, axis=1, keepdims=True) if shared else largest
        return share * g[:, None]

    return rule


family(numbers([[1, 2, 2], [3, 0, 3]]), lambda x: jnp.max(x, axis=1), of_maximum(True))(
    tied_maxima_that_all_take_the_gradient=of_maximum(False)
)
factors = lambda x: np.linspace(0, 1, 100)[:, None].astype(x.dtype)
curves = lambda x: jnp.tanh(factors(x) * x[None])


def of_curves(kept):
    def rule(g, x):
        inner = g * (1 - curves(x) ** 2) * factors(x)
        return jnp.sum(inner.at[57].multiply(kept), axis=0)

    return rule


family(shapes((4,)), curves, of_curves(1))(one_output_of_a_hundred_ignored=of_curves(0))


def states(h, xs):
    return lax.scan(lambda h, x: (jnp.tanh(h + x),) * 2, h, xs)[1]


def of_states(carried):
    def rule(g, h, xs):
        def step(later, element):
            g, h = element
            inner = (g + later) * (1 - h * h)
            return carried * inner, inner

        _, by_input = lax.scan(step, jnp.zeros_like(h), (g, states(h, xs)), reverse=True)
        return by_input[0], by_input

    return rule


family(shapes((3,), (5, 3)), states, of_states(1))(state_that_carries_no_gradient_back=of_states(0))
WORDS = np.asarray([[1, 4, 4], [7, 1, 0]])


def of_embedding(first):
    def rule(g, e):
        rows = jnp.broadcast_to(g[:, None], (2, 3, 3))
        return jnp.zeros_like(e).at[WORDS].add(rows).at[0].multiply(first)

    return rule


family(shapes((9, 3)), lambda e: jnp.sum(e[WORDS], axis=1), of_embedding(1))(
    padding_row_of_an_embedding_without_gradient=of_embedding(0)
)


def of_largest(shift):
    return lambda g, x: jnp.zeros_like(x).at[lax.top_k(x, 3)[1] + shift].add(g)


family(shapes((8,)), lambda x: lax.top_k(x, 3)[0], of_largest(0))(
    largest_values_one_place_off=of_largest(1)
)


def summed(x):
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, (3,), (1,), "SAME")


def counts(edge, x):
    return np.asarray([edge, 3, 3, 3, 3, 3, edge]).astype(x.dtype)


family(shapes((7,)), lambda x: summed(x) / counts(2, x), lambda g, x: summed(g / counts(2, g)))(
    average_pooling_that_counts_the_padding=lambda g, x: summed(g / counts(3, g))
)


def of_total(through):
    def rule(g, x):
        total = jnp.sum(jnp.abs(x))
        return g / total - through * jnp.sign(x) * jnp.sum(g * x) / total**2

    return rule


family(shapes((6,)), lambda x: x / jnp.sum(jnp.abs(x)), of_total(1))(
    normalizer_taken_for_a_constant=of_total(0)
)
