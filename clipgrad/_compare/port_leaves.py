"""The parameters of a version in JAX beside those of a model in another framework."""

import collections
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from clipgrad._compare.closeness import Candidates, Closest, Sketched, best_pairs, closest_of
from clipgrad._compare.differences import Judgment
from clipgrad._compare.findings import ONE_ARGUMENT, ComparedLeaf
from clipgrad._compare.kinship import Kinship
from clipgrad._compare.layouts import Layouts, Order
from clipgrad._compare.port_record import PortEntry
from clipgrad._compare.port_values import ALIKE, Likeness
from clipgrad._compare.records import ComparisonFinding
from clipgrad._compare.signatures import Signature
from clipgrad._compare.sketches import LARGEST_AT, NORM_AT
from clipgrad._compare.versions import VersionLeaf

_SAME = 1e-5  # norms of the same numbers in another order
_MOST_SHOWN = 5


class LeafPair(NamedTuple):
    """A parameter of a version, the other framework's of the same numbers, and the gradient."""

    path: str
    signature: Signature
    other: PortEntry
    orders: tuple[Order, ...]
    gradient: Judgment | None


class PortLeaves(NamedTuple):
    """The parameters.

    Attributes:
      pairs: those that are the same numbers.
      alone: those of the version of whose numbers the other framework has none left.
      others: the parameters of the other framework that no pair has, and stacks of these.
      again: of those alone the other's parameter that has these numbers, but is in a pair already.
      kin: which modules hold the same parameters.
    """

    pairs: list[LeafPair]
    alone: dict[str, Signature]
    others: list[PortEntry]
    again: dict[str, PortEntry]
    kin: Kinship


def match_leaves(
    params: Mapping[str, Signature],
    gradients: Mapping[str, Sketched],
    entries: Sequence[PortEntry],
    likeness: Likeness,
    rtol: float | None,
) -> PortLeaves:
    """Match parameters whose numbers agree; among several of these, by gradients and by names."""
    candidates = Candidates([entry.value for entry in entries])
    same = {path: _same(own, entries, candidates) for path, own in params.items()}
    table = {
        (path, j): (c, _gradient(gradients.get(path), entries[j].cotangent, c, rtol))
        for path, close in same.items()
        for j, c in close.items()
    }
    sure = _sure(list(table))
    kin = Kinship((path, _layers(entries[j], entries)) for path, j in sure.items())

    def score(path: str, entry: PortEntry) -> float:
        return likeness(path, (), entry) + (_kin(kin, path, entry) or 0.0)

    def certain(path: str, j: int) -> float:
        gradient = table[path, j][1]
        return score(path, entries[j]) + (gradient is not None and not gradient.differs)

    pairs = best_pairs(list(table), certain)
    matched = [
        _pair(path, params[path], entries[pairs[path]], *table[path, pairs[path]])
        for path in params
        if path in pairs
    ]
    kin = Kinship((pair.path, _layers(pair.other, entries)) for pair in matched)
    again = {
        path: max((entries[j] for j in close), key=lambda entry: score(path, entry))
        for path, close in same.items()
        if close and path not in pairs
    }
    covered = {name for pair in matched for name in _layers(pair.other, entries)}
    others = [e for e in entries if not _is_part(e) and covered.isdisjoint(_layers(e, entries))]
    alone = {path: own for path, own in params.items() if path not in pairs}
    return PortLeaves(matched, alone, others, again, kin)


def _sure(pairs: Sequence[tuple[str, int]]) -> dict[str, int]:
    """The pairs of which neither is in another."""
    ours, theirs = (collections.Counter(pair[i] for pair in pairs) for i in (0, 1))
    return {path: j for path, j in pairs if ours[path] == 1 and theirs[j] == 1}


def _pair(
    path: str, own: Signature, other: PortEntry, value: Closest, gradient: Judgment | None
) -> LeafPair:
    return LeafPair(path, own, other, tuple(other.value.orders[i] for i in value.at), gradient)


def _kin(kin: Kinship, path: str, entry: PortEntry) -> float | None:
    """The share of parameters that the modules around two parameters both have."""
    return kin.share(path.rpartition("/")[0], (), entry.name.rpartition(".")[0])


def _same(
    own: Signature, entries: Sequence[PortEntry], candidates: Candidates
) -> dict[int, Closest]:
    """The entries that are the same numbers; integers of the other framework may be longer."""
    if not own.digest:
        still = Sketched(own.sketch, np.zeros_like(own.sketch), own.shape, own.dtype)
        return {j: c for j, c in candidates.closest(still).items() if c.agrees}
    found = ((j, entry.value.digests) for j, entry in enumerate(entries))
    exact = Judgment(0.0, 0.0)
    return {j: Closest(exact, True, (x.index(own.digest),)) for j, x in found if own.digest in x}


def _gradient(
    own: Sketched | None, other: Layouts | None, value: Closest, rtol: float | None
) -> Judgment | None:
    """The closest of the gradients in the orders in which the parameters agree."""
    if own is None or other is None:
        return None
    return closest_of(own, other, value.at, rtol)


def _is_part(entry: PortEntry) -> bool:
    return entry.kind != "argument" and "[" in entry.name


