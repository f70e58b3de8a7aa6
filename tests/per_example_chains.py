"""Losses composed of operations, and of places such as a scan or `jax.checkpoint` around them.

A chain is a list of links. A link is the name of an operation with which weight it takes, 0 or 1,
or the name of a place with the chain in it. Operations that want weights of one shape share them:
so a chain has tied weights and modules that it uses twice.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import clipgrad as cg

# A product of T rows is smaller than a kernel of D x D as two Gram matrices, that of 2 T is not.
T, D, TOKENS, EXAMPLES = 8, 12, 6, 3
OPERATIONS: dict[str, "Operation"] = {}
PLACES: dict[str, Callable] = {}


class Operation(NamedTuple):
    """A function of weights, values (T, D) and ids (T,); the shapes of the weights."""

    shapes: tuple[tuple[int, ...], ...]
    apply: Callable


def operation(*shapes):
    """Registers a function of weights, values and ids; equal shapes are two different weights."""

    def register(apply):
        OPERATIONS[apply.__name__.replace("_", " ")] = Operation(shapes, apply)
        return apply

    return register


def place(apply):
    """Registers a function of what the chain in it does, of parameters, values and ids."""
    PLACES[apply.__name__.replace("_", " ")] = apply
    return apply


def names_of(shapes, which):
    """The names of an operation's weights: the second of a shape is the other one."""
    found = []
    for i, shape in enumerate(shapes):
        number = (which + shapes[:i].count(shape)) % 2
        found.append(f"{'x'.join(map(str, shape))}/{number}")
    return found


def shapes_of(chain):
    """The shapes of all weights; in ``layers`` those of number 0 are stacked."""
    found = {}
    for name, what in chain:
        if name in OPERATIONS:
            shapes = OPERATIONS[name].shapes
            found |= dict(zip(names_of(shapes, what), shapes, strict=True))
        else:
            inner = shapes_of(what)
            stack = name == "layers"
            if name == "stacked in the loss":
                inner |= {n[:-1] + "1": s for n, s in inner.items() if n.endswith("/0")}
            found |= {
                f"stack/{n}" if stack and n.endswith("/0") else n: (2, *s)
                if stack and n.endswith("/0")
                else s
                for n, s in inner.items()
            }
    return found


def run(chain, p, x, ids):
    """What comes out of the last link."""
    for name, what in chain:
        if name in OPERATIONS:
            shapes, apply = OPERATIONS[name]
            y = apply(*[p[n] for n in names_of(shapes, what)], x, ids)
            x = 0.5 * x + jnp.tanh(y)
        else:
            x = PLACES[name](functools.partial(run, what), p, x, ids)
    return x


def loss_of(chain):
    """A loss of one example, ``(values, ids)``."""

    def loss(p, example):
        x = run(chain, p, *example)
        return jnp.sum(jnp.sin(x) * jnp.cos(0.5 * x))

    return loss


def arguments(chain):
    """Parameters and a batch, with ids that repeat and some that are out of range."""
    rng = np.random.default_rng(len(chain))
    params = {}
    for name, shape in sorted(shapes_of(chain).items()):
        deviation = math.prod(shape[-3:-1]) ** -0.5
        params[name] = jnp.asarray(deviation * rng.normal(size=shape), jnp.float32)
    x = jnp.asarray(rng.normal(size=(EXAMPLES, T, D)), jnp.float32)
    return params, (x, jnp.asarray(rng.integers(-2, TOKENS + 2, (EXAMPLES, T)), jnp.int32))


# dense


@operation((D, D))
def dense(w, x, ids):
    return x @ w


@operation((D, D))
def transposed(w, x, ids):
    return x @ w.T


@operation((D, 3, 4))
def einsum(w, x, ids):
    return jnp.einsum("td,dhk->thk", x, w).reshape(x.shape)


@operation((3, 4, 4))
def heads(w, x, ids):
    return jnp.einsum("thd,hdk->thk", x.reshape(-1, 3, 4), w).reshape(x.shape)


@operation((2, D, D))
def experts(w, x, ids):
    dims = (((2,), (1,)), ((0,), (0,)))
    return jax.lax.dot_general(x.reshape(2, -1, D), w, dims).reshape(x.shape)


