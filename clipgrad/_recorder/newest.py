"""The trees that were recorded last, for as long as they are there."""

import weakref
from typing import Any

import jax


class Newest:
    """Trees whose arrays are not kept alive."""

    def __init__(self, trees: dict[str, Any]) -> None:
        leaves, self._structure = jax.tree.flatten(trees)
        self._leaves = [_reference(leaf) for leaf in leaves]

    def alive(self) -> dict[str, Any]:
        """The trees; empty if an array of them is gone or was donated."""
        leaves = [leaf() for leaf in self._leaves]
        if any(
            leaf is None or isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves
        ):
            return {}
        trees = self._structure.unflatten(leaves)
        return {name: tree for name, tree in trees.items() if tree is not None}


def _reference(leaf: Any) -> Any:
    try:
        return weakref.ref(leaf)
    except TypeError:  # numbers, which are small
        return lambda: leaf
