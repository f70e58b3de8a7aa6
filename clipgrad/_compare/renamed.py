"""Names in two versions: patterns between them, and paths of leaves in two trees."""

import collections
import re
from collections.abc import Sequence

from clipgrad._arrays import check_pattern, nearest, prefix_of


class Renamed:
    """The name under which a value of one version is looked for in the other."""

    def __init__(self, names: dict[str, str]) -> None:
        self.rules = list(names.items())
        self.patterns: list[str] = []
        self._found: dict[str, set[str]] = {}  # the names that each expression leads to

    def __call__(self, name: str) -> str:
        for pattern, wanted in self.rules:
            if found := prefix_of(pattern, name):
                texts = found.groups() if "*" in wanted else ()
                for text in texts:
                    wanted = re.sub(r"\*+", lambda _, text=text: text, wanted, count=1)
                renamed = wanted + name[found.end() :]
                self._found.setdefault(pattern, set()).add(renamed)
                return renamed
        for pattern in self.patterns:
            if found := prefix_of(pattern, name):
                return pattern + name[found.end() :]
        return name

    def check(self, here: Sequence[str], there: Sequence[str]) -> None:
        """Raise `ValueError` for an expression that fits no name, or leads to none."""
        for pattern, wanted in self.rules:
            if pattern not in self._found:
                check_pattern(pattern, "names")
                raise ValueError(
                    f"names: got {pattern!r}, expected the path of a value in fun, or a "
                    f"pattern of it; {nearest(pattern, here)}"
                )
            if self._found[pattern].isdisjoint(there):
                raise ValueError(
                    f"names: got {wanted!r} for {pattern!r}, expected the path of a value in "
                    f"other; {nearest(wanted, there)}"
                )


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
    (best, most), (_, second) = [*counts.most_common(2), ((0, ""), 0), ((0, ""), 0)][:2]
    least = max(len(set(own) & set(other)), min(len(own), len(other)) / 2, second)
    return best if most > least else (0, "")


def _below(prefix: str, path: str) -> str:
    return "/".join(part for part in (prefix, path) if part)
