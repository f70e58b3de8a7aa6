"""The third table's layers, losses and attentions: see `check_history`.

`LARGE` holds pairs with thousands of wrong elements, each wrong in its own way.
"""

# ruff: noqa: E731

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.check_history import Bug, edit, registrar
from tests.check_zoo import normal, twins

LAYERS: dict[str, Bug] = {}
LARGE: dict[str, Bug] = {}
bug, large = registrar(LAYERS), registrar(LARGE)


@bug("unslothai/unsloth#3314")
def swiglu_with_its_gradients_swapped(dtype):
    args = (normal(1, 5, dtype=dtype), normal(2, 5, dtype=dtype))

    def backward(order, g, e, f):
        s = jax.nn.sigmoid(e)
        return (g * f * s * (1 + e * (1 - s)), g * e * s)[::order]

    return edit(lambda e, f: jax.nn.silu(e) * f, backward, -1, 1, *args)


@bug("ByteDance-Seed/Triton-distributed#180")
def rows_all_written_to_the_first(dtype):
    args = (normal(3, 4, 6, dtype=dtype),)
    halves = lambda x: jnp.split(x, 2, axis=1)
    primal = lambda x: jax.nn.silu(halves(x)[0]) * halves(x)[1]

    def backward(row, g, *r):
        (e, f), s = halves(r[0]), jax.nn.sigmoid(halves(r[0])[0])
        grads = jnp.concatenate([g * f * s * (1 + e * (1 - s)), g * e * s], axis=1)
        return (jnp.zeros_like(grads).at[row].set(grads),)

    return edit(primal, backward, jnp.zeros(4, int), jnp.arange(4), *args)


@bug("linkedin/Liger-Kernel#1413")
def gated_product_without_one_half_of_its_input_gradient(dtype):
    args = tuple(normal(4 + k, 3, 3, dtype=dtype) for k in range(3))

    def backward(through, g, x, up, gate):
        a, b = x @ up, x @ gate
        of_up, of_gate = g * b, g * a
        return of_up @ up.T + through * of_gate @ gate.T, x.T @ of_up, x.T @ of_gate

    return edit(lambda x, up, gate: (x @ up) * (x @ gate), backward, 0, 1, *args)


def _mean(x):
    return jnp.mean(x, axis=-1, keepdims=True)


@bug("karpathy/llm.c#763")
def rms_norm_without_its_weight(dtype):
    args = (normal(7, 3, 6, dtype=dtype), normal(8, 6, dtype=dtype))
    scale = lambda x: lax.rsqrt(_mean(x * x) + 1e-5)

    def backward(weigh, g, x, w):
        s = scale(x)
        inner = weigh(g, w)
        by_x = s * (inner - s * s * x * _mean(inner * x))
        return by_x, jnp.sum(g * x * s, axis=0)

    primal = lambda x, w: x * scale(x) * w[None]
    return edit(primal, backward, lambda g, w: g, lambda g, w: g * w[None], *args)


@bug("Dao-AILab/quack#53")
def residual_added_before_the_norm_in_backward(dtype):
    args = (normal(9, 3, 6, dtype=dtype), normal(10, 3, 6, dtype=dtype))

    def normed(x):
        return x * lax.rsqrt(_mean(x * x) + 1e-5)

    def primal(residual, x):
        return residual + x, normed(residual + x)

    def backward(before, g, *r):
        _, pull = jax.vjp(normed, r[0] + r[1])
        total = pull(g[0] + g[1])[0] if before else g[0] + pull(g[1])[0]
        return total, total

    return edit(primal, backward, True, False, *args)


def _layer_norm(x):
    centred = x - _mean(x)
    return centred * lax.rsqrt(_mean(centred**2) + 1e-5)


def _layer_norm_backward(mean, times, mean_of_product, g, *r):
    """The rule of a layer norm with its means by these functions, the first so many times."""
    y, scale = _layer_norm(r[0]), lax.rsqrt(jnp.var(r[0], axis=-1, keepdims=True) + 1e-5)
    return (scale * (g - times * mean(g) - y * mean_of_product(g * y)),)


@bug("tenstorrent/tt-metal#53204")
def layer_norm_with_its_mean_subtracted_twice(dtype):
    args = (normal(11, 3, 6, dtype=dtype),)
    backward = lambda times, *rest: _layer_norm_backward(_mean, times, _mean, *rest)
    return edit(_layer_norm, backward, 2, 1, *args)


