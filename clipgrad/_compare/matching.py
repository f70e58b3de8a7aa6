"""The matching of the named values of two versions, and of the leaves of their gradients."""

import collections
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from clipgrad._compare.versions import Version, VersionValue
from clipgrad._trees import nearest

Group = tuple[str, str, tuple[int, ...]]


class Instance(NamedTuple):
    """A value at one step of the scans around it.

    Attributes:
      value: the value.
      steps: the indices in these scans, outermost first.
      at: the indices in the leading axes of its sketches; all of it over devices.
    """

    value: VersionValue
    steps: tuple[int, ...]
    at: tuple[Any, ...]

    @property
    def time(self) -> tuple:
        return self.value.time(self.steps)


class Pair(NamedTuple):
    """A value in both versions."""

    own: Instance
    other: Instance


class Matching(NamedTuple):
    """The values that both versions have, in the order of the first, and the others."""

    pairs: list[Pair]
    unmatched: list[str]


def match(own: Version, other: Version, names: Mapping[str, str] | None) -> Matching:
    """Match values by name, kind and shape, in the order of computation.

    As many values of the second version as of the first are matched one by one: n calls of a
    module are matched with n steps of a scan.

    Raises:
      ValueError: an expression of ``names`` fits no value of the first version, or leads to none
        of the second.
    """
    ours, theirs = Renamed(dict(names or {})), Renamed({})
    theirs.patterns = [b for a, b in ours.rules if "*" in b and "*" not in a]
    groups = _groups(own, ours), _groups(other, theirs)
    ours.check([v.name for v in own.values], [name for name, *_ in groups[1]])
    pairs, unmatched = [], []
    for group, found in groups[0].items():
        same = groups[1].get(group, [])
        if len(same) == len(found):
            pairs += map(Pair, found, same)
        elif not _is_under_a_name(found, own):
            unmatched.append(_unmatched(group, found, same, "fun", "other"))
    for group, found in groups[1].items():
        if group not in groups[0] and not _is_under_a_name(found, other):
            unmatched.append(_unmatched(group, found, [], "other", "fun"))
    return Matching(sorted(pairs, key=lambda pair: pair.own.time), unmatched)


def _groups(version: Version, renamed: "Renamed") -> dict[Group, list[Instance]]:
    groups: dict[Group, list[Instance]] = collections.defaultdict(list)
    for value in version.values:
        group = renamed(value.name), value.kind, value.shape
        groups[group] += instances_of(value)
    return {g: sorted(found, key=lambda i: i.time) for g, found in groups.items()}


def instances_of(value: VersionValue) -> Iterator[Instance]:
    """The value at each step of the scans around it."""
    for steps in itertools.product(*(range(size) for size, is_scan in value.axes if is_scan)):
        left = iter(steps)
        at = tuple(next(left) if is_scan else slice(None) for _, is_scan in value.axes)
        yield Instance(value, steps, at)


def _is_under_a_name(found: Sequence[Instance], version: Version) -> bool:
    """Whether all are carried by scans outside of modules, and are values with names, too."""
    named = {(value.position[:-3], value.variable) for value in version.values if value.name}
    return all(
        not each.value.name and (each.value.position[:-3], each.value.variable) in named
        for each in found
    )


def _unmatched(group: Group, found: Sequence, same: Sequence, here: str, there: str) -> str:
    (name, kind, shape), own = group, found[0].value.name
    what = f"{kind} {own}" if name else "value outside of all modules"
    what += f" (as {name})" if name != own else ""
    return f"{what} {list(shape)}: {len(found)} in {here}, {len(same)} in {there}"


class Renamed:
    """The name under which a value of one version is looked for in the other."""

    def __init__(self, names: dict[str, str]) -> None:
        self.rules = list(names.items())
        self.patterns: list[str] = []
        self._found: dict[str, set[str]] = {}  # the names that each expression leads to

    def __call__(self, name: str) -> str:
        for pattern, wanted in self.rules:
            if found := _prefix(pattern, name):
                texts = found.groups() if "*" in wanted else ()
                for text in texts:
                    wanted = re.sub(r"\*+", lambda _, text=text: text, wanted, count=1)
                renamed = wanted + name[found.end() :]
                self._found.setdefault(pattern, set()).add(renamed)
                return renamed
        for pattern in self.patterns:
            if found := _prefix(pattern, name):
                return pattern + name[found.end() :]
        return name

    def check(self, here: Sequence[str], there: Sequence[str]) -> None:
        """Raise `ValueError` for an expression that fits no name, or leads to none."""
        for pattern, wanted in self.rules:
            if pattern not in self._found:
                raise ValueError(
                    f"names: got {pattern!r}, expected the path of a value in fun, or a "
                    f"pattern of it; {nearest(pattern, here)}"
                )
            if self._found[pattern].isdisjoint(there):
                raise ValueError(
                    f"names: got {wanted!r} for {pattern!r}, expected the path of a value in "
                    f"other; {nearest(wanted, there)}"
                )


def _prefix(pattern: str, name: str) -> re.Match | None:
    """Match whole segments at the start of a name: ``*`` within one, ``**`` any number of them."""
    parts = re.split(r"(\*\*|\*)", pattern)
    regex = "".join(
        "(.*)" if part == "**" else "([^/]*)" if part == "*" else re.escape(part) for part in parts
    )
    return re.match(f"{regex}(?=/|$)", name)


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
