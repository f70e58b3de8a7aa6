"""Trees with models of NNX and Equinox as arguments and results of `jax.jit`."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

import clipgrad._flax as flax
from clipgrad._arrays import is_array
from clipgrad._flax import is_model
from clipgrad._frameworks.equinox import has_modules
from clipgrad._frameworks.nnx import models_in, objects_in


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A leaf that is no array, as a part of the structure: `jax.jit` takes it, and compares it."""

    kind: type
    value: Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["state", "leaves"],
    meta_fields=["graph", "structure"],
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """A tree with NNX models: their state, in which each variable is there once."""

    state: Any
    leaves: tuple[Any, ...]  # a model is `None`
    graph: Any
    structure: Any


def as_static(tree: Any) -> Any:
    """A tree with models whose leaves are arrays alone; `from_static` undoes it."""
    if has_modules(tree):
        static = lambda x: x if is_array(x) or is_model(x) else Static(type(x), x)  # noqa: E731
        tree = jax.tree.map(static, tree, is_leaf=is_model)
    models = models_in(tree)
    if not objects_in(models):
        return tree  # variables alone, as in an `nnx.State`, are nodes of a tree already
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_model)
    graph, state = flax.split(models)
    return Packed(state, tuple(None if is_model(x) else x for x in leaves), graph, structure)


def from_static(tree: Any) -> Any:
    """The tree with all its leaves; its NNX models are new objects."""
    if isinstance(tree, Packed):
        models = iter(flax.merge(tree.graph, tree.state))
        tree = tree.structure.unflatten(next(models) if x is None else x for x in tree.leaves)
    return jax.tree.map(
        lambda x: x.value if isinstance(x, Static) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Static) or is_model(x),
    )


def with_leaves(tree: Any, leaves: Sequence[Any]) -> Any:
    """A tree with other leaves; a variable that NNX models have in several places stays one."""
    copy = jax.tree.structure(tree).unflatten(leaves)
    if not (models := models_in(tree)):
        return copy
    graph, state = flax.split(models)
    known = dict(flax.flat_state(flax.split(models_in(copy))[1]))
    new = flax.from_flat_state([(path, known[path]) for path, _ in flax.flat_state(state)])
    merged = iter(flax.merge(graph, new))
    return jax.tree.map(lambda x: next(merged) if is_model(x) else x, copy, is_leaf=is_model)