@bug("tenstorrent/tt-metal#53204")
def layer_norm_with_the_last_block_of_a_sum(dtype):
    args = (normal(12, 3, 8, dtype=dtype),)
    last = lambda x: jnp.sum(x[:, 4:], axis=1, keepdims=True) / 8
    backward = lambda mean, *rest: _layer_norm_backward(_mean, 1, mean, *rest)
    return edit(_layer_norm, backward, last, _mean, *args)


@bug("flagos-ai/FlagGems#5392")
def layer_norm_of_rank_three_as_if_of_rank_two(dtype):
    args = (normal(13, 2, 3, 4, dtype=dtype),)
    whole = lambda x: jnp.mean(x, axis=(1, 2), keepdims=True)
    backward = lambda mean, *rest: _layer_norm_backward(mean, 1, mean, *rest)
    return edit(_layer_norm, backward, whole, _mean, *args)


@bug("tenstorrent/tt-metal#56202")
def group_norm_weights_by_the_wrong_group(dtype):
    args = (normal(14, 3, 8, 2, dtype=dtype), normal(15, 8, dtype=dtype))

    def normed(x):
        return _layer_norm(x.reshape(3, 2, 8)).reshape(3, 8, 2)

    def statistics(x):
        groups = x.reshape(3, 2, 8)
        return jnp.mean(groups, axis=2), lax.rsqrt(jnp.var(groups, axis=2) + 1e-5)

    def backward(group, g, x, w):
        (mean, scale) = statistics(x)
        hat = (x - mean[:, group, None]) * scale[:, group, None]
        by_x = jax.vjp(normed, x)[1](g * w[None, :, None])[0]
        return by_x, jnp.sum(g * hat, axis=(0, 2))

    channels = np.arange(8)
    primal = lambda x, w: normed(x) * w[None, :, None]
    return edit(primal, backward, channels % 2, channels // 4, *args)


@bug("pytorch/xla#913, pytorch/pytorch#586")
def batch_norm_in_evaluation_by_the_rule_of_training(dtype):
    args = (normal(16, 5, 3, dtype=dtype),)
    mean, scale = normal(17, 1, 3, dtype=dtype), jnp.asarray([[0.5, 1, 2]], dtype)

    def training(r, g):
        y = (r[0] - mean) * scale
        average = lambda x: jnp.mean(x, axis=0, keepdims=True)
        return (scale * (g - average(g) - y * average(g * y)),)

    evaluation = lambda r, g: (scale * g,)
    return *twins(lambda x: (x - mean) * scale, training, evaluation), args


@bug("after the rule of weight normalization")
def weight_norm_over_the_other_axis(dtype):
    args = (normal(18, 4, 4, dtype=dtype), jnp.abs(normal(19, 4, dtype=dtype)) + 1)
    unit = lambda v, axis: v / jnp.sqrt(jnp.sum(v * v, axis=axis, keepdims=True))

    def backward(axis, g, v, s):
        u = unit(v, 1)
        size = jnp.sqrt(jnp.sum(v * v, axis=1, keepdims=True))
        inner = g - u * jnp.sum(u * g, axis=axis, keepdims=True)
        return s[:, None] / size * inner, jnp.sum(g * u, axis=1)

    return edit(lambda v, s: s[:, None] * unit(v, 1), backward, 0, 1, *args)


@bug("pytorch/pytorch#63314")
def transposed_convolution_that_ignores_its_stride(dtype):
    args = (normal(20, 4, dtype=dtype), normal(21, dtype=dtype))
    primal = lambda x, w: jnp.zeros(7, dtype).at[::2].set(w * x)

    def backward(read, g, *r):
        return (r[1] * read(g), jnp.sum(r[0] * g[::2]))

    return edit(primal, backward, lambda g: g[:4], lambda g: g[::2], *args)


@bug("fla-org/flash-linear-attention#388")
def depthwise_taps_that_share_one_slice(dtype):
    args = (normal(22, 8, 3, dtype=dtype), normal(23, 4, 3, dtype=dtype))
    padded = lambda x: jnp.concatenate([jnp.zeros((3, 3), dtype), x])
    shifted = lambda x, tap: padded(x)[tap : tap + 8]
    primal = lambda x, w: sum(shifted(x, k) * w[k][None] for k in range(4))

    def backward(tap_of, g, x, w):
        by_x = jax.vjp(lambda x: primal(x, w), x)[1](g)[0]
        taps = [jnp.sum(shifted(x, tap_of(k)) * g, axis=0) for k in range(4)]
        return by_x, jnp.stack(taps)

    return edit(primal, backward, lambda k: 3, lambda k: k, *args)


@bug("FluxML/Flux.jl#1197")
def maximum_of_several_windows_counted_once(dtype):
    args, window = (normal(24, 7, dtype=dtype),), np.arange(5)[:, None] + np.arange(3)

    def backward(how, g, *r):
        index = jnp.asarray(window)[jnp.arange(5), jnp.argmax(r[0][window], axis=1)]
        return (getattr(jnp.zeros_like(r[0]).at[index], how)(g),)

    return edit(lambda x: jnp.max(x[window], axis=1), backward, "set", "add", *args)


@bug("pytorch/pytorch#100793")
def reflected_padding_that_counts_the_edge(dtype):
    args = (normal(25, 6, dtype=dtype),)

    places = lambda mode: np.pad(np.arange(6), 2, mode=mode)
    backward = lambda mode, g, x: (jnp.zeros_like(x).at[places(mode)].add(g),)
    return edit(lambda x: jnp.pad(x, 2, mode="reflect"), backward, "symmetric", "reflect", *args)


@bug("flagos-ai/FlagGems#5218")
def interpolation_by_too_small_a_window(dtype):
    args, place = (normal(26, 2, dtype=dtype),), np.linspace(0, 1, 10)
    weights = np.stack([1 - place, place])
    within = np.abs(np.arange(10) - np.array([[2], [7]])) <= 5
    whole, cut = jnp.asarray(weights, dtype), jnp.asarray(weights * within, dtype)
    backward = lambda matrix, g, *r: (matrix @ g,)
    return edit(lambda x: x @ whole, backward, cut, whole, *args)


@bug("pytorch/pytorch#23925")
def sampling_at_the_border_as_if_padded_with_zeros(dtype):
    args, image = (jnp.asarray([0.3, 1.6, 4], dtype),), jnp.asarray([1, 3, 2, 5, 4], dtype)

    def primal(x):
        x = jnp.clip(x, 0, 4)
        left = jnp.minimum(jnp.floor(x).astype(int), 3)
        share = x - left.astype(x.dtype)
        return image[left] * (1 - share) + image[left + 1] * share

    def backward(last, g, *r):
        left = jnp.floor(r[0]).astype(int)
        inside = image[jnp.minimum(left + 1, 4)] - image[left]
        return (g * jnp.where(left == 4, last - image[4], inside),)

    return edit(primal, backward, 0.0, image[4], *args)


def _attend(q, k, v, mask):
    scores = jnp.einsum("...id,...jd->...ij", q, k) / q.shape[-1] ** 0.5
    return jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ v


def _attend_backward(mask, g, q, k, v):
    """The rule of attention with this mask in the weights that it computes again."""
    scale = q.shape[-1] ** -0.5
    scores = jnp.where(mask, q @ k.T * scale, -1e9)
    true = jnp.where(jnp.tri(q.shape[0], dtype=bool), q @ k.T * scale, -1e9)
    p = jnp.exp(scores - jax.nn.logsumexp(true, axis=1, keepdims=True))
    inner = g @ v.T
    delta = jnp.sum(g * _attend(q, k, v, jnp.tri(q.shape[0], dtype=bool)), 1, keepdims=True)
    logits = p * (inner - delta) * scale
    return logits @ k, logits.T @ q, p.T @ g


@bug("triton-lang/triton#7216")
def causal_mask_missing_in_backward(dtype):
    args = tuple(normal(27 + k, 5, 4, dtype=dtype) for k in range(3))
    causal = jnp.tri(5, dtype=bool)
    primal = lambda q, k, v: _attend(q, k, v, causal)
    return edit(primal, _attend_backward, jnp.ones_like(causal), causal, *args)


def _grouped(wrong, right, length, width, dtype):
    """Eight heads of queries on two of keys, with the heads by which gradients are summed."""
    args = tuple(normal(30 + k, h, length, width, dtype=dtype) for k, h in enumerate((8, 2, 2)))
    heads, every = np.arange(8) % 2, jnp.ones((1, 1, 1), bool)
    attend = lambda q, k, v: _attend(q, k, v, every)
    primal = lambda q, k, v: attend(q, k[heads], v[heads])

    def backward(gathered, g, q, k, v):
        by_q, by_k, by_v = jax.vjp(attend, q, k[heads], v[heads])[1](g)
        return by_q, gathered(by_k), gathered(by_v)

    return edit(primal, backward, wrong, right, *args)


def _summed_by(heads):
    return lambda x: jnp.zeros((2, *x.shape[1:]), x.dtype).at[heads].add(x)


@bug("marin-community/levanter#449")
def grouped_keys_with_the_gradient_of_one_query(dtype):
    return _grouped(lambda x: x[:2], _summed_by(np.arange(8) % 2), 4, 3, dtype)


@large("XunhaoLai/native-sparse-attention-triton#27")
def heads_divided_where_they_are_interleaved(dtype):
    interleaved = np.arange(8) % 2
    return _grouped(_summed_by(np.arange(8) // 4), _summed_by(interleaved), 64, 32, dtype)


@bug("fla-org/flash-linear-attention#6")
def linear_attention_whose_values_ignore_the_decay(dtype):
    args = tuple(normal(33 + k, 6, 3, dtype=dtype) for k in range(3))
    age = np.arange(6)[:, None] - np.arange(6)
    decay = jnp.asarray(np.where(age >= 0, 0.8 ** np.maximum(age, 0), 0), dtype)

    def backward(weights, g, q, k, v):
        inner = decay * (g @ v.T)
        return inner @ k, inner.T @ q, (weights * (q @ k.T)).T @ g

    primal = lambda q, k, v: (decay * (q @ k.T)) @ v
    return edit(primal, backward, jnp.tri(6, dtype=dtype), decay, *args)


def _recurrence(a, b):
    """h_t = a_t h_{t-1} + b_t from zero."""
    step = lambda h, ab: (ab[0] * h + ab[1],) * 2
    return lax.scan(step, jnp.zeros_like(b[0]), (a, b))[1]


@bug("after the rule of a linear recurrence")
def recurrence_with_the_state_one_step_late(dtype):
    args = (jax.nn.sigmoid(normal(36, 6, 3, dtype=dtype)), normal(37, 6, 3, dtype=dtype))
    zero = jnp.zeros((1, 3), dtype)
    early = lambda h: jnp.concatenate([zero, h[:-1]])

    def backward(state, g, *r):
        following = jnp.concatenate([r[0][1:], zero])
        of_h = jnp.flip(_recurrence(jnp.flip(following, 0), jnp.flip(g, 0)), 0)
        return of_h * state(_recurrence(*r)), of_h

    return edit(_recurrence, backward, lambda h: h, early, *args)


@bug("lmnt-com/haste#43")
def zoneout_by_the_mask_of_the_first_step(dtype):
    args = (normal(38, 3, dtype=dtype), normal(39, 4, 3, dtype=dtype))
    mask = jnp.asarray([[1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 0, 1]], dtype)

    def states(h, xs):
        step = lambda h, e: (e[1] * jnp.tanh(h + e[0]) + (1 - e[1]) * h,) * 2
        return lax.scan(step, h, (xs, mask))[1]

    def backward(masks, g, *r):
        before = jnp.concatenate([r[0][None], states(*r)[:-1]])

        def step(after, element):
            g, h, x, m = element
            total = g + after
            inner = m * total * (1 - jnp.tanh(h + x) ** 2)
            return inner + (1 - m) * total, inner

        elements = (g, before, r[1], masks)
        return lax.scan(step, jnp.zeros_like(r[0]), elements, reverse=True)

    return edit(states, backward, jnp.tile(mask[:1], (4, 1)), mask, *args)


@bug("after the rule of a GRU cell")
def gru_without_the_path_through_its_reset_gate(dtype):
    args = (normal(40, 4, dtype=dtype), *(normal(41 + k, 4, 4, dtype=dtype) for k in range(3)))

    def gates(h, wr, wz, wn):
        r, z = jax.nn.sigmoid(h @ wr), jax.nn.sigmoid(h @ wz)
        return r, z, jnp.tanh(r * (h @ wn))

    def primal(h, *weights):
        _, z, n = gates(h, *weights)
        return (1 - z) * n + z * h

    def backward(through, g, h, wr, wz, wn):
        (r, z, n) = gates(h, wr, wz, wn)
        of_n = g * (1 - z) * (1 - n * n)
        of_z = g * (h - n) * z * (1 - z)
        of_r = of_n * (h @ wn) * r * (1 - r)
        by_h = g * z + (of_n * r) @ wn.T + of_z @ wz.T + through * of_r @ wr.T
        return by_h, jnp.outer(h, of_r), jnp.outer(h, of_z), jnp.outer(h, of_n * r)

    return edit(primal, backward, 0, 1, *args)


@bug("after the rule of an LSTM cell")
def forget_gate_by_the_new_cell(dtype):
    args = tuple(normal(44 + k, 5, dtype=dtype) for k in range(3))
    sigmoid = jax.nn.sigmoid
    primal = lambda c, f, i: sigmoid(f) * c + sigmoid(i) * jnp.tanh(i)

    def backward(cell, g, *r):
        i, s = r[2], sigmoid(r[1])
        by_i = jax.vjp(lambda i: sigmoid(i) * jnp.tanh(i), i)[1](g)[0]
        return g * s, g * s * (1 - s) * cell(*r), by_i

    return edit(primal, backward, primal, lambda c, f, i: c, *args)


@bug("pytorch/pytorch#52241, pytorch/pytorch#82545")
def ctc_with_the_gradient_of_a_softmax_before_it(dtype):
    args, steps = (normal(47, 4, 3, dtype=dtype),), np.arange(4)
    collapse = lambda path: [k for k, _ in itertools.groupby(path) if k]
    paths = np.array([p for p in itertools.product(range(3), repeat=4) if collapse(p) == [1, 2]])
    scores = lambda x: jnp.sum(x[steps[None], paths], axis=1)

    def backward(probabilities, g, *r):
        posterior = jax.nn.softmax(scores(r[0]))[:, None]
        counted = jnp.zeros_like(r[0]).at[steps[None], paths].add(posterior)
        return (g * (probabilities(r[0]) - counted),)

    return edit(lambda x: -jax.nn.logsumexp(scores(x)), backward, jnp.exp, jnp.zeros_like, *args)


@bug("pytorch/pytorch#73205")
def mean_loss_divided_by_the_ignored_tokens_too(dtype):
    args, labels = (normal(48, 5, 4, dtype=dtype),), jnp.asarray([0, -100, 2, -100, 1])
    kept = (labels >= 0).astype(dtype)[:, None]
    hot = jax.nn.one_hot(labels, 4, dtype=dtype)
    primal = lambda x: -jnp.sum(hot * jax.nn.log_softmax(x)) / 3
    backward = lambda count, g, *r: (g * kept * (jax.nn.softmax(r[0]) - hot) / count,)
    return edit(primal, backward, 5, 3, *args)


@bug("Dao-AILab/flash-attention#569")
def rotary_embedding_in_the_other_layout(dtype):
    args, angle = (normal(49, 3, 8, dtype=dtype),), jnp.linspace(0.1, 1, 4, dtype=dtype)[None]

    def rotated(x, sign, interleaved):
        cosine, sine = jnp.cos(angle), sign * jnp.sin(angle)
        a, b = (x[:, ::2], x[:, 1::2]) if interleaved else jnp.split(x, 2, axis=1)
        turned = a * cosine - b * sine, a * sine + b * cosine
        if interleaved:
            return jnp.stack(turned, axis=2).reshape(x.shape)
        return jnp.concatenate(turned, axis=1)

    backward = lambda interleaved, g, *r: (rotated(g, -1, interleaved),)
    return edit(lambda x: rotated(x, 1, True), backward, False, True, *args)


@bug("foundation-model-stack/fms-acceleration#97, kakaobrain/trident#89")
def dropout_whose_input_gradient_is_not_masked(dtype):
    args = (normal(50, 3, 4, dtype=dtype), normal(51, 4, 2, dtype=dtype))
    mask = jnp.asarray(np.random.default_rng(52).random((3, 4)) < 0.6, dtype) / 0.6
    backward = lambda kept, g, *r: (kept * (g @ r[1].T), (mask * r[0]).T @ g)
    return edit(lambda x, w: (mask * x) @ w, backward, jnp.ones_like(mask), mask, *args)


@large("fla-org/flash-linear-attention#568")
def causal_convolution_with_its_state_reversed(dtype):
    sizes = (2, 8, 1024), (2, 3, 1024), (4, 1024)
    args = tuple(normal(53 + k, *size, dtype=dtype) for k, size in enumerate(sizes))

    def primal(x, state, taps):
        whole = jnp.concatenate([state, x], axis=1)
        return jax.nn.silu(sum(whole[:, k : k + 8] * taps[k][None, None] for k in range(4)))

    def backward(route, g, *r):
        return jax.vjp(lambda x, s, w: primal(x, route(s), w), *r)[1](g)

    return edit(primal, backward, lambda s: jnp.flip(s, 1), lambda s: s, *args)


@large("after the rule of a cross entropy with soft targets")
def soft_targets_by_their_largest(dtype):
    args = (normal(56, 1024, 512, dtype=dtype),)
    targets = jax.nn.softmax(normal(57, 1024, 512, dtype=dtype))
    hard = jax.nn.one_hot(jnp.argmax(targets, axis=1), 512, dtype=dtype)
    primal = lambda x: -jnp.sum(targets * jax.nn.log_softmax(x), axis=1)
    backward = lambda labels, g, *r: (g[:, None] * (jax.nn.softmax(r[0]) - labels),)
    return edit(primal, backward, hard, targets, *args)
