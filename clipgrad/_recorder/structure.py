"""A tree as plain data and a list of leaves, and back; no code of the tree is needed or run.

`parts` says what the parts of a tree are and what their keys are; writing and restoring ask it.
"""

import collections
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

Encode = Callable[[Any], Any]
Path = tuple[Any, ...]

# Their states are tuples of arrays, and are made again as what they were.
_KNOWN = ("clipgrad", "optax")
_KEYS = (str, bool, int, float, bytes)
# A reader needs a few frames of Python's stack, of which there are 1000, for each level.
MOST_LEVELS = 100


def parts(tree: Any) -> list[tuple[Any, Any]] | None:
    """The parts of a tree with their keys; ``None`` for a leaf."""
    entries, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if len(entries) == 1 and not entries[0][0]:
        return None
    names = ("name", "key", "idx")
    keys = [next((getattr(k, n) for n in names if hasattr(k, n)), str(k)) for (k,), _ in entries]
    # What is read is a dictionary, whose keys JAX sorts: those of `nnx.List` are names and numbers.
    keys = list(map(str, keys)) if set(map(type, keys)) == {str, int} else keys
    return list(zip(keys, (part for _, part in entries), strict=True))


def without_boxes(tree: Any) -> Any:
    """The contents of a box of flax, such as ``flax.linen.Partitioned``; else the tree."""
    kind = getattr(sys.modules.get("flax.core.meta"), "AxisMetadata", ())
    while isinstance(tree, kind):
        found = parts(tree)
        if not found or len(found) != 1:
            break
        tree = found[0][1]
    return tree


def entries(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of a tree, `None` left out, with their paths, in JAX's order."""
    tree = without_boxes(tree)
    found = parts(tree)
    if found is None:
        yield path, tree
        return
    for key, part in found:
        if part is not None:
            yield from entries(part, (*path, key))


def path_text(path: Path) -> str:
    return "/".join(map(str, path))


def to_data(name: str, tree: Any, leaf: Encode, path: Path = (), most: int = MOST_LEVELS) -> Any:
    """The tree as JSON has it, with ``leaf(x)`` for each leaf.

    Raises:
      TypeError: a key of a dictionary is of a type that can't be written.
      ValueError: there are too many levels, or two parts of one key.
    """
    tree = without_boxes(tree)
    found = None if tree is None else parts(tree)
    if len(path) > most:
        got = f"{name}: got a tree of more than {most} levels"
        raise ValueError(f"{got}, expected fewer; stack the arrays of the levels")
    if found is None:
        return {"none": True} if tree is None else {"leaf": leaf(tree)}
    where = f"{name}: got {{}} at {path_text(path)!r}" if path else f"{name}: got {{}}"
    for key, _ in found:
        if not _is_key(key):
            got = where.format(f"the dictionary key {key!r:.60} of type {type(key).__name__}")
            raise TypeError(f"{got}, expected text, numbers, bytes or tuples of them as keys")
    if len({repr(_key_data(key)) for key, _ in found}) < len(found):
        raise ValueError(f"{where.format(type(tree).__name__)} with several parts of one key")
    children = [
        [_key_data(key), to_data(name, part, leaf, (*path, key), most)] for key, part in found
    ]
    kind = type(tree)
    for container, known in _CONTAINERS.items():
        if kind is known:
            keyed = container in _MAPPINGS
            return {container: children if keyed else [child for _, child in children]}
    if isinstance(tree, dict):
        return {"dict": children}
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": children}


_CONTAINERS = {
    "dict": dict,
    "list": list,
    "tuple": tuple,
    "OrderedDict": collections.OrderedDict,
}
_MAPPINGS = ("dict", "OrderedDict")


def from_data(data: Any, leaf: Encode) -> Any:
    """The tree: dictionaries, lists and tuples, and states of optax and of this library.

    Objects of other classes come back as dictionaries of their fields.
    """
    if "none" in data:
        return None
    if "leaf" in data:
        return leaf(data["leaf"])
    for name, kind in _CONTAINERS.items():
        if name in data and name not in _MAPPINGS:
            return kind(from_data(child, leaf) for child in data[name])
        if name in data:
            return kind((_key_from(key), from_data(child, leaf)) for key, child in data[name])
    fields = {_key_from(key): from_data(child, leaf) for key, child in data["fields"]}
    known = _known_tuple(data["class"], set(fields))
    return known(**fields) if known else fields


def _known_tuple(path: str, fields: set[str]) -> Any:
    """The class, if it is a tuple with these names that is imported already."""
    module, _, name = path.partition(":")
    found = getattr(sys.modules.get(module), name, None) if module.split(".")[0] in _KNOWN else None
    is_tuple = isinstance(found, type) and issubclass(found, tuple)
    return found if is_tuple and fields == set(getattr(found, "_fields", ())) else None


def _is_key(key: Any) -> bool:
    if isinstance(key, tuple):
        return type(key) is tuple and all(map(_is_key, key))
    plain = isinstance(key, np.generic) and key.dtype.kind in "biufSU"
    return key is None or type(key) in _KEYS or plain


def _key_data(key: Any) -> Any:
    """A key as JSON has it: text and integers as they are, all else by its type."""
    if type(key) in (str, int):
        return key
    if isinstance(key, tuple):
        return {"tuple": [_key_data(part) for part in key]}
    if isinstance(key, np.generic):
        return {"numpy": key.dtype.str, "hex": key.tobytes().hex()}
    return {"float": key.hex()} if isinstance(key, float) else plain_data(key)


def plain_data(value: Any) -> dict[str, Any]:
    """A plain value that is no tree, by its type."""
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return {"bytes": value.hex()} if isinstance(value, bytes) else {"value": value}


def _key_from(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    if "tuple" in data:
        return tuple(map(_key_from, data["tuple"]))
    if "numpy" in data:
        return np.frombuffer(bytes.fromhex(data["hex"]), np.dtype(data["numpy"]))[0]
    return float.fromhex(data["float"]) if "float" in data else plain_from(data)


def plain_from(data: dict[str, Any]) -> Any:
    if "complex" in data:
        return complex(*data["complex"])
    return bytes.fromhex(data["bytes"]) if "bytes" in data else data["value"]
