"""Taking the arrays out of a tree, so that the rest can be hashed."""

from typing import Any, NamedTuple

import jax

from clipgrad._jaxpr._trace import is_array


class Split(NamedTuple):
    """A tree without its arrays; equal to that of a tree equal but for them."""

    structure: Any
    fixed: tuple[Any, ...]

    def given(self, arrays: list) -> Any:
        """The tree with arrays in the places of those that were taken out."""
        rest = iter(arrays)
        leaves = [next(rest) if leaf is None else leaf for leaf in self.fixed]
        return self.structure.unflatten(leaves)


def split(tree: Any) -> tuple[Split, list]:
    """Return a tree without its arrays, and the arrays."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    fixed = tuple(None if is_array(leaf) else leaf for leaf in leaves)
    return Split(structure, fixed), arrays
