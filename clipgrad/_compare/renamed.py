"""Names in two versions: patterns between them, and paths of leaves in two trees."""

import collections
import functools
import re
from collections.abc import Iterator, Mapping, Sequence

from clipgrad._arrays import check_pattern, nearest, prefix_of


class Renamed:
    """The name under which a value of one version is looked for in the other."""

    def __init__(self, names: dict[str, str]) -> None:
        # What is deeper says more: `net/norm` comes before `net`, wherever it stands.
        self.rules = sorted(names.items(), key=lambda rule: -rule[0].count("/"))
        self.patterns: list[str] = []

    def __call__(self, name: str) -> str:
        return self._by_rule(name)[1]

    def names(self, name: str) -> bool:
        """Whether an expression names this; the new name may be the same."""
        return self._by_rule(name)[0] is not None

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
                    f"names: got {pattern!r}, expected the path of a value or of a leaf in fun, or "
                    f"a pattern of it; {nearest(pattern, here)}"
                )
            if leads[pattern].isdisjoint(there):
                raise ValueError(
                    f"names: got {wanted!r} for {pattern!r}, expected the path of a value or "
                    f"of a leaf in other; {nearest(wanted, there)}"
                )


def same_leaves(
    a: Sequence[str], b: Sequence[str], names: Mapping[str, str] | None = None
) -> dict[int, int]:
    """The position in ``b`` of each leaf of ``a`` that both have.

    Paths are equal, or all of one tree have one prefix more, since the tree is inside of another,
    such as ``{"params": ...}``. Ends alone say nothing: ``scale`` is not ``z/scale``. A leaf that
    ``b`` lacks is looked for under the new name of its module.
    """
    leads = _led_by_names((*a,), (*b,), tuple((names or {}).items()))
    same = _same_paths(a, b, _wrapping(a, b))
    return same | {group[0]: j for j, group in leads.items() if len(group) == 1}


def stacked_leaves(
    a: Sequence[str], b: Sequence[str], names: Mapping[str, str]
) -> dict[int, list[int]]:
    """For each leaf of ``b`` to which several of ``a`` lead, these in the order of their numbers.

    With ``{"layers_*": "layers"}``, ``layers/kernel`` may be the stack of ``layers_0/kernel``, ....
    """
    leads = _led_by_names((*a,), (*b,), (*names.items(),))
    return {j: group for j, group in leads.items() if len(group) > 1}


def _same_paths(a: Sequence[str], b: Sequence[str], wrapping: tuple[int, str]) -> dict[int, int]:
    """The position in ``b`` of each path of ``a``, but for the prefix of one of the trees."""
    inner, prefix = wrapping
    wrapped = [_below(prefix, path) for path in a] if inner == 0 else a
    there = {_below(prefix, p) if inner == 1 else p: j for j, p in enumerate(b)}
    return {i: there[path] for i, path in enumerate(wrapped) if path in there}


@functools.lru_cache(maxsize=16)  # one comparison asks several times
def _led_by_names(
    a: tuple[str, ...], b: tuple[str, ...], names: tuple[tuple[str, str], ...]
) -> Mapping[int, list[int]]:
    """For leaves of ``b`` without a partner those of ``a`` whose modules have new names there.

    The names of leaves that the names of modules may stand for, those first that lead to most.
    """
    same = _same_paths(a, b, _wrapping(a, b))
    left = [i for i in range(len(a)) if i not in same]
    free = {path for j, path in enumerate(b) if j not in {*same.values()}}
    options: list[dict[int, int]] = []
    for renamed in _names_of_leaves(dict(names)) if names and left and free else ():
        every = {i: paths for i in left if (paths := [*_renamed_leaves(a[i], renamed)])}
        new = {i: next((p for p in paths if p in free), paths[0]) for i, paths in every.items()}
        everywhere = [new.get(i, path) for i, path in enumerate(a)]
        pairs = _same_paths(everywhere, b, _wrapping([*new.values()], b, 0)).items()
        options.append({i: j for i, j in pairs if i not in same and b[j] in free})
    led: dict[int, int] = {}
    for option in sorted(options, key=len, reverse=True):
        taken = {*led.values()}
        led |= {i: j for i, j in option.items() if i not in led and j not in taken}
    leads: dict[int, list[int]] = collections.defaultdict(list)
    for i in sorted(led, key=lambda i: _numbered(a[i])):
        leads[led[i]].append(i)
    return leads


def _names_of_leaves(names: Mapping[str, str]) -> Iterator[Renamed]:
    """The names by which leaves may be renamed.

    Leaves of flax Linen are not below the name of the whole model: ``{"Net/a": "Net/b"}`` makes
    ``params/b/kernel`` of ``params/a/kernel``, and so do ``{"Net/a": "b"}`` and ``{"a": "Net/b"}``.
    """
    below_first = lambda name: name.partition("/")[2] or name  # noqa: E731
    as_is = lambda name: name  # noqa: E731
    yield Renamed(dict(_without_common_start(*pair) for pair in names.items()))
    for one, two in ((below_first, as_is), (as_is, below_first), (below_first, below_first)):
        yield Renamed({one(name): two(new) for name, new in names.items()})


def _renamed_leaves(path: str, renamed: Renamed) -> Iterator[str]:
    """The paths that a leaf may have, if its end from some segment on has a new name."""
    parts = path.split("/")
    for first in range(len(parts)):
        inside = "/".join(parts[first:])
        if renamed.names(inside):
            yield _below("/".join(parts[:first]), renamed(inside))


def _numbered(path: str) -> list[str | int]:
    """The texts and numbers of a path, by which ``layers_2`` comes before ``layers_10``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)]


def _without_common_start(name: str, other: str) -> tuple[str, str]:
    """Two names from the first segment on that differs; at least their last segments."""
    a, b = name.split("/"), other.split("/")
    while len(a) > 1 and len(b) > 1 and a[0] == b[0]:
        a, b = a[1:], b[1:]
    return "/".join(a), "/".join(b)


def _wrapping(a: Sequence[str], b: Sequence[str], least_part: float = 0.5) -> tuple[int, str]:
    """The tree that is inside of the other, 0 or 1, and its path there; "" if neither is.

    More than a part of the leaves must be the same there.
    """
    counts: collections.Counter[tuple[int, str]] = collections.Counter()
    for inner, inside, around in ((0, set(a), b), (1, set(b), a)):
        for path in around:
            parts = path.split("/")
            heads = ("/".join(parts[:i]) for i in range(1, len(parts) + 1))
            counts.update((inner, head) for head in heads if path[len(head) + 1 :] in inside)
    (best, most), (_, second) = [*counts.most_common(2), ((0, ""), 0), ((0, ""), 0)][:2]
    least = max(len(set(a) & set(b)), least_part * min(len(a), len(b)), second)
    return best if most > least else (0, "")


def _below(prefix: str, path: str) -> str:
    return "/".join(part for part in (prefix, path) if part)
