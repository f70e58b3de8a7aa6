"""A tree as plain data and a list of leaves, and back; no code of the tree is needed or run."""

import sys
from collections.abc import Callable
from typing import Any

import jax

Encode = Callable[[Any], Any]

# Their states are tuples of arrays, and are made again as what they were.
_KNOWN = ("clipgrad", "optax")


def to_data(tree: Any, leaf: Encode) -> Any:
    """The tree as JSON has it, with ``leaf(x)`` for each leaf."""
    if tree is None:
        return {"none": True}
    entries, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if len(entries) == 1 and not entries[0][0]:
        return {"leaf": leaf(tree)}
    children = [[_key_name(path[0]), to_data(child, leaf)] for path, child in entries]
    if isinstance(tree, dict):
        return {"dict": children}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [child for _, child in children]}
    kind = type(tree)
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": children}


def from_data(data: Any, leaf: Encode) -> Any:
    """The tree: dictionaries, lists and tuples, and states of optax and of this library.

    Objects of other classes come back as dictionaries of their fields.
    """
    if "none" in data:
        return None
    if "leaf" in data:
        return leaf(data["leaf"])
    for kind in (list, tuple):
        if kind.__name__ in data:
            return kind(from_data(child, leaf) for child in data[kind.__name__])
    if "dict" in data:
        return {key: from_data(child, leaf) for key, child in data["dict"]}
    fields = {key: from_data(child, leaf) for key, child in data["fields"]}
    known = _known_tuple(data["class"], set(fields))
    return known(**fields) if known else fields


def _known_tuple(path: str, fields: set[str]) -> Any:
    """The class, if it is a tuple with these names that is imported already."""
    module, _, name = path.partition(":")
    found = getattr(sys.modules.get(module), name, None) if module.split(".")[0] in _KNOWN else None
    is_tuple = isinstance(found, type) and issubclass(found, tuple)
    return found if is_tuple and fields == set(getattr(found, "_fields", ())) else None


def _key_name(key: Any) -> Any:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            name = getattr(key, attribute)
            return name if isinstance(name, str | int) else str(name)
    return str(key)
