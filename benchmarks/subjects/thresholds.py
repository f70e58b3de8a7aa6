"""Adaptive thresholds and skipped steps in a compiled training, beside optax's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import clipgrad as cg
from benchmarks import models
from benchmarks.rows import FLOOR, OURS, PEER, Row, Scale, Side, jitted

TITLE = "Adaptive thresholds and skipped steps"
# Out of reach, so that all trainings must end at the same parameters.
LIMIT = 1e6


def clipped(threshold: Any) -> optax.GradientTransformation:
    """The plain chain with another threshold."""
    return optax.chain(cg.clip_by_global_norm(threshold), optax.adam(1e-3))


def optimizers() -> dict[str, tuple[str, optax.GradientTransformation]]:
    """Name: kind and optimizer."""
    plain = optax.chain(optax.clip_by_global_norm(LIMIT), optax.adam(1e-3))
    percentile = cg.PercentileThreshold(100.0, window=1024)
    average = cg.EMAThreshold(relative=LIMIT, absolute=LIMIT)
    by_leaf = optax.chain(cg.clip_by_norm(average), optax.adam(1e-3))
    return {
        "skip_spikes": (OURS, cg.skip_spikes(clipped(LIMIT), sigma=LIMIT)),
        "skip_spikes(sigma=None)": (OURS, cg.skip_spikes(clipped(LIMIT), sigma=None)),
        "PercentileThreshold": (OURS, clipped(percentile)),
        "ZScoreThreshold": (OURS, clipped(cg.ZScoreThreshold(z=LIMIT))),
        "EMAThreshold, by leaf": (OURS, by_leaf),
        "HistoryThreshold": (OURS, clipped(cg.HistoryThreshold(sigma=LIMIT))),
        "optax.apply_if_finite": (PEER, optax.apply_if_finite(plain, 5)),
        "optax chain": (FLOOR, plain),
    }


def training(tx: optax.GradientTransformation) -> Callable:
    """All steps in one scan; returns the parameters."""

    def train(params: Any, batches: jax.Array) -> Any:
        def step(carry: Any, batch: jax.Array) -> tuple[Any, None]:
            params, state = carry
            grads = jax.grad(models.mlp_loss)(params, batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), batches)[0][0]

    return train


def sides(steps: int) -> list[Side]:
    """A small MLP, so that what is measured is not lost in the gradient."""
    params = models.mlp_params([64, 64, 64, 64])
    batches = jax.random.normal(jax.random.key(2), (steps, 16, 64), jnp.float32)
    return [
        jitted(name, kind, training(tx), params, batches)
        for name, (kind, tx) in optimizers().items()
    ]


def rows(scale: Scale) -> list[Row]:
    """One training."""
    steps = scale(1000)
    return [Row(f"MLP of 12k, scan of {steps:,} steps", lambda: sides(steps), 1e-4, 12.0)]