def _layers(entry: PortEntry, entries: Sequence[PortEntry]) -> list[str]:
    """The names of the whole parameters that an entry is, stacks or is a part of."""
    name = entry.name if entry.kind == "argument" else entry.name.split("[")[0]
    if "*" not in name:
        return [name]
    pattern = re.compile(re.escape(name).replace(r"\*", r"\d+"))
    return [other.name for other in entries if pattern.fullmatch(other.name)]


def compared_leaves(leaves: Sequence[VersionLeaf], found: PortLeaves) -> list[ComparedLeaf]:
    """The gradients of the parameters that both have."""
    known = {pair.path: pair.gradient for pair in found.pairs if pair.gradient is not None}
    return [
        ComparedLeaf(leaf.path, leaf.position, known[leaf.path])
        for leaf in leaves
        if leaf.path in known
    ]


def parameter_texts(found: PortLeaves, likeness: Likeness) -> dict[str, str]:
    """A text for each parameter that holds other numbers or is turned."""
    return dict(_other_numbers(found, likeness)) | dict(_odd_orders(found.pairs))


def parameter_finding(texts: Mapping[str, str]) -> ComparisonFinding:
    """The finding of parameters of which there are texts."""
    shown = list(texts.values())[:_MOST_SHOWN]
    more = f"; and {len(texts) - _MOST_SHOWN} more" if len(texts) > _MOST_SHOWN else ""
    text = f"{len(texts)} of the arguments differ: {'; '.join(shown)}{more}"
    return ComparisonFinding("argument", text, path=next(iter(texts)))


def _other_numbers(found: PortLeaves, likeness: Likeness) -> Iterator[tuple[str, str]]:
    """The parameters of which the other framework has one with this name, but other numbers."""
    left = list(found.others)
    for path, own in found.alone.items():
        near = [e for e in left if _may_be(own, e.value)]
        siblings = _siblings(path, found.pairs)
        scores = {
            e.name: likeness(path, (), e)
            + (_kin(found.kin, path, e) or 0)
            + any(_shift(name, e.name) == shift for name, shift in siblings)
            for e in near
        }
        named = max(near, key=lambda e: scores[e.name], default=None)
        name = path or ONE_ARGUMENT
        if path in found.again and (named is None or found.again[path].name != named.name):
            where = f", not of {named.name}" if named else ""
            yield path, f"{name} has the numbers of {found.again[path].name}{where}"
        elif named is not None and scores[named.name] >= ALIKE:
            yield path, f"{name} is not {named.name}{_same_numbers(own, named.value)}"
        else:
            continue
        if named is not None:
            left.remove(named)


def _siblings(path: str, pairs: Sequence[LeafPair]) -> list[tuple[str, int]]:
    """The other framework's names of the same parameter in other layers, and how far these are."""
    shifts = ((pair.other.name, _shift(pair.path, path)) for pair in pairs)
    return [(name, shift) for name, shift in shifts if shift]


def _shift(first: str, second: str) -> int | None:
    """The difference of the one number that two names differ in, if they do in nothing else."""
    tokens = [re.split(r"(\d+)", name) for name in (first, second)]
    apart = [(a, b) for a, b in zip(*tokens, strict=False) if a != b]
    is_one = len(tokens[0]) == len(tokens[1]) and len(apart) == 1
    numbers = [int(token) for token in apart[0] if token.isdigit()] if is_one else []
    return numbers[1] - numbers[0] if len(numbers) == 2 else None


def _may_be(own: Signature, other: Layouts) -> bool:
    """Whether two arrays can be compared at all: digests are of int32."""
    is_kind = str(own.dtype) == "int32" if own.digest else bool(len(other.sketches))
    return is_kind and bool(other.digests) == bool(own.digest) and other.size == np.prod(own.shape)


def _same_numbers(own: Signature, other: Layouts) -> str:
    """A note that two arrays have the same norm, and so the same numbers in another order."""
    sizes = [
        x[..., [NORM_AT, LARGEST_AT]] for x in (own.sketch, other.sketches[:1].ravel()) if len(x)
    ]
    is_same = len(sizes) == 2 and np.allclose(*sizes, rtol=_SAME, atol=0) and np.all(sizes)
    return ", but has the same numbers in another order" if is_same else ""


def _odd_orders(pairs: Sequence[LeafPair]) -> Iterator[tuple[str, str]]:
    """The parameters whose axes are in another order than those of others of their kind.

    Of those that are not square the shape would say so.
    """
    kinds: dict[tuple, list[LeafPair]] = collections.defaultdict(list)
    for pair in pairs:
        if len(pair.orders[0]) > 1:
            name = pair.other.name.rpartition(".")[2].split("[")[0]
            kind = pair.other.owner, name, len(pair.orders[0])
            kinds[kind].append(pair)
    for own in kinds.values():
        counts = collections.Counter(order for pair in own for order in pair.orders)
        most, count = counts.most_common(1)[0]
        for pair in own:
            shape = pair.other.value.shape
            turned = [[shape[i] for i in order] for order in (most, pair.orders[0])]
            if most not in pair.orders and count > 1 and turned[0] == turned[1]:
                text = f"{pair.path} is {pair.other.name} with its axes as {pair.orders[0]}; those "
                text += f"of {count} others are as {most}"
                yield pair.path, text
