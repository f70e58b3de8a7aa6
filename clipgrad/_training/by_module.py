"""Statistics by module: of the gradients of its parameters, and of the cotangents of its values."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._clip import ClipStats, GradientClipState, SkipSpikesState, stats_dtype
from clipgrad._trees import check_leaves, clippable_leaves, clippable_paths, instances, unboxed
from clipgrad._values import ValueStats

GRAD, COTANGENT, _VALUES = "grad", "cotangent", "values"
_BY_NAME = ClipStats | ValueStats | GradientClipState | SkipSpikesState


def by_module(tree: Any) -> Any:
    """Statistics under names that say what was measured, parameters' added up by module.

    A tree without statistics is one of gradients.
    """
    is_metrics = isinstance(tree, Mapping) and {"clips", "grads"} & set(tree)
    if not is_metrics and not instances(tree, _BY_NAME):
        return {GRAD: _module_norms(tree)}
    return _regrouped(tree)


def _regrouped(tree: Any) -> Any:
    if type(tree) in (tuple, list):
        return tuple(map(_regrouped, tree))
    if not isinstance(tree, Mapping):
        return jax.tree.map(
            _clip_by_module, tree, is_leaf=lambda x: isinstance(x, GradientClipState)
        )
    found: dict[Any, Any] = {}
    for key, value in tree.items():
        if isinstance(value, ClipStats):
            found.setdefault(COTANGENT, {})[key] = value
        elif isinstance(value, ValueStats):
            found.setdefault(_VALUES, {})[key] = value
        elif key == _VALUES and isinstance(value, Mapping):
            found.setdefault(_VALUES, {}).update(value)
        elif key == "error_clip":
            found.setdefault(COTANGENT, {}).update(value)
        elif key == "grads":
            found[GRAD] = _module_norms(value)
        else:
            found[key] = value if key == "clips" else _regrouped(value)
    return found


def _clip_by_module(state: Any) -> Any:
    if not isinstance(state, GradientClipState) or not state.leaf_stats:
        return state
    sums = _sums(state.leaf_stats)
    return state._replace(leaf_stats={f"{GRAD}/{m}": s for m, s in sums.items() if m})


def _module_norms(grads: Any) -> dict[str, dict[str, jax.Array]]:
    check_leaves("tree", grads)
    dtype, leaves = stats_dtype(grads), clippable_leaves(grads)
    stats = [ClipStats.of(leaf, leaf, dtype) for leaf in leaves]
    sums = _sums(dict(zip(clippable_paths(grads), stats, strict=True)))
    return {m: {"norm": s.norm, "nonfinite": s.nonfinite} for m, s in sums.items()}


def _sums(leaves: dict[str, ClipStats]) -> dict[str, ClipStats]:
    """The statistics of each module, with all parameters in it and in those inside it."""
    parts: dict[str, list[ClipStats]] = {}
    for path, stats in leaves.items():
        segments = unboxed(path).split("/")
        for depth in range(len(segments)):
            parts.setdefault("/".join(segments[:depth]), []).append(stats)
    add = functools.partial(jax.tree.map, jnp.add)
    return {module: functools.reduce(add, stats) for module, stats in parts.items()}
