"""The leaves of a tree that a selector means: a position, a name, a pattern, or several."""

import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

from clipgrad._arrays import (
    Pattern,
    decided,
    leaves_selected,
    nearest,
    shown,
    without_sign,
)

Selector = int | Pattern | Sequence[int | Pattern]


def select(selector: Selector, paths: Sequence[str], word: str) -> set[int]:
    """Return the positions in `paths` that a selector means.

    Args:
      selector: positions, names, or patterns such as `params/w`; of several in a sequence the last
        that matches decides, and `!` leaves out. A path from the root means every leaf at or below
        it; failing that, a pattern means what it does for the clips.
      paths: simple leaf paths; a leaf with several spellings separates them by `|`.
      word: the name of the selector's parameter, for errors.
    """
    one = isinstance(selector, Pattern) or getattr(selector, "ndim", None) == 0
    several: Any = list(selector) if isinstance(selector, Iterable) and not one else [selector]
    flags = decided(several, lambda each: _matches(each, paths, word), len(paths))
    return {k for k, flag in enumerate(flags) if flag}


def _matches(selector: Any, paths: Sequence[str], word: str) -> list[bool]:
    """For each path whether a selector matches it, which may leave it out."""
    is_position = _is_position(selector)
    if not is_position and not isinstance(selector, Pattern):
        raise TypeError(
            f"{word}: got {shown(selector)}, expected a position (int), a name or a pattern (str)"
        )
    spellings, labels = [path.split("|") for path in paths], [p.replace("|", " or ") for p in paths]
    wanted: Pattern = str(operator.index(selector)) if is_position else without_sign(selector)  # type: ignore
    if isinstance(wanted, str):
        wanted = _simple(wanted)
        at_root = [any(f"{p}/".startswith(f"{wanted}/") for p in each) for each in spellings]
        if any(at_root):
            return at_root
    if not is_position:
        return leaves_selected(wanted, spellings, labels, word)
    raise ValueError(
        f"{word}: got {selector!r}, expected one that selects a leaf; "
        f"{nearest(str(wanted), labels)}"
    )


def _is_position(selector: Any) -> bool:
    """Whether a selector is a whole number, of Python, NumPy or JAX."""
    try:
        operator.index(selector)
    except TypeError:
        return False
    return not isinstance(selector, bool)


def _simple(path: str) -> str:
    """`args[0]['w']`, `[0]['w']` and `args[0].w`, as reports name leaves, mean `0/w`."""
    if not re.fullmatch(r"(args|kwargs|out|(?=\[))(\[[^\]]+\]|\.\w+)+", path):
        return path
    parts = re.findall(r"\[['\"]?([^\]'\"]+)['\"]?\]|\.(\w+)", path)
    return "/".join(key or name for key, name in parts)
