"""The task of convolutions in which_clip.md, measured anew: python docs/convolutions.py.

A small residual network of convolutions without normalization reads scikit-learn's digits, for the
same number of epochs in large and in small batches, by SGD with momentum. Each way to clip has its
own best rate and threshold, chosen on two seeds, and is trained on five others. The results are
written to which_clip.json.
"""

import functools
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import clipgrad as cg

DATA = pathlib.Path(__file__).with_name("which_clip.json")
TRAIN, EPOCHS, WIDTH, BLOCKS = 1400, 30, 12, 5
BATCHES = {"large": 700, "small": 35}
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
SWEEP, COMPARISON = (200, 201), (10, 11, 12, 13, 14)
GOAL = 0.9


def all_but_the_last(threshold: Any) -> optax.GradientTransformation:
    """The last layer is not clipped, as Brock and others advise."""
    return cg.adaptive_grad_clip(threshold, where=lambda tree: {k: k != "out" for k in tree})


# The clip of each way, and the thresholds that are tried.
WAYS: dict[str, tuple[Any, tuple[float | None, ...]]] = {
    "no clip": (lambda _: cg.gradient_clip(None), (None,)),
    "norm": (cg.clip_by_global_norm, (0.1, 0.3, 1.0)),
    "value": (cg.clip_by_value, (0.003, 0.01, 0.03)),
    "adaptive": (cg.adaptive_grad_clip, (0.01, 0.04, 0.16)),
    "adaptive, not the last layer": (all_but_the_last, (0.01, 0.04, 0.16)),
}


def digits() -> tuple[jax.Array, jax.Array]:
    """Images and labels in a fixed order."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = images[order].reshape(-1, 8, 8, 1) / 16
    return jnp.asarray(images, jnp.float32), jnp.asarray(labels[order], jnp.int32)


def init(seed: int) -> dict[str, Any]:
    """He's initialization; nothing scales the branches of the blocks down."""
    random = np.random.default_rng(seed)

    def kernel(size: int, inputs: int) -> jax.Array:
        scale = (2 / (size * size * inputs)) ** 0.5
        return jnp.asarray(
            random.normal(scale=scale, size=(size, size, inputs, WIDTH)), jnp.float32
        )

    blocks = {f"block_{i}": kernel(3, WIDTH) for i in range(BLOCKS)}
    out = random.normal(scale=WIDTH**-0.5, size=(WIDTH, 10))
    return {"in": kernel(2, 1), **blocks, "out": jnp.asarray(out, jnp.float32)}


def convolved(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution as one product, which is quick on a CPU."""
    size, height = len(kernel), x.shape[1]
    if stride == 1:
        x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows = [
        x[:, i : i + height : stride, j : j + height : stride]
        for i in range(size)
        for j in range(size)
    ]
    return jnp.concatenate(rows, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])


def logits(params: dict[str, Any], images: jax.Array) -> jax.Array:
    """A residual network without normalization."""
    x = convolved(images, params["in"], stride=2)
    for i in range(BLOCKS):
        x = x + convolved(jax.nn.relu(x), params[f"block_{i}"])
    return jax.nn.relu(x).mean((1, 2)) @ params["out"]


def loss(params: dict[str, Any], batch: Any) -> jax.Array:
    """In nats."""
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


@functools.partial(jax.jit, static_argnums=(0, 1))
def accuracy(way: str, size: int, rate: Any, threshold: Any, params: Any, key: Any) -> jax.Array:
    """The share of unseen digits that are read after the training; NaN after an infinity."""
    images, labels = digits()
    optimizer = optax.chain(WAYS[way][0](threshold), optax.sgd(rate, momentum=0.9))

    def step(carry: Any, batch: jax.Array) -> tuple[Any, None]:
        params, state = carry
        part = lambda chosen: jax.grad(loss)(params, (images[chosen], labels[chosen]))  # noqa: E731
        # In parts that stay in the cache, which is quicker.
        grads = jax.lax.map(part, batch.reshape(-1, BATCHES["small"]))
        grads = jax.tree.map(lambda x: x.mean(0), grads)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def epoch(carry: Any, key: Any) -> tuple[Any, None]:
        order = jax.random.permutation(key, TRAIN).reshape(-1, size)
        return jax.lax.scan(step, carry, order)

    keys = jax.random.split(key, EPOCHS)
    (params, _), _ = jax.lax.scan(epoch, (params, optimizer.init(params)), keys)
    found = logits(params, images[TRAIN:])
    right = (found.argmax(-1) == labels[TRAIN:]).mean()
    return jnp.where(jnp.isfinite(found).all(), right, jnp.nan)


def trained(way: str, size: int, rate: float, threshold: float | None, seed: int) -> float | None:
    """One training; None for NaN."""
    found = float(accuracy(way, size, rate, threshold, init(seed), jax.random.key(seed)))
    return round(found, 4) if np.isfinite(found) else None


def measured(way: str, size: int) -> dict[str, Any]:
    """The sweep of a way, its best rate and threshold, and what they reach on the other seeds."""
    start = time.perf_counter()
    grid = [(rate, threshold) for rate in RATES for threshold in WAYS[way][1]]
    sweep = {pair: [trained(way, size, *pair, seed) for seed in SWEEP] for pair in grid}
    best = max(grid, key=lambda pair: np.mean([x or 0.0 for x in sweep[pair]]))
    found = [trained(way, size, *best, seed) for seed in COMPARISON]
    return {
        "sweep": [
            {"rate": rate, "threshold": threshold, "accuracy": sweep[rate, threshold]}
            for rate, threshold in grid
        ],
        "best": dict(zip(("rate", "threshold"), best, strict=True)),
        "metrics": {"accuracy": found, "reached": [float((x or 0) >= GOAL) for x in found]},
        "seconds": round(time.perf_counter() - start),
    }


def main() -> None:
    """Measures both sizes of batches, and writes them beside the other tasks."""
    for name, size in BATCHES.items():
        ways = {}
        for way in WAYS:
            ways[way] = measured(way, size)
            print(name, way, *ways[way].values(), flush=True)
        data = json.loads(DATA.read_text())
        task = {"goal": f"accuracy >= {GOAL}", "metric": "accuracy", "ways": ways}
        data["tasks"][f"convolutions, {name} batches"] = task
        DATA.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
