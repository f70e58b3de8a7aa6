"""A part of a capture, in the classes of the user's own tree."""

from typing import Any

import numpy as np

from clipgrad._errors import first_few
from clipgrad._frameworks import with_leaves
from clipgrad._recorder.structure import entries, path_text
from clipgrad._trees import is_array

_SINGLE = bool | int | float | complex | str | bytes | np.generic


def restored(like: Any, found: Any, name: str) -> Any:
    """A tree like ``like`` with the leaves of ``found``, by their paths.

    Raises:
      ValueError: paths, shapes or dtypes differ.
    """
    known = dict(entries(found))
    leaves = [_leaf_like(path, leaf, known, name) for path, leaf in entries(like)]
    if known:
        raise ValueError(
            f"like: got a tree without {_path_list(known)}, which {name} of the capture has; "
            "expected one with the same paths"
        )
    return with_leaves(like, leaves)


def _leaf_like(path: tuple, leaf: Any, known: dict[tuple, Any], name: str) -> Any:
    if path not in known:
        if not is_array(leaf) and not isinstance(leaf, _SINGLE):
            return leaf  # a function, for example
        raise ValueError(
            f"like: got {path_text(path)!r}, which {name} of the capture does not have, expected "
            f"its paths: {_path_list(known)}"
        )
    other = known.pop(path)
    got, expected = (
        (tuple(getattr(x, "shape", ())), str(getattr(x, "dtype", type(x).__name__)))
        for x in (leaf, other)
    )
    is_single = not is_array(leaf) or not is_array(other)
    if got != expected and not (is_single and got[0] == expected[0] == ()):
        raise ValueError(
            f"like: got {got[1]}{list(got[0])} at {path_text(path)!r}, expected "
            f"{expected[1]}{list(expected[0])} as in the capture"
        )
    return other


def _path_list(known: dict[tuple, Any]) -> str:
    paths = [path_text(path) or "one leaf" for path in known]
    return first_few([*map(repr, paths)], 5) or "none"
