"""The metrics of a training step: the loss, the norm, and what an optimizer's state has to say."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from clipgrad._arrays import count_nonfinite, global_norm, nearest_word
from clipgrad._training.optimizer_states import OptimizerStates, numbered

# Metrics that only some steps have, and what makes them.
_COMES_FROM = {
    **dict.fromkeys(
        ("clip", "clips", "clip_scale", "clipped_norm", "measured_norm"),
        "clip_by_global_norm(..., stats=True) or another clip in the optimizer",
    ),
    **dict.fromkeys(
        ("nonfinite_consecutive", "skip_spikes", "skipped", "skipped_consecutive"),
        "skip_spikes(optimizer)",
    ),
    "aux": "train_step(..., has_aux=True)",
    "error_clip": "train_step(..., error_clip=rules)",
    "leaves": 'clip_by_global_norm(..., stats="per_leaf") or another clip in the optimizer',
    "updates": "watch_updates(optimizer)",
    "values": "train_step(..., watch_values=names)",
}


class StepMetrics(dict[str, Any]):
    """The metrics of a step, a dictionary; an attribute is answered by the key to write."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            raise AttributeError(
                f"metrics: got .{name}, but they are a dictionary; write metrics[{name!r}]"
            )
        more = "" if name.startswith("_") else f"; {self._answer(name)}"
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{more}")

    def __missing__(self, name: Any) -> Any:
        raise KeyError(f"metrics: got [{name!r}], which is not there; {self._answer(name)}")

    def _answer(self, name: Any) -> str:
        if origin := _COMES_FROM.get(name):
            return f"metrics[{name!r}] comes from {origin}"
        near = nearest_word(str(name), list(self))
        return f"write metrics[{near!r}]" if near else f"there are {', '.join(self)}"


def _flatten_with_keys(metrics: StepMetrics) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    names = tuple(sorted(metrics))
    return [(jax.tree_util.DictKey(name), metrics[name]) for name in names], names


jax.tree_util.register_pytree_with_keys(
    StepMetrics,
    _flatten_with_keys,
    lambda names, values: StepMetrics(zip(names, values, strict=True)),
)


def step_metrics(loss: Any, grads: Any, states: OptimizerStates) -> dict[str, Any]:
    """The metrics of a loss, its gradients, and the states of the optimizer after the step."""
    metrics = {"loss": loss, "grad_norm": global_norm(grads, axis_name=())}
    metrics["nonfinite"] = count_nonfinite(grads)
    return metrics | _of_clips(states) | _of_skips(states) | states.updates


def shown_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics as a step returns them: inside of a transformation a plain dictionary."""
    records = [metrics[name] for name in numbered("clip", len(metrics.get("clips", ())))]
    leaves = [record["leaves"] for record in records if "leaves" in record]
    if leaves:  # of all clips together, without another buffer
        metrics = metrics | {"leaves": dict(itertools.chain(*map(dict.items, leaves)))}
    return metrics if isinstance(metrics["loss"], Tracer) else StepMetrics(metrics)


def _of_clips(states: OptimizerStates) -> dict[str, Any]:
    if not states.measured:
        return {}
    *_, last = states.measured.values()
    metrics = {"measured_norm": last.norm, "clipped_norm": last.clipped_norm}
    metrics |= {"clip_scale": last.scale, "clips": tuple(states.measured.values())}
    return metrics | {name: states.records[name] for name in states.measured}


def _of_skips(states: OptimizerStates) -> dict[str, Any]:
    skips = states.skips.values()
    if not skips:
        return {}
    metrics: dict[str, Any] = {name: states.records[name] for name in states.skips}
    metrics["skipped"] = jnp.stack([s.skipped for s in skips]).any()
    for name in ("skipped_consecutive", "nonfinite_consecutive"):
        metrics[name] = jnp.stack([getattr(s, name) for s in skips]).max()
    return metrics
