"""The arguments of a run: copies, since a function may donate them."""

from typing import Any

import jax

from clipgrad._trees import is_array


def copied(tree: Any) -> Any:
    """The tree with copies of its arrays, with the same types and layouts."""
    return jax.tree.map(lambda x: x.copy() if is_array(x) else x, tree)
