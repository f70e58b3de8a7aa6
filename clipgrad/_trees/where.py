"""``where``: which leaves of a tree are measured and scaled."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from clipgrad._trees.overwritten import are_overwritten
from clipgrad._trees.selectors import nearest, selects
from clipgrad._trees.trees import check_tree, is_clippable, is_none, parts_below, with_paths

Where = Any | Callable[[Any], Any] | str | None


def selected(where: Where, tree: Any, name: str = "where") -> list[bool]:
    """For each leaf of ``tree`` (``None`` included) whether ``where`` selects it.

    ``where`` is ``None`` (all), a tree of booleans that is a prefix of ``tree``, a function from
    ``tree`` to one, or an expression on paths, see `selects`; ``name`` is the argument's.
    What a gradient overwrites is not selected by anything.
    """
    check_tree("tree", tree)
    trained = [not flag for flag in are_overwritten(tree)]
    if where is None:
        return trained
    entries = with_paths(tree)
    if isinstance(where, str):
        flags = selects(where, [path for path, _ in entries], name)
    else:
        flags = _flags(where(tree) if callable(where) else where, tree, name)
    flags = [flag and train for flag, train in zip(flags, trained, strict=True)]
    triples = zip(flags, trained, entries, strict=True)
    candidates = {path: f for f, train, (path, leaf) in triples if train and is_clippable(leaf)}
    if candidates and not any(candidates.values()):
        shown, wanted = (repr(where), where) if isinstance(where, str) else ("a mask", "")
        raise ValueError(
            f"{name}: got {shown}, expected one that selects a leaf; {nearest(wanted, candidates)}"
        )
    return flags


def _flags(mask: Any, tree: Any, name: str) -> list[bool]:
    each, prefix = jax.tree.flatten(mask, is_leaf=is_none)
    for flag in each:
        if flag is not None and not isinstance(flag, (bool, np.bool_)):
            raise TypeError(
                f"{name}: got {flag!r} of type {type(flag).__name__} in the mask, expected True or "
                "False for each leaf or subtree"
            )
    parts = parts_below(name, "a mask", prefix, tree)
    if any(flag is None and jax.tree.leaves(part) for flag, part in zip(each, parts, strict=True)):
        raise ValueError(
            f"{name}: got None in the mask where the tree has leaves, expected True or False"
        )
    sizes = [len(jax.tree.leaves(part, is_leaf=is_none)) for part in parts]
    return [bool(flag) for flag, size in zip(each, sizes, strict=True) for _ in range(size)]
