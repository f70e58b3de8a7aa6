"""A small transformer in parts, the faults that such models had, and equal versions of it.

In mixed precision its weights are float32 and most of it computes in bfloat16.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

LAYERS, TOKENS, WIDTH, HEADS, WORDS, BATCH = 3, 6, 8, 2, 11, 8


def make_args(dtype="float32"):
    """Parameters and a batch: tokens, targets, and a key."""
    rng = np.random.default_rng(0)

    def normal(*shape, scale=0.4):
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    layers = {
        "qkv": normal(LAYERS, WIDTH, 3 * WIDTH),
        "out": normal(LAYERS, WIDTH, WIDTH),
        "up": normal(LAYERS, WIDTH, WIDTH),
        "down": normal(LAYERS, WIDTH, WIDTH),
        "scale": 1 + normal(LAYERS, 2, WIDTH, scale=0.1),
        "experts": normal(LAYERS, 2, WIDTH, WIDTH),
    }
    params = {
        "words": normal(WORDS, WIDTH, scale=1.0),
        "places": normal(TOKENS + 1, WIDTH),
        "layers": layers,
        "bias": normal(WORDS, scale=0.1),
    }
    tokens = jnp.asarray(rng.integers(0, WORDS, (BATCH, TOKENS)))
    targets = jnp.asarray(rng.integers(0, WORDS, (BATCH, TOKENS)))
    return params, (tokens, targets, jax.random.key(1))


def number(x, like):
    return jnp.asarray(x, like.dtype)


def row(x, like):
    """A vector as the last axis of an array of the rank of another one."""
    return x.reshape((1,) * (like.ndim - 1) + x.shape)


def norm(x, scale):
    size = jnp.mean(jnp.square(x), axis=-1, keepdims=True) + number(1e-6, x)
    return x * lax.rsqrt(size) * row(scale, x)


def masked(x, part):
    mask = part["mask"](jnp.arange(TOKENS)[:, None], jnp.arange(TOKENS)[None, :])
    return jnp.where(mask.reshape((1,) * (4 - mask.ndim) + mask.shape), x, number(-1e9, x))


def wide(x):
    return x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def attention(x, layer, part):
    with jax.named_scope("qkv"):
        split = (x @ part["weight"](layer["qkv"])).reshape(BATCH, TOKENS, 3, HEADS, -1)
        q, k, v = (split[:, :, i] for i in range(3))
    with jax.named_scope("logits"):
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * number((WIDTH // HEADS) ** -0.5, q)
        logits = checkpoint_name(logits, "logits")
    with jax.named_scope("mix"):
        mixed = part["mix"](masked(wide(logits), part), v, part)
    with jax.named_scope("out"):
        return mixed.reshape(x.shape) @ layer["out"]


def mix(x, v, part):
    return jnp.einsum("bhqk,bkhd->bqhd", part["softmax"](x).astype(v.dtype), v)


def mix_in_blocks(x, v, part):
    """The same with a running maximum and sum over blocks of keys, as in flash attention."""
    del part
    largest = jnp.full((*x.shape[:3], 1), -jnp.inf, jnp.float32)
    total, mixed = jnp.zeros_like(largest), jnp.zeros((*x.shape[:3], v.shape[-1]), jnp.float32)
    for i in range(0, TOKENS, 2):
        scores, values = x[..., i : i + 2], v[:, i : i + 2]
        new = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
        weights, old = jnp.exp(scores - new), jnp.exp(largest - new)
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        mixed = mixed * old + product("bhqk,bkhd->bhqd", weights.astype(v.dtype), values)
        total = total * old + jnp.sum(weights, axis=-1, keepdims=True)
        largest = new
    return (mixed / total).astype(v.dtype).transpose(0, 2, 1, 3)


def mlp(x, layer, part, key):
    with jax.named_scope("up"):
        hidden = part["act"](part["matmul"](x, layer["up"]))
    with jax.named_scope("experts"):
        mixed = jnp.einsum("btd,edf->ebtf", hidden, layer["experts"])
        hidden = hidden + jnp.sum(mixed, axis=0)
    with jax.named_scope("dropout"):
        kept = jax.random.bernoulli(part["key"](key), 0.8, hidden.shape)
        hidden = jnp.where(kept, hidden / number(0.8, hidden), number(0, hidden))
    with jax.named_scope("down"):
        return part["down"](hidden @ layer["down"])


def block(x, layer, key, step, part):
    with jax.named_scope("norm"):
        y = norm(x, layer["scale"][0])
    with jax.named_scope("attention"):
        x = part["residual"](x, attention(y, layer, part))
    with jax.named_scope("norm2"):
        y = norm(x, layer["scale"][1])
    with jax.named_scope("mlp"):
        x = x + mlp(y, layer, part, key)
    return part["step"](x, step)


def cross_entropy(x, targets):
    logp = jax.nn.log_softmax(x)
    return -jnp.mean(jnp.take_along_axis(logp, targets[..., None], axis=-1))


def by_logsumexp(x, targets):
    hot = jax.nn.one_hot(targets, WORDS, dtype=x.dtype)
    largest = lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    total = jnp.log(jnp.sum(jnp.exp(x - largest), axis=-1)) + largest[..., 0]
    return jnp.mean(total - jnp.sum(x * hot, axis=-1))


def identity(x):
    return x


RIGHT: dict[str, Any] = {
    "dtype": None,
    "at": None,
    "mask": lambda q, k: q >= k,
    "weight": identity,
    "softmax": jax.nn.softmax,
    "mix": mix,
    "act": jnp.tanh,
    "matmul": lambda x, w: x @ w,
    "key": identity,
    "down": identity,
    "residual": lambda x, y: x + y,
    "step": lambda x, step: x,
    "embed": identity,
    "tied": identity,
    "head": identity,
    "loss": cross_entropy,
    "scan": True,
    "loop": False,
    "block": identity,
}


def model(**replaced):
    """The loss, with some parts replaced: in the layer ``at``, or in all."""
    part = RIGHT | replaced

    def loss(params, batch):
        tokens, targets, key = batch
        if part["dtype"]:
            params = jax.tree.map(lambda x: x.astype(part["dtype"]), params)
        with jax.named_scope("embed"):
            x = params["words"][tokens] + params["places"][:TOKENS][None]
            x = part["embed"](x)
        keys, steps = jax.random.split(key, LAYERS), jnp.arange(LAYERS)
        own_block = part["block"](functools.partial(block, part=part))
        layers = params["layers"], keys, steps
        if part["scan"]:
            with jax.named_scope("layers"):
                if part["loop"]:
                    body = lambda i, x: own_block(x, *jax.tree.map(lambda w: w[i], layers))  # noqa: E731
                    x = lax.fori_loop(0, LAYERS, body, x)
                else:
                    x, _ = lax.scan(lambda x, layer: (own_block(x, *layer), None), x, layers)
        else:
            for i in range(LAYERS):
                chosen = (
                    own_block if part["at"] in (None, i) else functools.partial(block, part=RIGHT)
                )
                with jax.named_scope(f"layers_{i}"):
                    x = chosen(x, *jax.tree.map(lambda w, i=i: w[i], layers))
        with jax.named_scope("head"):
            logits = x @ part["tied"](params["words"]).T + row(params["bias"], x)
            logits = part["head"](wide(logits))
        return part["loss"](logits, targets)

    return loss


def with_vjp(function, backward):
    """A function whose cotangent is changed by another one."""
    wrapped = jax.custom_vjp(function)

    def forward(*args):
        value, pull_back = jax.vjp(function, *args)
        return value, pull_back

    wrapped.defvjp(forward, lambda pull_back, g: backward(pull_back(g)))
    return wrapped


def scaled(by):
    return lambda grads: jax.tree.map(lambda g: g * number(by, g), grads)


def tanh_with(share):
    """Hyperbolic tangent with a rule in forward mode."""
    function = jax.custom_jvp(jnp.tanh)
    function.defjvp(lambda x, t: (jnp.tanh(x[0]), t[0] * (1 - share * jnp.tanh(x[0]) ** 2)))
    return function


def at(axis, index, by):
    """Multiplies one slice of an array."""

    def change(x):
        where = jnp.arange(x.shape[axis]).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
        return x * jnp.where(where == index, number(by, x), number(1, x))

    return change


def in_bfloat16(x, w):
    product = jnp.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    return product.astype(x.dtype)


def at_step(i, by):
    return lambda x, step: x * jnp.where(step == i, number(by, x), number(1, x))


VALUE_FAULTS = {
    "mask off by one": ({"mask": lambda q, k: q > k}, "layers/attention/mix"),
    "dropout key reused": ({"key": lambda key: jax.random.key(5)}, "layers/mlp/dropout"),
    "bfloat16 product": ({"matmul": in_bfloat16}, "layers/mlp/up"),
    "one example": ({"embed": at(0, 2, 1.01)}, "embed"),
    "sum for mean": ({"loss": lambda x, t: cross_entropy(x, t) * BATCH * TOKENS}, ""),
}  # fmt: skip
VJP_FAULTS = {
    "wrong rule of the activation": ({"act": with_vjp(jnp.tanh, scaled(1.01))}, "layers/mlp/up"),
    "wrong rule in forward mode": ({"act": tanh_with(0.9)}, "layers/mlp/up"),
    "stop_gradient of weights": (
        {"softmax": lambda x: lax.stop_gradient(jax.nn.softmax(x))}, "layers/attention/mix",
    ),
    "wrong rule of a residual branch": (
        {"residual": with_vjp(lambda x, y: x + y, lambda g: (g[0], g[1] * number(0.9, g[1])))},
        "layers/attention",
    ),
    "cotangents in bfloat16": (
        {"down": with_vjp(identity, lambda g: jax.tree.map(
            lambda x: x.astype(jnp.bfloat16).astype(x.dtype), g))},
        "layers/mlp/down",
    ),
}  # fmt: skip
GRADS_FAULTS = {
    "tied weights untied": ({"tied": lax.stop_gradient}, "words"),
    "gradient of a weight": ({"weight": with_vjp(identity, scaled(2.0))}, "layers/qkv"),
}
STEP_FAULTS = {
    "one scan step": ({"step": at_step(1, 1.01)}, "value", 1),
    "the last scan step": ({"step": at_step(2, 1.01)}, "value", 2),
}


SAVED = jax.checkpoint_policies.save_only_these_names("logits")
VERSIONS = {  # parts of versions that are equal to the model
    "the same": {},
    "remat": {"block": jax.checkpoint},
    "remat with a policy": {"block": functools.partial(jax.checkpoint, policy=SAVED)},
    "softmax by hand": {
        "softmax": lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x), axis=-1, keepdims=True)
    },
    "products by sums": {"matmul": lambda x, w: jnp.sum(x[..., None] * w[None, None], axis=-2)},
    "a right rule": {"act": with_vjp(jnp.tanh, identity)},
    "a right rule in forward mode": {"act": tanh_with(1.0)},
    "a loop": {"loop": True},
}


# ---- in mixed precision: the other parts, and what a fault is called ----


def times(by):
    return lambda x: x * number(by, x)


def one_layer(**parts):
    """A fault of one of the layers, which are unrolled."""
    return {"at": 1, "scan": False} | parts


MIXED = {
    "unrolled": {"scan": False},
    "attention in blocks": {"mix": mix_in_blocks},
    "logsumexp": {"loss": by_logsumexp},
    "float16": {"dtype": jnp.float16, "mix": mix_in_blocks},
}
MIXED_FAULTS = {
    "a branch of one layer, 10 %": (
        one_layer(residual=lambda x, y: x + y * number(1.1, y)), ("value", "layers_1/attention"),
    ),
    "the mask is late by one": (
        {"mask": lambda q, k: q + 1 >= k}, ("value", "layers/attention/mix"),
    ),
    "the logits, 10 %": ({"head": times(1.1)}, ("value", "head")),
    "a VJP of one layer, 10 %": (
        one_layer(down=with_vjp(identity, scaled(1.1))), ("vjp", "layers_1/mlp/down"),
    ),
}  # fmt: skip
