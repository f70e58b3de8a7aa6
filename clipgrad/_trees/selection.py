"""The leaves of a tree that an expression means: a position, a name, a path, or several."""

import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from clipgrad._trees.selectors import nearest, selects
from clipgrad._trees.trees import path_string

Selector = int | str | Sequence[int | str]


def leaf_names(tree: Any, root: str) -> list[str]:
    """The leaves' names as one writes them in Python: `args[0]['w']`."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [root + jax.tree_util.keystr(path) for path, _ in paths]


def select(selector: Selector, paths: Sequence[str], word: str) -> set[int]:
    """Return the positions in `paths` that a selector means.

    Args:
      selector: positions, names, or paths such as `params/w`; several in a sequence. A path
        from the root means every leaf at or below it; failing that, an expression means what it
        does for the clips: whole segments of a path, or a regular expression that is searched.
      paths: simple leaf paths, separated by `/`, whose first part is a position; a leaf with
        several spellings separates them by `|`.
      word: the name of the selector's parameter, for the error that lists the paths that there are
        where an expression selects nothing.
    """
    chosen: set[int] = set()
    for expression in _several(selector):
        found = _matches(expression, paths, word)
        if not found:
            there = nearest(str(expression), [path.replace("|", " or ") for path in paths], 20)
            raise ValueError(
                f"{word}: got {expression!r}, expected one that selects a floating-point leaf; "
                f"{there}"
            )
        chosen |= found
    return chosen


def _several(selector: Any) -> list[Any]:
    """The expressions of a selector; integers of NumPy and JAX count as Python's."""
    one = isinstance(selector, str) or getattr(selector, "ndim", None) == 0
    is_several = isinstance(selector, Iterable) and not one
    return [_position(item) for item in (selector if is_several else [selector])]


def _position(item: Any) -> Any:
    try:
        return item if isinstance(item, bool) else operator.index(item)
    except TypeError:
        return item


def _matches(expression: int | str, paths: Sequence[str], word: str) -> set[int]:
    if not isinstance(expression, (int, str)) or isinstance(expression, bool):
        raise TypeError(
            f"{word}: got {expression!r}, expected a position (int), a name or a path (str)"
        )
    text = _simple(str(expression))
    spellings = [(k, name) for k, path in enumerate(paths) for name in path.split("|")]
    found = {k for k, name in spellings if f"{name}/".startswith(f"{text}/")}
    if found or isinstance(expression, int):
        return found
    flags = selects(text, [name for _, name in spellings], word)
    return {k for (k, _), flag in zip(spellings, flags, strict=True) if flag}


def _simple(path: str) -> str:
    """`args[0]['w']`, `[0]['w']` and `args[0].w`, as reports name leaves, mean `0/w`."""
    if not re.fullmatch(r"(args|kwargs|out|(?=\[))(\[[^\]]+\]|\.\w+)+", path):
        return path
    parts = re.findall(r"\[['\"]?([^\]'\"]+)['\"]?\]|\.(\w+)", path)
    return "/".join(key or name for key, name in parts)


def simple_paths(tree: Any) -> list[str]:
    """Leaf paths with their parts separated by slashes."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [path_string(path) for path, _ in paths]
