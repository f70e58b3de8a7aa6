"""Right pairs and planted faults in mixed precision: float32 weights, computed in bfloat16.

One transformer, one training step; a version is a choice of their parts.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.compare_trainers import AXIS, mesh, numbers

LAYERS, HEADS, WIDTH, TOKENS, ROWS, WORDS = 3, 2, 16, 8, 16, 12
HALF = jnp.bfloat16
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))


class Mixed(NamedTuple):
    """Two versions, their arguments, and what a fault between them is called.

    Attributes:
      options: those of `compare`.
      found: (kind, module) of the first finding, or its paths, of which it is one.
    """

    fun: Callable[..., Any]
    other: Callable[..., Any]
    args: tuple
    options: dict[str, Any]
    found: Any = None


def params():
    def layer(i):
        new = lambda n, *shape: numbers(*shape, seed=10 * i + n) / np.sqrt(shape[0])  # noqa: E731
        weights = {"qkv": new(1, WIDTH, 3 * WIDTH), "out": new(2, WIDTH, WIDTH)}
        weights |= {"up": new(3, WIDTH, 2 * WIDTH), "down": new(4, 2 * WIDTH, WIDTH)}
        return weights | {"scale": 1 + 0.1 * numbers(1, 1, WIDTH, seed=10 * i + 5)}

    layers = [layer(i) for i in range(LAYERS)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    embed, head = numbers(WORDS, WIDTH, seed=91), numbers(WIDTH, WORDS, seed=92) / 4
    return {"embed": embed, "layers": stacked, "head": head}


def batch(rows=ROWS):
    rng = np.random.default_rng(93)
    return tuple(jnp.asarray(rng.integers(0, WORDS, (rows, TOKENS)), jnp.int32) for _ in range(2))


# ---- the parts of the model ----


def normalized(x, scale):
    wide = x.astype(jnp.float32)
    size = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + jnp.float32(1e-5))
    return (wide * size).astype(x.dtype) * scale


def attention(q, k, v, late=0):
    """Causal attention, shapes (rows, heads, tokens, width); the softmax in float32."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32)
    scores = scores * jnp.float32(1 / np.sqrt(q.shape[-1]))
    mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool), late)[None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("bhqk,bhkd->bhqd", weights.astype(q.dtype), v)


def in_blocks(q, k, v):
    """The same with a running maximum and sum over blocks of keys, as in flash attention."""
    largest = jnp.full((*q.shape[:3], 1), -jnp.inf, jnp.float32)
    total, found = jnp.zeros_like(largest), jnp.zeros(q.shape, jnp.float32)
    rows = jnp.arange(TOKENS)[:, None]
    for i in range(0, TOKENS, 4):
        own = k[:, :, i : i + 4], v[:, :, i : i + 4]
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, own[0], preferred_element_type=jnp.float32)
        scores = scores * jnp.float32(1 / np.sqrt(q.shape[-1]))
        mask = (rows >= i + jnp.arange(4)[None])[None, None]
        scores = jnp.where(mask, scores, -1e9)
        new = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
        weights, old = jnp.exp(scores - new), jnp.exp(largest - new)
        part = jnp.einsum(
            "bhqk,bhkd->bhqd", weights.astype(q.dtype), own[1], preferred_element_type=jnp.float32
        )
        found, total = found * old + part, total * old + jnp.sum(weights, axis=-1, keepdims=True)
        largest = new
    return (found / total).astype(q.dtype)


def split(x):
    parts = x.reshape(*x.shape[:2], 3, HEADS, -1)
    return [parts[:, :, i].transpose(0, 2, 1, 3) for i in range(3)]


def layer(x, w, parts):
    with jax.named_scope("attention"):
        y = normalized(x, w["scale"])
        y = parts.get("attention", attention)(*split(y @ w["qkv"]))
        y = y.transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + parts.get("branch", _same)(y @ w["out"])
    with jax.named_scope("mlp"):
        y = jax.nn.gelu(normalized(x, w["scale"]) @ w["up"])
        return x + parts.get("down", _same)(y @ w["down"])


def _same(x):
    return x


def cross_entropy(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1))


def by_logsumexp(logits, labels):
    hot = jax.nn.one_hot(labels, WORDS, dtype=logits.dtype)
    largest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    total = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1)) + largest[..., 0]
    return jnp.mean(total - jnp.sum(logits * hot, axis=-1))


