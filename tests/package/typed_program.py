"""A program with types as a user writes it: pyright and mypy read it, nothing runs it.

`.ci/types` has them read it beside the installed package. A line is an error if, and only if, its
comment says so.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipgrad as cg
from clipgrad.types import ClipStats, Patterns, Threshold, Where

Params = dict[str, jax.Array]


def loss(params: Params, batch: jax.Array) -> jax.Array:
    return jnp.sum(params["w"] * batch)


params: Params = {"w": jnp.zeros(2)}
grads: Params = jax.grad(loss)(params, jnp.ones(2))

# A threshold is a number, an array, a schedule, or one that adapts: of a class and of a function.
schedule = optax.linear_schedule(1.0, 0.5, transition_steps=10)
thresholds: list[Threshold] = [1, 1.0, jnp.ones(()), np.float32(1), schedule]
thresholds += [cg.PercentileThreshold(90), cg.ZScoreThreshold(feed="raw"), cg.EMAThreshold()]
for threshold in thresholds:
    cg.clip_by_norm(threshold)
    cg.ClipByGlobalNorm(threshold)
cg.clip_by_norm("1.0")  # error
cg.ClipByGlobalNorm("1.0")  # error
cg.ClipByValue(1.0, nan=None, min=schedule)
cg.clip_by_value(1.0, -1.0, nan=0.0)
cg.AdaptiveClip(0.01, axis=lambda path, leaf: -1 if path.endswith("embedding") else None)
cg.AdaptiveClip(0.01, axis="last")  # error
cg.ClipByNorm(1.0, axes=0)  # error
cg.adaptive_grad_clip(0.01, eps=cg.HistoryThreshold())  # error
cg.PercentileThreshold(90, feed="raw")
cg.PercentileThreshold(90, feed="clip")  # error


class LargestSoFar:
    def init(self, norms: jax.Array) -> jax.Array:
        return norms

    def update(self, state: Any, norms: jax.Array) -> tuple[jax.Array, jax.Array]:
        return state, jnp.fmax(state, norms)


cg.clip_by_global_norm(LargestSoFar())
cg.clip_by_global_norm(optax.sgd(1.0))  # error: not of mypy, which knows no types of optax

# Leaves are selected by patterns, by a tree of booleans, or by a function of the tree.
patterns: Patterns = ("blocks/*/kernel", "!bias", re.compile("layer_[0-3]"))
selections: list[Where] = [None, "kernel", patterns, {"w": True}, True, lambda tree: tree]
for where in selections:
    cg.clip_by_global_norm(1.0, where=where)
    cg.clip_grads(grads, cg.ClipByNorm(1.0), where=where)
cg.clip_by_global_norm(1.0, where=3)  # error
cg.clip_by_global_norm(1.0, were="kernel")  # error

# Options are words.
cg.clip_by_global_norm(1.0, nonfinite="zero", stats="per_leaf")
cg.clip_by_global_norm(1.0, nonfinite="zeros")  # error
cg.clip_by_block_rms(1.0, stats="per-leaf")  # error
cg.gradient_clip(cg.AutoNorm(), nonfinite="raise")  # error
cg.gradient_clip("norm")  # error
cg.clip_grads(grads, cg.ClipByNorm(1.0), nonfinite="skip")  # error
cg.published.gradient_clipping("adaptive", 0.01)
cg.published.gradient_clipping("agc", 0.01)  # error
cg.skip_spikes(optax.sgd(0.1), judge="update", halt="spike")
cg.skip_spikes(optax.sgd(0.1), judge="updates")  # error
cg.skip_spikes(optax.sgd(0.1), halt="spikes")  # error
cg.watch_updates(optax.sgd(0.1), by=2, stacked="blocks")
cg.watch_updates(optax.sgd(0.1), by="modules")  # error
cg.global_norm(grads, ord=jnp.inf)
cg.global_norm(grads, norm_type=2)  # error

each = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0), reduce="sum", method="auto")
cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0), reduce="total")  # error
cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0), nonfinite="ignore")  # error
cg.per_example_norms(loss, method="best")  # error
report = cg.check_grads(loss, (params, jnp.ones(2)), mode="full", wrt="w")
cg.check_grads(loss, (params, jnp.ones(2)), mode="quick")  # error
cg.check_grads(loss, (params, jnp.ones(2)), order=3)  # error
print(report.ok, cg.compare(loss, "float32", (params, jnp.ones(2))).ok)
print(cg.diagnose(loss, (params, jnp.ones(2))).message)
cg.diagnose(loss, params)  # error

# What comes back has types.
clipped, stats = cg.clip_grads(grads, cg.ClipByGlobalNorm(1.0))
total: ClipStats = stats
norm: jax.Array = stats.norm
text: str = stats.norm  # error
rule: cg.ClipRule = cg.ClipByNorm(1.0)
print(cg.ClipByNorm(1.0).maxnorm)  # error
print(stats.zeros)  # error
tx: optax.GradientTransformation = optax.chain(cg.clip_by_norm(1.0), cg.ClipByNorm(1.0))
step = cg.train_step(loss, tx, error_clip={"h": cg.ErrorClipByValue(5.0), "out": None})
state, metrics = step(step.init(params), jnp.ones(2))
new: Any = state.params
cg.train_step(loss, tx, error_clip=cg.ErrorClipByValue(5.0))  # error
cg.train_step(loss, tx, acumulate=2)  # error


# A decorated function keeps its signature.
@cg.error_clip({"h": cg.ErrorClipByValue(max=5.0)})
def cell(w: jax.Array, h: jax.Array) -> jax.Array:
    return w * h


hidden: jax.Array = cell(jnp.ones(2), h=jnp.ones(2))
cell(jnp.ones(2), x=jnp.ones(2))  # error
jax.grad(cg.error_clip_by_name(loss, {"hidden": cg.ErrorClipByValue(max=5.0)}))
cg.error_clip_by_name(loss, cg.ErrorClipByValue(max=5.0))  # error
cg.value_and_grad_with_stats(loss, watch=["hidden", re.compile("attn")])
cg.list_names(loss, (params, jnp.ones(2)))
cg.list_names(loss, params)  # error
cg.clip_gradients(grads)  # error
