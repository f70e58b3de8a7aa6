"""The paths of the leaves of two gradients: which leaf is which."""

import collections
from collections.abc import Sequence


def same_leaves(own: Sequence[str], other: Sequence[str]) -> dict[int, int]:
    """The position in ``other`` of each leaf of ``own`` that both have.

    Paths are equal, or all of one tree have one prefix more, since the tree is inside of another,
    such as ``{"params": ...}``. Ends alone say nothing: ``scale`` is not ``z/scale``.
    """
    inner, prefix = _wrapping(own, other)
    wrapped = [_below(prefix, path) for path in own] if inner == 0 else list(own)
    there = {_below(prefix, p) if inner == 1 else p: j for j, p in enumerate(other)}
    return {i: there[path] for i, path in enumerate(wrapped) if path in there}


def _wrapping(own: Sequence[str], other: Sequence[str]) -> tuple[int, str]:
    """The tree that is inside of the other, 0 or 1, and its path there; "" if neither is."""
    counts: collections.Counter[tuple[int, str]] = collections.Counter()
    for inner, inside, around in ((0, set(own), other), (1, set(other), own)):
        for path in around:
            parts = path.split("/")
            heads = ("/".join(parts[:i]) for i in range(1, len(parts) + 1))
            counts.update((inner, head) for head in heads if path[len(head) + 1 :] in inside)
    equal = len(set(own) & set(other))
    ordered = counts.most_common(2)
    is_clear = len(ordered) == 1 or len(ordered) == 2 and ordered[0][1] > ordered[1][1]
    most = ordered[0][1] if is_clear else 0
    is_wrapped = most > equal and 2 * most > min(len(own), len(other))
    return ordered[0][0] if is_wrapped else (0, "")


def _below(prefix: str, path: str) -> str:
    return "/".join(part for part in (prefix, path) if part)