def loss(params, batch, **parts):
    """The loss of a version; `at` is the layer whose parts they are, or all."""
    dtype, at = parts.get("dtype", HALF), parts.get("at")
    words, labels = batch
    own = jax.tree.map(lambda p: p.astype(dtype), params)
    with jax.named_scope("embed"):
        x = own["embed"][words]

    def step(x, w, chosen):
        with jax.named_scope("layers"):
            return layer(x, w, chosen)

    if parts.get("scan"):
        x, _ = lax.scan(lambda x, w: (step(x, w, parts), None), x, own["layers"])
    else:
        for i in range(LAYERS):
            w = jax.tree.map(lambda p, i=i: p[i], own["layers"])
            x = step(x, w, parts if at in (None, i) else {})
    with jax.named_scope("head"):
        logits = parts.get("logits", _same)((x @ own["head"]).astype(jnp.float32))
        return parts.get("loss", cross_entropy)(logits, labels)


# ---- the parts of a step ----


def both(scan=True, **parts):
    return jax.value_and_grad(functools.partial(loss, scan=scan, **parts))


def changed(params, batch):
    """A gradient of which one leaf has a factor."""
    value, grads = both()(params, batch)
    layers = {**grads["layers"], "up": grads["layers"]["up"] * jnp.float32(1.1)}
    return value, {**grads, "layers": layers}


def step(gradient, optimizer=OPTIMIZER):
    @jax.jit
    def run(params, opt_state, batch):
        value, grads = gradient(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return {"params": optax.apply_updates(params, updates), "opt": opt_state, "loss": value}

    return run


PLAIN = step(both())


@functools.cache
def state():
    """Parameters and the state of the optimizer after two steps."""
    own, opt_state = params(), OPTIMIZER.init(params())
    for seed in (1, 2):
        grads = jax.tree.map(lambda p, s=seed: 0.01 * jnp.cos(100 * p + s), own)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, own)
        own = optax.apply_updates(own, updates)
    return own, opt_state


def placed(tree, *spec):
    return jax.device_put(tree, NamedSharding(mesh(), P(*spec)))


def steps(other, fun=PLAIN, found=None, spread=False):
    options: dict[str, Any] = {"argnums": None}
    if spread:
        options["other_args"] = (*placed(state()), placed(batch(), AXIS))
    return Mixed(fun, other, (*state(), batch()), options, found)


def losses(found=None, **parts):
    """The loss, and the same with other parts: of one layer, or of all in a scan."""
    kinds = {"scan": "at" not in parts, "dtype": parts.get("dtype", HALF)}
    versions = (functools.partial(loss, **kinds | own) for own in ({}, parts))
    return Mixed(*versions, (params(), batch()), {}, found)


def unrolled():
    return losses(scan=False)._replace(options={"names": {"layers": "layers"}})


RIGHT = {
    "step: unrolled on 8 devices": lambda: steps(step(both(scan=False)), spread=True),
    "unrolled": unrolled,
    "attention in blocks": lambda: losses(attention=in_blocks),
    "logsumexp": lambda: losses(loss=by_logsumexp),
    "float16": lambda: losses(dtype=jnp.float16, attention=in_blocks),
}


# ---- faults from 1 % up ----


def times(by):
    return lambda x: x * jnp.asarray(by, x.dtype)


def backward(by):
    """A wrong VJP: a factor on the way back."""
    passed = jax.custom_vjp(lambda x: x)
    passed.defvjp(lambda x: (x, None), lambda _, g: ((g * jnp.asarray(by, g.dtype)),))
    return passed


def other_optimizer(rate=1e-2, limit=0.5):
    return optax.chain(optax.clip_by_global_norm(limit), optax.adamw(rate, weight_decay=0.1))


def moments(*names):
    """The paths of an output that shows a gradient: the moments of a leaf."""
    return tuple(f"opt/1/0/mu/{name}" for name in names)


def wrong(module, kind="value", **parts):
    return lambda: losses((kind, module), **parts)


def wrong_step(paths, gradient=None, optimizer=OPTIMIZER):
    return lambda: steps(step(gradient or both(), optimizer), found=paths)


FAULTS = {
    "a branch of one layer, 10 %": wrong("layers/attention", at=1, branch=times(1.1)),
    "the MLP of one layer, 20 %": wrong("layers/mlp", at=2, down=times(1.2)),
    "the mask is late by one": wrong(
        "layers/attention", attention=functools.partial(attention, late=1)
    ),
    "the logits, 1 %": wrong("head", logits=times(1.01)),
    "a VJP of one layer, 10 %": wrong("layers/attention", "vjp", at=1, branch=backward(1.1)),
    "a leaf's gradient, 10 %": wrong_step(moments("layers/up"), changed),
    "the rate, 2 %": wrong_step(("params/embed",), None, other_optimizer(rate=1.02e-2)),
    "the clip's limit, 10 %": wrong_step(moments("embed"), None, other_optimizer(limit=0.55)),
}  # fmt: skip