@operation((3, D, D))
def expert_of_each_token(w, x, ids):
    return jnp.einsum("td,tdk->tk", x, w[ids % 3])


@operation((D, D), (D, D))
def attention(w, v, x, ids):
    return jax.nn.softmax(x @ w @ x.T / D, axis=-1) @ (x @ v)


@operation((D, 4 * D))
def slices(w, x, ids):
    i, f, g, o = jnp.split(w, 4, axis=1)
    return jnp.tanh(x @ i) * (x @ f) + jnp.sin(x @ g) * (x @ o)


@operation((D, 20))
def slices_that_overlap(w, x, ids):
    return (x @ w[:, :D]) * jnp.sin(x @ w[:, 20 - D :])


@operation((2, D, D))
def chosen_layer(w, x, ids):
    return x @ jax.lax.dynamic_index_in_dim(w, jnp.int32(ids[0] > 2), keepdims=False)


# linear functions of a weight

MASK = np.random.default_rng(0).normal(size=(D, D))


@operation((D, D), (D, 2), (2, D))
def merged_low_rank(w, a, b, x, ids):
    return x @ (w + 2 * a @ b)


@operation((D, D), (D, 2), (2, D))
def merged_low_rank_over_a_fixed_weight(w, a, b, x, ids):
    return x @ (jax.lax.stop_gradient(w) + 2 * a @ b)


@operation((D, D))
def weight_and_its_transpose(w, x, ids):
    return x @ (w @ w.T) / D


@operation((D, D))
def flipped(w, x, ids):
    return x @ jnp.flip(w, 0) + x @ jnp.flip(w)


@operation((D, D))
def summed_up(w, x, ids):
    return x @ jnp.cumsum(w, 0) / D + x @ jax.lax.cumsum(w, 1, reverse=True) / D


@operation((D, D))
def masked(w, x, ids):
    return x @ (w * jnp.asarray(MASK, w.dtype))


@operation((D, D))
def lower_triangle(w, x, ids):
    return x @ jnp.tril(w)


@operation((2 * D, D))
def every_second_row(w, x, ids):
    return x @ w[1::2] + x @ jnp.where(MASK > 0, w[:D], 0.0)


@operation((D, D))
def masked_by_the_example(w, x, ids):
    return x @ jnp.where(x[:1].T * x[1:2] > 0, w, 0.0)


# biases and scales


@operation((D,))
def bias(b, x, ids):
    return x + b[None]


@operation((D,))
def scale(s, x, ids):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3) * s[None]


# embeddings


@operation((TOKENS, D))
def embedding(e, x, ids):
    return x + e[ids]


@operation((TOKENS, D))
def embedding_as_head(e, x, ids):
    return jax.nn.softmax(x @ e.T, axis=-1) @ e


# convolutions


def convolved(x, k, dims=("NHC", "HIO", "NHC"), stride=1, padding="SAME", **options):
    strides = (stride,) * (k.ndim - 2)
    return jax.lax.conv_general_dilated(
        x[None], k, strides, padding, dimension_numbers=dims, **options
    )[0]


@operation((3, D, D))
def convolution(k, x, ids):
    return convolved(x, k)


@operation((3, D, D))
def strided_convolution(k, x, ids):
    return jnp.repeat(convolved(x, k, stride=2, padding=[(0, 1)]), 2, axis=0)


@operation((3, D, D))
def transposed_convolution(k, x, ids):
    return convolved(x, k, padding=[(1, 2)], lhs_dilation=(2,))[::2]


