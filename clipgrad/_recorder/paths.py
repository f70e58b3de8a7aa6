"""The leaves of a tree by their paths, and a tree made of such leaves: nested dictionaries and
lists, or one like a tree of the user's.

A path is a tuple of text, for a key or an attribute, and of integers. Trees of two kinds are
compared by paths of text alone, since a list may come back as a dictionary. No path is ever joined
but for a message: a key may have a "/".
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from clipgrad._arrays import check_tree, is_array, leaves_with_keys
from clipgrad._errors import first_few
from clipgrad._frameworks import with_leaves

Path = tuple[str | int, ...]
TextPath = tuple[str, ...]
_STORED = bool | int | float | complex | str | np.generic | jax.ShapeDtypeStruct


def leaves_by_path(name: str, tree: Any) -> dict[Path, Any]:
    """The leaves of a tree; `None` and empty containers are leaves too.

    A flax box, such as ``nnx.Variable`` or ``flax.linen.Partitioned``, is replaced by its content.
    """
    check_tree(name, tree)
    leaves: dict[Path, Any] = {}
    for keys, leaf in leaves_with_keys(tree, lambda x: not is_value(x)):
        path = tuple(_plain_key(name, key) for key in keys)
        if path in leaves:
            raise ValueError(f"{name}: got several parts of one key at {path_text(path)!r}")
        leaves[path] = leaf
    return leaves


def is_value(leaf: Any) -> bool:
    """Whether a leaf holds something: it is not `None`, and no empty container."""
    return leaf is not None and not (isinstance(leaf, dict | list | tuple) and not leaf)


def path_text(path: Path) -> str:
    """A path as messages show it."""
    return "/".join(map(str, path))


def text_path(path: Path) -> TextPath:
    """A path as all containers share it."""
    return tuple(map(str, path))


def _plain_key(name: str, key: Any) -> str | int:
    plain = next((getattr(key, n) for n in ("name", "key", "idx") if hasattr(key, n)), str(key))
    if type(plain) not in (str, int):
        raise TypeError(
            f"{name}: got the dictionary key {plain!r:.60} of type {type(plain).__name__}, "
            "expected text or integers as keys"
        )
    return plain


class _Parts(dict):
    """A container, in the making."""


def nested(leaves: Mapping[Path, Any]) -> Any:
    """The tree of these leaves: lists where the keys are 0, 1, ..., and dictionaries."""
    whole = _Parts()
    for path, leaf in leaves.items():
        node = whole
        for key in path[:-1]:
            node = node.setdefault(key, _Parts())
        node[path[-1]] = leaf
    return _contained(whole)


def _contained(node: Any) -> Any:
    if type(node) is not _Parts:
        return node
    parts = {key: _contained(part) for key, part in node.items()}
    if set(parts) == set(range(len(parts))):
        return [parts[i] for i in range(len(parts))]
    is_mixed = len(set(map(type, parts))) > 1  # JAX sorts keys
    return {str(key): part for key, part in parts.items()} if is_mixed else parts


def restored(like: Any, tree: Any, name: str) -> Any:
    """A tree like ``like`` with the leaves of ``tree``, by their paths, and its shardings."""
    known, wanted = _held_values(name, tree), _held_values("like", like)
    more = [path for path, leaf in wanted.items() if path not in known and _is_stored(leaf)]
    less = [path for path in known if path not in wanted]
    if more or less:
        raise ValueError(
            f"like: got a tree with other paths than {name} of the capture: {listed(more)} only in "
            f"the tree, {listed(less)} only in the capture; expected its paths: {listed(known)}"
        )
    leaves = [_leaf_like(p, leaf, known[p]) if p in known else leaf for p, leaf in wanted.items()]
    return with_leaves(like, leaves)


def _leaf_like(path: TextPath, leaf: Any, other: Any) -> Any:
    got, expected = (
        (tuple(getattr(x, "shape", ())), str(getattr(x, "dtype", type(x).__name__)))
        for x in (leaf, other)
    )
    is_single = not hasattr(leaf, "shape") or not hasattr(other, "shape")
    if got != expected and not (is_single and got[0] == expected[0] == ()):
        raise ValueError(
            f"like: got {got[1]}{list(got[0])} at {path_text(path)!r}, expected "
            f"{expected[1]}{list(expected[0])} as in the capture"
        )
    sharding = getattr(leaf, "sharding", None)
    is_there = sharding is None or getattr(other, "sharding", None) == sharding
    return other if is_there else jax.device_put(other, sharding)


def _held_values(name: str, tree: Any) -> dict[TextPath, Any]:
    """The leaves that hold something, in JAX's order, by paths that all containers share."""
    return {text_path(p): x for p, x in leaves_by_path(name, tree).items() if is_value(x)}


def stored_leaves(name: str, tree: Any) -> dict[TextPath, Any]:
    """The leaves that a capture has; functions, for example, are left out."""
    return {path: x for path, x in _held_values(name, tree).items() if _is_stored(x)}


def _is_stored(leaf: Any) -> bool:
    return isinstance(leaf, _STORED) or is_array(leaf)


def listed(paths: Iterable[TextPath]) -> str:
    return first_few([repr(path_text(path) or "one leaf") for path in paths], 5) or "none"
