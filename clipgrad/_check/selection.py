"""The leaves of a tree that an expression means: a position, a name, a path, or several."""

import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from clipgrad._arrays import nearest, path_string, selects

Selector = int | str | Sequence[int | str]


def leaf_names(tree: Any, root: str) -> list[str]:
    """The leaves' names as one writes them in Python: `args[0]['w']`."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [root + jax.tree_util.keystr(path) for path, _ in paths]


def simple_paths(tree: Any) -> list[str]:
    """Leaf paths with their parts separated by slashes."""
    return [path_string(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def select(selector: Selector, paths: Sequence[str], word: str) -> set[int]:
    """Return the positions in `paths` that a selector means.

    Args:
      selector: positions, names, or paths such as `params/w`; several in a sequence. A path
        from the root means every leaf at or below it; failing that, an expression means what it
        does for the clips: whole segments of a path, or a regular expression that is searched.
      paths: simple leaf paths; a leaf with several spellings separates them by `|`.
      word: the name of the selector's parameter, for errors.
    """
    one = isinstance(selector, str) or getattr(selector, "ndim", None) == 0
    several: Any = selector if isinstance(selector, Iterable) and not one else [selector]
    chosen: set[int] = set()
    for expression in several:
        found = _matches(expression, paths, word)
        if not found:
            there = nearest(str(expression), [path.replace("|", " or ") for path in paths], 20)
            raise ValueError(
                f"{word}: got {expression!r}, expected one that selects a floating-point leaf; "
                f"{there}"
            )
        chosen |= found
    return chosen


def _matches(expression, paths: Sequence[str], word: str) -> set[int]:
    is_position: Any = hasattr(expression, "__index__") and not isinstance(expression, bool)
    if not is_position and not isinstance(expression, str):
        raise TypeError(
            f"{word}: got {expression!r}, expected a position (int), a name or a path (str)"
        )
    text = _simple(expression) if isinstance(expression, str) else str(operator.index(expression))
    spellings = [(k, name) for k, path in enumerate(paths) for name in path.split("|")]
    found = {k for k, name in spellings if f"{name}/".startswith(f"{text}/")}
    if found or is_position:
        return found
    flags = selects(text, [name for _, name in spellings], word)
    return {k for (k, _), flag in zip(spellings, flags, strict=True) if flag}


def _simple(path: str) -> str:
    """`args[0]['w']`, `[0]['w']` and `args[0].w`, as reports name leaves, mean `0/w`."""
    if not re.fullmatch(r"(args|kwargs|out|(?=\[))(\[[^\]]+\]|\.\w+)+", path):
        return path
    parts = re.findall(r"\[['\"]?([^\]'\"]+)['\"]?\]|\.(\w+)", path)
    return "/".join(key or name for key, name in parts)
