"""Trees with models of NNX and Equinox as arguments and results of `jax.jit`."""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax

from clipgrad._frameworks.equinox import has_modules
from clipgrad._frameworks.nnx import is_model, is_module
from clipgrad._trees import is_array


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
        tree = jax.tree.map(_static_leaf, tree, is_leaf=is_model)
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_model)
    models = [x for x in leaves if is_model(x)]
    if not any(map(is_module, models)):
        return tree  # variables alone, as in an `nnx.State`, are nodes of a tree already
    graph, state = sys.modules["flax.nnx"].split(models)
    return Packed(state, tuple(None if is_model(x) else x for x in leaves), graph, structure)


def from_static(tree: Any) -> Any:
    """The tree with all its leaves; its NNX models are new objects."""
    if isinstance(tree, Packed):
        models = iter(sys.modules["flax.nnx"].merge(tree.graph, tree.state))
        tree = tree.structure.unflatten(next(models) if x is None else x for x in tree.leaves)

    def is_leaf(x: Any) -> bool:
        return isinstance(x, Static) or is_model(x)

    def value(x: Any) -> Any:
        return x.value if isinstance(x, Static) else x

    return jax.tree.map(value, tree, is_leaf=is_leaf)


def with_leaves(tree: Any, leaves: Sequence[Any]) -> Any:
    """A tree with other leaves; a variable that NNX models have in several places stays one."""
    copy = jax.tree.structure(tree).unflatten(leaves)
    models = [x for x in jax.tree.leaves(tree, is_leaf=is_model) if is_model(x)]
    if not models:
        return copy
    nnx: Any = sys.modules["flax.nnx"]
    graph, state = nnx.split(models)
    copies = [x for x in jax.tree.leaves(copy, is_leaf=is_model) if is_model(x)]
    known = dict(nnx.to_flat_state(nnx.split(copies)[1]))
    merged = iter(
        nnx.merge(graph, nnx.from_flat_state([(p, known[p]) for p, _ in nnx.to_flat_state(state)]))
    )
    return jax.tree.map(lambda x: next(merged) if is_model(x) else x, copy, is_leaf=is_model)


def _static_leaf(x: Any) -> Any:
    return x if is_array(x) or is_model(x) else Static(type(x), x)
