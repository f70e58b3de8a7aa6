"""``where``: which leaves of a tree are measured and scaled."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from clipgrad._trees import is_none, takes_part, unboxed, with_paths

Where = Any | Callable[[Any], Any] | str | None


def selected(where: Where, tree: Any, name: str = "where") -> list[bool]:
    """For each leaf of ``tree`` (``None`` included) whether ``where`` selects it.

    Args:
      where: ``None`` (all), a tree of booleans that is a prefix of ``tree``, a function from
        ``tree`` to one, or a regular expression that is searched in the paths, with and without
        the ``/value`` at their end: flax NNX has it in its parameters and not in its gradients.
      tree: the tree of gradients.
      name: what the argument is called.

    Raises:
      ValueError: if leaves that could be clipped are all left out, or a mask is no prefix.
      TypeError: if a mask holds anything else than booleans.
    """
    paths, leaves, structure = with_paths(tree)
    if where is None:
        return [True] * len(leaves)
    if isinstance(where, str):
        flags = [_matches(_pattern(where, name), path) for path in paths]
    else:
        flags = _flags(where(tree) if callable(where) else where, tree, structure, name)
    candidates = [path for path, leaf in zip(paths, leaves, strict=True) if takes_part(leaf)]
    if candidates and not any(
        f and takes_part(leaf) for f, leaf in zip(flags, leaves, strict=True)
    ):
        raise ValueError(f"{name}: {_shown(where)} selects none of the leaves {candidates}")
    return flags


def keep_selected(tree: Any, flags: list[bool]) -> Any:
    """``tree`` with ``None`` in place of the leaves that are not selected."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_none)
    return structure.unflatten(
        [leaf if flag else None for leaf, flag in zip(leaves, flags, strict=True)]
    )


def put_back(clipped: Any, tree: Any, flags: list[bool]) -> Any:
    """``clipped`` with the leaves of ``tree`` where those were not selected."""
    originals, structure = jax.tree.flatten(tree, is_leaf=is_none)
    results = structure.flatten_up_to(clipped)
    pairs = zip(results, originals, flags, strict=True)
    return structure.unflatten([r if flag else leaf for r, leaf, flag in pairs])


def _matches(pattern: re.Pattern[str], path: str) -> bool:
    return any(pattern.search(text) for text in (path, unboxed(path)))


def _pattern(where: str, name: str) -> re.Pattern[str]:
    try:
        return re.compile(where)
    except re.error as error:
        raise ValueError(f"{name}: {where!r} is no regular expression: {error}") from None


def _flags(mask: Any, tree: Any, structure: Any, name: str) -> list[bool]:
    each, prefix = jax.tree.flatten(mask, is_leaf=is_none)
    for flag in each:
        if flag is not None and not isinstance(flag, (bool, np.bool_)):
            raise TypeError(
                f"{name}: got {flag!r} of type {type(flag).__name__} in the mask, expected True or "
                "False for each leaf or subtree"
            )
    try:
        parts = prefix.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{name}: got a mask of the structure {prefix}, which is no prefix of {structure}: "
            f"{error}"
        ) from None
    for flag, part in zip(each, parts, strict=True):
        if flag is None and jax.tree.leaves(part):
            raise ValueError(
                f"{name}: got None in the mask where the tree has leaves, expected bool"
            )
    sizes = [len(jax.tree.leaves(part, is_leaf=is_none)) for part in parts]
    return [bool(flag) for flag, size in zip(each, sizes, strict=True) for _ in range(size)]


def _shown(where: Where) -> str:
    return repr(where) if isinstance(where, str) else "the mask"
