"""Which leaves of a tree are clipped, and what their paths are called."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def takes_part(leaf: Any) -> bool:
    """Whether a leaf is measured and clipped: floating or complex numbers are, nothing else.

    ``None``, integers, booleans, ``float0``, PRNG keys and objects that are no arrays pass
    through every clip untouched.
    """
    if isinstance(leaf, (float, complex)):
        return True
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def is_none(leaf: Any) -> bool:
    """``is_leaf`` for trees in which ``None`` holds a place."""
    return leaf is None


def partition(tree: Any, chosen: Callable[[Any], bool] | Sequence[bool]) -> tuple[Any, Any]:
    """Takes leaves out of a tree: a tree of those that are chosen and a tree of the others.

    Each has the structure of ``tree``, with ``None`` in the gaps; `combine` undoes it.

    Args:
      tree: a pytree; ``None`` in it counts as a leaf.
      chosen: a function of a leaf, or for each leaf whether it is chosen.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_none)
    flags = [chosen(leaf) for leaf in leaves] if callable(chosen) else chosen
    pairs = list(zip(leaves, flags, strict=True))
    return (
        structure.unflatten([leaf if flag else None for leaf, flag in pairs]),
        structure.unflatten([None if flag else leaf for leaf, flag in pairs]),
    )


def combine(first: Any, second: Any) -> Any:
    """The leaves of ``first``, and those of ``second`` where it has ``None``."""
    return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=is_none)


def leaves_taking_part(tree: Any) -> list[jax.Array]:
    """The leaves of ``tree`` that are measured and clipped, as arrays."""
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if takes_part(leaf)]


def paths_taking_part(tree: Any) -> tuple[list[str], list[jax.Array]]:
    """The paths and the leaves that are measured and clipped."""
    paths, leaves, _ = with_paths(tree)
    pairs = [(p, _array(x)) for p, x in zip(paths, leaves, strict=True) if takes_part(x)]
    return [path for path, _ in pairs], [leaf for _, leaf in pairs]


def map_taking_part(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """``jax.tree.map`` over the leaves that are clipped; the others come back as they are."""
    return jax.tree.map(
        lambda leaf, *others: f(jnp.asarray(leaf), *others) if takes_part(leaf) else leaf,
        tree,
        *rest,
        is_leaf=is_none,
    )


def _array(leaf: Any) -> Any:
    """The leaf as an array; a `jax.ShapeDtypeStruct` stands for one."""
    return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)


def path_string(path: Any) -> str:
    """The path of a leaf as text: ``"layers/0/kernel"``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def unboxed(path: str) -> str:
    """The path without the ``/value`` at its end that flax variables have in some trees."""
    return path.removesuffix("/value")


def with_paths(tree: Any) -> tuple[list[str], list[Any], Any]:
    """The paths, leaves (``None`` included) and structure of ``tree``."""
    entries, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_none)
    return [path_string(path) for path, _ in entries], [leaf for _, leaf in entries], structure


def map_groups(f: Callable[..., list[Any]], tree: Any, *rest: Any) -> Any:
    """Maps ``f(paths, leaves, ...)`` over the leaves that are clipped, all of them at once.

    Raises:
      ValueError: if a tree in ``rest`` has another structure.
    """
    paths, leaves, structure = with_paths(tree)
    others = [_like(structure, other) for other in rest]
    chosen = [i for i, leaf in enumerate(leaves) if takes_part(leaf)]
    arrays = [jnp.asarray(leaves[i]) for i in chosen]
    results = f([paths[i] for i in chosen], arrays, *([o[i] for i in chosen] for o in others))
    for i, result in zip(chosen, results, strict=True):
        leaves[i] = result
    return structure.unflatten(leaves)


def _like(structure: Any, other: Any) -> list[Any]:
    try:
        return structure.flatten_up_to(other)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"params: got another structure than that of the gradients, {structure}: {error}"
        ) from None
