"""Whether a small transformer whose attention logits grow trains better with QK-clip.

A transformer of two layers reads the help texts of the standard library. It is trained by Muon and
by adamw at several learning rates, on five seeds, without a clip and with `qk_clip` at two limits.
Prints the loss of unseen text (median and worst seed), how many seeds got worse than the start or
NaN, and the largest attention logit of the training. The results are in benchmarks/RESULTS.md.

    python -m benchmarks.qk_clip [--steps 300] [--optimizers muon adamw]
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._demo import char_rnn, task

BATCH, LENGTH, WIDTH, LAYERS, HEADS = 16, 32, 64, 2, 4
SEEDS = (10, 11, 12, 13, 14)
RATES = {
    "muon": (0.01, 0.03, 0.1, 0.3, 1.0),
    "adamw": (0.003, 0.01, 0.03, 0.1, 0.3),
}
LIMITS = {"no clip": None, "qk_clip at 100": 100.0, "qk_clip at 30": 30.0}
OPTIMIZERS = {"muon": optax.contrib.muon, "adamw": optax.adamw}


def first_params(seed: int, size: int) -> Any:
    """Normal weights, in layers that are not stacked."""
    random = np.random.default_rng(seed)
    shapes = {name: (WIDTH, WIDTH) for name in ("query", "key", "value", "joined")}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    layers = {
        f"layer_{i}": {n: task.normal(random, *s, scale=s[0] ** -0.5) for n, s in shapes.items()}
        for i in range(LAYERS)
    }
    ends = {
        "embed": task.normal(random, size, WIDTH, scale=1.0),
        "place": task.normal(random, LENGTH, WIDTH, scale=0.3),
        "out": task.normal(random, WIDTH, size, scale=WIDTH**-0.5),
    }
    return layers | ends


def rms(x: jax.Array) -> jax.Array:
    """The normalization before each layer, without weights."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attention(weights: Any, x: jax.Array, name: str) -> jax.Array:
    """Causal attention whose logits are tagged before the mask."""
    names = ("query", "key", "value")
    query, key, value = ((x @ weights[n]).reshape(*x.shape[:2], HEADS, -1) for n in names)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    logits = checkpoint_name(logits, name)
    mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
    shares = jax.nn.softmax(jnp.where(mask, logits, -1e30))
    return jnp.einsum("bhqk,bkhd->bqhd", shares, value).reshape(x.shape) @ weights["joined"]


def loss(params: Any, text: jax.Array) -> jax.Array:
    """Nats per character."""
    x = params["embed"][text[:, :-1]] + params["place"]
    for i in range(LAYERS):
        weights = params[f"layer_{i}"]
        x = x + attention(weights, rms(x), f"logits_{i}")
        x = x + jax.nn.gelu(rms(x) @ weights["up"]) @ weights["down"]
    return task.cross_entropy(rms(x) @ params["out"], text[:, 1:])


def pairs() -> list[tuple]:
    """The kernels of each layer, whose heads lie one after the other."""
    return [(f"logits_{i}", f"layer_{i}/query", f"layer_{i}/key", 1) for i in range(LAYERS)]


def train(
    make: Callable[[Any], Any], limit: float | None, steps: int, data: Any, params: Any, key: Any,
    rate: jax.Array,
) -> Any:  # fmt: skip
    """The loss of unseen text before and after, and the largest logit."""
    clip = () if limit is None else (cg.qk_clip(pairs(), max_logit=limit),)
    warmed_up = rate * jnp.minimum(1.0, (jnp.arange(steps) + 1) / 20)
    watched = cg.with_value_stats(loss, watch={f"logits_{i}": 1 for i in range(LAYERS)})
    optimizer = optax.chain(make(1.0), optax.scale(1.0))

    def step(carry: Any, now: Any) -> Any:
        params, state = carry
        number, rate = now
        rows = jax.random.randint(jax.random.fold_in(key, number), (BATCH,), 0, len(data.train))
        grads, stats = jax.grad(watched, has_aux=True)(params, data.train[rows])
        largest = {name: found.highest for name, found in stats.items()}
        updates, state = optimizer.update(grads, state, params)
        updates = jax.tree.map(lambda u: u * rate, updates)
        for each in clip:
            updates, _ = each.update(updates, each.init(params), params, max_logits=largest)
        top = jnp.max(jnp.stack(list(largest.values())))
        return (optax.apply_updates(params, updates), state), top

    carry = params, optimizer.init(params)
    (last, _), tops = jax.lax.scan(step, carry, (jnp.arange(steps), warmed_up))
    return loss(params, data.test), loss(last, data.test), jnp.max(tops)


def main() -> None:
    """Prints a row of Markdown for each optimizer, clip and learning rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    options = parser.parse_args()
    data = char_rnn.load_text(LENGTH)
    starts = [first_params(seed, len(data.alphabet)) for seed in SEEDS]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    keys = jax.vmap(jax.random.key)(jnp.array(SEEDS))
    print("| optimizer | clip | learning rate | median | worst seed | failed | largest logit |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for name in options.optimizers:
        rates = jnp.array(RATES[name])
        for label, limit in LIMITS.items():
            one = functools.partial(train, OPTIMIZERS[name], limit, options.steps, data)
            every = jax.vmap(jax.vmap(one, (0, 0, None)), (None, None, 0))
            first, last, tops = map(np.asarray, jax.jit(every)(params, keys, rates))
            for i, rate in enumerate(RATES[name]):
                found = np.sort(np.where(np.isfinite(last[i]), last[i], np.inf))
                failed = int(np.sum(~(last[i] < first[i])))
                cells = [f"{found[len(found) // 2]:.3f}", f"{found[-1]:.3f}"]
                cells += [f"{failed} of {len(SEEDS)}", f"{np.max(tops[i]):.3g}"]
                print(f"| {name} | {label} | {rate} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
