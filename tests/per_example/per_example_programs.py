"""Programs in which weights are followed to where they meet data, each a loss of one example.

A row is ``(params, batch, direct)``: shapes of random parameters, the batch, and which leaves are
direct in the plan. Sizes are such that a gradient is larger than its rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers import array

PROGRAMS = {}
EXAMPLES = 3


class Program(NamedTuple):
    loss: object
    params: dict
    batch: object
    direct: frozenset


def program(batch, direct="", **params):
    """Registers a loss with the shapes of its parameters and of one example."""

    def register(loss):
        name = loss.__name__.replace("_", " ")
        PROGRAMS[name] = Program(loss, params, batch, frozenset(direct.split()))
        return loss

    return register


def arguments(name, dtype=jnp.float32):
    """Parameters and a batch for a program."""
    row = PROGRAMS[name]
    rng = np.random.default_rng(len(name))
    params = {
        k: array(rng.normal(size=s) / max(s[-2:-1] or (1,)) ** 0.5, dtype)
        for k, s in row.params.items()
    }
    made = []
    for part in row.batch if isinstance(row.batch, list) else [row.batch]:
        if isinstance(part, int):  # ids below it, some of them repeated
            made.append(array(rng.integers(part, size=(EXAMPLES, 4)), np.int32))
        else:
            made.append(array(rng.normal(size=(EXAMPLES, *part)), dtype))
    return params, made if isinstance(row.batch, list) else made[0]


def total(x):
    return jnp.sum(jnp.sin(x) * jnp.cos(0.5 * x))


# dense


@program((12,), "b", w=(12, 16), b=(16,), v=(16, 9))
def dense_layers(p, x):
    return total(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"])


@program((3, 12), "b", w=(12, 16), b=(16,))
def dense_layer_over_a_sequence(p, x):
    return total(x @ p["w"] + p["b"][None])


@program((2, 3, 12), w=(2, 12, 9))
def experts_as_a_batch_dimension(p, x):
    return total(jax.lax.dot_general(x, p["w"], (((2,), (1,)), ((0,), (0,)))))


@program(
    (4, 12), "left right one other scaled",
    cut=(12, 2, 16), summed=(2, 6, 20), heads=(2, 6, 20), transposed=(16, 12),
    flat=(12 * 16,), reshaped=(3, 4, 2, 8), left=(12, 8), right=(12, 10), one=(12, 16),
    other=(12, 16), scaled=(12, 16), axes=(12, 30),
)  # fmt: skip
def kernels_of_any_shape(p, x):
    halves = x.reshape(4, 2, 6)
    made = [
        jnp.einsum("td,dhk->thk", x, p["cut"]),
        jnp.einsum("thk,hkd->td", halves, p["summed"]),
        jnp.einsum("thd,hdk->thk", halves, p["heads"]),
        jnp.einsum("abd,dk->abk", x.reshape(2, 2, 12), p["axes"]),
        x @ p["transposed"].T,
        x @ p["flat"].reshape(12, 16),
        x @ p["reshaped"].reshape(12, 16),
        x @ jnp.concatenate([p["left"], p["right"]], axis=1),
        x @ (p["one"] + 0.5 * p["other"]),
        x @ (p["scaled"] * jnp.arange(1.0, 17.0)[None]) / 3,
    ]
    return sum(map(total, made))


@program((3, 12), w=(12 * 16 + 16 * 10,))
def one_vector_for_two_layers(p, x):
    w, v = p["w"][: 12 * 16].reshape(12, 16), p["w"][12 * 16 :].reshape(16, 10)
    return total(jnp.tanh(x @ w) @ v)


@program((3, 12), "s o", w=(12, 16), s=(16,), o=(16,))
def scale_and_offset(p, x):
    h = x @ p["w"]
    h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-3)
    return total(h * p["s"][None] + p["o"][None])


# one weight in several places


@program((3, 12), twice=(12, 12), transposed=(12, 12), gates=(12, 32), overlap=(12, 20))
def kernels_in_several_places(p, x):
    i, f, g, o = (x @ gate for gate in jnp.split(p["gates"], 4, axis=1))
    made = [
        jnp.tanh(x @ p["twice"]) @ p["twice"],
        jnp.tanh(x @ p["transposed"]) @ p["transposed"].T,
        jnp.tanh(i) * f + jnp.sin(g) * o,
        jnp.tanh(x @ p["overlap"][:, :14])[:, :8] * (x @ p["overlap"][:, 12:]),
    ]
    return sum(map(total, made))


@program((6, 12), w=(12, 16), r=(16, 16))
def unrolled_recurrence(p, x):
    h = jnp.zeros(16)
    for t in range(6):
        h = jnp.tanh(x[t] @ p["w"] + h @ p["r"])
    return total(h)


@program((3, 12), w=(4, 12, 12))
def stacked_kernels_by_index(p, x):
    for i in range(4):
        x = jnp.tanh(x @ p["w"][i])
    return total(x)


# embeddings


@program(40, whole=(40, 12), filled=(20, 12), clamped=(20, 12))
def embeddings(p, x):
    """Of ids that are in range, and of some that are not."""
    rows = p["filled"].at[x].get(mode="fill", fill_value=0.0), p["clamped"].at[x].get(mode="clip")
    return sum(map(total, (p["whole"][x], *rows)))


@program(20, e=(20, 12), w=(12, 12))
def embedding_tied_to_the_head(p, x):
    return total(jax.nn.log_softmax(jnp.tanh(p["e"][x] @ p["w"]) @ p["e"].T)[:, 0])


@program([5, 6], "e", e=(5, 6, 12))
def embedding_with_two_indices(p, batch):
    first, second = batch
    return total(p["e"][first, second])


@program([3, (4, 12)], w=(3, 12, 16))
def expert_chosen_for_each_token(p, batch):
    chosen, x = batch
    return total(jnp.einsum("td,tdk->tk", x, p["w"][chosen]))


@program((3, 12), "w", w=(4, 12, 12))
def layer_chosen_by_a_traced_index(p, x):
    index = jnp.int32(x[0, 0] > 0)
    return total(x @ jax.lax.dynamic_index_in_dim(p["w"], index, keepdims=False))


# convolutions


def convolved(x, k, dims, stride=1, padding="SAME", **options):
    rank = k.ndim - 2
    strides = (stride,) * rank
    return jax.lax.conv_general_dilated(
        x[None], k, strides, padding, dimension_numbers=dims, **options
    )[0]


@program((5, 4, 12), each=(3, 3, 12, 20), row=(20, 4, 3, 3), whole=(20, 3, 3, 2))
def convolutions_at_many_positions(p, x):
    each = convolved(x, p["each"], ("NHWC", "HWIO", "NHWC"))
    rows = convolved(
        jnp.moveaxis(x[..., :4], -1, 0),
        p["row"],
        ("NCHW", "OIHW", "NCHW"),
        1,
        [(2, 2)] * 2,
        rhs_dilation=(2, 2),
    )
    whole = convolved(x[..., :2], p["whole"], ("NHWC", "OHWI", "NHWC"), 2, [(2, 1), (1, 3)])
    return total(each) + total(rows) + total(whole)


@program((7, 5, 8), k=(3, 2, 8, 40))
def convolution_with_stride_and_dilation(p, x):
    dims = ("NHWC", "HWIO", "NHWC")
    return total(convolved(x, p["k"], dims, 2, [(1, 2), (0, 1)], rhs_dilation=(2, 1)))


@program((4, 4, 16), k=(3, 3, 4, 64))
def grouped_convolution(p, x):
    dims = ("NHWC", "HWIO", "NHWC")
    return total(convolved(x, p["k"], dims, 2, feature_group_count=4))


@program((5, 12), first=(3, 1, 12), second=(36, 1, 2))
def depthwise_convolutions(p, x):
    """Of one output for each input, and of three."""
    x = jnp.tanh(convolved(x, p["first"], ("NHC", "HIO", "NHC"), feature_group_count=12))
    dims = ("NCH", "OIH", "NCH")
    return total(convolved(x.T, p["second"], dims, rhs_dilation=(2,), feature_group_count=12))


@program((4, 4, 12), k=(3, 12, 2, 2, 4))
def scanned_grouped_convolutions(p, x):
    def layer(x, k):
        return jnp.tanh(convolved(x, k, ("NHWC", "OHWI", "NHWC"), feature_group_count=3)), None

    return total(jax.lax.scan(layer, x, p["k"])[0])


@program((4, 12), k=(12, 3, 1))
def grouped_kernel_used_as_a_matrix_too(p, x):
    y = convolved(x, p["k"], ("NHC", "OHI", "NHC"), feature_group_count=12)
    return total(y @ p["k"][..., 0])


@program((8, 12), "k", k=(3, 12, 8))
def convolution_with_groups_of_the_batch(p, x):
    dims = ("NHC", "HIO", "NHC")
    y = jax.lax.conv_general_dilated(
        x.reshape(2, 4, 12), p["k"], (1,), "SAME", dimension_numbers=dims, batch_group_count=2
    )
    return total(y)


@program((12, 5), k=(16, 12, 5))
def convolution_of_rank_one(p, x):
    return total(convolved(x, p["k"], ("NCH", "OIH", "NCH")))


@program((2, 3, 3, 12), k=(2, 2, 2, 12, 24))
def convolution_of_rank_three(p, x):
    return total(convolved(x, p["k"], ("NHWDC", "HWDIO", "NHWDC"), 2))


@program((3, 12), k=(4, 12, 16))
def transposed_convolution(p, x):
    dims = ("NHC", "HIO", "NHC")
    return total(convolved(x, p["k"], dims, 1, [(2, 2)], lhs_dilation=(2,)))


# programs inside of programs


@program((3, 12), "b", w=(5, 12, 12), b=(5, 12))
def scanned_layers(p, x):
    def layer(x, w):
        return jnp.tanh(x @ w["w"] + w["b"][None]), None

    return total(jax.lax.scan(layer, x, p)[0])


@program((3, 12), w=(4, 12, 16), v=(4, 16, 12))
def scanned_layers_with_remat(p, x):
    @jax.checkpoint
    def layer(x, w):
        return x + jnp.tanh(x @ w["w"]) @ w["v"], None

    return total(jax.lax.scan(layer, x, p)[0])


@program((3, 12), w=(4, 12, 12))
def stack_of_layers_used_twice(p, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, p["w"])
    return total(jax.lax.scan(layer, x, p["w"], reverse=True)[0])


@program((4, 12), "b", i=(12, 48), h=(12, 48), b=(48,))
def lstm(p, x):
    def step(state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ p["i"] + h @ p["h"] + p["b"], 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return total(jax.lax.scan(step, (jnp.zeros(12), jnp.zeros(12)), x)[1])


@program((4, 12), w=(3, 12, 12), r=(12, 12))
def recurrence_through_stacked_layers(p, x):
    def step(h, x):
        def layer(h, w):
            return jnp.tanh(h @ w + x @ p["r"]), None

        return jax.lax.scan(layer, h, p["w"])[0], None

    return total(jax.lax.scan(step, jnp.zeros(12), x)[0])


@program((3, 12), "w", w=(4, 12, 12))
def scan_over_the_index_of_a_layer(p, x):
    def layer(x, i):
        return jnp.tanh(x @ p["w"][i]), None

    return total(jax.lax.scan(layer, x, jnp.arange(4))[0])


@program((3, 12), w=(12, 16))
def vmap_inside_of_the_loss(p, x):
    return total(jax.vmap(lambda row: jnp.tanh(row @ p["w"]))(x))


@jax.custom_vjp
def _product(x, w):
    return x @ w


_product.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda saved, ct: (ct @ saved[1].T, 2 * saved[0].T @ ct)
)


@program((3, 12), "w", w=(12, 16))
def custom_rule(p, x):
    return total(_product(x, p["w"]))


@program((3, 12), w=(12, 12), v=(12, 12))
def error_clip_inside(p, x):
    import clipgrad as cg

    h = cg.clip_cotangent(jnp.tanh(x @ p["w"]), cg.ErrorClipByValue(0.1))
    return total(cg.clip_cotangent(h @ p["v"], cg.ClipByGlobalNorm(0.5)))


@program((3, 12), w=(3, 12, 12), v=(12, 12))
def error_clip_inside_of_scanned_layers_with_remat(p, x):
    import clipgrad as cg

    @jax.checkpoint
    def layer(h, w):
        h = cg.clip_cotangent(jnp.tanh(h @ w), cg.ClipByGlobalNorm(0.2))
        return h + jnp.sin(h @ p["v"]), None

    return total(jax.lax.scan(layer, x, p["w"])[0])


# weights that are changed or cut before they are used


@program((3, 24), "q k v", q=(24, 8), k=(24, 8), v=(24, 8))
def joined_kernels_that_are_cut_again(p, x):
    w = jnp.concatenate([p["q"], p["k"], p["v"]], axis=1)
    return total(jax.nn.softmax((x @ w[:, :8]) @ (x @ w[:, 8:16]).T) @ (x @ w[:, 16:]))


@program((3, 30), w=(40, 60))
def kernel_reshaped_across_its_axes(p, x):
    return total(x @ p["w"].reshape(30, 80))


@program((3, 3, 4), a=(3, 3, 4, 8), b=(3, 3, 8, 16))
def strided_convolution_of_an_image_smaller_than_its_kernel(p, x):
    dims = ("NHWC", "HWIO", "NHWC")
    x = jnp.tanh(convolved(x, p["a"], dims, stride=2))
    return total(convolved(x, p["b"], dims, stride=2))


@program((5, 12), "first", first=(5, 12), w=(3, 12, 12))
def first_state_that_is_a_weight(p, x):
    """A carry of the backward scan is the gradient of a leaf, and is changed in each step."""

    def step(h, w):
        return h * x + h @ w, None

    return total(jax.lax.scan(step, p["first"], p["w"])[0])


# functions of a weight: direct


@program((3, 12), "b c v w", b=(16,), c=(16,), v=(16, 16), w=(16, 16), first=(12, 16))
def layers_stacked_in_the_loss(p, x):
    layers = [{"w": p["v"], "b": p["b"]}, {"w": p["w"], "b": p["c"]}]
    stack = jax.tree.map(lambda *w: jnp.stack(w), *layers)
    step = lambda h, p: (jnp.tanh(h @ p["w"] + p["b"][None]), None)  # noqa: E731
    return total(jax.lax.scan(step, x @ p["first"], stack)[0])


@program((3, 16), "a b w", w=(16, 20), a=(16, 2), b=(2, 20))
def merged_low_rank(p, x):
    return total(x @ (p["w"] + 2 * p["a"] @ p["b"]))


@program((3, 12), "reversed summed rows columns upper selected masked bounded",
         reversed=(12, 16), summed=(12, 20), rows=(24, 16), columns=(12, 20),
         upper=(12, 16), selected=(12, 9), masked=(12, 9), bounded=(12, 16))  # fmt: skip
def linear_functions_of_weights(p, x):
    mask = np.random.default_rng(0).normal(size=(12, 9))
    weights = [
        jnp.flip(p["reversed"], 0),
        jnp.cumsum(jnp.cumsum(p["summed"], 0), 1) / 10,
        p["rows"][::2],
        p["columns"][:, 1::3],
        jnp.triu(p["upper"]),
        jnp.where(mask[:, :1] > mask[:, 1:2], p["selected"], 0.0),
        p["masked"] * jnp.asarray(mask, x.dtype),
        jnp.tanh(p["bounded"]),
    ]
    return sum(total(x @ w) for w in weights)


@program((3, 12), "v w", v=(2, 12, 12), w=(12, 12))
def masks_in_scanned_and_rematerialized_layers(p, x):
    mask = np.random.default_rng(0).normal(size=(12, 12)) > 0
    layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ jnp.where(mask, w, 0.0)), None))
    return total(layer(jax.lax.scan(layer, x, p["v"])[0], p["w"])[0] @ p["w"])


# what is direct


@program((3, 12), "w g", w=(12, 16), g=(16,), v=(16, 9))
def weight_normalization(p, x):
    w = p["w"] * (p["g"] * jax.lax.rsqrt(jnp.sum(p["w"] ** 2, 0)))[None]
    return total(jnp.tanh(x @ w) @ p["v"])


@program((3, 12), "w", w=(12, 16), v=(12, 16))
def weight_in_a_branch(p, x):
    h = jax.lax.cond(x[0, 0] > 0, lambda x: x @ p["w"], lambda x: jnp.sin(x @ p["w"]), x)
    return total(h + x @ p["v"])


@program((40, 4), "w", w=(4, 6))
def long_sequence_over_a_small_kernel(p, x):
    return total(x @ p["w"])


@program((3, 12), w=(12, 16), u=(7,))
def unused_parameter(p, x):
    return total(x @ p["w"])
