"""The trees that were recorded last, for as long as they are there."""

import weakref
from collections.abc import Mapping
from typing import Any

import jax

# The leaves and the structure of a tree.
Flat = tuple[list[Any], Any]


class Newest:
    """Trees whose arrays are not kept alive."""

    def __init__(self, trees: Mapping[str, Flat]) -> None:
        self._trees = {
            name: ([_reference(leaf) for leaf in leaves], structure)
            for name, (leaves, structure) in trees.items()
        }

    def alive(self) -> dict[str, Any]:
        """The trees; empty if an array of them is gone or was donated."""
        found = {}
        for name, (references, structure) in self._trees.items():
            leaves = [reference() for reference in references]
            if any(map(_is_gone, leaves)):
                return {}
            found[name] = structure.unflatten(leaves)
        return found


def _is_gone(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, jax.Array) and leaf.is_deleted()


def _reference(leaf: Any) -> Any:
    try:
        return weakref.ref(leaf)
    except TypeError:  # numbers, which are small
        return lambda: leaf
