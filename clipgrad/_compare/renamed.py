"""Names in two versions: patterns between them, and paths of leaves in two trees."""

import collections
import re
from collections.abc import Iterator, Mapping, Sequence

from clipgrad._arrays import check_pattern, nearest, prefix_of


class Renamed:
    """The name under which a value of one version is looked for in the other."""

    def __init__(self, names: dict[str, str]) -> None:
        self.rules = list(names.items())
        self.patterns: list[str] = []

    def __call__(self, name: str) -> str:
        return self._by_rule(name)[1]

    def _by_rule(self, name: str) -> tuple[str | None, str]:
        """The expression that renames a name, if one does, and the new name."""
        for pattern, wanted in self.rules:
            if match := prefix_of(pattern, name):
                texts = match.groups() if "*" in wanted else ()
                for text in texts:
                    wanted = re.sub(r"\*+", lambda _, text=text: text, wanted, count=1)
                return pattern, wanted + name[match.end() :]
        for pattern in self.patterns:
            if match := prefix_of(pattern, name):
                return None, pattern + name[match.end() :]
        return None, name

    def check(self, here: Sequence[str], there: Sequence[str]) -> None:
        """Raise `ValueError` for an expression that fits no name, or leads to none."""
        leads = collections.defaultdict(set)
        for pattern, renamed in map(self._by_rule, here):
            leads[pattern].add(renamed)
        for pattern, wanted in self.rules:
            if pattern not in leads:
                check_pattern(pattern, "names")
                raise ValueError(
                    f"names: got {pattern!r}, expected the path of a value in fun, or a "
                    f"pattern of it; {nearest(pattern, here)}"
                )
            if leads[pattern].isdisjoint(there):
                raise ValueError(
                    f"names: got {wanted!r} for {pattern!r}, expected the path of a value in "
                    f"other; {nearest(wanted, there)}"
                )


def same_leaves(
    a: Sequence[str], b: Sequence[str], names: Mapping[str, str] | None = None
) -> dict[int, int]:
    """The position in ``b`` of each leaf of ``a`` that both have.

    Paths are equal, or all of one tree have one prefix more, since the tree is inside of another,
    such as ``{"params": ...}``. Ends alone say nothing: ``scale`` is not ``z/scale``. A leaf that
    ``b`` lacks is looked for under the new name of its module.
    """
    inner, prefix = _wrapping(a, b)
    wrapped = [_below(prefix, path) for path in a] if inner == 0 else list(a)
    there = {_below(prefix, p) if inner == 1 else p: j for j, p in enumerate(b)}
    same = {i: there[path] for i, path in enumerate(wrapped) if path in there}
    return same if names is None else same | _same_if_renamed(wrapped, there, same, names)


def _same_if_renamed(
    paths: Sequence[str],
    there: Mapping[str, int],
    same: Mapping[int, int],
    names: Mapping[str, str],
) -> dict[int, int]:
    """The partners of leaves that have none, under the new names of their modules.

    ``{"Net/a": "Net/b"}`` makes ``params/b/kernel`` of ``params/a/kernel``: leaves of a framework
    are not below the name of the whole model.
    """
    renamed = Renamed(dict(_without_common_start(*pair) for pair in names.items()))
    taken = {*same.values()}
    free = {path: j for path, j in there.items() if j not in taken}
    partners: dict[int, int] = {}
    for i in (i for i in range(len(paths)) if i not in same):
        path = next((p for p in _renamed_leaves(paths[i], renamed) if p in free), None)
        if path is not None:
            partners[i] = free.pop(path)
    return partners


def _renamed_leaves(path: str, renamed: Renamed) -> Iterator[str]:
    """The paths that a leaf may have, if its end from some segment on has a new name."""
    parts = path.split("/")
    for first in range(len(parts)):
        inside = "/".join(parts[first:])
        if (other := renamed(inside)) != inside:
            yield _below("/".join(parts[:first]), other)


def _without_common_start(name: str, other: str) -> tuple[str, str]:
    """Two names from the first segment on that differs; at least their last segments."""
    a, b = name.split("/"), other.split("/")
    while len(a) > 1 and len(b) > 1 and a[0] == b[0]:
        a, b = a[1:], b[1:]
    return "/".join(a), "/".join(b)


def _wrapping(a: Sequence[str], b: Sequence[str]) -> tuple[int, str]:
    """The tree that is inside of the other, 0 or 1, and its path there; "" if neither is."""
    counts: collections.Counter[tuple[int, str]] = collections.Counter()
    for inner, inside, around in ((0, set(a), b), (1, set(b), a)):
        for path in around:
            parts = path.split("/")
            heads = ("/".join(parts[:i]) for i in range(1, len(parts) + 1))
            counts.update((inner, head) for head in heads if path[len(head) + 1 :] in inside)
    (best, most), (_, second) = [*counts.most_common(2), ((0, ""), 0), ((0, ""), 0)][:2]
    least = max(len(set(a) & set(b)), min(len(a), len(b)) / 2, second)
    return best if most > least else (0, "")


def _below(prefix: str, path: str) -> str:
    return "/".join(part for part in (prefix, path) if part)