@operation((3, D // 3, D))
def grouped_convolution(k, x, ids):
    return convolved(x, k, feature_group_count=3)


@operation((2, 3, D, D))
def convolution_of_images(k, x, ids):
    dims = ("NHWC", "HWIO", "NHWC")
    return convolved(x.reshape(2, -1, D), k, dims).reshape(x.shape)


# recurrences


@operation((D, D), (D, D), (D,))
def recurrence(w, r, b, x, ids):
    def step(h, x):
        h = jnp.tanh(x @ w + h @ r + b)
        return h, h

    return jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1]


@operation((D, 4 * D), (D, 4 * D))
def lstm(w, r, x, ids):
    def step(state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ w + h @ r, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros_like(x[0])
    return jax.lax.scan(step, (start, start), x, reverse=True)[1]


# places


@place
def jit(body, p, x, ids):
    return jax.jit(body)(p, x, ids)


@place
def remat(body, p, x, ids):
    return jax.checkpoint(body)(p, x, ids)


@place
def remat_that_saves_products(body, p, x, ids):
    return jax.checkpoint(body, policy=jax.checkpoint_policies.dots_saveable)(p, x, ids)


@place
def twice(body, p, x, ids):
    return body(p, body(p, x, ids), ids)


@place
def loop(body, p, x, ids):
    """The gradients of its weights are added up in the carry of the backward pass."""
    return jax.lax.scan(lambda x, _: (body(p, x, ids), None), x, length=2)[0]


@place
def layers(body, p, x, ids):
    """Scanned layers; weights that are not stacked are the same in all of them."""
    stack = {n.removeprefix("stack/"): w for n, w in p.items() if n.startswith("stack/")}
    return jax.lax.scan(lambda x, w: (body(p | w, x, ids), None), x, stack, length=2)[0]


@place
def stacked_in_the_loss(body, p, x, ids):
    """Scanned layers that the loss stacks itself."""
    first = {n for n in p if n.endswith("/0") and n[:-1] + "1" in p}
    stack = jax.tree.map(
        lambda *w: jnp.stack(w), *({n: p[n[:-1] + i] for n in first} for i in "01")
    )
    return jax.lax.scan(lambda x, w: (body(p | w, x, ids), None), x, stack, length=2)[0]


@place
def vmap(body, p, x, ids):
    return jnp.mean(jax.vmap(lambda x: body(p, x, ids))(jnp.stack([x, jnp.sin(x)])), axis=0)


@place
def error_clip(body, p, x, ids):
    return cg.clip_cotangent(body(p, x, ids), cg.ErrorClipByValue(0.3))


@place
def error_clip_by_norm(body, p, x, ids):
    return cg.clip_cotangent(body(p, x, ids), cg.ClipByGlobalNorm(0.5))


@place
def custom_rule(body, p, x, ids):
    """A rule that doubles the cotangent."""
    doubled = jax.custom_vjp(body)

    def backward(saved, ct):
        *args, ids = saved
        return *jax.vjp(lambda p, x: body(p, x, ids), *args)[1](2 * ct), None

    doubled.defvjp(lambda p, x, ids: (body(p, x, ids), (p, x, ids)), backward)
    return doubled(p, x, ids)


@place
def branch(body, p, x, ids):
    """Its weights are direct."""
    return jax.lax.cond(x[0, 0] > 0, body, lambda p, x, ids: jnp.sin(x), p, x, ids)


operations = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 1))


def placed(inner):
    """An operation, or a place with a chain of one or two links in it."""
    inside = st.lists(inner, min_size=1, max_size=2)
    return operations | st.tuples(st.sampled_from(sorted(PLACES)), inside)


chains = st.lists(placed(placed(placed(operations))), min_size=2, max_size=3)

# Each place is in one of them, and kinds of products that lie apart in the code.
CHAINS = {
    "tied": [
        ("embedding", 0),
        ("layers", [("remat", [("dense", 0), ("expert of each token", 0)]), ("bias", 0)]),
        ("twice", [("grouped convolution", 0)]),
        ("embedding as head", 0),
    ],
    "recurrent": [
        ("loop", [("recurrence", 0)]),
        ("error clip", [("vmap", [("slices", 0)]), ("jit", [("transposed", 1)])]),
        ("branch", [("scale", 1)]),
    ],
    "convolved": [
        ("custom rule", [("strided convolution", 0), ("einsum", 0)]),
        ("remat that saves products", [("convolution of images", 0), ("experts", 1)]),
        ("error clip by norm", [("heads", 1), ("slices that overlap", 0)]),
    ],
    "linear": [
        ("stacked in the loss", [("remat", [("merged low rank", 0), ("masked", 0)]), ("bias", 0)]),
        ("loop", [("merged low rank over a fixed weight", 0), ("flipped", 1)]),
        ("layers", [("lower triangle", 0), ("summed up", 1), ("every second row", 0)]),
    ],
}
