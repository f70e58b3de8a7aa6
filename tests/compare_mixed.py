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


def normalized(x, scale, eps=1e-5):
    wide = x.astype(jnp.float32)
    size = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + jnp.float32(eps))
    return (wide * size).astype(x.dtype) * scale


def attention(q, k, v, scale=1.0, late=0):
    """Causal attention, shapes (rows, heads, tokens, width); the softmax in float32."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32)
    scores = scores * jnp.float32(scale / np.sqrt(q.shape[-1]))
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


def by_einsum(x):
    found = x.reshape(*x.shape[:2], 3, HEADS, -1)
    return list(jnp.einsum("btnhd->nbhtd", found))


def layer(x, w, parts):
    with jax.named_scope("attention"):
        y = normalized(x, w["scale"], parts.get("eps", 1e-5))
        y = parts.get("attention", attention)(*parts.get("split", split)(y @ w["qkv"]))
        y = y.transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + parts.get("branch", _same)(y @ w["out"])
    with jax.named_scope("mlp"):
        y = jax.nn.gelu(normalized(x, parts.get("scale", _same)(w["scale"])) @ w["up"])
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


def smoothed(logits, labels):
    """Another loss, by 1 %."""
    return cross_entropy(logits, labels) - 0.01 * jnp.mean(jax.nn.log_softmax(logits))


def loss(params, batch, **parts):
    """The loss of a version; `at` is the layer whose parts they are, or all."""
    dtype, at, run = parts.get("dtype", HALF), parts.get("at"), parts.get("run", _same)
    words, labels = batch
    own = jax.tree.map(lambda p: p.astype(dtype), parts.get("read", _same)(params))
    with jax.named_scope("embed"):
        x = own["embed"][words]

    def step(x, w, chosen):
        with jax.named_scope("layers"):
            return layer(x, w, chosen)

    if parts.get("scan"):
        x = lax.scan(lambda x, w: (run(functools.partial(step, chosen=parts))(x, w), None), x,
                     own["layers"])[0]  # fmt: skip
    else:
        for i in range(LAYERS):
            w = jax.tree.map(lambda p, i=i: p[i], own["layers"])
            chosen = parts if at in (None, i) else {}
            x = run(functools.partial(step, chosen=chosen))(x, w)
    with jax.named_scope("head"):
        logits = parts.get("logits", _same)((x @ own["head"]).astype(jnp.float32))
        return parts.get("loss", cross_entropy)(logits, labels)


# ---- the parts of a step ----


def both(scan=True, **parts):
    return jax.value_and_grad(functools.partial(loss, scan=scan, **parts))


def one_device_alone(params, batch):
    """What each device computes, and no mean."""
    return jax.shard_map(
        both(), mesh=mesh(), in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=False
    )(params, batch)


def accumulated(mean=lambda tree: jax.tree.map(lambda x: jnp.mean(x, axis=0), tree), count=4):
    """The gradients of microbatches in a loop."""

    def run(params, batch):
        parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        return mean(lax.map(lambda part: both()(params, part), parts))

    return run


def in_halves(params, batch, first=0.5):
    halves = [jax.tree.map(lambda x, i=i: x[8 * i : 8 * i + 8], batch) for i in range(2)]
    found = [both()(params, half) for half in halves]
    return jax.tree.map(lambda a, b: first * a + (1 - first) * b, *found)


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


def losses(found=None, spread=False, **parts):
    """The loss, and the same with other parts: of one layer, or of all in a scan."""
    kinds = {"scan": "at" not in parts, "dtype": parts.get("dtype", HALF)}
    options = {"other_args": (placed(params()), placed(batch(), AXIS))} if spread else {}
    versions = (functools.partial(loss, **kinds | own) for own in ({}, parts))
    return Mixed(*versions, (params(), batch()), options, found)


def unrolled():
    return losses(scan=False)._replace(options={"names": {"layers": "layers"}})


RIGHT = {
    "step: unrolled on 8 devices": lambda: steps(step(both(scan=False)), spread=True),
    "step: mean of halves": lambda: steps(step(in_halves)),
    "remat on 8 devices": lambda: losses(run=jax.checkpoint, spread=True),
    "unrolled": unrolled,
    "attention in blocks": lambda: losses(attention=in_blocks),
    "heads by einsum": lambda: losses(split=by_einsum),
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
    "attention's scale, 10 %": wrong(
        "layers/attention", attention=functools.partial(attention, scale=1.1)
    ),
    "the mask is late by one": wrong(
        "layers/attention", attention=functools.partial(attention, late=1)
    ),
    "the epsilon of a norm": wrong("layers/attention", at=0, eps=0.05),
    "the norm has no scale": wrong("layers/mlp", at=1, scale=jnp.ones_like),
    "the logits, 1 %": wrong("head", logits=times(1.01)),
    "a smoothed loss, 1 %": wrong("head", loss=smoothed),
    "a VJP of one layer, 10 %": wrong("layers/attention", "vjp", at=1, branch=backward(1.1)),
    "a VJP of one layer, the sign": wrong("layers/mlp", "vjp", at=0, down=backward(-1)),
    "a leaf's gradient, 10 %": wrong_step(moments("layers/up"), changed),
    "a microbatch too few": wrong_step(
        ("loss",), accumulated(lambda t: jax.tree.map(lambda x: jnp.sum(x[:3], axis=0) / 3, t))
    ),
    "halves of other weights, 10 %": wrong_step(
        ("loss",), functools.partial(in_halves, first=0.6)
    ),
    "one device's gradient": wrong_step(
        ("loss",), one_device_alone
    ),
    "the rate, 2 %": wrong_step(("params/embed",), None, other_optimizer(rate=1.02e-2)),
    "the clip's limit, 10 %": wrong_step(moments("embed"), None, other_optimizer(limit=0.55)),
}  # fmt: skip
